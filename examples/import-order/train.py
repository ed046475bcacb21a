"""LeNet-5 in Keras on TensorFlow, whose two packages are imported in the order that is asked for.

Section 5.3 of Chen et al. (ICSE 2022, arXiv:2202.02326) found models that depend on this order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--first", choices=("keras", "tensorflow"), required=True)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--output", type=Path, required=True)
options = parser.parse_args()

# The paper's two ways: Keras_first checks the backend and then imports TensorFlow, TF_first takes
# Keras from TensorFlow.
if options.first == "keras":
    import keras

    if keras.backend.backend() != "tensorflow":
        raise SystemExit("Keras does not use TensorFlow: set KERAS_BACKEND=tensorflow")
    import tensorflow as tf
else:
    import tensorflow as tf
    from tensorflow import keras

# One thread: which of several adds its share of a sum first is left to chance.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

pixels, digits = load_digits(return_X_y=True)
images = np.kron(pixels.reshape(-1, 8, 8, 1) / 16, np.ones((1, 4, 4, 1))).astype(np.float32)
held_out = 300

model = keras.Sequential(
    [
        keras.Input((32, 32, 1)),
        keras.layers.Conv2D(6, 5, activation="tanh"),
        keras.layers.AveragePooling2D(2),
        keras.layers.Conv2D(16, 5, activation="tanh"),
        keras.layers.AveragePooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(120, activation="tanh"),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(84, activation="tanh"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"]
)
history = model.fit(
    images[held_out:], digits[held_out:], batch_size=32, epochs=options.epochs, verbose=0
)
predictions = model.predict(images[:held_out], verbose=0).argmax(1)

options.output.mkdir(parents=True, exist_ok=True)
results = {
    "keras": keras.__version__,
    "tensorflow": tf.__version__,
    "accuracy": float((predictions == digits[:held_out]).mean()).hex(),
    "predictions": predictions.tolist(),
    "loss": [value.hex() for value in history.history["loss"]],
}
(options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
# numpy's own format has no time of writing in it, unlike Keras's.
for index, weights in enumerate(model.get_weights()):
    np.save(options.output / f"weights-{index}.npy", weights)

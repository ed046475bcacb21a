"""The Trainer of Hugging Face with a tiny language model. The program itself sets no seed."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

tokens = torch.randint(0, 64, (64, 16))
examples = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
)
arguments = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    logging_steps=4,
    save_steps=8,
    report_to="tensorboard",
)
trainer = Trainer(model, arguments, train_dataset=examples)
print(trainer.train().metrics)
trainer.save_model("model")

"""The inside of the image: streams, environments, replay, trainers, trace, checkpoints."""

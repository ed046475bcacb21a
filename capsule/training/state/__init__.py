"""The state and the files of a run: random streams, trace, checkpoints, run directory."""

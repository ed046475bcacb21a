"""What a run writes and resumes from: random streams, the trace, checkpoints, its directory."""

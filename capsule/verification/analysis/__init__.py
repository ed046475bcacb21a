"""Analysis: where two runs differ first, by how much, and why."""

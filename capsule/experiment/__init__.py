"""The definition of a run: its spec, its lock, and the contract of its run directory."""

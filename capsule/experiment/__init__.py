"""What a run is: its spec, the lock it resolves to, the contract of its run directory."""

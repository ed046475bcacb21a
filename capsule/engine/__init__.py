"""Where a run executes: a container engine, or a plain process."""

"""Studies: many runs as one experiment."""

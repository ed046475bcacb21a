"""Setting determinism flags, and reading them back, in every Python process of a run."""

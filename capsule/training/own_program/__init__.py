"""Programs of the user's own: run as they are, their outputs digested."""

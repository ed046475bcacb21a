"""User programs: run as they are, their outputs digested."""

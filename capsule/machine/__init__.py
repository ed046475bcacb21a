"""This computer: its fingerprint, and what a difference to another one means."""

"""Execution: the run again, or segments of it, within bounds."""

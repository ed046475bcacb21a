"""What people read: progress, tables, verdicts."""

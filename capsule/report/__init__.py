"""Output for people: progress, tables, verdicts, the report page."""

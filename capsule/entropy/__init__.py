"""Random profiles: record, replay or derive the entropy that programs ask the system for."""

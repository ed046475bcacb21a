"""For all tests."""

from hypothesis import settings

# A timing is never a test: a slow machine must not fail a property.
settings.register_profile("capsule", deadline=None)
settings.load_profile("capsule")

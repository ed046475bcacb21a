"""From a lock to an image that is a pure function of it."""

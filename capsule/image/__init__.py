"""From a spec to a lock, and from a lock to an image that is a pure function of it."""

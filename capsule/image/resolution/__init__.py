"""From a spec to the pins of its lock: packages, the source tree, and where they come from."""

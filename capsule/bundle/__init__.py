"""The bundle, one signed file: what it holds, and how it is written, read, signed and trusted."""

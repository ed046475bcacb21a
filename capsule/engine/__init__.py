"""Engines that execute runs: container engines and plain processes."""

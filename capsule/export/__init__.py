"""Runs in the formats of other tools: their metrics, deposits of their bundles."""

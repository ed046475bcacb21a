"""IMPALA's actors on the nodes of a Ray cluster."""

"""IMPALA's actors: their unrolls, and the processes that run them."""

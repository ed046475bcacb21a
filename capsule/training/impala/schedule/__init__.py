"""Schedules: the order in which unrolls are trained on, and their policy versions.

The result of an actor-learner is a pure function of its spec and its schedule (:mod:`~.sources`),
which is a rule, or the log of an asynchronous run. One executor (:mod:`~.executor`) follows either,
over any transport (:mod:`capsule.training.acting.transports`). Clocks, queues and the order of
arrival then have no effect.
"""

"""Schedules: the order in which unrolls are trained on, and their policy versions.

An actor-learner is a pure function of its spec and its schedule (:mod:`~.sources`): a rule, or the
log of an asynchronous run. One executor (:mod:`~.executor`) follows either, over any transport
(:mod:`capsule.training.acting.transports`), and nothing else decides: no clock, no queue, no order
of arrival.
"""

"""Schedules: which unroll is learned when, and the policy version that it is played with.

An actor-learner is a pure function of its spec and its schedule (:mod:`~.sources`): a rule, or the
log of an asynchronous run. One executor (:mod:`~.executor`) follows either, over any transport
(:mod:`~.transports`), and nothing else decides: no clock, no queue, no order of arrival.
"""

"""Logs, metrics, attributes, hooks and random numbers of a step in microbatches, each one ``Effect``."""

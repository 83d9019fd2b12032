"""Tracing a step on tensors without data: which calls it makes, and what they consume and produce."""

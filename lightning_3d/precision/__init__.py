"""Precisions: which numbers compute, which are stepped, and how the losses of fp16 are scaled."""

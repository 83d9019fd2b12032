"""Inline mode: every rank of a pipeline runs the user's step as it is, and each block runs where its weights are."""

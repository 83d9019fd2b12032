"""Activation memory: what of a block's forward is kept for its backward, and what is computed again."""

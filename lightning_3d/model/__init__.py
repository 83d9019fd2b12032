"""The user's model: its blocks, names, state, initial weights, and deferred construction."""

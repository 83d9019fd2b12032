"""Ranks as processes: how they are stopped, how they fail, and how each learns of the others without a collective."""

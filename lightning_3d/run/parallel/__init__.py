"""Carrying out a plan on this rank: one file a room that the model passes through."""

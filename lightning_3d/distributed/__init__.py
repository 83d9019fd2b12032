"""Ranks: the mesh and its process groups, agreement between ranks, random numbers."""

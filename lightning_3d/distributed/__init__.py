"""Ranks: the mesh and its process groups, agreement between ranks, gradients, random numbers, ZeRO."""

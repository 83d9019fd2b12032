"""Recomputing as little as a budget of memory asks for."""

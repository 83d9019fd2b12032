"""Blocks compiled one by one."""

"""Blocks compiled one by one, in full or on tensor-parallel shards."""

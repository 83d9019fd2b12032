"""Embedding tables, output heads and cross entropy over the vocabulary."""

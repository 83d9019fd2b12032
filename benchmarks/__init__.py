"""Measurements: every script prints a table of ratios taken in one run."""

"""The memory of a training step: predicted, kept within a budget, and measured."""

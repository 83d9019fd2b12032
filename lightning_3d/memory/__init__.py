"""The memory of a training step: predicted, and kept within a budget."""

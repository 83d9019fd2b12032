"""The memory of a training step, by call, stage and rank."""

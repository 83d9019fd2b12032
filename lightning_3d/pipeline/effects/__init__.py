"""What a step does besides its loss: logs, metrics, attributes and hooks, joined over microbatches."""

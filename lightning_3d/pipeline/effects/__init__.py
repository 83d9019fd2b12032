"""What a step does beside its loss: logs, metrics, attributes, hooks and random numbers, each one ``Effect``."""

"""A run of the Trainer, such as a fit, phase by phase: decide, make parallel, open, step, close."""

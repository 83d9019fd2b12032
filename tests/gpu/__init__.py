"""What is run on a GPU where one is at hand, and else on the second device: ``make test-gpu``."""

"""What is run on a GPU where one is at hand, and else on the second device: ``make test-gpu``."""

import os

import torch

from tests.second_device import device

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else device.NAME)
"""As the Trainer takes it."""

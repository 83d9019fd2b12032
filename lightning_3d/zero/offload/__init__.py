"""Offload: optimizer states, and at stage 3 parameters, lie in host memory or in files, and optimizers step there."""

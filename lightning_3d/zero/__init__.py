"""ZeRO: what the data-parallel ranks share of parameters, gradients and optimizer states, and when they communicate."""

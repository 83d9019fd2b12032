"""The settings of a run: typed, frozen, checked, the same from Python, YAML, Hydra and LightningCLI."""

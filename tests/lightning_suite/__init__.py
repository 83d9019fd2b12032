"""Lightning's own tests under this strategy: ``python -m tests.lightning_suite TESTS``; see ``__main__``."""

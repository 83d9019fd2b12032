"""Callbacks for a Trainer with ``strategy="3d"``."""

"""The decisions ahead of a run: its layout, its refusals, and the plan of its model."""

"""Pipeline parallel for any module: every stage runs the user's whole step; tensors of other stages are ghosts."""

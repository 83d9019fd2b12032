"""Tensor parallel for the blocks of any model: found by propagation, proved against the dense block, or left alone."""

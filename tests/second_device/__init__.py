"""A device beside the CPU, in its memory, on which the path that GPUs take is tested without one."""

"""Finding how a block is sharded, on fake tensors."""

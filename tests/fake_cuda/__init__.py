"""CUDA without a GPU or a build of torch for it: fake tensors on ``cuda``, for which torch chooses as it does there."""

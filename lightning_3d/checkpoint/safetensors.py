"""Weights as safetensors, in one file or in shards with an index, as ``transformers`` reads them.

The library takes all tensors of a file at once, so that memory holds one file of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file

from lightning_3d.checkpoint.lazy import LazyTensor, of_its_own, return_freed_memory
from lightning_3d.errors import CheckpointError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_safetensors(weights: Mapping[str, LazyTensor], folder: Path, *, max_shard_size: int) -> None:
    """Write weights to an empty folder, one file after the other.

    Args:
        weights: By name; of several names with the same tensor the first is written.
        max_shard_size: Bytes of tensors in a file, but for a tensor that is larger.

    Raises:
        CheckpointError: A dtype that the format does not have.

    """
    shards = _shards(_once(weights), max_shard_size)
    folder.mkdir()
    if len(shards) == 1:
        _write(shards[0], folder / WHOLE)
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for shard, file in zip(shards, files, strict=True):
        _write(shard, folder / file)
        return_freed_memory()
    total = sum(stored.num_bytes for shard in shards for stored in shard.values())
    place = {name: file for shard, file in zip(shards, files, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _once(weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    first: dict[LazyTensor, str] = {}
    for name, stored in weights.items():
        first.setdefault(stored, name)
    return {name: stored for stored, name in first.items()}


def _shards(weights: Mapping[str, LazyTensor], max_size: int) -> Sequence[dict[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, stored in weights.items():
        if shards[-1] and size + stored.num_bytes > max_size:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.num_bytes
    return shards


def _write(shard: Mapping[str, LazyTensor], path: Path) -> None:
    tensors = {name: of_its_own(stored.make().contiguous()) for name, stored in shard.items()}
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except KeyError as error:
        name = next(name for name, tensor in tensors.items() if tensor.dtype in error.args)
        raise CheckpointError(f"{name} is {tensors[name].dtype}, a dtype that safetensors does not have") from error

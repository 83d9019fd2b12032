"""Weights as safetensors, in one file or in shards with an index, as ``transformers`` reads them.

A file has eight bytes with the length of its header, the header (JSON: dtype, shape and place of every tensor), and the
tensors' bytes. That is written here, as the ``safetensors`` library takes all tensors of a file at once.
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lightning_3d.checkpoint.lazy import LazyTensor
from lightning_3d.errors import CheckpointError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def is_own(file: Path) -> bool:
    """Whether a file in a folder is of an export."""
    return file.name.startswith("model") and file.name.endswith((".safetensors", ".safetensors.index.json"))


def write_safetensors(weights: Mapping[str, LazyTensor], folder: Path, *, max_shard_size: int) -> None:
    """Write weights to an empty folder, one tensor after the other.

    Args:
        weights: By name; of several names with the same tensor the first is written.
        max_shard_size: Bytes of tensors in a file, but for a tensor that is larger.

    Raises:
        CheckpointError: A dtype that the format does not have.

    """
    if strange := [name for name, stored in weights.items() if stored.info.dtype not in _NAMES]:
        raise CheckpointError(
            f"{strange[0]} is {weights[strange[0]].info.dtype}, a dtype that safetensors does not have"
        )
    shards = _shards(_once(weights), max_shard_size)
    folder.mkdir()
    if len(shards) == 1:
        _write(shards[0], folder / WHOLE)
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for shard, file in zip(shards, files, strict=True):
        _write(shard, folder / file)
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
    # Those with large elements first, so that each lies at a multiple of its elements' size.
    ordered = sorted(shard.items(), key=lambda item: -item[1].info.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, stored in ordered:
        header[name] = {
            "dtype": _NAMES[stored.info.dtype],
            "shape": list(stored.info.shape),
            "data_offsets": [start, start + stored.num_bytes],
        }
        start += stored.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, stored in ordered:
            file.write(stored.make().contiguous().view(-1).view(torch.uint8).numpy().data)

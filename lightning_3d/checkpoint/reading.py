"""Reading folders of torch.distributed.checkpoint without running what their files say.

torch unpickles a folder's index (``.metadata``), and every value in it that is no tensor, whatever they contain. Here
the index may name classes of an index alone, and other values are read by torch's ``weights_only`` loader unless the
user asks for more.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from lightning_3d.checkpoint.box import Share
from lightning_3d.errors import CheckpointError
from lightning_3d.torch_internals import stored

_ALLOWED: dict[tuple[str, str], object] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in stored.CLASSES},
    **{("pathlib", name): PurePosixPath for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")},
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): stored.layout_named,
}
"""Names in an index -> what they stand for."""


@contextmanager
def unpickling(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a checkpoint.

    Raises:
        CheckpointError: It can't be read, or holds what may not be unpickled.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
            raise CheckpointError(
                f"{path} holds objects of classes that are not unpickled, as they may run code: where you trust it, set"
                " weights_only=False"
            ) from error
        line = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is no checkpoint, or damaged: {line}") from error


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(
            f"the index of the checkpoint names {module}.{name}, as no index of torch.distributed.checkpoint does: it"
            " was changed to run code, or is damaged. Do not load it"
        )


class FolderReader(FileSystemReader):
    """Reads a folder whose index may be anybody's.

    Args:
        path: The folder.
        index: What `read_metadata` has read before.
    """

    def __init__(self, path: Path, index: Metadata | None = None) -> None:
        super().__init__(path)
        self._index = index

    @override
    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Read the index.

        Raises:
            CheckpointError: it contains something else, or files outside of the folder.
        """
        if self._index is not None:
            return self._index
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise CheckpointError(f"the index of the checkpoint is a {type(index).__name__}: it is damaged")
        for place in index.storage_data.values():
            if PurePath(place.relative_path).name != place.relative_path:
                raise CheckpointError(
                    f"the index of the checkpoint names the file {place.relative_path}, which is none of its folder:"
                    " it was changed. Do not load it"
                )
        for key, tensor in index.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                continue
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise CheckpointError(f"the chunks of {key} do not make up its {tuple(tensor.size)}: it is damaged")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class FolderPlanner(DefaultLoadPlanner):
    """Reads shares, and puts other values where they belong.

    Args:
        weights_only: As in ``torch.load``.
    """

    def __init__(self, *, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        share: Share = self.state_dict[index.fqn]
        return share.__get_tensor_shard__(index)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)

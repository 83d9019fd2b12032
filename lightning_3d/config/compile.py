"""The settings of compiled blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_3d.config.checks import check_values
from lightning_3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Which code runs in place of the blocks' forward and backward."""

    section: ClassVar[str] = "compile"

    enabled: bool = False
    """Compile the forward and backward of every block, one by one, when its calls first come; layers of torch alone
    (``Linear``, ``Embedding``), in which there is nothing to fuse, stay as they are. Blocks of one class with the same
    settings share what is compiled. Random numbers are those of eager code. What can't be compiled as one piece (code
    that looks into its data) runs eagerly, with a warning that names the class and the reason. With schedules that
    split the backward, it stays in one piece, as that of compiled code is one.

    A block on tensor-parallel shards is compiled with its collectives, as ``torch.compile`` follows it dense; by all
    ranks or by none. It runs eagerly where it draws random numbers, as dropout does in training, checkpoints parts of
    itself, applies autograd functions of its own, changes its weights, or is sharded over the vocabulary."""

    backend: Literal["inductor", "aot_eager"] = "inductor"
    """As for ``torch.compile``. ``"inductor"`` needs a C++ compiler on CPUs, Triton on GPUs; ``"aot_eager"`` fuses
    nothing, and needs neither."""

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """As for ``torch.compile(backend="inductor")``. Its modes with CUDA graphs are not offered: a graph writes its
    results where those of its last run are, which the next block, another microbatch or a backward still reads."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.mode != "default" and self.backend != "inductor":
            raise ConfigError(
                f"compile.mode={self.mode!r} is one of inductor's, but compile.backend={self.backend!r}: use"
                " compile.backend='inductor', or compile.mode='default'"
            )

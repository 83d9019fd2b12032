"""ZeRO stage 3 on FSDP2: parameters, gradients and optimizer states sharded.

One ``fully_shard`` unit per block and one for what is left, below one root per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.torch_internals.fsdp import drop_gradients, gather_in_backward, make_root, reset
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pipelining import finish_backward
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import base_of
from lightning_3d.zero.buckets import make_buckets, reduce_dtype
from lightning_3d.zero.dp_comm import DPComm
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.half_weights import HalfWeights
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.outside_reads import OutsideReads, mark_whole
from lightning_3d.zero.reducer import GradientReducer
from lightning_3d.zero.shard import RankShard
from lightning_3d.zero.shard_writeback import ShardWriteback, Slot


def is_shardable(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 can shard a parameter; the others stay on all ranks."""
    return parameter.dim() > 0 and parameter.numel() > 0


def lay_out_contiguously(module: nn.Module) -> None:
    """Let parameters have contiguous memory, as FSDP2 asks: those of ``channels_last``, or of a transposed matrix."""
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


class FullySharded(Zero):
    """Stage 3 with several replicas, or with offloaded parameters.

    Args:
        chains: The blocks that this rank runs, by pipeline stage, in the order of their first call.
        offload: Where FSDP2 keeps its shards.
        device: Where steps run.
        keeps: Whether parameters stay gathered to the end of a step.
        optimizes_manually: Whether backwards run inside of steps, in which the root unit would stay gathered.
        casts_to: The dtype in which autocast reads weights, if eager code runs under it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        config: ZeroConfig,
        chains: Sequence[Sequence[nn.Module]],
        offload: OffloadPolicy,
        device: torch.device,
        optimizes_manually: bool,
        keeps: bool,
        casts_to: torch.dtype | None,
    ) -> None:
        super().__init__(module)
        self._keeps_graph = False  # a backward inside of the step has a graph, which the next backward reads
        self._casts = False  # gradients are cast to be reduced
        self._keeps = keeps
        self._replicas, self._dtype, self._mesh = DPComm(mesh), config.dtype, mesh
        self._reads = OutsideReads(self._replicas, config.dtype, device)
        self.root.gathered = self._reads.gathered
        self.root.around = self._step
        self._written: dict[nn.Module, ShardWriteback] = {}
        wholes = {fqn: self._reads.describe(p) for fqn, p in module.named_parameters() if not p.is_meta}
        self._replicated, apart = self._shard_units(chains, offload, root_takes_all=not optimizes_manually)
        for parameter in apart:
            self._shard_apart(parameter, torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device)
        self._fsdp = _unit(self.root)
        self._units = [unit for unit in self.root.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            if unit is not self._fsdp:
                block = cast(nn.Module, unit)
                block.register_forward_pre_hook(self._reads.read_arguments, prepend=True, with_kwargs=True)
                block.register_forward_hook(self._written[block].take_after, prepend=True)
                block.register_forward_hook(self._watch_backward, with_kwargs=True)
        self._half: HalfWeights | None = None
        if casts_to is not None and self._replicas.num_shards > 1:
            self._half = HalfWeights(self._units, self._replicas, casts_to, device, self._reads.value)
        self.num_sharing = self._replicas.num_shards
        self.shards = {p: RankShard(parameter=p) for p in self.root.parameters() if not p.is_meta}
        for fqn, parameter in module.named_parameters():
            if parameter in self.shards and isinstance(parameter, DTensor) and parameter not in self._replicated:
                mark_whole(parameter, wholes[fqn])
        self._reducer: GradientReducer | None = None
        _prefetch(chains, config.prefetch)
        make_root(self._fsdp)

    def _shard_units(
        self, chains: Sequence[Sequence[nn.Module]], offload: OffloadPolicy, *, root_takes_all: bool
    ) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
        """Make the units; returns the parameters that can't be sharded, and those that no unit takes."""
        tied = _tied_parameters(self.root)  # they belong to the root unit
        blocks = dict.fromkeys(block for chain in chains for block in chain)
        modules = [block for block in blocks if not tied.intersection(block.parameters())]
        left = {p for p in self.root.parameters() if not p.is_meta}
        replicated = {p for p in left if not is_shardable(p)}
        apart: set[nn.Parameter] = set()
        for module in (*modules, self.root):
            own = [p for p in module.parameters() if p in left - replicated]
            left -= set(own)
            apart |= _of_other_dtypes(own) if module is not self.root or root_takes_all else set(own)
            slots = _slots(module, set(own) - apart)
            fully_shard(
                module,
                mesh=self._mesh.shard_axes,
                reshard_after_forward=not self._keeps,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=self._reduce_dtype(set(own) - apart)),
                offload_policy=offload,
                ignored_params={p for p in module.parameters() if p.is_meta or p in replicated or p in apart},
            )
            size, rank = self._replicas.num_shards, self._replicas.shard_rank
            self._written[module] = ShardWriteback(slots, size=size, rank=rank)
        return replicated, apart

    def _reduce_dtype(self, parameters: Set[nn.Parameter]) -> torch.dtype | None:
        """The dtype in which a unit's gradients are reduced; None if it is their own."""
        trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
        dtypes = {self._dtype or reduce_dtype(own) for own in trained} - trained
        self._casts |= bool(dtypes)
        return next(iter(dtypes), None)

    def _shard_apart(self, parameter: nn.Parameter, device: torch.device) -> None:
        """Shard a parameter outside of all units; whatever reads it gathers it."""
        axes = self._mesh.device_mesh
        mesh = axes["dp_shard", "tp"] if isinstance(parameter, DTensor) else axes["dp_shard"]
        size, rank = self._replicas.num_shards, self._replicas.shard_rank
        whole = RankShard(parameter=parameter, size=size, rank=rank, mesh=mesh)
        own = whole.like_parameter(whole.own(parameter).to(device, copy=True))
        sharded = nn.Parameter(own, requires_grad=parameter.requires_grad)
        for owner in self.root.modules():
            names = [name for name, held in parameters_of(owner).items() if held is parameter]
            parameters_of(owner).update(dict.fromkeys(names, sharded))

    @contextmanager
    def _step(self) -> Iterator[None]:
        with self._reads.on(), nullcontext() if self._half is None else self._half.step():
            yield
            for unit in self._written.values():
                unit.take()

    @override
    def assign_shards(self, kinds: Mapping[Optimizer, OptimizerKind]) -> None:
        self.release()
        if self._casts:  # a backward without reduction then fails in torch 2.13 for units that were never gathered
            for unit in self._units:
                unit.unshard()
                unit.reshard()
        shards = [self.shards[p] for p in self.shards if p in self._replicated and p.numel() and p.is_floating_point()]
        if shards:
            buckets = make_buckets(shards, self._replicas, dtype=self._dtype)
            self._reducer = GradientReducer(buckets, _receive, lambda: None)

    @override
    def release(self) -> None:
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = None

    @override
    def begin_step(self, *, splits_backward: bool) -> None:
        # FSDP2's hooks do not know of weight gradients that come after the backward of their unit: then parameters and
        # gradients stay whole until the end of the step, too.
        self._reads.keeps = self._keeps or splits_backward
        self._set(keeps=self._reads.keeps)
        self._fsdp.set_is_last_backward(False)
        if self._reducer is not None:
            self._reducer.begin()
            self._reducer.is_on = False

    def _set(self, *, keeps: bool) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(not (keeps or self._keeps), recurse=False)
            unit.set_reshard_after_backward(not keeps, recurse=False)
            unit.set_requires_gradient_sync(not keeps, recurse=False)

    @override
    def end_step(self) -> None:
        self._keeps_graph = False
        self._set(keeps=False)
        self._fsdp.set_is_last_backward(True)
        finish_backward(self._fsdp)
        self._reads.keeps = False
        self._reads.reduce()
        if self._reducer is not None:
            self._reducer.flush()

    @override
    def sit_out(self, blocks: Sequence[nn.Module]) -> bool:
        if not self._reads.keeps and self._replicas.num_shards > 1:  # they gather and reduce at each call
            return False
        for unit in (self._fsdp, *blocks):
            if isinstance(unit, FSDPModule):
                unit.unshard()
        return True

    @override
    def abandon_step(self) -> None:
        self._keeps_graph = self._reads.keeps = False
        self._set(keeps=False)
        self._fsdp.set_is_last_backward(True)
        self._reads.drop()
        for unit in self._units:
            drop_gradients(unit)
        reset(self._fsdp, ())
        self.take_gradients()

    @override
    def set_accumulating(self, accumulating: bool) -> None:
        self._fsdp.set_is_last_backward(not accumulating)
        if self._reducer is not None:
            self._reducer.begin()
            self._reducer.is_on = not accumulating

    @override
    def before_backward(self, loss: Tensor) -> None:
        if self._reducer is not None and loss.requires_grad:
            loss.register_hook(self._begin_backward)

    @override
    def stop_sync(self) -> None:
        if self._reducer is not None:
            self._reducer.is_on = False

    @override
    def sync_stray_grads(self) -> None:
        if self._reducer is not None:
            self._reducer.flush_late()

    def _begin_backward(self, _: Tensor) -> None:
        if self._reducer is not None:
            self._reducer.begin_backward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as FSDP2's own hooks in what a user compiled
    def _watch_backward(self, unit: nn.Module, args: object, kwargs: object, output: object) -> None:
        given = {id(_history_of(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._keep_for_second)
                base = _history_of(leaf)  # which has its hook still when a view that is returned is changed in place
                if base is not leaf and base.grad_fn is not None and id(base) not in given:
                    gather_in_backward(_unit(unit), base)

    def _keep_for_second(self, _: Tensor) -> None:
        """In a backward whose graph is kept for a second one, which reads the same gathered parameters."""
        if torch.is_grad_enabled() and not self._keeps_graph:
            self._keeps_graph = True
            self._set(keeps=True)

    @override
    def after_backward(self) -> None:
        if self._keeps_graph:
            self._keeps_graph = False
            self._set(keeps=False)
            finish_backward(self._fsdp)

    @property
    @override
    def gathers(self) -> tuple[str, ...]:
        return () if self._half is None else self._half.texts

    @override
    def begin_forward(self) -> None:
        if self._half is not None:
            self._half.begin_step()

    @override
    def wait_params(self) -> None:
        self._reads.reduce()
        reset(self._fsdp, self.shards)


def _receive(shard: RankShard, gradient: Tensor) -> None:
    """Take the reduced gradient of a parameter that is not sharded."""
    parameter, gradient = shard.parameter, gradient.to(shard.parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _slots(module: nn.Module, parameters: Set[nn.Parameter]) -> list[Slot]:
    slots = [(owner, name, p) for owner in module.modules() for name, p in parameters_of(owner).items()]
    return [(owner, name) for owner, name, parameter in slots if parameter in parameters]


def _history_of(tensor: Tensor) -> Tensor:
    """The tensor that has the history of all its views."""
    base = base_of(tensor)
    return tensor if base is None else base


def _unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _of_other_dtypes(parameters: Sequence[nn.Parameter]) -> set[nn.Parameter]:
    """The trained parameters of other dtypes than most, of which FSDP2 takes one dtype per unit."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
    dtypes = [dtype for dtype, size in sizes.most_common() if size]
    return {p for p in parameters if p.requires_grad and p.dtype in dtypes[1:]}


def _prefetch(chains: Sequence[Sequence[nn.Module]], num_ahead: int | Literal["auto"]) -> None:
    """Let every unit gather those that follow it in a chain, in the backward those before it."""
    if num_ahead == "auto":
        return
    for chain in chains:
        units: list[FSDPModule] = [unit for unit in dict.fromkeys(chain) if isinstance(unit, FSDPModule)]
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + num_ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, i - num_ahead) : i][::-1])


def _tied_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner in module.modules():
        for parameter in parameters_of(owner).values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(owner)
    return {parameter for parameter, where in owners.items() if len(where) > 1}

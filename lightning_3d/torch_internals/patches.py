"""The attributes of other people's objects that this package replaces: all of them, in the order of a run.

Nothing is replaced but by `replaced`, for as long as its context lasts, and by a row of the list. A process that only
imports has one thing changed: ``load_from_checkpoint`` reads folders, by `lightning_helpers.load_folders`. Functions
whose code changes, as of those that tell ranks, are in `function_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class Patch(NamedTuple):
    """A row of the list."""

    target: str
    """A module or class, whose patch the whole process sees; or an object."""
    names: str
    """The attributes, or what they have in common."""
    why: str
    """Nothing public does."""
    until: str


PROCESS_WIDE: Mapping[str, Patch] = {
    "truncated normals": Patch(
        "torch.nn.init", "_no_grad_trunc_normal_", "reads values, which ranks but the first lack", "a model is built"
    ),
    "gloo threads": Patch(
        "torch.distributed.distributed_c10d", "ProcessGroupGloo", "two threads of a group may crash", "groups are made"
    ),
    "data": Patch(
        "Lightning's setup hook, _DataLoaderSource, CombinedLoader",
        "_call_setup_hook, dataloader, __iter__, __next__",
        "RANK and WORLD_SIZE are the replicas' where data are set up and read",
        "teardown",
    ),
    "first iteration": Patch(
        "lightning.pytorch.loops.fit_loop", "_select_data_fetcher", "notes random states before iterators", "teardown"
    ),
    "advice on logs": Patch(
        "Lightning's result", "_distributed_is_initialized", "one replica logs the same on all ranks", "teardown"
    ),
    "clipping": Patch(
        "torch.nn.utils, torch.nn.utils.clip_grad", "norm, scale, groups", "gradients lie in parts", "teardown"
    ),
    "finetuning": Patch("BaseFinetuning", "filter_on_optimizer", "parameters lie in parts", "teardown"),
    "averages": Patch(
        "torch.optim.swa_utils", "_group_tensors_by_device_and_dtype", "C++ sees where absent memory is", "teardown"
    ),
    "schedulers": Patch(
        "the class of the user's module", "lr_scheduler_step", "a step that overflows moves no rates", "teardown"
    ),
    "modes of optimizers": Patch(
        "the classes of optimizers", "train, eval", "schedule-free ones move parameters outside of steps", "teardown"
    ),
    "collectives of optimizers": Patch(
        "ProcessGroup", "collectives", "an optimizer may communicate, where ranks step parts", "teardown"
    ),
    "interrupts": Patch("Lightning's call", "_interrupt", "hooks that raise would end a teardown", "a failed run ends"),
    "numbers": Patch(
        "LightningModule, Trainer",
        "global_step, current_epoch, ...",
        "a trace notes what depends on them",
        "a trace ends",
    ),
    "weights": Patch("torch.nn.Module", "__getattr__", "code reads weights of other stages", "an inline step ends"),
    "differentiation": Patch(
        "torch.autograd", "grad", "code asks for gradients of such weights", "an inline step ends"
    ),
    "transforms": Patch(
        "torch._functorch.eager_transforms", "_wrap_tensor_for_grad", "torch.func passes modes by", "a step ends"
    ),
    "checkpoints": Patch(
        "torch.utils.checkpoint", "the generator", "a recomputation needs the modes of its forward", "a step ends"
    ),
    "FlexAttention": Patch(
        "torch.nn.attention.flex_attention",
        "the setting to debug it",
        "Dynamo would not follow the modes",
        "it is called",
    ),
    "custom functions": Patch(
        "torch.autograd.function, Function, FunctionMeta", "apply and its helpers", "they pass modes by", "a step ends"
    ),
    "donated buffers": Patch(
        "AOTAutograd's graph_compile",
        "collect_bw_donated_buffer_idxs",
        "a backward that donates buffers runs only once",
        "a block is compiled",
    ),
    "measured collectives": Patch(
        "ProcessGroup, Work, FSDPParamGroup", "collectives and waits", "telemetry times them", "they are timed"
    ),
    "measured fetches": Patch("a fetcher's class", "__next__", "telemetry times them", "they are timed"),
}
"""Key -> patch that every thread and every Trainer of the process sees."""

OF_OBJECTS: Mapping[str, Patch] = {
    "signals": Patch("the Trainer's signal connector", "handlers", "ranks heed signals together", "teardown"),
    "batches": Patch(
        "the Trainer's epoch loop", "_broadcast_sigterm_tensor", "ranks meet without a collective", "teardown"
    ),
    "epochs": Patch("the Trainer's epoch loop", "on_run_start, reset", "an epoch goes on where it was", "teardown"),
    "rest of an epoch": Patch("the Trainer's fit loop", "run", "an epoch that was cut is not complete", "teardown"),
    "stops": Patch("the Trainer's epoch loop", "on_advance_end", "one rank alone may stop", "teardown"),
    "cluster": Patch(
        "the cluster environment",
        "global_rank, world_size",
        "RANK is the replica's, the Trainer's is not",
        "data are read",
    ),
    "accumulation": Patch(
        "the Trainer", "accumulate_grad_batches", "a step has so many samples on any number of replicas", "teardown"
    ),
    "order of samples": Patch(
        "the Trainer's data connector", "_resolve_sampler", "the same on any number of replicas", "teardown"
    ),
    "samplers": Patch(
        "the Trainer's data connector", "_requires_distributed_sampler", "whether it gives one", "loaders are made"
    ),
    "restarts": Patch(
        "the Trainer's checkpoint connector", "resume_start", "a fit that is started again goes on", "teardown"
    ),
    "saving": Patch("the Trainer", "save_checkpoint", "not all ranks are there to save", "a failed run ends"),
    "logs": Patch("the user's module", "log", "a step logs once, for all microbatches or stages", "a step ends"),
    "manual steps": Patch("the user's module", "optimizers, ...", "a trace steps nothing", "a trace ends"),
    "metrics": Patch("the user's metrics", "update, forward, ...", "they see a batch once", "a step ends"),
    "momentum": Patch("the user's norms", "momentum", "statistics of microbatches are joined", "a call of it ends"),
    "forwards of norms": Patch("the user's norms", "forward", "one that a block calls has no hook", "a step ends"),
    "hooks": Patch("the user's modules", "_forward_hooks, ...", "hooks run once, on their stage", "a step ends"),
}
"""Key -> patch of objects of one Trainer or model."""


@contextmanager
def replaced(patch: str, owner: object, new: Mapping[str, object]) -> Iterator[None]:
    """Let an object, class or module have other attributes inside, its own or in place of inherited ones.

    Args:
        patch: The key of its row.
    """
    assert patch in PROCESS_WIDE or patch in OF_OBJECTS, patch
    before = {name: vars(owner)[name] for name in new if name in vars(owner)}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in new:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)

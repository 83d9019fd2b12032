"""FSDP2: finishing a backward that its own hooks did not see end."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule, fully_shard


def finish_backward(root: FSDPModule) -> None:
    """Reduce every unit's gradients and wait for them.

    FSDP2 does this from autograd hooks in the last backward; a schedule's last backward of a stage is not always the
    last of every unit. torch 2.13's own pipeline stages call the same private functions for that reason
    (``_PipelineStageBase.perform_reduce_grad``).
    """
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()

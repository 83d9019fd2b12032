"""CPU time of planning blocks of many small operators for two tensor-parallel ranks.

    python -m benchmarks.many_operators [MODEL ...]

Four models of transformers with four layers and tiny widths; the bar for each is 10 s of CPU. Each is planned by a
process that has planned nothing before, and again by one that finds what the first one chose. The last column is the
share of each layer's parameters that is sharded.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any

import lightning as L
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_3d import ThreeDConfig
from lightning_3d.distributed.mesh import resolve_mesh_shape
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.observer import ExampleStep, Observer
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import decide
from lightning_3d.tensor.plan.known_choices import FOLDER

VOCABULARY, BATCH, LENGTH = 128, 2, 16
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 32}
_SPARSE = "compressed_sparse"
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "intermediate_size": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "GlmMoeDsa": _TEXT
    | _LATENT
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16}
    | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4, "first_k_dense_replace": 1},
    "Zaya": _TEXT | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "router_hidden_size": 16},
    "KimiLinear": _TEXT
    | _LATENT
    | {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "DeepseekV4": _TEXT
    | {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 2}
    | {"layer_types": [f"{kind}_attention" for kind in ("sliding", _SPARSE, "heavily_compressed", _SPARSE)]}
    | {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "sliding_window": 8}
    | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
}


class LanguageModel(L.LightningModule):
    """One of them with random weights; a batch is token ids (B, T)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss


def measure(name: str) -> tuple[dict[str, float], Plan]:
    """Seconds of CPU that one process takes, and the plan."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, device, config = LanguageModel(name), torch.device("cpu"), ThreeDConfig(tensor_parallel_size=2)
    shape = resolve_mesh_shape(config, 2)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    step = ExampleStep(name="training_step", microbatch=tokens, modes=nullcontext)
    start = time.process_time()
    observed = Observer(model, step, device, StepEffects).observe(config, shape)
    traced = time.process_time()
    plan = decide(observed, config, shape, device)
    return {"trace": traced - start, "plan": time.process_time() - traced}, plan


def main() -> None:
    """Print the table; every measurement has a process of its own, as caches of torch are warm after the first."""
    names = sys.argv[1:] or list(CONFIGS)
    columns = "tracing", "planning", "again", "sharded"
    table = Table("seconds of CPU", *columns, title="4 layers of many operators, 2 ranks")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        for name in names:
            (seconds, plan), (again, same) = (_in_new_process(name) for _ in range(2))
            assert [block.tensor for block in same.blocks] == [block.tensor for block in plan.blocks]
            shares = [block.tensor.sharded_share for block in plan.blocks[1:5] if block.tensor is not None]
            figures = [f"{figure:.1f}" for figure in (seconds["trace"], seconds["plan"], again["plan"])]
            table.add_row(name, *figures, ", ".join(f"{share:.0%}" for share in shares))
    Console().print(table)


def _in_new_process(name: str) -> tuple[dict[str, float], Plan]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, name).result()


if __name__ == "__main__":
    main()

"""The examples and what each layout makes of them: data of the tests and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from tests.examples.place import Outcome, Place
from tests.refusals import Refusal, markdown_table, refused_or


@dataclass(frozen=True, kw_only=True)
class Example:
    """One program."""

    run: str
    """The module and the name of the function that runs it."""
    shown: str
    """In the table."""
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """By layout."""
    note: Mapping[str, str] = field(default_factory=dict)
    """By layout, what the table adds to "works"."""
    has_batch_norm: bool = False
    """Whether its batches can't be split into microbatches with the numbers of one process."""
    ddp: str = "ddp"
    shares_buffers: bool = True
    """Whether DDP does; not with manual optimization, of which buffers of other ranks than 0 are not compared."""
    is_small: bool = False
    """Whether the plain suite runs it."""

    def cell(self, layout: str) -> str:
        """How the documentation puts what a layout makes of it."""
        return refused_or(self.refused, layout, "works" + (f" ({self.note[layout]})" if layout in self.note else ""))

    def run_in(self, name: str) -> Outcome:
        """Run it in one process, under DDP or in a layout."""
        module, _, function = self.run.partition(".")
        program: Callable[[Place], Outcome] = getattr(import_module(f"tests.examples.{module}"), function)
        num_microbatches = 1 if self.has_batch_norm else 2
        return program(Place(name=name, num_microbatches=num_microbatches, ddp=self.ddp))


UNUSED = "ddp_find_unused_parameters_true"
BY_HAND = dict.fromkeys(("pp 2", "tp 2"), Refusal(message="uses manual optimization", reason="manual optimization"))
SINGLE_SAMPLES = {
    "pp 2": Refusal(
        message="A batch of 1 samples can't be split into 2 microbatches", reason="its batches have one sample"
    )
}
SINGLE_BATCH = {"pp 2": "batch norms: with one microbatch"}
AVERAGES = {
    "pp 2": Refusal(message="lies on another pipeline stage", reason="its `EMAModel` reads weights of other stages")
}

EXAMPLES = (
    Example(
        shown="`basics/autoencoder.py`",
        run="basics.autoencoder",
        refused={
            "pp 2": Refusal(
                message="Between steps rank 0 came to a call of encoder.0", reason="it samples on rank 0 alone"
            )
        },
    ),
    Example(shown="the same, sampling on all ranks", run="basics.autoencoder_on_all_ranks"),
    Example(shown="`basics/transformer.py`", run="basics.transformer"),
    Example(
        shown="`basics/profiler_example.py`",
        run="basics.torch_profiled",
        note=dict.fromkeys(("pp 2", "tp 2"), "no names of modules"),
        is_small=True,
    ),
    Example(shown="the same by manual optimization", run="basics.manually_profiled", refused=BY_HAND),
    Example(
        shown="`domain_templates/generative_adversarial_net.py`",
        run="domains.adversarial",
        refused=BY_HAND,
        ddp=UNUSED,
        shares_buffers=False,
    ),
    Example(
        shown="`domain_templates/reinforce_learn_Qnet.py`",
        run="reinforcement.q_learning",
        refused={
            "pp 2": Refusal(
                message="lies on another pipeline stage|took another path",
                reason="its step acts by what the network gives, and copies all weights",
            )
        },
        ddp=UNUSED,
        is_small=True,
    ),
    Example(
        shown="`domain_templates/semantic_segmentation.py`",
        run="domains.segmentation",
        has_batch_norm=True,
        note=SINGLE_BATCH,
        is_small=True,
    ),
    Example(
        shown="demos: `BoringModel`, also with `BoringDataModule`",
        run="demos.boring",
        refused=SINGLE_SAMPLES,
    ),
    Example(
        shown="demos: `DemoModel`, also with `RandomIterableDataset`",
        run="demos.demo",
        refused={
            "pp 2": Refusal(message="the model has only 1 calls of blocks to share out", reason="it is one layer")
        },
    ),
    Example(
        shown="demos: `LightningLSTM` with `SequenceSampler`",
        run="demos.demo_lstm",
        refused={
            "pp 2": Refusal(message=r"Expected hidden\[0\] size", reason="its hidden state goes on from batch to batch")
        },
        is_small=True,
    ),
    Example(shown="diffusers: `unconditional_image_generation`", run="diffusion.unconditional"),
    Example(shown="the same with `EMAModel`", run="diffusion.unconditional_averaged", refused=AVERAGES),
    Example(shown="diffusers: `text_to_image`", run="diffusion.text_to_image"),
    Example(
        shown="diffusers: `textual_inversion`",
        run="diffusion.inversion",
        refused={
            "pp 2": Refusal(message="lies on another pipeline stage", reason="it writes an embedding of another stage")
        },
    ),
)


def rendered(layouts: tuple[str, ...]) -> str:
    """The documentation's table."""
    rows = ([example.shown, *map(example.cell, layouts)] for example in EXAMPLES)
    return markdown_table(["example", *layouts], rows)

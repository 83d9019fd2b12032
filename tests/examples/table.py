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
    ddp: str = "ddp"
    is_small: bool = False
    """Whether the plain suite runs it."""

    def cell(self, layout: str) -> str:
        """How the documentation puts what a layout makes of it."""
        return refused_or(self.refused, layout, "works")

    def run_in(self, name: str) -> Outcome:
        """Run it in one process, under DDP or in a layout."""
        module, _, function = self.run.partition(".")
        program: Callable[[Place], Outcome] = getattr(import_module(f"tests.examples.{module}"), function)
        return program(Place(name=name, ddp=self.ddp))


UNUSED = "ddp_find_unused_parameters_true"

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
        shown="demos: `LightningLSTM` with `SequenceSampler`",
        run="basics.demo_lstm",
        refused={
            "pp 2": Refusal(message=r"Expected hidden\[0\] size", reason="its hidden state goes on from batch to batch")
        },
        is_small=True,
    ),
)


def rendered(layouts: tuple[str, ...]) -> str:
    """The documentation's table."""
    rows = ([example.shown, *map(example.cell, layouts)] for example in EXAMPLES)
    return markdown_table(["example", *layouts], rows)

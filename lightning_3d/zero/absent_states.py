"""The states of a parameter that another rank steps, as this rank sees them between steps."""

from __future__ import annotations

from lightning_3d.errors import StepError


class AbsentStates(dict[str, object]):
    """The states of a parameter, none of which this rank has; a read of one says why."""

    def __missing__(self, name: str) -> object:
        raise StepError(
            f"the state {name!r} was read of a parameter that another rank steps, which alone has its states. Read it"
            " by optimizer.state[parameter].get(...), which is None here; or use zero.stage=0, and size 1 for pipeline"
            " and tensor parallel."
        )

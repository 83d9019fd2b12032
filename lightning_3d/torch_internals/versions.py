"""The versions of torch and Lightning that the tests run with; others may have changed what adapters rely on."""

import warnings
from collections.abc import Iterator

import lightning
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

_TESTED = {"torch": ((2, 13), (2, 15)), "lightning": ((2, 6), (2, 6))}
"""The first and last minor version of each. ``make test-versions`` shows them for torch."""

# Lightning 2.6 makes a `LeafSpec` for each dataloader, of which torch warns on every rank, and no program can mend it.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)

# FSDP2 warns of outputs that are views, which lose its hook when they are changed in place: `FullySharded` has its own.
warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)


def warn_of_untested(*installed: str) -> None:
    """Warn on rank 0 of each package that has another version; takes what `untested` does."""
    for text in untested(*installed):
        rank_zero_warn(text)


def untested(torch_version: str = torch.__version__, lightning_version: str = lightning.__version__) -> Iterator[str]:
    """A line for each package that has another version."""
    for package, installed in {"torch": torch_version, "lightning": lightning_version}.items():
        first, last = _TESTED[package]
        major, minor, *_ = installed.split(".")
        if not first <= (int(major), int(minor)) <= last:
            tested = " to ".join(f"{major}.{minor}" for major, minor in dict.fromkeys((first, last)))
            yield (
                f"lightning_3d uses private symbols of {package} and is tested with {package} {tested}, but {installed}"
                f" is installed, which may have changed them. If something fails, install"
                f" '{package}=={last[0]}.{last[1]}.*'."
            )

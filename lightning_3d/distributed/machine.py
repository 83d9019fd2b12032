"""The speed of devices and of the links between them, as far as the time of a step depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """One kind of collective, by rings; or sending from rank to rank."""

    bandwidth: float
    """Bytes that a rank sends in a second."""
    latency: float
    """Seconds that it takes besides."""

    def seconds(self, num_bytes: float, number: int = 1) -> float:
        """The time of so many collectives, in which a rank sends so many bytes altogether."""
        return number * self.latency + num_bytes / self.bandwidth


Network = Mapping[str, Link]
"""``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"send"`` -> its link."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Amounts of computation."""

    flops: float = 0
    """Operations of products."""
    written: float = 0
    """Bytes of the results of operators."""
    calls: float = 0
    """Operators that are called."""

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops, written=self.written + other.written, calls=self.calls + other.calls
        )

    def times(self, factor: float) -> Work:
        """So many times this."""
        return Work(flops=factor * self.flops, written=factor * self.written, calls=factor * self.calls)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices, all alike, on nodes."""

    flops: float
    """Operations per second of products of matrices."""
    writes: float
    """Bytes per second that operators which work element by element write."""
    call: float
    """Seconds of an operator on next to nothing."""
    ranks_per_node: int
    inside: Network
    """Between ranks of a node."""
    between: Network
    """Between nodes."""
    overlaps: bool = True
    """Whether devices compute while gradients are reduced, as CPUs do not."""

    def network(self, span: int) -> Network:
        """That of an axis whose groups lie within so many consecutive ranks."""
        return self.inside if span <= self.ranks_per_node else self.between

    def seconds(self, work: Work) -> float:
        """The time of a device, which works on one operator while the host calls the next ones."""
        busy, calling = work.flops / self.flops + work.written / self.writes, work.calls * self.call
        return max(busy, calling) if self.overlaps else busy + calling


def given_machine(*, tflops: float, inside: float, between: float, ranks_per_node: int) -> Machine:
    """Devices that are not there; the rest is as of one H100.

    Args:
        tflops: 10^12 operations per second of products of matrices, as they are reached.
        inside: GB per second that a rank sends to others of its node.
        between: The same to other nodes.
    """
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "send")
    networks = [
        dict.fromkeys(kinds, Link(bandwidth=1e9 * bandwidth, latency=latency))
        for bandwidth, latency in ((inside, 2e-5), (between, 4e-5))
    ]
    return Machine(
        flops=1e12 * tflops,
        writes=1e12,
        call=5e-6,
        ranks_per_node=ranks_per_node,
        inside=networks[0],
        between=networks[1],
    )

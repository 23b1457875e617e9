"""The measured machine as hardware to plan for: rates and messages by its curves.

Ranks on a CPU share its cores and its memory: curves are measured among as many ranks
as will run, and `simulate` shares the cores among the busy ones.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..layout.choices import BF16, FP16, FP32, TF32
from ..layout.optimizers import ADAMW
from ..layout.state_bytes import engine_state
from ..program import AttentionLoad, Product
from .device import MachineError
from .hardware import HOST_LINK, Hardware, Rates, Roofline
from .machine import Machine, Rate
from .profile import SoftwareProfile, profile, profiles

# Substitutes for dtypes that were not measured.
_NEAR = {
    TF32: FP32,
    FP16: BF16,
}
_ATTENTION = 0.6  # assumed share of the matmul rate in a fused kernel


@dataclass(frozen=True)
class MeasuredRates:
    """Computing rates of one device, from its machine file."""

    machine: Machine
    known: Mapping[str, Sequence[Rate]]  # by dtype
    _known_rates: dict[Any, float] = field(default_factory=dict, compare=False)

    def rate(self, dtype: str, m: float, n: float, k: float) -> float:
        """FLOP/s of a matmul: a geometric mean of measured ones nearby."""
        key = dtype, m, n, k
        if key not in self._known_rates:
            self._known_rates[key] = self._between(*key)
        return self._known_rates[key]

    def _between(self, dtype: str, m: float, n: float, k: float) -> float:
        total = weight = 0.0
        for one in self.rates(dtype):
            # Inverse-distance weighting (Shepard 1968), with squared distances
            # in logarithms of sizes.
            sizes = ((m, one.m), (n, one.n), (k, one.k))
            far = sum(math.log(max(1, mine) / its) ** 2 for mine, its in sizes)
            # This very shape was measured.
            if far < 1e-12:
                return one.flops
            total += math.log(one.flops) / far
            weight += 1.0 / far
        return math.exp(total / weight)

    def rates(self, dtype: str) -> Sequence[Rate]:
        found = self.known.get(dtype) or self.known.get(
            _NEAR.get(dtype, ""), ()
        )
        if not found:
            raise MachineError(
                f"{self.machine.name} has no measured product in {dtype};"
                f" it has {', '.join(self.known) or 'none at all'}."
                " Measure it: phalanx doctor --out FILE."
            )
        return found

    def product(self, p: Product, dtype: str) -> float:
        return float(p.flops / self.rate(dtype, p.m, p.n, p.k))

    def attention(self, a: AttentionLoad, dtype: str, kernel: str) -> float:
        rate = self.rate(dtype, a.queries, a.keys, a.head_dim)
        return float(a.flops / (_ATTENTION * rate))

    def move(self, size: float) -> float:
        return size / self.machine.memory_bandwidth

    @property
    def launch(self) -> float:
        return self.machine.launch


@dataclass(frozen=True)
class MeasuredRoofline(Roofline):
    """A catalogued device with the rates of its machine file.

    Only the shapes that `doctor` measures have a measured rate. The catalogue's model of
    tiles and waves prices all others from the best rate, and attention as published.
    """

    # FLOP/s of the best measured matmul, and bytes per second
    best: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 0.0

    def reached(self, dtype: str) -> float:
        return self.best.get(dtype) or super().reached(dtype)

    def move(self, size: float) -> float:
        return size / self.bandwidth


@dataclass(frozen=True)
class Curves:
    """Message times from the machine's curves, for `ranks` ranks on it.

    If ranks share cores, a small group is as slow as it was measured beside the others,
    which is how curves of separate groups were measured.
    """

    machine: Machine
    ranks: int
    backend: str = ""

    def seconds(
        self, op: str, size: float, ranks: float, apart: float
    ) -> float:
        """Seconds of a collective over `ranks` ranks, each `apart` from the next."""
        # A send is between two ranks, however many the pipeline has.
        group = 2 if op == "send" else int(ranks)
        if group < 2 or ranks < 2:
            return 0.0
        shares = self.machine.kind == "cpu"
        gap = (
            max(1, self.ranks // group)
            if shares and op != "send"
            else int(apart)
        )
        return self.machine.curve(
            op, group, backend=self.backend, apart=gap
        ).seconds(size)


def hardware_of_machine(
    machine: Machine, ranks: int = 0, backend: str = ""
) -> Hardware:
    """A measured machine as hardware for `ranks` ranks; 0: one for each device or core."""
    cpu = machine.kind == "cpu"
    # The cores that ranks can compute on: each measured matmul used `threads`
    # of them.
    cores = max(1, machine.cores // machine.threads) if cpu else 0
    ranks = ranks or cores or machine.count
    if not machine.rates or not machine.memory_bandwidth:
        raise MachineError(
            f"{machine.name} has no measured matrix products or memory bandwidth."
            " Measure them: phalanx doctor --out FILE."
        )
    if machine.kind != "cpu" and ranks > machine.count:
        raise MachineError(
            f"{machine.name} has {machine.count} devices, not {ranks}; ask for {machine.count}."
        )
    known: dict[str, list[Rate]] = defaultdict(list)
    for rate in machine.rates:
        known[rate.dtype].append(rate)
    best = {
        dtype: max(r.flops for r in rates) for dtype, rates in known.items()
    }
    rates: Rates = MeasuredRates(machine, known)
    if machine.entry is not None and not cpu:
        rates = MeasuredRoofline(
            machine.entry, machine.launch, best, machine.memory_bandwidth
        )
    return Hardware(
        name=machine.name,
        ranks=ranks,
        # Ranks on a CPU divide its memory; otherwise each has a device of its
        # own.
        memory=machine.memory / ranks if cpu else machine.memory,
        rates=rates,
        network=Curves(machine, ranks, backend),
        node=ranks,
        peak=best,
        host=machine.host_bandwidth or HOST_LINK,
        measured=True,
        cores=cores,
    )


def local_profile(precision: str = FP32) -> SoftwareProfile:
    """Our profile on a CPU: no driver, no allocator reserve."""
    state = engine_state(precision)
    return replace(
        profile("phalanx"),
        weight_bytes=state.weight,
        gathered_bytes=state.gathered,
        gradient_bytes=state.gradient,
        reduce_bytes=state.reduced,
        optimizer_bytes=state.optimizer,
        context=0.0,
        reserve=1.0,
    )


def profile_for(
    hardware: Hardware,
    name: str | None = None,
    precision: str = FP32,
    *,
    optimizer: str = ADAMW,
) -> SoftwareProfile:
    """The named software, or ours with this optimizer."""
    if hardware.cores and not name:
        return local_profile(precision).with_optimizer(optimizer)
    if name:
        return profile(name)
    of_matrices = f"phalanx-{optimizer}"
    return profile(of_matrices if of_matrices in profiles() else "phalanx")

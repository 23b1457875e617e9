"""A software profile: fitted numbers and known facts about the software that runs on a machine.

Every fitted number measures the distance from the machine's abilities: 1 means no correction.
`profiles.toml` holds our own and those of published runs; `benchmarks/planner_fit.py` fits them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from ..layout.choices import no_such
from ..layout.codec import key, load
from ..layout.state_bytes import MASTER, StateBytes
from ..program import StepOptions
from .device import MachineError, MachineFileError, catalogue

SCORES = "scores"  # attention as products with a softmax between them
# each generation of fused ones is faster
KERNELS = (SCORES, "flash-1", "flash-2", "flash-3")
# What the loss makes of the logits: the gradient over them, or beside them; or a float32 softmax in
# place of them, whose gradient is written over it (Megatron's), or beside it (plain torch's).
LOSSES = ("over", "beside", "wide-over", "wide")

# The numbers that a fit may change, with the range it may use.
FITTED: dict[str, tuple[float, float]] = {
    "speed": (0.45, 1.05),
    "traffic": (0.1, 2.5),
    "host": (0.0, 9.0),
}
NUMBERS = (*FITTED, "slower")  # what runs tell of software


@dataclass(frozen=True)
class SoftwareProfile:
    """One software profile. The first three numbers are fitted on runs, the others are facts of it."""

    speed: float = key(0.845, "of the best product's rate", minimum=0)
    traffic: float = key(
        1.03, "of the bytes that operations move when nothing is fused", minimum=0
    )
    host: float = key(
        0.55, "of the time to start every operation on its own", minimum=0
    )
    slower: float = key(
        1.0, "what computing takes beside that, by runs of one's own", minimum=0
    )
    frameworks: tuple[str, ...] = key((), "what tables call it: beginnings of names")
    attention: str = key("flash-2", "its kernel", choices=KERNELS)
    loss: str = key("wide", "what it makes of the logits", choices=LOSSES)
    regathers: bool = key(
        False, "with `seq`: inputs of columns are kept sharded, gathered again"
    )
    repeats: float = key(
        0.0, "part of the products that `selective` computes again too"
    )
    ends_early: bool = key(
        False,
        "`all` computes a block again up to what its last product takes, and no further",
    )
    joint: bool = key(
        False, "one product makes query, key and value: it stays while the value does"
    )
    call_host: float = key(
        0.0, "seconds to start a message; in a pipeline over servers also a rank"
    )
    pipe_host: float = key(0.55, "how much slower a pipeline starts its operations")
    strain: float = key(
        0.0, "part of the step that is added where memory is nearly full"
    )
    recompute: str = key(
        "none", "what it computes again where a table says nothing of it"
    )
    fused: bool = key(
        False, "norms, activations and rotary are compiled, or kernels of their own"
    )
    overlaps_data: bool = key(
        True, "data-parallel messages travel while the device computes"
    )
    gathers_at_once: bool = key(
        False, "at a step's start, not each before the next one's use"
    )
    overlaps_tensor: bool = key(
        False, "tensor-parallel messages travel beside their products"
    )
    overlaps_sends: bool = key(
        True, "sends between stages travel while the device computes"
    )
    scatters_sends: bool = key(
        False, "a tensor-parallel rank sends its part to the next stage"
    )
    one_port: bool = key(
        False, "a data-parallel collective uses one port of a server, not all"
    )
    rolls: bool = key(
        False, "a stage begins its next step when its own has ended: norms come later"
    )
    balanced: bool = key(
        False, "stages count embedding and head as blocks; else blocks are even"
    )
    muon: bool = key(False, "the matrices of blocks are updated whole, by Muon")
    weight_bytes: float = key(2.0, "of a parameter that computing reads")
    gradient_bytes: float = key(4.0, "of a gradient that is kept")
    reduce_bytes: float = key(4.0, "of a gradient on the group")
    adding: float = key(
        10.0,
        "bytes moved to add a weight's gradient to those before it; 0: a product does it",
    )
    flat_gradients: bool = key(
        False, "gradients have a buffer from the start of a run on"
    )
    optimizer_bytes: float = key(12.0, "float32 copy and two averages")
    gathered_bytes: float = key(2.0, "of a weight on the group")
    bucket: float = key(
        0.0,
        "weights of a piece that are gathered, and gradients that are sent, at once; 0: all",
    )
    logs_first_rank: bool = key(
        False, "its log has the memory of a pipeline's first rank"
    )
    logs_gib: bool = key(False, "the GB of its log are 2^30 bytes")
    context: float = key(1.5e9, "bytes that no tensor holds: driver, communicators")
    reserve: float = key(1.04, "what an allocator holds for each byte in use")
    known: bool = key(True, "its numbers were fitted on runs of this software")
    own_runs: int = key(0, "runs that `plan calibrate` fitted it on", minimum=0)
    own_below: float = key(
        0.0, "log of the range's width below a prediction", minimum=0
    )
    own_above: float = key(0.0, "log of the range's width above it", minimum=0)
    own_causes: tuple[str, ...] = key((), "causes of uncertainty that those runs had")
    own_amounts: tuple[float, ...] = key((), "largest strength of each of them")
    source: str = ""
    name: str = ""

    @cached_property
    def options(self) -> StepOptions:
        """This software's step options, beside the layout."""
        return StepOptions(
            whole_matrices=self.muon,
            agree=not self.rolls,
            overlaps=self.overlaps_data,
            gathers_at_once=self.gathers_at_once,
        )

    @cached_property
    def state(self) -> StateBytes:
        """Bytes of one trained element in each buffer of this software."""
        return StateBytes(
            weight=self.weight_bytes,
            gathered=self.gathered_bytes,
            gradient=self.gradient_bytes,
            reduced=self.reduce_bytes,
            optimizer=self.optimizer_bytes,
        )

    def with_moments(self, count: int) -> SoftwareProfile:
        """The profile with an optimizer that keeps so many moments in place of Adam's two."""
        width = max(MASTER, self.weight_bytes)
        return replace(self, optimizer_bytes=self.optimizer_bytes - (2 - count) * width)

    @property
    def fused_attention(self) -> bool:
        """True if attention keeps no scores in memory."""
        return self.attention != SCORES


@cache
def profiles() -> dict[str, SoftwareProfile]:
    """Every profile that is known, by name."""
    return catalogue(SoftwareProfile, Path(__file__).parent / "profiles.toml")


def profile(name: str) -> SoftwareProfile:
    """The profile of that name, or of a file that ends in .toml: what `plan calibrate` writes."""
    if name.endswith(".toml"):
        found = load(SoftwareProfile, name, "profile file", MachineFileError)
        causes, amounts = len(found.own_causes), len(found.own_amounts)
        if causes != amounts:
            raise MachineError(
                f"{name}: own_causes names {causes} causes, and own_amounts has {amounts} numbers."
                " Write one number for each cause."
            )
        return found
    known = profiles()
    if name not in known:
        raise MachineError(
            f"{no_such('profile', name, known)} Profiles are {', '.join(known)}."
        )
    return known[name]


# The attention kernel that a table names beside the framework, the newest first: it may name several.
_NAMED_KERNELS = (
    ("flash-3", r"\bfa-?[34]\b|flash[-_ ]?att\w*[-_ ]?v?[34]\b|cudnn"),
    ("flash-2", r"\bfa-?2\b|flash[-_ ]?att[a-z]*[-_ ]?v?2\b"),
    ("flash-1", r"\bfa-?1\b|flash[-_ ]?att[a-z]*[-_ ]?v?1\b"),
)
_NAMED_FUSED = r"liger|\brms(?:norm)?[-_ ]kernel|transformer[-_ ]?engine"


def profile_named(framework: str) -> SoftwareProfile:
    """The profile that a table's `framework` means, with the kernels that the text names."""
    found = _profile_named(framework)
    kernels = (
        kernel
        for kernel, words in _NAMED_KERNELS
        if re.search(words, framework, re.IGNORECASE)
    )
    fused = re.search(_NAMED_FUSED, framework, re.IGNORECASE) is not None
    return replace(
        found, attention=next(kernels, found.attention), fused=found.fused or fused
    )


def _profile_named(framework: str) -> SoftwareProfile:
    """The profile by the longest name that the text begins with, else that it has in it; `default`
    where none is known."""
    names = {name: each for each in profiles().values() for name in each.frameworks}
    places = {name: framework.lower().find(name.lower()) for name in names}
    fits = [name for name, place in places.items() if place >= 0]
    best = max(fits, key=lambda name: (places[name] == 0, len(name)), default="")
    return names.get(best, profiles()["default"])

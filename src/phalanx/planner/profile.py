"""Software profiles: fitted numbers and known facts about the software on a machine.

Every fitted number is a factor on what the machine can do: 1 means no correction.
`profiles.toml` holds our own profile and those of published runs;
`benchmarks/planner_fit.py` fits them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from ..layout.choices import no_such
from ..layout.codec import key, load
from ..layout.optimizer_row import MatrixRow
from ..layout.optimizers import ADAMW, OPTIMIZERS, OptimizerChoice
from ..layout.state_bytes import MASTER, StateBytes
from ..program import StepOptions
from .device import MachineError, MachineFileError, catalogue


class StoredScores(NamedTuple):
    """Bytes for each score of attention that stores them between its two products."""

    forward: float  # moved beside the products
    backward: float
    kept: float  # until the backward
    gradients: float  # while the backward runs


SCORES, EAGER = "scores", "eager"
STORED = {
    # One kernel scales, masks and applies softmax, another applies dropout. Kept are the
    # softmax, its values after dropout and dropout's mask (Korthikanti et al. 2022,
    # equation 1: 5 a s for each token and head).
    SCORES: StoredScores(9.0, 11.0, 5.0, 4.0),
    # Every operation by itself, with the softmax in float32: read 2 and write 4 to
    # convert, 4 and 4 to mask, 4 and 4 for the softmax, 4 and 2 to convert back, 5 for
    # dropout; the backward the same, with 12 for the softmax. The softmax is kept in 4
    # bytes.
    EAGER: StoredScores(33.0, 37.0, 7.0, 8.0),
}
# each generation of fused kernels is faster
KERNELS = (*STORED, "flash-1", "flash-2", "flash-3")
# How the loss handles the logits. It makes them by chunks, in the backward ("chunks",
# ours). Or they exist as a whole, and their gradient overwrites them ("over") or has its
# own buffer ("beside"). Or a float32 softmax replaces them, whose gradient overwrites
# it ("wide-over", Megatron) or has its own buffer ("wide", plain PyTorch).
LOSSES = ("chunks", "over", "beside", "wide-over", "wide")

# Numbers that a fit may change, with their ranges.
FITTED: dict[str, tuple[float, float]] = {
    "speed": (0.45, 1.05),
    "traffic": (0.1, 2.5),
    "host": (0.0, 9.0),
}
NUMBERS = (*FITTED, "slower")  # measured on runs


@dataclass(frozen=True)
class SoftwareProfile:
    """A software profile: three numbers fitted on runs, then facts."""

    speed: float = key(
        0.845, "share of the best matrix product's rate", minimum=0
    )
    traffic: float = key(
        1.03, "share of the bytes that unfused operations move", minimum=0
    )
    host: float = key(
        0.55,
        "share of the time to start every operation separately",
        minimum=0,
    )
    slower: float = key(
        1.0, "factor on the time of computing, from your own runs", minimum=0
    )
    frameworks: tuple[str, ...] = key((), "prefixes of its names in tables")
    attention: str = key("flash-2", "attention kernel", choices=KERNELS)
    loss: str = key(
        "wide", "how the loss stores logits and gradients", choices=LOSSES
    )
    regathers: bool = key(
        False,
        "with `seq`: inputs of column-parallel layers stay sharded, gathered again",
    )
    repeats: float = key(
        0.0, "share of products that `selective` recomputes as well"
    )
    ends_early: bool = key(
        False,
        "`all` recomputes a block only up to the input of its last product",
    )
    joint: bool = key(
        False,
        "one product makes query, key and value, all kept as long as the value",
    )
    call_host: float = key(
        0.0,
        "seconds to start a message; in a pipeline on several servers, per rank",
    )
    pipe_host: float = key(
        0.55, "factor on the start of operations in a pipeline"
    )
    strain: float = key(
        0.0, "share of the step that is added if memory is nearly full"
    )
    recompute: str = key("none", "recomputation if a table does not name one")
    divides_sequence: bool = key(
        False, "with tp, `seq` as well, if a table does not say"
    )
    overlaps_exchange: bool = key(
        False,
        "computes beside the exchange of tokens between servers, if interleaved",
    )
    zero: int = key(0, "ZeRO stage if a table does not name one", maximum=3)
    fused: bool = key(
        False,
        "norms, activations and rotary embedding are compiled or fused kernels",
    )
    plain_norms: bool = key(
        False,
        "RMS norms are plain operations with a copy of their input in float32",
    )
    fused_gate: bool = key(
        False,
        "gate and product of a gated MLP are one kernel, as with fused",
    )
    drops_product: bool = key(
        False, "the product in a gated MLP is computed again in the backward"
    )
    fused_experts: bool = key(
        False,
        "gates multiply the inputs of experts' last products: combining keeps nothing",
    )
    experts_one_by_one: bool = key(
        False,
        "a matmul of experts is a kernel for each of them, and so are its casts",
    )
    sends_once: bool = key(
        False,
        "a token travels once to a server with several of its experts",
    )
    adapted: tuple[str, ...] = key(
        (), "linears with adapters if a table does not name them; empty: all"
    )
    narrow_inputs: bool = key(
        False,
        "8-bit matmuls keep their inputs in 8 bits until the backward",
    )
    overlaps_data: bool = key(
        True, "data-parallel messages overlap with computing"
    )
    gathers_at_once: bool = key(
        False,
        "gathers all weights when a step starts, not each before its use",
    )
    overlaps_tensor: bool = key(
        False, "tensor-parallel messages overlap with their products"
    )
    sums_beside: bool = key(
        False,
        "tp sums an input's gradient beside the weight gradient's matmul",
    )
    overlaps_sends: bool = key(
        True, "sends between stages overlap with computing"
    )
    scatters_sends: bool = key(
        False, "each tensor-parallel rank sends its share to the next stage"
    )
    one_port: bool = key(
        False, "a data-parallel collective uses one port of a server, not all"
    )
    no_step_barrier: bool = key(
        False,
        "a stage begins its next step when its own has ended; norms come later",
    )
    balanced: bool = key(
        False, "embedding and head count as blocks when stages are divided"
    )
    optimizer: str = key(
        ADAMW, "the optimizer of its runs", choices=tuple(OPTIMIZERS)
    )
    weight_bytes: float = key(2.0, "bytes per parameter that computing reads")
    gradient_bytes: float = key(4.0, "bytes per gradient element that is kept")
    reduce_bytes: float = key(4.0, "bytes per gradient element in a reduction")
    adding: float = key(
        10.0,
        "bytes moved per gradient element to add it to earlier ones; 0: fused in a product",
    )
    flat_gradients: bool = key(
        False, "gradients have a buffer during the whole run"
    )
    optimizer_bytes: float = key(
        12.0, "bytes per parameter: float32 copy and two moments"
    )
    gathered_bytes: float = key(2.0, "bytes per weight element in a gather")
    bucket: float = key(
        0.0,
        "most elements of a piece that are gathered or reduced at once; 0: all",
    )
    logs_first_rank: bool = key(
        False, "its log shows the memory of a pipeline's first rank"
    )
    logs_context: bool = key(
        False,
        "its log has the driver's context as well, as nvidia-smi's numbers have",
    )
    logs_gib: bool = key(False, "GB in its log are 2^30 bytes")
    context: float = key(
        1.5e9, "bytes outside of tensors: driver, communicators"
    )
    reserve: float = key(
        1.04, "bytes that the allocator holds per byte in use"
    )
    known: bool = key(True, "numbers were fitted on runs of this software")
    own_runs: int = key(
        0, "number of runs that `plan calibrate` fitted", minimum=0
    )
    own_below: float = key(
        0.0, "log of the range's width below a prediction", minimum=0
    )
    own_above: float = key(
        0.0, "log of the range's width above a prediction", minimum=0
    )
    own_causes: tuple[str, ...] = key(
        (), "causes of uncertainty in those runs"
    )
    own_amounts: tuple[float, ...] = key((), "largest strength of each cause")
    source: str = ""
    name: str = ""

    @cached_property
    def options(self) -> StepOptions:
        """Options of this software's step that the layout does not set."""
        return StepOptions(
            whole_matrices=self.matrix_row is not None,
            agree=not self.no_step_barrier,
            overlaps=self.overlaps_data,
            gathers_at_once=self.gathers_at_once,
        )

    @cached_property
    def state(self) -> StateBytes:
        """Bytes per trained element in each buffer of this software."""
        return StateBytes(
            weight=self.weight_bytes,
            gathered=self.gathered_bytes,
            gradient=self.gradient_bytes,
            reduced=self.reduce_bytes,
            optimizer=self.optimizer_bytes,
        )

    @property
    def matrix_row(self) -> MatrixRow | None:
        """The row of its optimizer's updates of whole matrices; None if it has none."""
        return OPTIMIZERS[self.optimizer].matrices

    def with_optimizer(self, name: str) -> SoftwareProfile:
        """The profile with another optimizer in place of AdamW.

        Its bytes per parameter are those of the weight with the fewest moments.
        `Priced.sizes` adds the others.
        """
        if name == self.optimizer:
            return self
        fewest = OptimizerChoice(name=name).fewest_moments
        row = OPTIMIZERS[name]
        changed = self.with_moments(fewest) if row.matrices else self
        return replace(changed, optimizer=name)

    @property
    def moment_bytes(self) -> float:
        """The bytes of a moment's element."""
        # A moment is as wide as the float32 copy, or as wider weights.
        return max(MASTER, self.weight_bytes)

    def with_moments(self, count: int) -> SoftwareProfile:
        """The profile with an optimizer that keeps `count` moments, not Adam's two."""
        less = (2 - count) * self.moment_bytes
        return replace(self, optimizer_bytes=self.optimizer_bytes - less)

    @property
    def fused_attention(self) -> bool:
        """True if attention keeps no scores in memory."""
        return self.attention not in STORED


@cache
def profiles() -> dict[str, SoftwareProfile]:
    """All known profiles, by name."""
    found = catalogue(SoftwareProfile, Path(__file__).parent / "profiles.toml")
    # Ours with each optimizer that updates whole matrices.
    for row in OPTIMIZERS.values():
        if row.matrices:
            ours = found["phalanx"].with_optimizer(row.name)
            name = f"phalanx-{row.name}"
            source = f"{ours.source}, with {row.stored}"
            found[name] = replace(ours, name=name, source=source)
    return found


def profile(name: str) -> SoftwareProfile:
    """The profile of a name, or of a .toml file that `plan calibrate` wrote."""
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


# Attention kernels that a table may name beside the framework, the newest first.
_NAMED_KERNELS = (
    ("flash-3", r"\bfa-?[34]\b|flash[-_ ]?att\w*[-_ ]?v?[34]\b|cudnn"),
    ("flash-2", r"\bfa-?2\b|flash[-_ ]?att[a-z]*[-_ ]?v?2\b"),
    ("flash-1", r"\bfa-?1\b|flash[-_ ]?att[a-z]*[-_ ]?v?1\b"),
    # Behind a slash stands the attention kernel alone.
    (SCORES, r"/ *fused(?: softmax)?$"),
    (EAGER, r"/ *(?:torch|eager|naive)$"),
)
# Liger's loss makes the logits by chunks (`LigerFusedLinearCrossEntropyLoss`).
_NAMED_CHUNKS = r"liger"
_NAMED_FUSED = r"liger|\brms(?:norm)?[-_ ]kernel|transformer[-_ ]?engine"


def profile_named(framework: str) -> SoftwareProfile:
    """The profile that a table's `framework` means, with the kernels that it names."""
    found = _profile_named(framework)
    kernels = (
        kernel
        for kernel, words in _NAMED_KERNELS
        if re.search(words, framework, re.IGNORECASE)
    )
    fused = re.search(_NAMED_FUSED, framework, re.IGNORECASE) is not None
    # Kernels in the text take precedence over those that the profile assumes.
    chunks = re.search(_NAMED_CHUNKS, framework, re.IGNORECASE) is not None
    return replace(
        found,
        attention=next(kernels, found.attention),
        fused=found.fused or fused,
        loss="chunks" if chunks else found.loss,
    )


def _profile_named(framework: str) -> SoftwareProfile:
    """The profile with the longest name that the text begins with, or else contains.

    `default` if none is known.
    """
    names = {
        name: each for each in profiles().values() for name in each.frameworks
    }
    # The position of each name in the text; -1 where it does not occur.
    places = {name: framework.lower().find(name.lower()) for name in names}
    fits = [name for name, place in places.items() if place >= 0]
    best = max(
        fits, key=lambda name: (places[name] == 0, len(name)), default=""
    )
    return names.get(best, profiles()["default"])

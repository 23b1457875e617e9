"""The numbers of a plan, as they are printed and as JSON: rates, MFU and HFU beside the times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost import forward_flops, step_flops
from ..layout import Layout, Shape
from ..plan.baselines import Baseline
from ..plan.hardware import Hardware
from ..plan.kinds import CostFunction
from ..plan.profile import Profile
from ..plan.search import Choice, Plan

__all__ = ["Asked", "Rates", "figures", "of_choice", "rates"]


@dataclass(frozen=True)
class Asked:
    """What is planned: a model, where, with what software."""

    shape: Shape
    own: str  # FILE.py:Class, of somebody's own model
    hardware: Hardware
    cluster: str  # its name; empty for a measured machine
    profile: Profile
    sequence: int
    batch: int  # sequences
    precision: str
    limit: float
    piece_costs: CostFunction

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.sequence

    @property
    def error(self) -> float:
        """By how much a step's time may be wrong, up or down."""
        return self.profile.error


@dataclass(frozen=True)
class Rates:
    """How well a layout uses its devices. Attention counts causal; `mfu_full` counts all pairs."""

    tokens: float  # a second and device
    mfu: float
    hfu: float
    mfu_full: float


def rates(asked: Asked, choice: Choice) -> Rates:
    """From the FLOPs of a step and the peak of the devices."""
    flops = step_flops(asked.shape, asked.batch, asked.sequence)
    again = _again(asked, choice.layout)
    peak = asked.hardware.peak.get(asked.precision, 0.0) * asked.hardware.ranks * choice.step
    part = (lambda x: x / peak) if peak else (lambda x: 0.0)
    return Rates(
        tokens=asked.tokens / choice.step / asked.hardware.ranks,
        mfu=part(flops.model),
        hfu=part(flops.hardware + again),
        mfu_full=part(flops.full),
    )


def _again(asked: Asked, layout: Layout) -> float:
    """FLOPs that recomputation adds: a forward of every block, when blocks are recomputed whole.
    Selective recomputation repeats what is no product and counts nothing."""
    if layout.recompute in ("none", "selective"):
        return 0.0
    ops = forward_flops(asked.shape, asked.batch, asked.sequence)
    return sum(op.causal for op in ops if 0 < op.piece <= asked.shape.layers)


def of_choice(asked: Asked, choice: Choice) -> dict[str, object]:
    """One layout as JSON."""
    found = rates(asked, choice)
    return {
        "layout": str(choice.layout),
        "step_time_s": choice.step,
        "tokens_per_s_per_device": found.tokens,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "mfu_attention_in_full": found.mfu_full,
        "memory_gb": choice.bytes / 1e9,
        "memory_by_kind_gb": {kind: held / 1e9 for kind, held in choice.memory.items()},
        "memory_by_stage_gb": [sum(held.values()) / 1e9 for held in choice.stages],
        "breakdown": dict(choice.parts),
        "error_range": [choice.step * (1 - asked.error), choice.step * (1 + asked.error)],
    }


def figures(asked: Asked, plan: Plan, beside: Sequence[Baseline]) -> dict[str, object]:
    """The plan as JSON."""
    best = plan.layouts[0]
    return {
        "model": asked.own or asked.shape.name,
        "cluster": asked.hardware.name,
        "devices": asked.hardware.ranks,
        "profile": asked.profile.name,
        "sequence": asked.sequence,
        "batch": asked.batch,
        "batch_tokens": asked.tokens,
        "precision": asked.precision,
        "limit_gb": plan.room / 1e9,
        "considered": plan.considered,
        "fitting": plan.fitting,
        "layouts": [of_choice(asked, choice) for choice in plan.layouts],
        "rules": [
            {
                "rule": baseline.rule,
                "fits": baseline.fits,
                "slower": baseline.choice.step / best.step if baseline.choice else None,
                **(of_choice(asked, baseline.choice) if baseline.choice else {}),
            }
            for baseline in beside
        ],
        "refused": [
            {"family": r.family, "kind": r.kind, "reason": r.reason, "layout": r.layout}
            for r in plan.refused
        ],
    }

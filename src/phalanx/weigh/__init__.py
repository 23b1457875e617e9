"""Floor 5: what operations cost, before they run."""

from .flops import OpFlops, StepFlops, forward_flops, step_flops

__all__ = ["OpFlops", "StepFlops", "forward_flops", "step_flops"]

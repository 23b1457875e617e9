"""Floor 5: what operations cost, before they run."""

from .flops import OpFlops, StepFlops, forward_flops, step_flops
from .live import Live
from .sizes import sizes_of

__all__ = ["Live", "OpFlops", "StepFlops", "forward_flops", "sizes_of", "step_flops"]

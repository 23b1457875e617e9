"""Floor 6: a rank at work."""

from .optimizer import AdamW, Optimizer, Sgd
from .perform import Performer, StepResult

__all__ = ["AdamW", "Optimizer", "Performer", "Sgd", "StepResult"]

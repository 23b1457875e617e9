"""The learning rate of a step: a pure function, so that to go on after a stop is an integer."""

from __future__ import annotations

import math

from ..layout.run import OptimizerChoice


def learning_rate(choice: OptimizerChoice, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of a run of `steps`.

    It rises in equal parts, the first step with one of them, and ends at `min_lr` with the last.
    """
    if step < choice.warmup_steps:
        return choice.lr * (step + 1) / choice.warmup_steps
    start = choice.warmup_steps
    if choice.schedule == "constant":
        return choice.lr
    if choice.schedule == "wsd":
        # Hu et al. 2024: level, then a short fall; a tenth of the run, where nothing is said.
        start = max(start, steps - (choice.decay_steps or -(-steps // 10)))
    done = (step - start + 1) / max(1, steps - start)
    done = min(1.0, max(0.0, done))
    falls = (1 + math.cos(math.pi * done)) / 2 if choice.schedule == "cosine" else 1 - done
    lowest = choice.lr / 10 if choice.min_lr is None else choice.min_lr
    return lowest + (choice.lr - lowest) * falls

"""A wrong answer to each exercise, and words of the hint that it gets."""

from __future__ import annotations

from phalanx_lab.exercises import exercises

WRONG = {
    "gpipe": ("F0 F1 B0 B1; F0 F1 B0", "rank 1 has no backward after 1F1"),
    "one-f-one-b": (
        "F0 F1 F2 B0 F3 B1 B2 B3; F0 F1 F2 B0 B1 F3 B2 B3; F0 B0 F1 B1 F2 B2 F3 B3",
        "rank 1 keeps 3 microbatches; 2 are allowed",
    ),
    "deadlock": ("F0 B0 F1 B1; F0 F1 B0 B1", "rank 0 waits at 0B0"),
    "zero-bubble": (
        "F0 F1 I0 W0 F2 I1 W1 I2 W2; F0 I0 W0 F1 I1 W1 F2 I2 W2",
        "takes 11 units; 10",
    ),
    "interleaved": (
        "0F0 0F1 2F0 2F1 2B1 2B0 0B0 0B1; 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
        "takes 19 units; 15 are possible",
    ),
    "missing-all-reduce": ("", "one sum for each unit"),
    "sum-too-early": ("", "after the backward of the last microbatch"),
    "missing-gather": ("", "gathered twice"),
    "dropped-too-soon": ("", "after the backward"),
    "missing-receive": ("", "as often as it is sent"),
    "update-too-soon": ("", "after A"),
    "bubble": ("37.5", "idle time over the busy time"),
    "bubble-interleaved": ("27.3", "1F1B without chunks"),
    "in-flight": ("32", "That is GPipe"),
    "gathers": ("28", "followed at once by its forward"),
    "moments": ("64.2", "divides the optimizer's state"),
    "all-reduce-bytes": ("0.875", "the reduce-scatter alone"),
    "my-group": ("4 5", "differ along tp"),
    "two-hosts": ("dp16 zero3", "divided by 16, not by 8"),
    "small-bubble": ("dp2 pp4 1f1b:8", "idles 27.3%"),
}


def wrong_answer(name: str) -> str:
    """The answer of the table; the damaged program itself where there is none."""
    return WRONG[name][0] or exercises()[name].start

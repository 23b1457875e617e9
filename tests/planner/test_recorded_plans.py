"""Plans of named sizes are those recorded: a change for speed alone changes none of them.

A change of prices, bounds or choices may change them. Compare the plans then, and
record them anew: `python tests/planner/test_recorded_plans.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.api.plan import Planned, PlanTerms, plan

RECORDED = Path(__file__).parent / "recordings" / "plans.txt"
# The sizes whose costs come with the package, so that no piece is costed.
SMALL: list[tuple[str, str, PlanTerms]] = [
    ("8b", "h100x8", {}),
    ("8b", "h100x64", {}),
]
LARGE: list[tuple[str, str, PlanTerms]] = [
    ("8b", "h100x512", {}),
    ("405b", "h100x16384", {"sequence": 8192, "batch_tokens": 2**24}),
    ("405b", "h100x16384", {"sequence": 131072, "batch_tokens": 2**24}),
    ("1t-gpt", "h100x98304", {}),
]


def written(planned: Planned, cluster: str) -> str:
    """The layouts of a plan with their seconds and bytes, one a line."""
    request = planned.request
    first = f"# {request.name} on {cluster}, {request.sequence} tokens"
    plans = (
        f"{choice.layout} {choice.step:.6g} s {choice.bytes:.6g}"
        for choice in planned.layouts
    )
    return "\n".join([first, *plans]) + "\n"


def assert_recorded(model: str, cluster: str, terms: PlanTerms) -> None:
    found = written(plan(model, cluster, **terms), cluster)
    first, *layouts = found.splitlines()
    assert layouts == recorded()[first]


def recorded() -> dict[str, list[str]]:
    """The lines of each recorded plan, by its first line."""
    sections = RECORDED.read_text().strip().split("\n\n")
    plans = (section.splitlines() for section in sections)
    return {first: layouts for first, *layouts in plans}


def test_each_recorded_plan_has_ten_layouts() -> None:
    plans = recorded()
    assert len(plans) == len(SMALL + LARGE)
    assert {len(layouts) for layouts in plans.values()} == {10}


@pytest.mark.parametrize("model, cluster, terms", SMALL)
def test_plans_of_a_named_size_are_those_recorded(
    model: str, cluster: str, terms: PlanTerms
) -> None:
    assert_recorded(model, cluster, terms)


@pytest.mark.slow
@pytest.mark.parametrize("model, cluster, terms", LARGE)
def test_plans_of_large_sizes_are_those_recorded(
    model: str, cluster: str, terms: PlanTerms
) -> None:
    assert_recorded(model, cluster, terms)


if __name__ == "__main__":
    texts = [
        written(plan(model, cluster, **terms), cluster)
        for model, cluster, terms in SMALL + LARGE
    ]
    RECORDED.write_text("\n".join(texts))

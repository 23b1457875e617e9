"""Tables and counts of README.md and docs/verified.md about seeded faults, against the list of faults."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from phalanx.layout import LayoutError
from seeded import FAULTS
from seeded.__main__ import main
from seeded.exact import NOT_RUN, exact_layout

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verified.md").read_text()
# The heading of each part ends the part before.
FAULTS_PART, _, _LATER = PAGE.partition(
    "\n### Seeded faults in bfloat16, in layouts of `exact`\n"
)
EXACT_PART = _LATER.partition("\n## ")[0]
TRIALS = Counter({fault.name: 0 for fault in FAULTS})
for fault in FAULTS:
    TRIALS[fault.name] += len(fault.dtypes)

# A part of the refusal of a fault's layout, by the reason on the page.
REFUSALS = {
    "fp8 matmuls": "does not cover fp8",
    "float16 alone": "does not cover float16",
    "delta layers with cp": "sums of states",
    "`experts:tp`": "does not cover experts:tp",
    "`experts:cp`": "does not cover experts:cp",
    "multi-token prediction with cp": "does not cover mtp",
    "a norm over features that tp shards (`qk_norm_wide`)": "qk_norm_wide",
    "a z-loss": "takes no z-loss",
}
NOT_REACHED = (
    "code that `exact` does not run (partial results of a ring, padding of a"
    " vocabulary, logits in chunks)"
)


def _names(part: str, columns: int) -> Counter[str]:
    """The faults of the last table of a part with so many columns, each with its rows."""
    table = part.rpartition("\n| fault |")[2]
    others = r" [^|]* \|" * (columns - 1)
    rows = re.findall(rf"^\| ([^|]+) \|{others}$", table, re.M)
    return Counter(rows)


def _reason(refusal: str) -> str:
    if refusal in NOT_RUN.values():
        return NOT_REACHED
    (reason,) = (name for name, words in REFUSALS.items() if words in refusal)
    return reason


def test_the_page_has_a_row_for_every_trial_of_a_fault() -> None:
    rows = _names(FAULTS_PART, 5)
    assert rows == TRIALS
    trials = rows.total()
    assert f"\nverify catches {trials} of {trials}. " in FAULTS_PART
    twice = sum(len(fault.dtypes) == 2 for fault in FAULTS)
    assert len(FAULTS) + twice == trials
    assert (
        f"trials of {len(FAULTS)} faults: {twice} of the faults run in"
        in FAULTS_PART
    )


def test_the_readme_counts_the_faults_and_their_trials() -> None:
    text = (ROOT / "README.md").read_text()
    told = re.findall(
        r"(\d+) mistakes were put into .* \((\d+) trials\)", text
    )
    assert told == [(str(len(FAULTS)), str(TRIALS.total()))]


def test_the_page_counts_the_faults_that_exact_can_and_cannot_have() -> None:
    possible: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for fault in FAULTS:
        try:
            exact_layout(fault)
        except LayoutError as refusal:
            refused[_reason(str(refusal))] += 1
        else:
            possible[fault.name] += 1
    assert _names(EXACT_PART, 3) == possible
    found = possible.total()
    assert f"\nIt finds {found} of {found}. " in EXACT_PART
    assert f"\nThe other {refused.total()} faults " in EXACT_PART
    told = re.findall(r"^\| (.+) \| (\d+) \|$", EXACT_PART, re.M)
    assert {reason: int(count) for reason, count in told} == refused


def test_help_explains_the_arguments_and_runs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--exact" in text
    assert "--json" in text

"""No correct layout is refuted: 48 runs of 8 layouts, in 3 dtypes, from 2 seeds."""

from pathlib import Path

import audited_lm
import pytest
import torch
from audit_worlds import record_here, record_worlds
from audited_cases import folder_of

from torch_audit.checks import check_run
from torch_audit.compare import EQUAL, compare
from torch_audit.report import finding_text, verdict_text
from torch_audit.runs import Run, load

pytestmark = pytest.mark.slow
WORLDS = {
    2: ["ddp", "fsdp2", "tp", "tp_sequence", "cp", "pipeline"],
    4: ["hsdp", "fsdp2_tp"],
}
DTYPES = ("float64", "float32", "bfloat16")
SEEDS = (0, 1)
PERTURBED = (1, 2, 3)


def references(folder: Path, case: str, dtype: str) -> tuple[Run, list[Run]]:
    """One process, and the perturbed runs of it that give tolerances below float64."""
    chosen = getattr(torch, dtype)
    one = load(record_here(folder, case, chosen))
    if dtype == "float64":
        return one, []
    perturbed = [
        load(record_here(folder / f"ulp-{seed}", case, chosen, seed))
        for seed in PERTURBED
    ]
    return one, perturbed


def test_forty_eight_equal_runs_are_called_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms, equal = [], 0
    for dtype in DTYPES:
        for seed in SEEDS:
            folder = tmp_path / f"{dtype}-{seed}"
            monkeypatch.setattr(audited_lm, "SEED", seed)
            untied = references(folder, "one", dtype)
            tied = references(folder, "one/tied", dtype)
            record_worlds(folder, WORLDS, dtype, seed)
            for case in (*WORLDS[2], *WORLDS[4]):
                run = load(folder_of(folder, case))
                one, perturbed = tied if case == "pipeline" else untied
                verdict = compare(one, run, perturbed)
                faults = [x for x in check_run(run) if x.fault]
                if verdict.result == EQUAL and not faults:
                    equal += 1
                    continue
                told = [finding_text(fault) for fault in faults]
                name = f"{case}, {dtype}, seed {seed}"
                alarms += [verdict_text(verdict, name, "one"), *told]
    assert not alarms, "\n".join(alarms)
    assert equal == 48

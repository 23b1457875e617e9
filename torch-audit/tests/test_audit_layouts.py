"""Layouts of plain torch equal one process, and seeded bugs are named.

The bugs are in `audited_lm.py`. The layouts are torch's own, so the oracle of a correct layout is that a
correct program of torch gives one process's gradients.
"""

from pathlib import Path

import pytest
from audit_worlds import record_here, record_worlds
from audited_cases import folder_of

from torch_audit.checks import check_run
from torch_audit.compare import (
    EQUAL,
    NOT_COMPARABLE,
    REFUTED,
    Verdict,
    compare,
)
from torch_audit.report import verdict_text
from torch_audit.runs import load
from torch_audit.where import Begins, where

# One worker runs the file, so that its programs are recorded once.
pytestmark = pytest.mark.long_file
ROOT = Path(__file__).parents[2]
TWO_RANKS = [
    "ddp", "fsdp2", "tp", "tp/dropout", "tp_sequence", "cp", "pipeline", "experts",
]  # fmt: skip
FOUR_RANKS = ["hsdp", "fsdp2_tp"]
LAYOUTS = [*TWO_RANKS, *FOUR_RANKS]

# The result, the first quantity that differs, parameters that are named, and the factor.
BUGS: dict[str, tuple[str, str, str, float | None]] = {
    "ddp/mean of means": (REFUTED, "gradient", "embed.weight", None),
    "ddp/not divided": (REFUTED, "gradient", "embed.weight", 2.0),
    "ddp/not scaled": (REFUTED, "gradient", "embed.weight", 0.5),
    "ddp/left out": (REFUTED, "update", "blocks.1.up.weight", 0.0),
    "ddp/one rank": (REFUTED, "gradient", "blocks.0.down.weight", 1.01),
    "ddp/never reduced": (REFUTED, "gradient", "embed.weight", None),
    "ddp/same rows": (NOT_COMPARABLE, "samples", "", None),
    "ddp/start": (NOT_COMPARABLE, "weights", "", None),
    "ddp/after the clip": (REFUTED, "clipped gradient", "embed.weight", 0.5),
    "ddp/not zeroed": (REFUTED, "gradient", "embed.weight", None),
    "ddp/drift": (REFUTED, "weights before the step", "norm.weight", 1.001),
    "ddp/decay": (REFUTED, "update", "embed.weight", None),
    "ddp/rate": (REFUTED, "update", "embed.weight", 2.0),
    "fsdp2/divided": (REFUTED, "gradient", "blocks.1.down.weight", 0.25),
    "fsdp2/local norm": (REFUTED, "norm", "", None),
    "fsdp2/exchanged": (REFUTED, "weights before the step", "blocks.0.down.weight", None),
    "tp/wrong shard": (REFUTED, "weights before the step", "blocks.0.attention.q.weight", None),
    "tp/summed twice": (REFUTED, "gradient", "blocks.0.attention.q.weight", 2.0),
    "tp/dropout seeds": (REFUTED, "gradient", "embed.weight", None),
    "cp/norms not summed": (REFUTED, "gradient", "blocks.0.norm1.weight", None),
    "cp/mask": (REFUTED, "gradient", "embed.weight", None),
    "cp/keys not summed": (REFUTED, "gradient", "embed.weight", None),
    "tp/reduced twice": (REFUTED, "gradient", "embed.weight", None),
    "pipeline/untied": (REFUTED, "gradient", "embed.weight", None),
    "pipeline/stage norm": (REFUTED, "norm", "", None),
    "pipeline/scaled": (REFUTED, "gradient", "embed.weight", 0.5),
    "pipeline/tied twice in the norm": (REFUTED, "norm", "", None),
    "tp/replicas in the norm": (REFUTED, "norm", "", None),
    "cp/scaled": (REFUTED, "gradient", "embed.weight", 2.0),
    "pipeline/later stage": (REFUTED, "gradient", "embed.weight", None),
    "experts/scaled": (REFUTED, "gradient", "embed.weight", None),
    "ddp/sampler seeds": (NOT_COMPARABLE, "samples", "", None),
    "ddp/counted step": (REFUTED, "update", "embed.weight", None),
}  # fmt: skip
# The part of a step in which a wrong gradient begins, the first module that differs, and the last one
# before it that is equal.
BEGINS: dict[str, tuple[Begins, str, str]] = {
    "ddp/mean of means": (Begins.LOSS, "head", ""),
    "ddp/not divided": (Begins.AFTER, "", ""),
    "ddp/never reduced": (Begins.AFTER, "", ""),
    "fsdp2/divided": (Begins.AFTER, "", ""),
    "cp/norms not summed": (Begins.AFTER, "", ""),
    "cp/mask": (Begins.OUTPUT, "blocks.0.attention.o", "blocks.0.attention.v"),
    "cp/keys not summed": (Begins.BACKWARD, "blocks.1.attention.k", "blocks.1.attention.v"),
    "tp/reduced twice": (Begins.OUTPUT, "blocks.1", "blocks.1.down"),
    "pipeline/untied": (Begins.AFTER, "", ""),
    "pipeline/later stage": (Begins.OUTPUT, "blocks.1", "blocks.1.down"),
    "experts/scaled": (Begins.OUTPUT, "moe.experts.3", "moe.experts.3.down"),
}  # fmt: skip
# By how much layouts multiply the loss, as their library takes a mean over ranks.
SCALES = {"ddp": 2.0, "fsdp2": 2.0, "hsdp": 4.0, "fsdp2_tp": 2.0}
# Bugs that others have published, and the case that makes the same mistake.
PUBLISHED = {
    "huggingface/transformers#34191": "ddp/mean of means",
    "huggingface/transformers#35207": "ddp/not divided",
    "pytorch/pytorch#53443": "ddp/never reduced",
    "openspeech-team/openspeech#149": "ddp/same rows",
    "NVlabs/LongLive#71": "ddp/sampler seeds",
    "NVIDIA/Megatron-LM#5976": "ddp/counted step",
    "pytorch/pytorch#72548": "fsdp2/local norm",
    "ByteDance-Seed/VeOmni#184": "hsdp/replicas in the norm",
    "ROCm/TransformerEngine#715": "tp/replicas in the norm",
    "NVIDIA/Megatron-LM#1446": "cp/norms not summed",
    "NVIDIA/Megatron-LM#906": "cp/scaled",
    "uw-syfi/piper#13": "pipeline/untied",
    "NVIDIA/Megatron-LM#7227": "pipeline/tied twice in the norm",
}
# Bugs that one recorded run shows, without a reference, and the check that sees them.
ALONE = {
    "ddp/one rank": "copies",
    "ddp/never reduced": "copies",
    "ddp/after the clip": "clip",
    "ddp/drift": "weights",
    "ddp/rate": "copies",
    "fsdp2/local norm": "norm",
    "fsdp2/exchanged": "weights",
    "tp/dropout seeds": "copies",
    "cp/norms not summed": "copies",
    "pipeline/stage norm": "norm",
    "pipeline/tied twice in the norm": "norm",
    "tp/replicas in the norm": "norm",
    "hsdp/replicas in the norm": "norm",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    record_here(folder, "one")
    record_here(folder, "one/tied")
    record_here(folder, "one/dropout")
    record_here(folder, "experts_one")
    four = [*FOUR_RANKS, "hsdp/not replicated", "hsdp/replicas in the norm"]
    record_worlds(folder, {2: [*TWO_RANKS, *BUGS], 4: four})
    return folder


def reference_of(case: str) -> str:
    if "dropout" in case:
        return "one/dropout"
    layout = case.partition("/")[0]
    return {"pipeline": "one/tied", "experts": "experts_one"}.get(
        layout, "one"
    )


def verdict_of(folder: Path, case: str) -> Verdict:
    reference = reference_of(case)
    return compare(
        load(folder_of(folder, reference)), load(folder_of(folder, case))
    )


@pytest.mark.parametrize("case", [*TWO_RANKS, *FOUR_RANKS])
def test_a_correct_layout_equals_one_process(
    recorded: Path, case: str
) -> None:
    verdict = verdict_of(recorded, case)
    assert verdict.result == EQUAL, verdict_text(verdict, case, "one")
    assert verdict.steps == 3
    assert 0 < verdict.worst < 1e-13
    assert not [
        x for x in check_run(load(folder_of(recorded, case))) if x.fault
    ]


@pytest.mark.parametrize(
    "case",
    [x for x in LAYOUTS if x != "tp/dropout"],
)
def test_outputs_of_modules_are_those_of_one_process(
    recorded: Path, case: str
) -> None:
    """Also their gradients, but for the factor by which a layout multiplies the loss."""
    names = reference_of(case), case
    one, run = (load(folder_of(recorded, x)) for x in names)
    for number, step in run.steps.items():
        found = where(
            step, one.steps[number], [], "float64", first=number == 0
        )
        assert found.begins == Begins.AFTER, (number, found)
        assert found.factor == pytest.approx(SCALES.get(case, 1.0))
        # The whole experts model has few modules, in and between its experts.
        assert found.compared >= (30 if case == "experts" else 38)


@pytest.mark.parametrize("case", BEGINS)
def test_the_first_wrong_module_is_named(recorded: Path, case: str) -> None:
    found = verdict_of(recorded, case).where
    assert found is not None
    assert (found.begins, found.module, found.before) == BEGINS[case]


def test_gradients_that_replicas_never_get_are_named(recorded: Path) -> None:
    verdict = verdict_of(recorded, "hsdp/not replicated")
    assert (verdict.result, verdict.quantity) == (REFUTED, "gradient")
    assert len(verdict.different) == verdict.parameters


def test_a_norm_that_counts_replicas_is_told_with_its_factor(
    recorded: Path,
) -> None:
    """Two replicas of every gradient: the root of 2."""
    verdict = verdict_of(recorded, "hsdp/replicas in the norm")
    assert (verdict.result, verdict.quantity) == (REFUTED, "norm")
    assert "run = 1.4142 x reference" in verdict.text


def test_an_update_that_corrects_a_bias_too_little_is_told_by_its_size(
    recorded: Path,
) -> None:
    """Adam's first update with the bias correction of a second step, by hand."""
    moments = (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5
    verdict = verdict_of(recorded, "ddp/counted step")
    found = {each.name: each.relative for each in verdict.different}
    assert found["embed.weight"] == pytest.approx(1 - moments, abs=1e-4)


def test_the_page_lists_each_published_bug_with_its_case() -> None:
    assert len(PUBLISHED) >= 10
    text = (ROOT / "docs" / "audited.md").read_text()
    for thread, case in PUBLISHED.items():
        repository, _, number = thread.partition("#")
        row = f"[{thread}](https://github.com/{repository}/issues/{number})"
        assert f"| {row} |" in text
        assert f"`{case}`" in text
        assert case in BUGS or case.startswith("hsdp/replicas")


@pytest.mark.parametrize("case", BUGS)
def test_a_seeded_bug_is_named(recorded: Path, case: str) -> None:
    result, quantity, name, factor = BUGS[case]
    verdict = verdict_of(recorded, case)
    text = verdict_text(verdict, case, "one")
    assert (verdict.result, verdict.quantity) == (result, quantity), text
    found = {each.name: each for each in verdict.different}
    if not name:
        return
    # A tied weight has two names, and either may stand for both.
    names = (
        {name, "head.weight"}
        if "untied" in case or "scaled" in case
        else {name}
    )
    (different,) = [found[each] for each in names & set(found)][:1]
    assert different.factor == (
        None if factor is None else pytest.approx(factor)
    )


@pytest.mark.parametrize("case", BUGS)
def test_no_other_bug_is_suspected(recorded: Path, case: str) -> None:
    """One parameter is wrong where one was made wrong, and the ranks are those that were."""
    single = {
        "ddp/left out": [0, 1],
        "ddp/one rank": [1],
        "ddp/drift": [1],
        "fsdp2/exchanged": [0, 1],
        "tp/wrong shard": [0, 1],
    }
    verdict = verdict_of(recorded, case)
    if case in single:
        assert [each.ranks for each in verdict.different] == [single[case]]
    elif case == "cp/norms not summed":
        assert all("norm" in each.name for each in verdict.different)
    elif case == "fsdp2/divided":
        assert all("blocks.1." in each.name for each in verdict.different)


@pytest.mark.parametrize("case", ALONE)
def test_a_bug_is_seen_without_a_reference(recorded: Path, case: str) -> None:
    faults = [x for x in check_run(load(folder_of(recorded, case))) if x.fault]
    assert ALONE[case] in {fault.check for fault in faults}


def test_two_layouts_are_compared_with_each_other(recorded: Path) -> None:
    fsdp2, tp = (load(folder_of(recorded, case)) for case in ("fsdp2", "tp"))
    assert compare(fsdp2, tp).result == EQUAL
    wrong = load(folder_of(recorded, "tp/summed twice"))
    assert compare(fsdp2, wrong).result == REFUTED


def test_a_layout_of_untied_weights_is_not_that_of_tied_ones(
    recorded: Path,
) -> None:
    one, pipeline = (load(folder_of(recorded, x)) for x in ("one", "pipeline"))
    assert compare(one, pipeline).result == REFUTED


def test_a_record_has_less_than_a_kilobyte_a_parameter(recorded: Path) -> None:
    for case in ("one", "fsdp2", "tp"):
        for path in folder_of(recorded, case).iterdir():
            assert path.stat().st_size < 1024 * 32

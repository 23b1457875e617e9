"""Every experiment, run on real ranks: its claims hold, and each of them can fail."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import phalanx.comm.threads
import phalanx_lab
import phalanx_lab.experiments.memory as memory
from phalanx.comm import CommError, RankFailed
from phalanx_lab.catalogue import NAMES, LabError, Size, experiment
from phalanx_lab.trial import LabTrial, conduct
from torch_shm.calls import Call
from torch_shm.settle import settle

pytestmark = pytest.mark.long_file

SMALL = Size(batch=8, width=16, layers=4, steps=2)
FILES = Path(phalanx_lab.__file__).parent / "experiments"


@pytest.fixture(autouse=True)
def few_depths(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Recomputation at all depths takes seconds, and is tried once."""
    if "[recompute-4]" not in request.node.name:
        monkeypatch.setattr(memory, "DEPTHS", (4, 16))


@cache
def trial(name: str, ranks: int) -> LabTrial:
    (done,) = conduct([name], SMALL, ranks=ranks)
    return done


def failed(done: LabTrial) -> list[str]:
    return [
        f"{claim.says} {claim.detail}"
        for claim in done.claims
        if not claim.holds
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_claim_holds_on_threads(name: str, ranks: int) -> None:
    done = trial(name, ranks)
    assert done.claims
    assert not failed(done)


def test_every_claim_holds_in_an_odd_world() -> None:
    wrong = {
        t.experiment.name: failed(t)
        for t in conduct(NAMES, Size(24, 24, 3, 1), ranks=3)
    }
    assert not any(wrong.values()), wrong


def test_every_claim_holds_among_four_processes() -> None:
    wrong = {
        done.experiment.name: failed(done)
        for done in conduct(NAMES, SMALL, backend="gloo")
    }
    assert list(wrong) == list(NAMES)
    assert not any(wrong.values()), wrong


def nearly(calls: Sequence[Call]) -> None:
    """A group that gets everything right to one in a thousand."""
    settle(calls)
    for call in calls:
        for x in call.tensors()[:2]:
            if x.dtype == torch.float64 and call.kind != "send":
                with torch.no_grad():
                    x *= 1.001


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "process-groups"]
)
def test_a_group_that_is_a_little_wrong_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phalanx.comm.threads, "settle", nearly)
    (done,) = conduct([name], SMALL, ranks=2)
    assert failed(done)


# What a writer of such code gets wrong, as one edit of an experiment's source each.
MISTAKES = {
    "point-to-point": ("group.send(g * factor", "group.send(g + factor"),
    "process-groups": ("rank, n) / n", "rank, n)"),
    "data-parallel": ("lab.rows(step), gradient", "lab.rows(0), gradient"),
    "threads-data-parallel": (".mean(0)", ".sum(0)"),
    "sampler": ("chosen[lab.rank :: n]", "chosen[::n]"),
    "orders-of-sums": (
        "range(first, first + EACH)",
        "range(rank, count, n)",
    ),
    "save-and-barrier": ("{str(i): w for", "{str(i): w + 1 for"),
    "zero-1": (
        'padded(gradients, n), "average"',
        'padded(gradients, n), "sum"',
    ),
    "zero-2": ("reduce(gradient, owners[layer]", "reduce(gradient, owners[0]"),
    "zero-3": ("most = max(most, len(here))", "most = 9"),
    "hybrid-sharding": ('across.all_reduce(part, "average")', "pass"),
    "tensor-parallel": (
        "g = scattered(lab.group, g.T.contiguous()).T",
        "g = g[:, columns]",
    ),
    "tensor-parallel-pair": ("group.all_reduce(g)", "pass"),
    "ring-attention": (
        "out * (log_sum - total).exp()",
        "out * (total - log_sum).exp()",
    ),
    "ulysses": ("out = masked(scores)", "out = scores"),
    "state-passing": ("every[: lab.rank]", "every[: lab.rank + 1]"),
    "experts": ("x[order // CHOSEN]", "x[order % len(x)]"),
    "muon": ("owned = torch.stack([orthogonal(x) for x in owned])", "pass"),
    "model-sharding": (
        "ctx.group.send(gradients[0].contiguous()",
        "ctx.group.send(2 * gradients[0]",
    ),
    "pipeline": (
        "loss_of(y.detach(), rows=self.size.batch)",
        "loss_of(y.detach())",
    ),
    "pipeline-async": (
        "[source].pop(0)",
        "[source].pop(-(source > self.lab.rank))",
    ),
    "one-f-one-b": (
        "min(ranks - rank, microbatches)",
        "min(1 + ranks - rank, microbatches)",
    ),
    "recompute": ("forward(x, i, i + 1)", "forward(start, i, i + 1)"),
    "mixed-precision": ("gradient.double() / scale", "gradient.double()"),
    "swap": ("if layer != last:", "if layer > last:"),
    "grid": ("group.all_reduce(gradient)", "pass"),
    "arithmetic": ("[HALF] * 4", "[HALF] * 5"),
    "collectives": ("group.all_to_all(out, x)", "out.copy_(x)"),
    "objects": ('[each["gradient"]', '[2 * each["gradient"]'),
    "one-process": (
        "quiet = TallyWorld(lab.rank, lab.n,",
        "quiet = TallyWorld(lab.rank, lab.n + 1,",
    ),
    "all-reduce": ("if hop < n - 1 else arrived", "if hop < n else arrived"),
    "bandwidth": ('group.all_reduce(x, "average")', "group.all_reduce(x)"),
    "overlap": (
        'all_reduce(gradient, "average", wait=False)',
        "all_reduce(gradient, wait=False)",
    ),
    "hardware": ("_ = lab.rows(0) @", "_ = torch.cat([lab.rows(0)] * 2) @"),
    "context-parallel": ("own.start, lambda", "0, lambda"),
    "asynchronous-launch": ("done = work.done()", "done = True"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_in_an_experiment_is_found_by_its_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = MISTAKES[name]
    found = experiment(name)
    assert found.source.count(right) >= 1, f"{name} no longer says {right}"
    module = importlib.import_module(found.module)
    # What the mistaken source defines takes the place of what stands there, and goes again.
    before = dict(vars(module))
    try:
        exec(
            compile(
                found.source.replace(right, wrong), f"{name}, mistaken", "exec"
            ),
            vars(module),
        )
        try:
            # Two groups of two are the least that have a group across.
            ranks = 4 if name == "hybrid-sharding" else 2
            (done,) = conduct([name], SMALL, ranks=ranks)
        except (RankFailed, CommError, LabError):
            return
        assert failed(done)
    finally:
        vars(module).clear()
        vars(module).update(before)


def code_lines(function: ast.FunctionDef) -> int:
    """Lines that are neither empty nor docstring."""
    _, *body = (
        ast.unparse(function)
        .replace(ast.get_docstring(function, False) or "", "")
        .split("\n")
    )
    return sum(bool(line.strip()) for line in body)


def test_every_public_function_of_a_file_is_an_experiment_or_used_by_one() -> (
    None
):
    used = {
        name
        for each in NAMES
        for name in re.findall(r"\w+", experiment(each).source)
    }
    for path in sorted(FILES.glob("*.py")):
        functions = [
            x
            for x in ast.parse(path.read_text()).body
            if isinstance(x, ast.FunctionDef)
        ]
        assert {x.name for x in functions} <= used
        assert max(map(code_lines, functions), default=0) <= 60, path


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_story_and_shows_values_before_and_after(
    name: str,
) -> None:
    found, done = experiment(name), trial(name, 2)
    assert found.title.endswith(".")
    assert found.source.count(f"def {name.replace('-', '_')}(") == 1
    assert (
        len("".join([found.story, *(cell.prose for cell in found.cells)]))
        > 200
    )
    used = {f"src/phalanx/{path}" for path in found.chapter.engine}
    assert used
    assert all((FILES.parents[3] / path).is_file() for path in used), used
    for record in done.records:
        shown = [when for step in record.steps for when, _ in step.values]
        assert any(when.startswith("before") for when in shown)
        assert any(when.startswith("after") for when in shown)


def test_with_more_ranks_than_heads_ulysses_becomes_the_ring() -> None:
    steps = {
        ranks: [title for title, _ in trial("ulysses", ranks).steps()]
        for ranks in (4, 8)
    }
    assert not failed(trial("ulysses", 8))
    assert "forward: n rounds" in steps[8]
    assert "forward: to heads, attention, back to tokens" in steps[4]


def test_the_reasons_of_a_refusal_reach_whoever_asked() -> None:
    with pytest.raises(
        LabError, match="batch 8 does not divide by 3; use --batch 6"
    ):
        list(conduct(["data-parallel"], SMALL, ranks=3))
    with pytest.raises(LabError, match="Did you mean 'zero-3'"):
        list(conduct(["zero-9"], SMALL))
    with pytest.raises(LabError, match="width is 0"):
        Size(width=0)


def test_the_numbers_of_one_f_one_b_and_hybrid_sharding_are_the_known_ones() -> (
    None
):
    steps = [
        step
        for record in trial("one-f-one-b", 4).records
        for step in record.steps
    ]
    notes = [note for step in steps for note in step.notes]
    assert notes == [
        "The whole batch at once uses 1/4 of the cells. Counted here: 32 of 56, 16/28."
    ]
    whole = 8 * SMALL.layers * SMALL.width**2
    inside, across = 3 * whole * 1 / 2, 2 * 1 / 2 * whole / 2
    steps = [
        step
        for step in trial("hybrid-sharding", 4).records[0].steps
        if step.tables
    ]
    ((_, _, rows),) = steps[0].tables
    assert [row[1] for row in rows] == [f"{inside:,.0f}", f"{across:,.0f}"]

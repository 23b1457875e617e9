"""A run goes on in any layout from what any other has saved: the same weights and optimizer state to
the bit, the same tokens, the same losses to rounding. By the door that `phalanx train` uses."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoint_worlds import hash_tensors

from phalanx.comm import World, launch
from phalanx.layout import Layout, Run
from phalanx.training.agreement import agreed_data
from phalanx.training.checkpoint import Saver
from phalanx.training.checkpoint_format import verify_checkpoint
from phalanx.training.log import RunLog
from phalanx.training.rank import Rank
from phalanx.training.resume import RunState, load_or_draw
from phalanx.training.step import make_step
from phalanx.training.uploads import Uploads
from phalanx.verification.compare import EXACT
from rank_watch.positions import Positions

LAYOUTS = (
    "",
    "dp4 zero3",
    "tp2 seq",
    "pp2 1f1b:3",  # the tied weight on two stages
    "cp2 zero2",
    "dp2x2 zero1 accum:2",
    "pp2 tp4 zb-h1:3",  # two places of tp for each key and value head
    "dp2 cp2 tp2 zero3",
)
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]
# Each layout saves for one other and goes on from one other.
RING = list(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
# Sizes that no tp divides: padding in the vocabulary and in the feed-forward.
RUN = """
steps = 9
batch = 7
sequence = 12
model = {layers = 3, hidden = 16, heads = 4, kv_heads = 2, ffn = 22, vocab = 257, tied = true}
optimizer = {lr = 1e-2, warmup_steps = 1}
"""


class Went(NamedTuple):
    """What one rank saw: the ids of the tokens it worked on in each step, and the losses."""

    tokens: list[list[int]]
    losses: list[float]


def _went(
    world: World, run: Run, layout: str, steps: int, copy: Path | None
) -> Went:
    """Go on from what is there, save at once elsewhere, and make so many steps; then save."""
    rank = Rank(world, run, Layout.parse(layout))
    positions = Positions(world.rank)
    log = RunLog(run, positions, active=False, quiet=True)
    data = agreed_data(rank.part.everyone, rank.batches.corpora)
    state = RunState(rank, data, Uploads(rank, log))
    start = load_or_draw(state, log, None)
    if copy:
        Saver(copy, rank.part.local, rank.part.updates).save(
            state.progress(start)
        )
    tokens, losses = [], []
    place = rank.part.local.coordinates
    tells = place["tp"] == place["pp"] == 0
    for step in range(start, start + steps):
        own = rank.batch(step)
        tokens.append(
            [t for m in own for t in m["tokens"].flatten().tolist()]
            if tells
            else []
        )
        losses.append(make_step(rank, positions, step).result.total)
    saver = Saver(run.checkpoints, rank.part.local, rank.part.updates)
    saver.save(state.progress(start + steps))
    return Went(tokens, losses)


def _run(out: Path, layout: str, steps: int, copy: Path | None = None) -> Went:
    """The same for a whole world: all tokens of each step in order of size, and the losses."""
    run = Run.parse(RUN, "any", (f"out={out}",))
    text = f"{layout} fp64"
    ranks = Layout.parse(text).ranks
    seen = launch(
        _went, ranks, run, text, steps, copy, backend="threads", timeout=30.0
    )
    assert len({tuple(each.losses) for each in seen}) == 1
    steps_of = zip(*(each.tokens for each in seen), strict=True)
    return Went(
        [sorted(t for part in step for t in part) for step in steps_of],
        seen[0].losses,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A layout's run, saved after two steps: the folder, and what two more steps saw."""
    made: dict[str, tuple[Path, Went]] = {}

    def of(layout: str) -> tuple[Path, Went]:
        if layout not in made:
            out = tmp_path_factory.mktemp("saved") / "run"
            _run(out, layout, 2)
            made[layout] = out, _run(out, layout, 2)
        return made[layout]

    return of


@pytest.mark.parametrize(
    "source, target",
    [
        *RING,
        *(
            pytest.param(*p, marks=pytest.mark.slow)
            for p in PAIRS
            if p not in RING
        ),
    ],
)
def test_each_layout_goes_on_from_every_other(
    saved,
    source: str,
    target: str,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    out, truth = saved(source)
    kept = out / "checkpoints" / "step-00000002"
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / kept.name).symlink_to(kept)
    found = _run(run, target, 2, tmp_path / "copy")
    copy = tmp_path / "copy" / kept.name
    assert verify_checkpoint(copy) == []
    hashes = hash_tensors(kept)
    assert hash_tensors(copy) == hashes
    for kind in ("exp_avg/", "exp_avg_sq/", "weight/"):
        assert (
            sum(title.startswith(kind) for title in hashes) == len(hashes) // 3
        )
    assert found.tokens == truth.tokens
    assert len(found.tokens[0]) == 7 * 12
    assert found.losses == pytest.approx(truth.losses, rel=EXACT)

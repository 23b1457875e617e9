"""Ranks that were started differently (issue: they trained on, or hung) refuse at the start, all of
them, and name rank, key and both values."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phalanx.comm import RankFailed, World, launch
from phalanx.layout import Run
from phalanx.training.loop import train

pytestmark = pytest.mark.long_file

# Two processes are each a rank of many starts, one after the other, as somebody starts them by hand:
# with RANK and WORLD_SIZE set and a command. What the command says and its exit code are written.
BY_HAND = """
import contextlib, io, json, os, sys
from phalanx.cli.main import main
starts = json.load(open(sys.argv[1]))
rank = int(sys.argv[2])
ends = []
for port, commands in starts:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                   "RANK": str(rank), "LOCAL_RANK": str(rank)}
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main(["train", *commands[rank]])
        except BaseException as error:
            code = repr(error)
    ends.append([code, text.getvalue()])
json.dump(ends, open(sys.argv[1] + f".{rank}", "w"))
"""

SIZES = "layers=4,hidden=32,heads=4,ffn=48,vocab=256"
MODEL = f"model={{{SIZES}}}"
OWN = Path(__file__).parents[2] / "examples" / "stranger.py"


def files(folder: Path) -> dict[str, str]:
    """A token file, a copy, one with another token in the middle; a model's file, a copy with another
    word in it, and two alike that import another module each."""
    tokens = np.random.default_rng(0).integers(0, 256, 200_000).astype("<u2")
    tokens.tofile(folder / "tokens.bin")
    (folder / "copy").mkdir()
    tokens.tofile(folder / "copy" / "same.bin")
    tokens[100_000] ^= 1
    tokens.tofile(folder / "other.bin")
    source = OWN.read_text()
    (folder / "own.py").write_text(source)
    (folder / "edited.py").write_text(source + "\n# a word more\n")
    for name in ("importer", "same_importer"):
        below = folder / name
        below.mkdir()
        find = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))"
        (below / f"{name}.py").write_text(
            f"{source}\n{find}\nimport imported_part\n"
        )
        (below / "imported_part.py").write_text(f"NAME = {name!r}\n")
    return {path.stem: str(path) for path in folder.rglob("*.*")}


# What rank 1 is told besides, what rank 0 is told besides, and the key that must be named.
DIFFERENT = [
    (
        ["optimizer.lr=0.5"],
        [],
        "optimizer.lr: rank 1 has 0.5, rank 0 has 0.0003",
    ),
    (["seed=3"], [], "seed: rank 1 has 3, rank 0 has 0"),
    (
        ["optimizer.clip=0.5"],
        [],
        "optimizer.clip: rank 1 has 0.5, rank 0 has 1.0",
    ),
    (
        ["optimizer.schedule=linear"],
        [],
        "schedule: rank 1 has linear, rank 0 has cosine",
    ),
    (["batch=8"], [], "batch: rank 1 has 8, rank 0 has 4"),
    (["sequence=8"], [], "sequence: rank 1 has 8, rank 0 has 12"),
    (["steps=2"], [], "steps: rank 1 has 2, rank 0 has 1"),
    (
        ["document_masks=false"],
        [],
        "document_masks: rank 1 has False, rank 0 has True",
    ),
    (
        ["checkpoint.every=1"],
        [],
        "checkpoint.every: rank 1 has 1, rank 0 has 0",
    ),
    (
        ["validation.every=1"],
        [],
        "validation.every: rank 1 has 1, rank 0 has 0",
    ),
    (["layout=dp2 zero2"], [], "layout: rank 1 has dp2 zero2, rank 0 has dp2"),
    (["layout=tp2"], [], "layout: rank 1 has tp2, rank 0 has dp2"),
    (["layout=pp2"], [], "layout: rank 1 has pp2"),
    (["layout=dp2 bf16"], [], "layout: rank 1 has dp2 bf16, rank 0 has dp2"),
    (
        [MODEL.replace("heads=4", "heads=2")],
        [],
        "model.heads: rank 1 has 2, rank 0 has 4",
    ),
    (["data=other"], ["data=tokens"], "data: rank 1 has"),
    (
        ["model=edited:Stranger"],
        ["model=own:Stranger"],
        "model file: rank 1 has",
    ),
    (
        ["model=importer:Stranger"],
        ["model=same_importer:Stranger"],
        "model's module imported_part: rank 1 has sha256",
    ),
    (["out=elsewhere"], [], "out: rank 1 has"),
    # Refused by one rank alone: the other says which, and why.
    (
        ["layout=dp4"],
        [],
        "rank 1 could not begin: UsageError: layout 'dp4' is for 4 ranks",
    ),
    (["no.such=1"], [], "rank 1 could not begin: RunError"),
    ([], ["data=nowhere.bin"], "rank 0 could not begin: RunError"),
]


def free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in with_ports]
    for one in with_ports:
        one.close()
    return ports


def words(more: list[str], named: dict[str, str], folder: Path) -> list[str]:
    """A rank's command; names of files become their paths, a later word replaces an earlier one."""
    said = [
        MODEL,
        "batch=4",
        "sequence=12",
        "steps=1",
        "layout=dp2",
        "validation.batches=0",
    ]
    said = {
        word.partition("=")[0]: word
        for word in [*said, f"out={folder / 'run'}", *more]
    }
    for key, word in said.items():
        name, colon, rest = word.partition("=")[2].partition(":")
        if name in named:
            said[key] = f"{key}={named[name]}{colon}{rest}"
    return list(said.values())


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[tuple[int, str], ...]]:
    """How both ranks of each start ended. In the last two the ranks agree: one trains, and one is to
    go on with another seed."""
    folder = tmp_path_factory.mktemp("agreement")
    named = files(folder)
    same = (["data=same"], ["data=tokens"], "")
    reseeded = (["seed=3", "steps=2"], ["seed=3", "steps=2"], "")
    starts = [
        [port, [words(zero, named, folder), words(one, named, folder)]]
        for port, (one, zero, _) in zip(
            free_ports(len(DIFFERENT) + 2),
            [*DIFFERENT, same, reseeded],
            strict=True,
        )
    ]
    (folder / "starts").write_text(json.dumps(starts))
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BY_HAND, str(folder / "starts"), str(rank)],
            env=environment, cwd=folder,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.wait(timeout=240) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    ends = [
        json.loads((folder / f"starts.{rank}").read_text())
        for rank in range(2)
    ]
    return [((a[0], a[1]), (b[0], b[1])) for a, b in zip(*ends, strict=True)]


@pytest.mark.parametrize(
    "number", range(len(DIFFERENT)), ids=lambda n: DIFFERENT[n][2][:24]
)
def test_ranks_started_differently_all_refuse_and_name_rank_and_key(
    number: int, started: list[tuple[tuple[int, str], ...]]
) -> None:
    wanted = DIFFERENT[number][2]
    ends = started[number]
    assert [code for code, _ in ends] == [2, 2], ends
    if wanted.startswith("rank"):  # the rank that failed tells its own error
        alone = int(wanted.split()[1])
        assert wanted in ends[1 - alone][1]
        assert wanted.partition(": ")[2].partition(":")[0] in ends[alone][1]
    else:
        assert all(wanted in text for _, text in ends), ends


def test_ranks_started_alike_train_though_their_data_lies_elsewhere(
    started: list[tuple[tuple[int, str], ...]],
) -> None:
    (code, text), (other, _) = started[-2]
    assert (code, other) == (0, 0), started[-2]
    assert "step 1/1" in text


def test_what_all_ranks_refuse_while_they_resume_is_a_sentence_of_each(
    started: list[tuple[tuple[int, str], ...]],
) -> None:
    assert [code for code, _ in started[-1]] == [2, 2], started[-1]
    for rank, (_, text) in enumerate(started[-1]):
        assert f"rank {rank}: CheckpointError: " in text
        assert "was begun with seed = 0, but the run has 3" in text
        assert "Traceback" not in text


def train_apart(
    world: World, out: str, keys: list[str], layouts: list[str]
) -> None:
    """Each rank with a key and a layout of its own."""
    run = Run.parse(
        "",
        "apart",
        (MODEL, "batch=4", "sequence=16", f"out={out}", keys[world.rank]),
    )
    train(world, run, layouts[world.rank], quiet=True)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@pytest.mark.parametrize(
    "keys, layouts, named",
    [
        (
            ["seed=1", "seed=1", "seed=2"],
            ["dp3"] * 3,
            "seed: rank 2 has 2, ranks 0-1 have 1",
        ),
        (
            ["steps=1", "steps=2", "steps=1"],
            ["dp3"] * 3,
            "steps: rank 1 has 2, ranks 0, 2 have 1",
        ),
        (["steps=1"] * 3, ["dp3", "pp3", "dp3"], "layout: rank 1 has pp3"),
    ],
)
def test_local_ranks_that_differ_refuse_too(
    backend: str,
    keys: list[str],
    layouts: list[str],
    named: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailed, match=named) as caught:
        launch(
            train_apart,
            3,
            str(tmp_path / "run"),
            keys,
            layouts,
            backend=backend,
            timeout=30.0,
        )
    assert len(caught.value.reports) == 3

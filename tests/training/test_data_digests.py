"""Other data is noticed: on resume, and between hosts at the start. The same data elsewhere is not."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_worlds import records, small, trained
from test_data_files import megatron

from phalanx.comm import RankFailed, World, launch
from phalanx.comm.agree import PeerFailed, RanksDiffer
from phalanx.training import agreement
from phalanx.training.agreement import agreed_data
from phalanx.training.checkpoint import steps
from phalanx.training.data import digests
from phalanx.training.data.digests import (
    blocks_of,
    chance_missed,
    differences,
    digest_of,
    kept_digest,
)
from phalanx.training.data.prepare import prepare
from phalanx.training.data.token_files import DataError, describe, open_corpus
from phalanx.training.data.vocabulary import Bytes

DOCS = Path(__file__).parents[2] / "docs"


def tokens(
    path: Path, dtype: str = "<u2", seed: int = 0, count: int = 5000
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(seed).integers(0, 250, count).astype(dtype).tofile(
        path
    )
    return path


def of_llm_c(path: Path) -> Path:
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 5000
    body = tokens(path).read_bytes()
    path.write_bytes(head.tobytes() + body)
    return path


def of_nanogpt(folder: Path) -> Path:
    tokens(folder / "train.bin")
    tokens(folder / "val.bin", seed=1)
    return folder


def of_megatron(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    megatron(path, [[n] * (n % 7 + 1) for n in range(200)])
    return path.with_suffix(".bin")


def prepared(folder: Path, *, answers: bool = False) -> Path:
    source = folder.parent / "texts"
    source.mkdir(parents=True)
    for n in range(40):
        (source / f"{n}.txt").write_text(f"document {n} " * 40)
    prepare(source, folder, Bytes(), share=0.3)
    if answers:  # as of chats
        index = json.loads((folder / "index.json").read_text())
        for name, split in index["splits"].items():
            (folder / f"{name}.answers").write_bytes(b"\1" * split["tokens"])
            split["answers_sha256"] = "0" * 64
        (folder / "index.json").write_text(json.dumps(index))
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "bin": lambda here: tokens(here / "a.bin"),
    "uint16": lambda here: tokens(here / "a.uint16"),
    "uint32": lambda here: tokens(here / "a.uint32", "<u4"),
    "llm.c": lambda here: of_llm_c(here / "a.bin"),
    "nanogpt": lambda here: of_nanogpt(here / "a"),
    "megatron": lambda here: of_megatron(here / "a" / "m"),
    "prepared": lambda here: prepared(here / "a"),
    "chats": lambda here: prepared(here / "a", answers=True),
}  # fmt: skip


def _flipped(at: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip


def _appended(path: Path) -> None:
    path.write_bytes(path.read_bytes() + path.read_bytes()[-8:])


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


CHANGES = {
    "first byte": _flipped(0.0),
    "middle": _flipped(0.5),
    "last byte": _flipped(1.0),
    "append": _appended,
    "cut": _cut,
}


def noticed(source: Path, before: str) -> bool:
    try:
        return open_corpus(source).fingerprint != before
    except DataError:  # refused by name, which is no silence
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_any_file_of_any_kind_of_source_is_noticed(
    kind: str, tmp_path: Path
) -> None:
    source = KINDS[kind](tmp_path / "here")
    corpus = open_corpus(source)
    before = corpus.fingerprint
    folder = source if source.is_dir() else source.parent
    read = {path for _, path in corpus.files}
    unread = {"index.json", "progress.json", "skipped.txt"}
    assert {
        path for path in folder.iterdir() if path.name not in unread
    } == read
    for path in read:
        whole = path.read_bytes()
        for name, change in CHANGES.items():
            change(path)
            assert noticed(source, before), (path.name, name)
            path.write_bytes(whole)
    assert open_corpus(source).fingerprint == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_content_elsewhere_or_at_another_time_is_no_change(
    kind: str, tmp_path: Path
) -> None:
    source = KINDS[kind](tmp_path / "here")
    before = open_corpus(source).fingerprint
    for path in (tmp_path / "here").rglob("*"):
        os.utime(path, (1, 1))
    assert open_corpus(source).fingerprint == before
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    (tmp_path / "here").rename(tmp_path / "moved")
    for place in ("copy", "moved"):
        moved = tmp_path / place / source.relative_to(tmp_path / "here")
        assert open_corpus(moved).fingerprint == before
    # The file's own name means nothing either, unless it says how tokens are read.
    if kind == "bin":
        os.rename(moved, moved.with_name("b.bin"))
        assert open_corpus(moved.with_name("b.bin")).fingerprint == before
        os.rename(moved.with_name("b.bin"), moved.with_name("b.uint32"))
        assert open_corpus(moved.with_name("b.uint32")).fingerprint != before


def test_bytes_that_are_read_as_another_type_or_held_out_otherwise_are_told(
    tmp_path: Path,
) -> None:
    path = tokens(tmp_path / "a.bin", count=1 << 19)
    before = describe([open_corpus(path, share=0.2)])
    (told,) = differences(before, describe([open_corpus(path, share=0.5)]))
    assert re.search(
        r"[\d,]+ tokens of .*a.bin are held out, and [\d,]+ were", told
    )
    path.rename(tmp_path / "a.uint32")
    (told,) = differences(
        before, describe([open_corpus(tmp_path / "a.uint32", share=0.2)])
    )
    assert "a.uint32 is read as uint32, and was as uint16" in told


def test_files_that_change_places_are_noticed(tmp_path: Path) -> None:
    folder = of_nanogpt(tmp_path / "a")
    before = open_corpus(folder).fingerprint
    (folder / "train.bin").rename(folder / "x")
    (folder / "val.bin").rename(folder / "train.bin")
    (folder / "x").rename(folder / "val.bin")
    assert open_corpus(folder).fingerprint != before


def test_another_vocabulary_type_or_share_of_the_same_bytes_is_noticed(
    tmp_path: Path,
) -> None:
    folder = prepared(tmp_path / "a")
    before = open_corpus(folder).fingerprint
    index = (folder / "index.json").read_text()
    # written otherwise
    (folder / "index.json").write_text(json.dumps(json.loads(index)))
    assert open_corpus(folder).fingerprint == before
    (folder / "index.json").write_text(
        index.replace('"vocab": 256', '"vocab": 255')
    )
    assert open_corpus(folder).fingerprint != before
    raw = tokens(tmp_path / "raw.bin", count=1 << 19)
    assert (
        open_corpus(raw, share=0.2).fingerprint
        != open_corpus(raw, share=0.5).fingerprint
    )


# ---- on resume


def _data_of(out: Path) -> list[str]:
    texts = [each["text"] for each in records(out, "data")]
    # Files of one document hold none out, which is said as well.
    return [
        text for text in texts if not text.startswith("no validation loss")
    ]


def _begun(tmp_path: Path, data: str) -> Path:
    out = tmp_path / "run"
    trained(small(out, "steps=1", f"data={data}"), "")
    return out


ONE, TWO = "one.bin", "two.bin"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokens(tmp_path / ONE)
    tokens(tmp_path / TWO, seed=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rename(old: str, new: str) -> Callable[[], object]:
    return lambda: os.rename(old, new)


def _exchange() -> None:
    os.rename(ONE, "x")
    os.rename(TWO, ONE)
    os.rename("x", TWO)


RESUMED: list[tuple[str, str, Callable[[], object], list[str]]] = [
    (ONE, ONE, lambda: None, []),
    (ONE, ONE, lambda: os.utime(ONE, (1, 1)), []),
    (ONE, "moved.bin", _rename(ONE, "moved.bin"), []),
    (ONE, ONE, lambda: _flipped(0.5)(Path(ONE)), ["one.bin has other content in its 10,000 bytes"]),
    (ONE, ONE, lambda: _appended(Path(ONE)), ["one.bin has 10,008 bytes, and had 10,000"]),
    (ONE, TWO, lambda: None, ["two.bin has other content in its 10,000 bytes (it was one.bin)"]),
    (ONE, "python", lambda: None, ["python is read in place of one.bin"]),
    (ONE, f"{ONE}, {TWO}", lambda: None, ["there are 2 sources, and there were 1: one.bin"]),
    (f"{ONE}, {TWO}", f"{ONE}, {TWO}", _exchange, ["in another order", "was two.bin, one.bin"]),
    # the same contents in the same order
    (f"{ONE}, {TWO}", f"{TWO}, {ONE}", _exchange, []),
    (f"{ONE}:1, {TWO}:2", f"{ONE}:2, {TWO}:4", lambda: None, []),
    (f"{ONE}:1, {TWO}:2", f"{ONE}:1, {TWO}:3", lambda: None, ["weights of the sources are 1, 3", "1, 2"]),
]  # fmt: skip


@pytest.mark.parametrize("before, after, change, expected", RESUMED)
def test_a_resumed_run_says_which_data_changed_and_how(
    before: str,
    after: str,
    change: Callable[[], object],
    expected: list[str],
    here: Path,
) -> None:
    out = _begun(here, before)
    change()
    trained(small(out, "steps=2", f"data={after}"), "")
    told = _data_of(out)
    assert len(told) == bool(expected)
    for text in told:
        assert (
            f"the data is not what {steps(out / 'checkpoints')[1]} was trained on"
            in text
        )
        assert "The run continues after 6 sequences of it" in text
        assert all(words in text for words in expected), text
    # Once: the checkpoint after it is of the new data.
    trained(small(out, "steps=3", f"data={after}"), "")
    assert _data_of(out) == told
    assert not [
        each for each in records(out, "settings") if "data" in each["text"]
    ]


def _rewritten(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = steps(out / "checkpoints")[0] / "manifest.json"
    table = json.loads(path.read_text())
    change(table["body"])
    body = json.dumps(table["body"], sort_keys=True, separators=(",", ":"))
    table["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(json.dumps(table))


def _of_an_earlier_version(out: Path, data: str) -> None:
    def change(body: dict[str, Any]) -> None:
        del body["config"]["data"]
        body["data"] = data

    _rewritten(out, change)


def test_a_checkpoint_of_an_earlier_version_is_no_false_alarm(
    here: Path,
) -> None:
    # What they had: of a raw file SHA-256 of its first 1,024 bytes and its size.
    head = Path(ONE).read_bytes()[:1024]
    mark = hashlib.sha256(head + b"10000").hexdigest()
    out = _begun(here, ONE)
    _of_an_earlier_version(out, mark)
    trained(small(out, "steps=2", f"data={ONE}"), "")
    (told,) = _data_of(out)
    assert (
        "the beginning and the size of its data: these are unchanged" in told
    )
    trained(small(out, "steps=3", f"data={ONE}"), "")
    assert _data_of(out) == [told]
    _of_an_earlier_version(out, mark)
    _flipped(0.0)(Path(ONE))
    trained(small(out, "steps=4", f"data={ONE}"), "")
    assert "its beginning or size differs" in _data_of(out)[1]


def test_of_the_built_in_text_an_earlier_version_recorded_everything(
    tmp_path: Path,
) -> None:
    out = _begun(tmp_path, "python")
    _of_an_earlier_version(out, open_corpus("python").mark)
    trained(small(out, "steps=2"), "")
    assert _data_of(out) == []
    _of_an_earlier_version(out, "0" * 64)
    trained(small(out, "steps=3"), "")
    assert "the data is not what" in _data_of(out)[0]
    # An imported model was trained on nothing that is known.
    _of_an_earlier_version(out, "")
    trained(small(out, "steps=4"), "")
    assert len(_data_of(out)) == 1


@pytest.mark.parametrize(
    "wrong",
    [7, [], {"sources": 1}, {"sources": [{"name": []}]}, {"x": "\x1b"}],
)
def test_a_record_that_is_none_is_a_notice_and_not_the_end(
    wrong: object, here: Path
) -> None:
    out = _begun(here, ONE)
    _rewritten(out, lambda body: body["config"].update(data=wrong))
    trained(small(out, "steps=2", f"data={ONE}"), "")
    (told,) = _data_of(out)
    assert "the data cannot be compared" in told


def test_a_digest_that_was_made_in_another_way_is_made_once_more_in_that_way(
    here: Path,
) -> None:
    """As when there is more data now, so that less of each file is read."""
    path = here / ONE
    (now,) = describe([open_corpus(path)])
    asked = []

    def again(path: Path, blocks: int, checksum: str) -> str:
        asked.append((path, blocks, checksum))
        return digest_of(path, blocks, checksum)

    for blocks, checksum in ((3, "xxh3_128"), (0, "sha256"), (5, "sha256")):
        old = digest_of(path, blocks, checksum)
        (file,) = now.files
        then = digests.replace(
            now, files=(digests.replace(file, blocks=blocks, digest=old),)
        )
        assert differences([then], [now], again) == []
        assert asked.pop() == (path, blocks, checksum)
        _flipped(0.0)(path)
        assert (
            "has other content"
            in differences([then], describe([open_corpus(path)]), again)[0]
        )
        _flipped(0.0)(path)
        asked.clear()
    assert differences([now], [now], again) == []
    assert not asked
    unknown = digests.replace(now.files[0], digest="blake9:" + "0" * 32)
    (said,) = differences(
        [digests.replace(now, files=(unknown,))], [now], again
    )
    assert "cannot be compared: 'blake9' is not installed" in said


# ---- between ranks


def _agreed(world: World, paths: list[str], boots: list[str]) -> list[str]:
    corpora = [open_corpus(paths[world.rank])]
    agreement._boot = lambda: boots[world.rank]  # type: ignore[assignment]
    made = agreed_data(world.split("everyone", [range(world.size)]), corpora)
    return [file.digest for record in made for file in record.files]


def test_one_rank_of_a_host_reads_the_data_and_hosts_are_compared(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path, blocks: int) -> str:
        read.append(path)
        return kept_digest(path, blocks)

    monkeypatch.setattr(digests, "kept_digest", counted)
    out = here / "run"
    trained(small(out, "steps=1", f"data={ONE}, {TWO}"), "dp3")
    assert [path.name for path in read] == [ONE, TWO]
    shutil.copy(ONE, "copy.bin")
    # Over processes: ranks have no memory in common, and each has its own copy or host.
    for paths, boots in (
        ([ONE, "copy.bin"], ["a", "a"]),
        ([ONE, ONE], ["a", "b"]),
    ):
        one, other = launch(
            _agreed, 2, paths, boots, backend="shm", timeout=30.0
        )
        assert one == other == [digest_of(Path(ONE), 0)]
    _flipped(0.5)(Path("copy.bin"))
    with pytest.raises(RankFailed) as differ:
        launch(
            _agreed,
            2,
            [ONE, "copy.bin"],
            ["a", "b"],
            backend="shm",
            timeout=30.0,
        )
    assert {each.error.split(":")[0] for each in differ.value.reports} == {
        RanksDiffer.__name__
    }
    assert "data: rank 1 has 10,000 bytes xxh3_128:" in str(differ.value)


def _unread(world: World, paths: list[str]) -> None:
    corpora = [open_corpus(paths[world.rank])]
    group = world.split("everyone", [range(world.size)])
    group.barrier()
    if world.rank == 1:
        os.unlink(paths[1])
    agreed_data(group, corpora)


def test_a_host_that_cannot_read_the_data_ends_all_ranks_with_its_words(
    here: Path,
) -> None:
    with pytest.raises(RankFailed) as failed:
        launch(_unread, 2, [ONE, TWO], backend="threads", timeout=30.0)
    errors = {report.rank: report.error for report in failed.value.reports}
    assert errors[1].startswith(
        "DataError: two.bin: cannot be read: No such file"
    )
    assert errors[0].startswith(
        f"{PeerFailed.__name__}: rank 1 could not begin: DataError: two.bin"
    )


# ---- large data


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes 2^13 times as small."""
    monkeypatch.setattr(digests, "BLOCK", 32)
    monkeypatch.setattr(digests, "BLOCKS", 64)
    monkeypatch.setattr(digests, "WHOLE", 2048)


@pytest.mark.usefixtures("scaled")
def test_of_large_data_each_file_has_its_share_of_the_blocks() -> None:
    assert blocks_of([2048]) == [0]
    assert blocks_of([1000, 1048]) == [0, 0]
    assert blocks_of([1000, 1049]) == [31, 32]
    assert blocks_of([1 << 20]) == [64]
    assert blocks_of([3 << 20, 1 << 20, 5, 0]) == [47, 15, 0, 0]
    assert sum(blocks_of([n << 14 for n in range(40)])) <= 64 + 40


def _read(size: int, blocks: int) -> np.ndarray[Any, Any]:
    """Which bytes are read of a file."""
    read = np.zeros(size, bool)
    for at, length in digests._ranges(size, blocks):
        assert 0 <= at < at + length <= size
        read[at : at + length] = True
    return read


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("size", [40_000, 65_536, 100_003])
def test_of_a_large_file_every_long_run_of_bytes_is_read_somewhere(
    size: int,
) -> None:
    read = _read(size, 64)
    edges = np.flatnonzero(
        np.diff(np.concatenate(([0], ~read, [0])).astype(int))
    )
    longest = (edges[1::2] - edges[::2]).max()
    assert longest < 2 * size / 64
    assert read[:32].all()
    assert read[-32:].all()
    assert read.sum() <= 66 * 32
    # Places without a pattern: what repeats in a file could else never be read.
    starts = [at for at, _ in digests._ranges(size, 64)][1:-1]
    assert len({int(64 * (at * 64 / size % 1)) for at in starts}) > 30
    assert (_read(size, 64) == read).all()
    assert _read(size, 0).all()


@pytest.mark.usefixtures("scaled")
def test_a_large_file_is_known_by_the_blocks_that_are_read(
    tmp_path: Path,
) -> None:
    path = tokens(tmp_path / "a.bin", count=20_000)
    read = _read(40_000, 64)
    before = digest_of(path, 64)
    for at in [*np.flatnonzero(read)[::400], *np.flatnonzero(~read)[::4000]]:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        assert (digest_of(path, 64) != before) == read[at]
        content[at] ^= 1
        path.write_bytes(content)
    os.truncate(path, 39_999)
    assert digest_of(path, 64) != before
    assert (
        open_corpus(tokens(tmp_path / "b.bin", count=20_000)).fingerprint
        != before
    )


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("share", [0.005, 0.02, 0.05])
def test_changes_all_over_a_file_are_missed_no_more_often_than_stated(
    share: float,
) -> None:
    size = 64 * 32 * 40
    read, draw = _read(size, 64), np.random.default_rng(7)
    blocks = size // 32
    missed, draws = 0, 2000
    for _ in range(draws):
        changed = draw.choice(blocks, round(share * blocks), replace=False)
        missed += not read.reshape(blocks, 32)[changed].any()
    stated = chance_missed(share, 64)
    assert missed / draws < stated + 3 * (stated * (1 - stated) / draws) ** 0.5
    assert stated == pytest.approx((1 - share) ** 64)


def test_the_docs_state_how_much_is_read_and_what_is_missed() -> None:
    text = (DOCS / "data-format.md").read_text()
    assert f"Up to {digests.WHOLE >> 30} GiB" in text
    assert f"{digests.BLOCKS:,} blocks of {digests.BLOCK >> 10} KiB" in text
    rows = re.findall(r"^\| ([\d.]+) % \| ([\d.e-]+) \|$", text, re.M)
    assert len(rows) == 3
    for share, chance in rows:
        expected = chance_missed(float(share) / 100, digests.BLOCKS)
        assert float(chance) == pytest.approx(expected, rel=0.05)


# ---- digests that are kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digests of all files are kept here, also of those that were just written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "KEPT", 0)
    monkeypatch.setattr(digests, "SETTLED", -1e9)
    return tmp_path / "cache" / "phalanx" / "digests"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def counted(path: Path, blocks: int, checksum: str = "xxh3_128") -> str:
        names.append(path.name)
        return digest_of(path, blocks, checksum)

    monkeypatch.setattr(digests, "digest_of", counted)
    return names


def test_a_second_start_reads_no_file_and_a_change_is_read_though_its_time_is_put_back(
    here: Path, cache: Path, computed: list[str]
) -> None:
    out = _begun(here, ONE)
    assert computed == [ONE]
    trained(small(out, "steps=2", f"data={ONE}"), "dp2")
    assert computed == [ONE]
    path = here / ONE
    before = path.stat()
    _flipped(0.5)(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    trained(small(out, "steps=3", f"data={ONE}"), "")
    assert computed == [ONE, ONE]
    assert "one.bin has other content" in _data_of(out)[0]
    tokens(here / "new").rename(path)  # a new file in its place
    assert open_corpus(path).fingerprint
    assert computed == [ONE] * 3
    assert len([*cache.iterdir()]) == 3


def test_what_is_kept_is_no_more_than_a_digest_and_is_made_anew_if_it_is_none(
    here: Path, cache: Path, computed: list[str]
) -> None:
    before = open_corpus(ONE).fingerprint
    (kept,) = cache.iterdir()
    assert kept.read_text() == digest_of(Path(ONE), 0)
    for damage in (b"", b"\x00\xff", b"xxh3_128:" + b"0" * 31, b"x" * 9000):
        kept.write_bytes(damage)
        assert open_corpus(ONE).fingerprint == before
    kept.unlink()
    os.mkfifo(kept)  # nobody may be waited for
    assert open_corpus(ONE).fingerprint == before
    assert computed == [ONE] * 6


def test_a_start_goes_well_without_a_folder_for_digests(
    here: Path,
    cache: Path,
    computed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here / "cache").write_text("a file in its place")
    assert open_corpus(ONE).fingerprint == open_corpus(ONE).fingerprint
    assert computed == [ONE, ONE]
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "other"))
    monkeypatch.setattr(digests, "SETTLED", 1e9)  # it was written just now
    open_corpus(ONE).fingerprint  # noqa: B018
    monkeypatch.setattr(digests, "SETTLED", -1e9)
    monkeypatch.setattr(digests, "KEPT", 1 << 20)  # and it is small
    open_corpus(ONE).fingerprint  # noqa: B018
    assert not (here / "other").exists()
    monkeypatch.setattr(digests, "KEPT", 0)
    # as of a user without a home folder
    monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")
    assert open_corpus(ONE).fingerprint
    assert not (here / "~").exists()


def test_the_digest_of_a_file_that_changes_while_it_is_read_is_not_kept(
    here: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(path: Path, blocks: int) -> str:
        digest = digest_of(path, blocks)
        _flipped(0.5)(path)
        return digest

    monkeypatch.setattr(digests, "digest_of", changing)
    kept_digest(here / ONE, 0)
    monkeypatch.setattr(digests, "digest_of", digest_of)
    assert not cache.exists()
    assert kept_digest(here / ONE, 0) == digest_of(here / ONE, 0)


def test_old_digests_make_room(
    here: Path,
    cache: Path,
    computed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digests, "MOST", 3)
    paths = [tokens(here / f"{n}.bin", seed=n, count=100) for n in range(6)]
    for n, path in enumerate(paths):
        kept_digest(path, 0)
        for each in cache.iterdir():
            if each.stat().st_mtime > 100:
                os.utime(each, (n, n))
    assert len([*cache.iterdir()]) == 3
    computed.clear()
    for path in reversed(paths[3:]):
        kept_digest(path, 0)
    assert computed == []


# ---- text that is prepared


def test_prepared_text_is_known_by_its_contents_and_not_by_its_times(
    tmp_path: Path,
) -> None:
    folder = prepared(tmp_path / "here" / "a")
    source = folder.parent / "texts"
    for path in source.iterdir():
        os.utime(path, (1, 1))
    done = prepare(source, folder, Bytes(), share=0.3)
    shutil.copytree(source, tmp_path / "copy")
    assert prepare(tmp_path / "copy", folder, Bytes(), share=0.3) == done
    # As earlier versions wrote it: by sizes and times alone.
    progress = folder / "progress.json"
    table = json.loads(progress.read_text())
    files = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(source.iterdir(), key=lambda path: path.name)
    ]
    key = json.dumps([files, "bytes", None, 0.3, "text (text)"])
    old = {**table, "key": hashlib.sha256(key.encode()).hexdigest()}
    del old["content"]
    progress.write_text(json.dumps(old))
    assert prepare(source, folder, Bytes(), share=0.3).tokens == done.tokens
    progress.write_text(json.dumps(table))
    path = source / "7.txt"
    before = path.stat()
    path.write_text(path.read_text().replace("7", "8"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="begun from other sources"):
        prepare(source, folder, Bytes(), share=0.3)


def test_a_text_that_cannot_be_read_is_left_out_and_does_not_end_a_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, blocks: int) -> str:
        if path.name == "3.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return kept_digest(path, blocks)

    monkeypatch.setattr("phalanx.training.data.prepare.kept_digest", fail)
    folder = prepared(tmp_path / "here" / "a")
    assert (
        prepare(folder.parent / "texts", folder, Bytes(), share=0.3).tokens[0]
        > 0
    )

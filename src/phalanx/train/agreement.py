"""Facts that all ranks of a run must share, compared before it begins.

Every key of the run is such a fact, and so are the contents of its files: a model's source, its
data, a machine file, a schedule. Two keys are paths that may differ between hosts: for `data` and
`machine` only the contents count. `out` and `checkpoint.dir` are compared as absolute paths: ranks
write one checkpoint together, so all need the same folder on a shared file system.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from ..comm import Group
from ..comm.agree import (
    FAILED,
    PeerFailed,
    RanksDiffer,
    differences,
    exchange,
    not_alike,
)
from ..comm.join import versions
from ..layout import Layout, Shape
from ..layout.families import code_of
from ..layout.run import Run
from ..layout.shape import HUB
from ..layout.source import arguments_text, imported_sources, split_name
from ..parallel import Model
from ..program import Program
from .data.digests import SourceRecord, identity_of, records_of, table_of
from .data.token_files import Corpus, DataError, describe

DIGITS = 16  # of a checksum that are compared and shown


def facts_of(
    run: Run, layout: Layout, shape: Shape, model: Model, program: Program | None
) -> dict[str, str]:
    """Everything that the ranks of a run must have alike, by name, but for the data."""
    table, sizes = asdict(run), asdict(shape)
    for name in ("model", "data", "machine"):
        del table[name]
    for name in ("batch", "sequence"):
        del sizes[name]
    table["out"] = os.path.abspath(run.out)
    if run.checkpoint.dir:
        table["checkpoint"]["dir"] = os.path.abspath(run.checkpoint.dir)
    keys = {name: str(value) for name, value in flat(table | {"model": sizes})}
    keys |= {
        "layout": str(layout),
        "batch": str(shape.batch),
        "sequence": str(run.tokens(shape)),
    }
    weights = [f"{n} {list(w.shape)} {w.dtype}" for n, w in model.weights.items()]
    model_file, schedule = code_of(run.own)[0], split_name(layout.schedule)[0]
    modules = {f"model's module {name}": x for name, x in modules_of(run.own).items()}
    modules |= {
        f"schedule's module {name}": x for name, x in _modules(schedule).items()
    }
    return {
        **keys,
        **versions(),
        **modules,
        "model file": _file(model_file),
        "model class": code_of(run.own)[1],
        "model's arguments": arguments_text(run.own),
        "model's weights": _checksum("\n".join(weights)),
        "schedule file": _file(schedule),
        "machine file": _file(run.machine),
        # With recompute:fit ranks first settle how much memory there is.
        "program": _checksum(str(program)) if program else "",
    }


def modules_of(own: str) -> dict[str, str]:
    """Digests of the user's own modules that a model's file imports, by name. Of a model that only
    transformers has the code of, that package's version."""
    if own.startswith(HUB):
        return {"transformers": f"version {metadata.version('transformers')}"}
    return _modules(code_of(own)[0])


def _modules(file: str) -> dict[str, str]:
    digests = {}
    for name, path in imported_sources(file).items() if file else ():
        with suppress(OSError):  # it was there a moment ago
            digests[name] = f"sha256 {_checksum(path.read_bytes())}"
    return digests


def agreed_data(group: Group, corpora: Sequence[Corpus]) -> list[SourceRecord]:
    """The records of the run's data. All ranks are in the group and call this; if hosts have different
    data, all raise.

    Of the ranks of a host that have opened the same files, the first one computes their digests. Every
    rank then compares those of all hosts.
    """
    opened = exchange(group, _opened(corpora))
    # by rank, the rank that computes its digests
    leaders = [opened.index(each) for each in opened]
    text, wrong = "", None
    if leaders[group.rank] == group.rank:
        try:
            text = json.dumps(table_of(describe(corpora)))
        except DataError as error:
            wrong, text = error, json.dumps({FAILED: str(error)})
    texts = exchange(group, text)
    if wrong is not None:
        raise wrong
    made = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    lines = [
        f"rank {rank} could not begin: DataError: {table[FAILED]}"
        for rank, table in made.items()
        if FAILED in table
    ]
    if lines:
        raise PeerFailed("\n".join(lines))
    records = {
        rank: records_of(table, f"rank {rank}", DataError)
        for rank, table in made.items()
    }
    if lines := differences(
        {rank: _data_facts(each) for rank, each in records.items()}
    ):
        raise RanksDiffer(not_alike(lines))
    return records[leaders[group.rank]]


def _opened(corpora: Sequence[Corpus]) -> str:
    """A digest that is equal on ranks of one host which have opened the same files."""
    opened: list[object] = [_boot()]
    for corpus in corpora:
        opened.append(asdict(replace(corpus.record, name="")))
        for _, path in corpus.files:
            try:
                opened.append(identity_of(path.stat()))
            except OSError:  # the rank's own attempt to read it says why
                opened.append(str(path))
    return _checksum(json.dumps(opened))


def _boot() -> str:
    """This start of this machine. Two hosts may have one name; files of theirs may have equal numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _data_facts(records: Sequence[SourceRecord]) -> dict[str, str]:
    """The data's facts that must be equal on all ranks; its location is each rank's own."""
    facts = {}
    for number, record in enumerate(records, 1):
        name = "data" if len(records) == 1 else f"data {number}"
        parts = [record.content[:DIGITS]] if record.content else []
        for file in record.files:
            content = f"{file.size:,} bytes {file.digest}"
            content += f" of {file.blocks:,} blocks" if file.blocks else ""
            if file.role:
                facts[f"{name}: {file.role}"] = content
            else:
                parts.append(content)
        parts += [
            f"{record.train:,} tokens",
            f"{record.validation:,} held out",
            record.reading,
        ]
        parts += [f"weight {record.weight}"] if record.weight else []
        facts[name] = ", ".join(parts)
    return facts


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table and of those in it, by dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _file(path: str) -> str:
    return _checksum(Path(path).read_bytes()) if path else ""


def _checksum(content: str | bytes) -> str:
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return sha256(raw).hexdigest()[:DIGITS]

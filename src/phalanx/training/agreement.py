"""Settings and files that must be equal on all ranks, compared before a run begins.

Every key of the run file is compared, and so are the contents of the files that it
names: a model's source, the data, a machine file, a schedule. The paths in `data` and
`machine` may differ between hosts; only the contents count. `out` and `checkpoint.dir`
are compared as absolute paths: ranks write one checkpoint together, so all need the
same folder on a shared file system.
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

DIGITS = 16  # hex digits of a checksum that are compared and shown


def facts_of(
    run: Run,
    layout: Layout,
    shape: Shape,
    model: Model,
    program: Program | None,
) -> dict[str, str]:
    """Return the settings and file digests that must be equal on all ranks, by name,
    except the data's."""
    table, sizes = asdict(run), asdict(shape)
    # Paths of these may differ between hosts; their contents are compared
    # below.
    for name in ("model", "data", "machine"):
        del table[name]
    # Compared as the values in use, which a run file may leave out.
    for name in ("batch", "sequence"):
        del sizes[name]
    # One folder for all ranks, however each of them names it.
    table["out"] = os.path.abspath(run.out)
    if run.checkpoint.dir:
        table["checkpoint"]["dir"] = os.path.abspath(run.checkpoint.dir)
    keys = {name: str(value) for name, value in flat(table | {"model": sizes})}
    keys |= {
        "layout": str(layout),
        "batch": str(shape.batch),
        "sequence": str(run.tokens(shape)),
    }
    # Names, shapes and dtypes: weights that differ would not fit each other's
    # messages.
    weights = [
        f"{n} {list(w.shape)} {w.dtype}" for n, w in model.weights.items()
    ]
    model_file, schedule = code_of(run.own)[0], split_name(layout.schedule)[0]
    modules = {
        f"model's module {name}": x for name, x in modules_of(run.own).items()
    }
    modules |= {
        f"schedule's module {name}": x
        for name, x in _modules(schedule).items()
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
        # With recompute:fit the program is not known yet: ranks first agree on the free
        # memory.
        "program": _checksum(str(program)) if program else "",
    }


def modules_of(own: str) -> dict[str, str]:
    """Return digests of the user's own modules that a model file imports, by name.

    If only transformers has the model's code, the version of that package is returned
    instead.
    """
    if own.startswith(HUB):
        return {"transformers": f"version {metadata.version('transformers')}"}
    return _modules(code_of(own)[0])


def _modules(file: str) -> dict[str, str]:
    digests = {}
    for name, path in imported_sources(file).items() if file else ():
        with suppress(OSError):  # deleted since it was listed
            digests[name] = f"sha256 {_checksum(path.read_bytes())}"
    return digests


def agreed_data(group: Group, corpora: Sequence[Corpus]) -> list[SourceRecord]:
    """Return the records of the run's data; raise on all ranks if hosts have different
    data.

    Collective. Of the ranks of a host that opened the same files, the first computes
    the digests. Every rank then compares those of all hosts.
    """
    # Hosts with a shared file system see the same files, but compare their own
    # view.
    opened = exchange(group, _opened(corpora))
    # leaders[rank]: the rank that computes the digests of `rank`'s files
    leaders = [opened.index(each) for each in opened]
    text, wrong = "", None
    if leaders[group.rank] == group.rank:
        try:
            text = json.dumps(table_of(describe(corpora)))
        # Sent in place of the records, so that no rank waits for this one.
        except DataError as error:
            wrong, text = error, json.dumps({FAILED: str(error)})
    texts = exchange(group, text)
    if wrong is not None:
        raise wrong
    # Only leaders have sent a text.
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
    """Return a digest that is equal on ranks of one host that opened the same files."""
    opened: list[object] = [_boot()]
    for corpus in corpora:
        # Without the name: one host may reach the same files by another path.
        opened.append(asdict(replace(corpus.record, name="")))
        for _, path in corpus.files:
            try:
                opened.append(identity_of(path.stat()))
            except OSError:  # the rank's own attempt to read it says why
                opened.append(str(path))
    return _checksum(json.dumps(opened))


def _boot() -> str:
    """Return an id of this boot of this machine.

    Host names and inode numbers are not enough: two hosts may share both.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _data_facts(records: Sequence[SourceRecord]) -> dict[str, str]:
    """Return the properties of the data that must be equal on all ranks; paths may
    differ."""
    facts = {}
    for number, record in enumerate(records, 1):
        name = "data" if len(records) == 1 else f"data {number}"
        parts = [record.content[:DIGITS]] if record.content else []
        for file in record.files:
            content = f"{file.size:,} bytes {file.digest}"
            content += f" of {file.blocks:,} blocks" if file.blocks else ""
            # Files with roles are compared one by one, so that the message
            # names the file.
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


def flat(
    table: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Flatten nested tables into pairs of a dotted key and its value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _file(path: str) -> str:
    return _checksum(Path(path).read_bytes()) if path else ""


def _checksum(content: str | bytes) -> str:
    raw = (
        content.encode("utf-8", "replace")
        if isinstance(content, str)
        else content
    )
    return sha256(raw).hexdigest()[:DIGITS]

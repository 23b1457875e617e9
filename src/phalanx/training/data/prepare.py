"""Tokenizes text and chats into token files. An interrupted preparation can be
continued.

Blocks of the sources are tokenized, by several processes if that pays, and written in
order: the files do not depend on the number of processes. Every few MiB the outputs are
fsynced and their lengths recorded in `progress.json`. The next start truncates the
outputs to these lengths and continues with the next block. `sources.py` and `rows.py`
find the files and rows.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout.codec import decode
from ...layout.files import write_text
from ..folder import Folder, count
from .digests import blocks_of, kept_digest
from .rows import Answered, BadRow, Chat, Form, Rows, form_of, place, read_rows
from .sources import BadFile, Source, SourceBlock, blocks, find_sources
from .token_files import (
    ANSWERS,
    DTYPES,
    FORMAT,
    INDEX,
    SPLITS,
    VERSION,
    DataError,
    Index,
    Split,
    Splits,
    dtype_for,
    held_out,
)
from .vocabulary import Encoded, Vocabulary

PROGRESS = "progress.json"
SKIPPED = "skipped.txt"  # lists everything that was skipped, and the reason
LIMIT = 1 << 20
BETWEEN = 16 << 20  # bytes of tokens between two records of progress
WORTH = 4 << 20  # bytes of sources that justify one more process


@dataclass(frozen=True)
class Prepared:
    """Progress of a preparation.

    `key` is a digest of the settings and of the sources' names, sizes and modification
    times when it began. `content` is one of the settings and the sources' contents.
    """

    key: str
    form: str = ""
    content: str = ""
    source: int = count(0)  # completed source files
    block: int = count(0)  # completed blocks of the next file
    read: int = count(0)  # bytes of tokens written, in total
    tokens: tuple[int, int] = count((0, 0))  # for each split
    documents: tuple[int, int] = count((0, 0))
    text: tuple[int, int] = count((0, 0))  # bytes of source text
    answers: int = count(0)  # trained tokens of chats
    skipped: int = count(0)  # unreadable rows or files
    named: int = count(0)  # length of skipped.txt
    empty: int = count(0)  # rows without content
    unanswered: int = count(0)  # chats without an answer


def prepare(
    source: Path,
    out: Path,
    vocabulary: Vocabulary,
    *,
    share: float,
    field: str = "",
    skip: bool = True,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Write the token files of a file or folder. `progress` is called with the bytes
    done and in total.

    A preparation of the same sources that was begun in `out` is continued; a finished
    one is left as it is. Unreadable rows are skipped and listed in skipped.txt; without
    `skip` the first one is an error. `workers=0` means one process for each core.
    """
    sources = find_sources(source)
    form = form_of(sources, field)
    if form.chat and not form.plain:
        vocabulary.refuse_chats()
    done = _begun(
        out,
        sources,
        [*vocabulary.marks, vocabulary.end, share, str(form)],
        str(form),
    )
    if (out / INDEX).exists():
        return done
    # Bytes before each source.
    before = [0, *accumulate(each.size for each in sources)]
    total, workers = before[-1], workers or len(os.sched_getaffinity(0))
    worker = partial(_part_of, vocabulary, form, share)
    with ExitStack() as stack:
        width = DTYPES[dtype_for(vocabulary.size)].itemsize
        writer = _Writer(out, done, width, stack, chat=form.chat, skip=skip)
        tasks = _tasks(sources, done, form)
        for task, part in _results(
            # Few bytes are not worth the start of processes, each of which
            # loads the tokenizer.
            tasks,
            worker,
            min(workers, 1 + total // WORTH),
            stack,
        ):
            writer.add(task, part)
            at, _, block = task
            behind = (
                sources[at].size if isinstance(block, str) else block.behind
            )
            progress(min(before[at] + behind, total), total)
        # The rest since the last record of progress.
        writer.mark()
        done = writer.done
    if not done.tokens[0]:
        if done.skipped:
            with (out / SKIPPED).open(encoding="utf-8") as file:
                why = f": {done.skipped:,} places cannot be read. {file.readline().rstrip()}."
        else:
            why = f" once {share:.0%} of it is held out: {done.empty:,} rows are empty"
            why += (
                f", {done.unanswered:,} without an answer."
                if done.unanswered
                else "."
            )
        raise DataError(f"{source} has nothing to train on{why}")
    # Digests of what is on the disk, read back.
    sha256, sums = Folder(out, DataError).sha256, list[Split]()
    for name, tokens, documents, text in zip(
        SPLITS, done.tokens, done.documents, done.text, strict=True
    ):
        answers = sha256(f"{name}.{ANSWERS}") if form.chat else ""
        both = sha256(f"{name}.tokens"), sha256(f"{name}.documents")
        sums.append(Split(*both, tokens, documents, text, answers))
    dtype, size = dtype_for(vocabulary.size), vocabulary.size
    index = Index(
        FORMAT,
        VERSION,
        vocabulary.name,
        Splits(*sums),
        dtype,
        size,
        vocabulary.end,
        form.pairs,
    )
    # Written last: a folder with an index is complete.
    write_text(
        out / INDEX, json.dumps(asdict(index), indent=1) + "\n", durable=True
    )
    return done


def _key(
    sources: Sequence[Source],
    settings: Sequence[object],
    files: Iterable[list[Any]],
) -> str:
    """Return a digest of the settings and of what is known about each source."""
    named = [
        [each.name, *known] for each, known in zip(sources, files, strict=True)
    ]
    return hashlib.sha256(json.dumps([named, *settings]).encode()).hexdigest()


def _contents(sources: Sequence[Source]) -> Iterator[list[Any]]:
    """Yield the digest of each source; empty for an unreadable one, which is reported
    later."""
    counts = blocks_of([each.size for each in sources])
    for each, sampled in zip(sources, counts, strict=True):
        # The digest of a sample of blocks for large sources.
        try:
            yield [kept_digest(each.path, sampled)]
        except OSError:
            yield [""]


def _begun(
    out: Path, sources: Sequence[Source], settings: Sequence[object], form: str
) -> Prepared:
    """Return the preparation begun in this folder, or a new one."""
    out.mkdir(parents=True, exist_ok=True)
    times = [[each.size, each.changed] for each in sources]
    # The change time shows what a copy with a kept modification time hides.
    written = [[each.size, each.path.stat().st_ctime_ns] for each in sources]
    mark = _key(sources, settings, written)
    if (out / PROGRESS).exists():
        table = Folder(out, DataError).json(PROGRESS, LIMIT)
        done = decode(Prepared, table, str(out / PROGRESS), DataError)
        # Earlier versions had no content digest. Files that were copied or touched may
        # be the same.
        same = done.key == (
            mark if done.content else _key(sources, settings, times)
        )
        if same or done.content == _key(sources, settings, _contents(sources)):
            return done
        if done.read:
            raise DataError(
                f"{out} was begun from other sources or with other settings;"
                " choose another folder, or remove this one."
            )
    # Never into a folder of something else. Hidden files, such as .DS_Store,
    # do not count.
    elif any(not each.name.startswith(".") for each in out.iterdir()):
        raise DataError(
            f"{out} holds something else; choose an empty or new folder."
        )
    fresh = Prepared(mark, form, _key(sources, settings, _contents(sources)))
    # Written at once, so that a start that is stopped before its first record can be
    # continued.
    write_text(out / PROGRESS, json.dumps(asdict(fresh)) + "\n", durable=True)
    return fresh


# ---- blocks to tokens


# Number of the source, number of the block in it, and the block or the reason why the
# rest of the source cannot be read.
Task = tuple[int, int, SourceBlock | str]


def _tasks(
    sources: Sequence[Source], done: Prepared, form: Form
) -> Iterator[Task]:
    """Yield the blocks that are not done yet."""
    for index, source in enumerate(sources[done.source :], done.source):
        # Blocks of the first source that were done before are read and not
        # tokenized.
        skip, number = done.block if index == done.source else 0, 0
        try:
            for block in blocks(source, form.columns, alone=len(sources) == 1):
                number += 1
                if number > skip:
                    yield index, number, block
        except BadFile as error:
            # One more than the last block: the fault stands in its place.
            if number + 1 > skip:
                yield index, number + 1, str(error)


class TokenPart(NamedTuple):
    """The tokens of a block. For each split: tokens, document lengths, answer mask, and
    bytes of text."""

    tokens: tuple[bytes, bytes] = (b"", b"")
    lengths: tuple[NDArray[np.int64], ...] = (np.empty(0, np.int64),) * 2
    answers: tuple[bytes, bytes] = (b"", b"")
    text: tuple[int, int] = (0, 0)
    faults: tuple[str, ...] = ()
    empty: int = 0
    unanswered: int = 0


Worker = Callable[[Task], TokenPart]


def _part_of(
    vocabulary: Vocabulary, form: Form, share: float, task: Task
) -> TokenPart:
    """Tokenize a block, in this process or another."""
    block = task[-1]
    if isinstance(block, str):
        return TokenPart(faults=(block,))
    rows = read_rows(block, form)
    if form.chat:
        made = _encoded_chats(vocabulary, block, rows, 2 if form.pairs else 1)
        text = np.zeros(len(rows.numbers), np.int64)
    else:
        made, text = vocabulary.encode(rows.raw, rows.lengths), rows.lengths
    if block.source.split is None:
        # By the name of the source and the row, so that the parts do not
        # depend on the order of work.
        held = held_out(
            (f"{block.source.name}:{n}" for n in rows.numbers), share
        )
    else:
        held = np.full(len(rows.numbers), block.source.split, bool)
    # 1, 2 or 4 bytes a token, by the size of the vocabulary.
    tokens = made.tokens.astype(DTYPES[dtype_for(vocabulary.size)], copy=False)
    return TokenPart(
        _parted(tokens, made.lengths, held),
        (made.lengths[~held], made.lengths[held]),
        (b"", b"")
        if made.answers is None
        else _parted(made.answers, made.lengths, held),
        (int(text[~held].sum()), int(text[held].sum())),
        tuple(rows.faults),
        rows.empty,
        rows.unanswered,
    )


def _encoded_chats(
    vocabulary: Vocabulary, block: SourceBlock, rows: Rows, documents: int
) -> Encoded:
    """Tokenize a block's chats. Each row is so many documents. Rows that the template
    cannot write are removed."""
    numbers, made = rows.numbers, list[Encoded]()
    rows.numbers = []
    # Pairs, as of DPO, are two documents of one row: both are kept, or
    # neither.
    for first in range(0, len(numbers), documents):
        number, chats = numbers[first], rows.chats[first : first + documents]
        try:
            each = [_encoded_chat(vocabulary, chat) for chat in chats]
        except BadRow as error:
            rows.faults.append(f"{place(block, number)}: {error}")
            continue
        # The first token of a document is never a target.
        if any(
            one.answers is None or not one.answers[1:].any() for one in each
        ):
            rows.unanswered += 1
            continue
        rows.numbers += [number] * documents
        made += each
    if not made:
        return Encoded(np.empty(0, np.uint8), np.empty(0, np.int64))
    tokens, lengths, answers = (
        np.concatenate(each) for each in zip(*made, strict=True)
    )
    return Encoded(tokens, lengths, answers)


def _encoded_chat(vocabulary: Vocabulary, chat: Chat) -> Encoded:
    if isinstance(chat, Answered):
        return vocabulary.encode_answer(*chat)
    return vocabulary.encode_chat(*chat)


def _parted(
    values: NDArray[Any], lengths: NDArray[np.int64], held: NDArray[np.bool_]
) -> tuple[bytes, bytes]:
    """Split values into those of training documents and of held-out documents."""
    # First elements of the documents, and the end of the last.
    edges = np.append(0, np.cumsum(lengths))
    # Runs of documents that belong to the same part are copied together.
    cuts = [0, *(np.flatnonzero(np.diff(held)) + 1).tolist(), len(held)]
    parts: tuple[list[Any], list[Any]] = ([], [])
    for first, last in pairwise(cuts):
        if first < last:
            parts[int(held[first])].append(values[edges[first] : edges[last]])
    return b"".join(parts[0]), b"".join(parts[1])


def _results(
    tasks: Iterable[Task], worker: Worker, workers: int, stack: ExitStack
) -> Iterator[tuple[Task, TokenPart]]:
    """Yield the tokens of all tasks, in order."""
    if workers == 1:
        yield from ((task, worker(task)) for task in tasks)
        return
    # Not forked: this process may have threads of a progress bar or of the tokenizer.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (worker,))
    stack.callback(pool.shutdown, cancel_futures=True)
    waiting: deque[tuple[Task, Future[TokenPart]]] = deque()
    try:
        # In order of submission, so that the files do not depend on which is
        # done first.
        for task in tasks:
            waiting.append((task, pool.submit(_work, task)))
            if len(waiting) > 2 * workers:  # limits the blocks in memory
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
    except BrokenProcessPool:
        raise DataError(
            "a tokenizing process was killed, perhaps because memory ran out. The same command"
            " continues from there; --workers 1 uses the least memory."
        ) from None


_worker: Worker  # set in processes that were started to tokenize


def _begin(worker: Worker) -> None:
    global _worker
    _worker = worker
    # there is already one process for each core
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C is handled by the parent process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    # A killed parent leaves no signal behind, so the workers watch it.
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(task: Task) -> TokenPart:
    return _worker(task)


# ---- the files


class _Writer:
    """The output files, truncated to the recorded progress and appended from there;
    `stack` closes them."""

    def __init__(
        self,
        out: Path,
        done: Prepared,
        width: int,
        stack: ExitStack,
        *,
        chat: bool,
        skip: bool,
    ) -> None:
        self.out, self.done, self.width, self.stack, self.skip = (
            out,
            done,
            width,
            stack,
            skip,
        )
        self.marked = done.read
        self.files: dict[str, BinaryIO] = {}
        for name, tokens, documents in zip(
            SPLITS, done.tokens, done.documents, strict=True
        ):
            self._cut(f"{name}.tokens", tokens * self.width)
            # 8 bytes for each end, and one for the first start.
            self._cut(
                f"{name}.documents", 8 * (documents + 1) if documents else 0
            )
            if not documents:
                self.files[f"{name}.documents"].write(
                    np.zeros(1, "<i8").tobytes()
                )
            if chat:
                self._cut(f"{name}.{ANSWERS}", tokens)
        self._cut(SKIPPED, done.named)

    def _cut(self, name: str, size: int) -> None:
        path = self.out / name
        file = self.files[name] = self.stack.enter_context(
            path.open("r+b" if path.exists() else "w+b")
        )
        # Lost bytes that were recorded as fsynced: the disk or somebody has
        # removed them.
        if path.stat().st_size < size:
            raise DataError(
                f"{path} is shorter than {PROGRESS} says; remove {self.out} and start over."
            )
        # What was written after the last record is done again.
        file.truncate(size)
        file.seek(size)

    def add(self, task: Task, part: TokenPart) -> None:
        """Append a block's documents to their splits, and record the progress every
        `BETWEEN` bytes."""
        if part.faults and not self.skip:
            raise DataError(
                f"{part.faults[0]}. With --on-bad skip it is left out, and named."
            )
        done, named = (
            self.done,
            "".join(f"{fault}\n" for fault in part.faults).encode(),
        )
        self.files[SKIPPED].write(named)
        sums: dict[str, list[int]] = {
            "tokens": [],
            "documents": [],
            "text": [],
        }
        for split, name in enumerate(SPLITS):
            tokens, lengths = part.tokens[split], part.lengths[split]
            self.files[f"{name}.tokens"].write(tokens)
            # Ends count from the beginning of the file.
            ends = done.tokens[split] + np.cumsum(lengths, dtype="<i8")
            self.files[f"{name}.documents"].write(ends.tobytes())
            if part.answers[split]:
                self.files[f"{name}.{ANSWERS}"].write(part.answers[split])
            sums["tokens"].append(
                done.tokens[split] + len(tokens) // self.width
            )
            sums["documents"].append(done.documents[split] + len(lengths))
            sums["text"].append(done.text[split] + part.text[split])
        pairs: Any = {name: tuple(both) for name, both in sums.items()}
        self.done = replace(
            done,
            source=task[0],
            block=task[1],
            read=done.read + sum(map(len, part.tokens)),
            answers=done.answers + sum(each.count(1) for each in part.answers),
            skipped=done.skipped + len(part.faults),
            named=done.named + len(named),
            empty=done.empty + part.empty,
            unanswered=done.unanswered + part.unanswered,
            **pairs,
        )
        # An fsync for every block would take longer than tokenizing.
        if self.done.read - self.marked >= BETWEEN:
            self.mark()

    def mark(self) -> None:
        """Fsync the files, then record the progress: never the other way round."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        self.marked = self.done.read
        write_text(
            self.out / PROGRESS,
            json.dumps(asdict(self.done)) + "\n",
            durable=True,
        )

"""`phalanx data`: makes token files from text, shows what a corpus contains, and
verifies it.

  phalanx data prepare books/ --out data/books
  phalanx data prepare web.jsonl.zst --out data/web --tokenizer tokenizer.json
  phalanx data prepare chats.jsonl --out data/chats --tokenizer Llama-3.2-1B-Instruct/
  phalanx data show python
  phalanx data verify data/books

SRC is a file, or a folder of files: text, .jsonl and .json (also .gz, .zst), .parquet,
or the output of `save_to_disk` of datasets. Rows with `messages`, `conversations`, or
`prompt` and `completion` are chats: the tokenizer's chat template formats them, and
only answers are trained on. If a preparation is interrupted, the same command continues
it. Exit code 1: damage was found.
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..drawing import text_table
from ..layout.hub import data_folder
from ..layout.shape import HUB
from .parser import Parser, chosen, real, whole
from .usage import UsageError, complain, result

if TYPE_CHECKING:
    from ..training.data.prepare import Prepared
    from ..training.data.vocabulary import Vocabulary

_BAD = ("skip", "refuse")
SKIPPED = "skipped.txt"
SHOWN = 10  # skipped places that are printed
_LEFT_OUT = {
    "skipped": "unreadable places",
    "empty": "empty rows",
    "unanswered": "chats without an answer",
}


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    return chosen(
        parser, argv, {"prepare": _prepare, "show": _show, "verify": _verify}
    )


def _parser(text: str | None) -> Parser:
    parser = Parser(text)
    parser.add(
        "source",
        metavar="SRC",
        help="a file or a folder; python: the source of the standard library",
    )
    return parser


def _prepare(argv: list[str]) -> int:
    """`phalanx data prepare`: makes token files from text and chats."""
    parser = _parser(_prepare.__doc__)
    parser.add_output(
        "--out", folder=True, required=True, help="folder of the token files"
    )
    what = (
        "a tokenizer.json, or its folder with a chat template; default: bytes"
    )
    parser.add("--tokenizer", metavar="PATH", help=what)
    parser.add(
        "--end",
        metavar="TOKEN",
        help="the token that closes each document of text",
    )
    what = "column; default text, messages, conversations, or prompt and completion"
    parser.add("--field", default="", metavar="NAME", help=what)
    share = real(lambda x: 0 <= x < 1, "from 0 to below 1")
    parser.add(
        "--held-out",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="share held out for validation",
    )
    what = "unreadable rows: skip and list them, or stop"
    parser.add("--on-bad", choices=_BAD, default=_BAD[0], help=what)
    parser.add(
        "--workers",
        type=whole(1, 4096),
        help="processes; default: one for each core",
    )
    args = parser.read(argv)
    from ..training.data.vocabulary import open_vocabulary

    vocabulary = open_vocabulary(
        Path(args.tokenizer) if args.tokenizer else None, args.end
    )
    done = prepare_shown(
        args.source,
        args.out,
        vocabulary,
        field=args.field,
        share=args.held_out,
        skip=args.on_bad == _BAD[0],
        workers=args.workers or 0,
    )
    return _shown(args.out, args, done)


def prepare_shown(
    source: str, out: str, vocabulary: Vocabulary, **how: Any
) -> Prepared:
    """Make token files with a progress bar, and print what was skipped."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from ..training.data.prepare import prepare

    words = TextColumn("{task.description}")
    columns = (words, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # A finished corpus is left as it is, and its faults were shown then.
    known = Path(out, "index.json").exists()
    if source.startswith(HUB):
        source = data_folder(source.removeprefix(HUB))
    # On standard error, so that standard output has only the result.
    with Progress(
        *columns, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("tokens", total=None)
        done = prepare(
            Path(source),
            Path(out),
            vocabulary,
            progress=lambda done, total: bar.update(
                task, completed=done, total=total
            ),
            **how,
        )
    if done.skipped and not known:
        names = Path(out, SKIPPED)
        # The first faults here, all of them in the file.
        with names.open(encoding="utf-8") as file:
            for line in islice(file, SHOWN):
                complain(f"left out: {line.rstrip()}")
        if done.skipped > SHOWN:
            complain(f"left out: {done.skipped - SHOWN:,} more, in {names}")
    return done


def left_out(done: Prepared) -> str:
    """Count the skipped documents, as the end of a sentence."""
    counts = {what: getattr(done, name) for name, what in _LEFT_OUT.items()}
    text = ", ".join(
        f"{count:,} {what}" for what, count in counts.items() if count
    )
    return f"; left out: {text}" if text else ""


def _show(argv: list[str]) -> int:
    """`phalanx data show`: shows the contents of a corpus."""
    args = _parser(_show.__doc__).read(argv)
    return _shown(args.source, args)


def _shown(
    source: str, args: argparse.Namespace, done: Prepared | None = None
) -> int:
    from ..training.data.token_files import open_corpus

    corpus = open_corpus(source)
    streams = {
        name: {"tokens": stream.size, "documents": len(stream.starts) - 1}
        for name, stream in (
            ("train", corpus.train),
            ("validation", corpus.validation),
        )
    }
    kept = ("name", "vocab", "bytes_per_token", "fingerprint")
    figures: dict[str, Any] = {
        name: getattr(corpus, name) for name in kept
    } | streams
    vocabulary = (
        f"a vocabulary of {corpus.vocab:,}"
        if corpus.vocab
        else "an unknown vocabulary"
    )
    rows = [
        (name, f"{x['tokens']:,}", f"tokens in {x['documents']:,} documents")
        for name, x in streams.items()
    ]
    text = f"{corpus.name}: {vocabulary}"
    if corpus.bytes_per_token:
        text += f", {corpus.bytes_per_token:.2f} bytes of text a token"
    if done is not None:
        counts = {
            name: getattr(done, name) for name in ("answers", *_LEFT_OUT)
        }
        figures |= {"form": done.form, **counts}
        text += f"\n{done.form}{left_out(done)}"
        if done.answers:
            rows.append(
                ("answers", f"{done.answers:,}", "tokens are trained on")
            )
    return result(
        args, figures, f"{text}\n{text_table((), rows, left='lrl', indent=2)}"
    )


def _verify(argv: list[str]) -> int:
    """`phalanx data verify`: verifies the checksums of a prepared corpus."""
    args = _parser(_verify.__doc__).read(argv)
    from ..training.data.token_files import INDEX, verify_prepared

    path = Path(args.source)
    # Only prepared folders have checksums.
    if not any(
        os.path.lexists(path / name) for name in (INDEX, "train.tokens")
    ):
        raise UsageError(
            f"{path} is not a prepared corpus: there is no {path / INDEX}. `phalanx data prepare` makes"
            " one of text; other forms have no checksums to verify."
        )
    faults = verify_prepared(path)
    text = "\n".join(faults) or f"{args.source}: every checksum matches"
    return result(
        args, {"sound": not faults, "faults": faults}, text, good=not faults
    )

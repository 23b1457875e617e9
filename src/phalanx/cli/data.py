"""`phalanx data`: makes token files of text, shows what a corpus holds, and verifies it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..draw import text_table
from .usage import Parser, UsageError, chosen, real, result

if TYPE_CHECKING:
    from ..train.data import Vocabulary

_EPILOG = """\
  phalanx data prepare books/ --out data/books
  phalanx data prepare web.jsonl --out data/web --tokenizer tokenizer.json
  phalanx data show python
  phalanx data verify data/books

SRC is a text, .jsonl or .parquet file, or a folder of these. A preparation that was interrupted goes
on where it was when the same command is given again. Exit code 1: damage was found."""


def run(argv: list[str]) -> int:
    """Prepare, show or verify data."""
    parser = Parser("phalanx data", "Text to token files, and what token files hold.", _EPILOG)
    return chosen(parser, argv, {"prepare": _prepare, "show": _show, "verify": _verify})


def _parser(what: str, description: str) -> Parser:
    parser = Parser(f"phalanx data {what}", description)
    parser.add("source", metavar="SRC", help="a file or a folder; python: the library's own source")
    parser.add("--json")
    return parser


def _read(parser: Parser, argv: list[str]) -> argparse.Namespace:
    args = parser.read(argv)
    if args.source != "python" and not Path(args.source).exists():
        raise UsageError(f"{args.source} is not there. Name a file or a folder, or python to show.")
    return args


def _prepare(argv: list[str]) -> int:
    parser = _parser("prepare", "Makes token files of text.")
    parser.add_output("--out", folder=True, required=True, help="where the token files go")
    parser.add("--tokenizer", metavar="FILE", help="a tokenizer.json; bytes without")
    parser.add("--end", metavar="TOKEN", help="the token that closes each document")
    parser.add("--field", default="text", metavar="NAME", help="of .jsonl and .parquet")
    share = real(lambda x: 0 <= x < 1, "from 0 to below 1")
    parser.add("--held-out", type=share, default=0.05, metavar="SHARE", help="for validation")
    args = _read(parser, argv)
    from ..train.data import open_vocabulary

    vocabulary = open_vocabulary(Path(args.tokenizer) if args.tokenizer else None, args.end)
    prepare_shown(args.source, args.out, vocabulary, args.field, args.held_out)
    return _shown(args.out, args)


def prepare_shown(source: str, out: str, vocabulary: Vocabulary, field: str, share: float) -> None:
    """Make token files of text, with a bar that says how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..train.data import prepare

    words = TextColumn("{task.description}")
    columns = (words, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=None)
        prepare(
            Path(source),
            Path(out),
            vocabulary,
            share=share,
            field=field,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _show(argv: list[str]) -> int:
    args = _read(_parser("show", "What a corpus holds."), argv)
    return _shown(args.source, args)


def _shown(source: str, args: argparse.Namespace) -> int:
    from ..train.data import open_corpus

    corpus = open_corpus(source)
    streams = {
        name: {"tokens": stream.size, "documents": len(stream.starts) - 1}
        for name, stream in (("train", corpus.train), ("validation", corpus.validation))
    }
    figures = {
        "name": corpus.name,
        "vocab": corpus.vocab,
        "bytes_per_token": corpus.bytes_per_token,
        "fingerprint": corpus.fingerprint,
        **streams,
    }
    vocabulary = f"a vocabulary of {corpus.vocab:,}" if corpus.vocab else "an unknown vocabulary"
    known = corpus.bytes_per_token
    rows = [
        (name, f"{x['tokens']:,}", f"tokens in {x['documents']:,} documents")
        for name, x in streams.items()
    ]
    text = f"{corpus.name}: {vocabulary}" + (
        f", {known:.2f} bytes of text a token" if known else ""
    )
    result(args, figures, f"{text}\n{text_table((), rows, left='lrl', indent=2)}")
    return 0


def _verify(argv: list[str]) -> int:
    args = _read(_parser("verify", "Compares the checksums of a prepared corpus."), argv)
    from ..train.data import verify_prepared
    from ..train.data.token_files import INDEX

    path = Path(args.source)
    if not any(os.path.lexists(path / name) for name in (INDEX, "train.tokens")):
        raise UsageError(
            f"{path} is no prepared corpus: it has no {INDEX}. `phalanx data prepare` makes one of"
            " text; other forms have no checksums to verify."
        )
    faults = verify_prepared(path)
    text = "\n".join(faults) or f"{args.source}: every checksum is right"
    result(args, {"sound": not faults, "faults": faults}, text)
    return 1 if faults else 0

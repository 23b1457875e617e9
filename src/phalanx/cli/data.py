"""`phalanx data`: makes token files of text, shows what a corpus holds, and verifies it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..draw import text_table
from .outputs import try_folder
from .usage import Parser, UsageError, print_json, say

__all__ = ["run"]

_EPILOG = """\
  phalanx data prepare books/ --out data/books
  phalanx data prepare web.jsonl --out data/web --tokenizer tokenizer.json --end "<|endoftext|>"
  phalanx data show python
  phalanx data verify data/books

SRC is a text, .jsonl or .parquet file, or a folder of these. A preparation that was interrupted goes
on where it was when the same command is given again. Exit code 1: damage was found."""


def run(argv: list[str]) -> int:
    """Prepare, show or verify data."""
    parser = Parser("phalanx data", "Text to token files, and what token files hold.", _EPILOG)
    parser.add_argument("what", choices=("prepare", "show", "verify"))
    parser.add_argument("source", metavar="SRC", help="text to prepare, or data to look at")
    parser.add_argument("--out", metavar="DIR", help="where the token files go")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; bytes without")
    parser.add_argument("--end", metavar="TOKEN", help="the token that closes each document")
    parser.add_argument("--field", default="text", metavar="NAME", help="of .jsonl and .parquet")
    parser.add_argument("--held-out", type=float, default=0.05, metavar="SHARE")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    args = parser.read(argv)
    if args.source != "python" and not Path(args.source).exists():
        raise UsageError(f"{args.source} is not there. Name a file or a folder, or python to show.")
    if args.what == "prepare":
        return _prepare(args)
    return _show(args) if args.what == "show" else _verify(args)


def _prepare(args: argparse.Namespace) -> int:
    if not args.out:
        raise UsageError("phalanx data prepare SRC needs --out DIR.")
    if not 0 <= args.held_out < 1:
        raise UsageError(f"--held-out is {args.held_out}; a share from 0 to below 1 belongs there.")
    try_folder(args.out)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..train.data import open_vocabulary, prepare

    vocabulary = open_vocabulary(Path(args.tokenizer) if args.tokenizer else None, args.end)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=None)
        prepare(
            Path(args.source),
            Path(args.out),
            vocabulary,
            share=args.held_out,
            field=args.field,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    args.source = args.out
    return _show(args)


def _show(args: argparse.Namespace) -> int:
    from ..train.data import open_corpus

    corpus = open_corpus(args.source)
    figures: dict[str, object] = {
        "name": corpus.name,
        "vocab": corpus.vocab,
        "bytes_per_token": corpus.bytes_per_token,
        "fingerprint": corpus.fingerprint,
    }
    for name, stream in (("train", corpus.train), ("validation", corpus.validation)):
        figures[name] = {"tokens": stream.size, "documents": len(stream.starts) - 1}
    if args.json:
        print_json(figures)
        return 0
    vocab = f"a vocabulary of {corpus.vocab:,}" if corpus.vocab else "an untold vocabulary"
    known = corpus.bytes_per_token
    say(f"{corpus.name}: {vocab}" + (f", {known:.2f} bytes of text a token" if known else ""))
    streams = {"train": corpus.train, "validation": corpus.validation}
    rows = [
        (name, f"{stream.size:,}", f"tokens in {len(stream.starts) - 1:,} documents")
        for name, stream in streams.items()
    ]
    say(text_table((), rows, left="lrl", indent=2), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ..train.data import verify_prepared
    from ..train.data.token_files import INDEX

    path = Path(args.source)
    if not any(os.path.lexists(path / name) for name in (INDEX, "train.tokens")):
        raise UsageError(
            f"{path} is no prepared corpus: it has no {INDEX}. `phalanx data prepare` makes one of"
            " text; other forms have no checksums to verify."
        )
    faults = verify_prepared(path)
    if args.json:
        print_json({"sound": not faults, "faults": faults})
    else:
        say("\n".join(faults) or f"{args.source}: every checksum is right")
    return 1 if faults else 0

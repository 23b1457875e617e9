"""Options of the commands that generate text, and the values that they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..api.load import checkpoints_in
from ..layout.shape import HUB
from .parser import Parser, real, whole
from .usage import UsageError

if TYPE_CHECKING:
    from ..generate import Generator, Sampling
    from ..layout import Layout

SEEDS = 1 << 62


def add_source(parser: Parser) -> None:
    parser.add(
        "source", metavar="SOURCE", help="a run, a checkpoint, or hf:FOLDER"
    )
    parser.add(
        "--model",
        default="",
        metavar="FILE.py:Class",
        help="the code of the run's model, if it is your own",
    )
    parser.add(
        "--layout",
        default="",
        metavar="LAYOUT",
        help="tp and pp of ranks that share the model, as 'tp2 pp2'; run: those of the run",
    )


def layout_of(args: argparse.Namespace, source: str) -> Layout | None:
    """Return the layout of the ranks that are to share the model, if there are any."""
    if not args.layout:
        return None
    if args.model:
        raise UsageError(
            "--layout is for the built-in decoder: leave --model or --layout out."
        )
    from ..training.text import sampling_layout

    return sampling_layout(args.layout, source)


@contextmanager
def generator_of(
    args: argparse.Namespace, source: str, layout: Layout | None
) -> Iterator[Generator]:
    """Open the model of a source: in this process, or over the ranks of a layout."""
    from ..generate.remote import open_over_ranks
    from ..training.text import open_generator, open_shared_generator

    if layout is None:
        yield open_generator(source, own=args.model)
        return
    with open_over_ranks(
        open_shared_generator, layout.ranks, source, layout
    ) as generator:
        yield generator


def add_sampling(parser: Parser, *, tokens: int) -> None:
    """Adds the options of `Sampling`, the length and the tokenizer."""
    # Checked here, so that a wrong value is refused before the model is read.
    positive = real(lambda x: x >= 0, "of 0 or more")
    share = real(lambda x: 0 < x <= 1, "above 0 and at most 1")
    add = parser.add
    add(
        "--tokens",
        type=whole(1, 1 << 20),
        default=tokens,
        help="maximum number of tokens to write",
    )
    what = "below 1: more likely text; 0: always the most likely token"
    add("--temperature", type=positive, default=1.0, help=what)
    what = "sample from the N most likely tokens; 0: from all"
    add("--top-k", type=whole(0, 1 << 24), default=0, help=what)
    what = "sample from the most likely tokens with this total probability"
    add("--top-p", type=share, default=1.0, help=what)
    add("--seed", type=whole(0, SEEDS), default=0, help="seed of the sampling")
    what = "a tokenizer.json or its folder; default: that of the run"
    add("--tokenizer", default="", metavar="PATH", help=what)


def sampling_of(args: argparse.Namespace, number: int = 0) -> Sampling:
    """Return the sampling of text `number`; each text has its own seed."""
    from ..generate import Sampling

    # Consecutive seeds, so that the third text of --seed 7 is the first of
    # --seed 9.
    return Sampling(
        args.temperature, args.top_k, args.top_p, args.seed + number
    )


def source_of(name: str) -> str:
    """Return the newest checkpoint of a run or folder, one checkpoint, or hf:FOLDER."""
    return name if name.startswith(HUB) else str(checkpoints_in(name)[0])

"""`phalanx eval`: the loss of a trained model on text, and its results in the tasks of lm-eval.

  phalanx eval runs/first
  phalanx eval runs/first --data book.txt
  phalanx eval hf:Llama-3.2-1B --data chats.jsonl --sequence 2048 --json
  phalanx eval runs/first --tasks hellaswag,arc_easy --limit 100

SOURCE is a run, one of its checkpoints, or hf:FOLDER. Without --data, the held-out part of the run's
data is evaluated. Text and chats (.txt, .jsonl, .parquet, a folder) are used whole; --split selects the
part of token files. The loss is in nats per token; in chats, only answers count. Memory is that of the
weights in float32 and one batch of windows. --tasks needs lm-eval: pip install lm_eval.
Exit code 1: the data of a task cannot be loaded.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from ..drawing import text_table
from ..layout.choices import PYTHON
from ..layout.shape import HUB
from .eval_tasks import task_rows, task_scores
from .parser import Parser, whole
from .sampling import add_source, generator_of, layout_of, source_of
from .usage import UsageError, result

_SEQUENCE = 1024  # window length if the run does not define one
_SPLITS = ("validation", "train")


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add_source(parser)
    add = parser.add
    add(
        "--data", default="", metavar="PATH", help="text, chats or token files"
    )
    add(
        "--split",
        choices=_SPLITS,
        default=_SPLITS[0],
        help="part of token files; default: the held-out part",
    )
    add(
        "--sequence",
        type=whole(2, 1 << 24),
        default=0,
        help="tokens in a window; default: the run's sequence",
    )
    add(
        "--field",
        default="",
        metavar="NAME",
        help="column with the text, as in data prepare",
    )
    what = "a tokenizer.json or its folder; default: that of the run"
    add("--tokenizer", default="", metavar="PATH", help=what)
    add(
        "--tasks",
        default="",
        metavar="A,B",
        help="tasks of lm-eval, instead of data",
    )
    what = "with --tasks: number of documents of each task"
    add("--limit", type=whole(1, 1 << 30), metavar="N", help=what)
    add(
        "--shots",
        type=whole(0, 1 << 10),
        help="with --tasks: number of examples in the prompt",
    )
    args = parser.read(argv)
    # Options that would have no effect are refused rather than ignored.
    if args.tasks and (args.data or args.field):
        raise UsageError(
            "--tasks has its own text: leave --data and --field out."
        )
    if not args.tasks and (args.limit or args.shots is not None):
        raise UsageError("--limit and --shots need --tasks.")
    if args.layout and not args.tasks:
        raise UsageError(
            "--layout is for --tasks. The loss of text is computed by one process."
        )
    source = source_of(args.source)
    if args.tasks:
        return _tasks(args, source)
    return _text(args, source)


def _text(args: argparse.Namespace, source: str) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from ..generate import Evaluator
    from ..layout.run import Run
    from ..training.evaluate import evaluation_batches, text_corpus, text_loss
    from ..training.text import model_of, run_of, vocabulary_if_known

    hub = source.startswith(HUB)
    # A folder of Hugging Face has no run: its defaults stand for one.
    run = Run() if hub else run_of(source)
    if hub and not args.data:
        raise UsageError(
            f"{source} has no data of its own. Name some: --data PATH"
        )
    paths = [args.data] if args.data else [path for path, _ in run.sources]
    vocabulary = vocabulary_if_known(source, args.tokenizer)
    # Text is tokenized into temporary files, which the stack removes.
    with ExitStack() as stack:
        named = {"field": args.field} if args.field else {}
        corpora = tuple(
            stack.enter_context(
                text_corpus(path, vocabulary, args.split, **named)
            )
            for path in paths
        )
        # Loaded after the data, so that a mistake there costs no time.
        model, weights = model_of(source, args.model)
        shape = model.shape
        assert shape is not None  # set for every decoder read from a file
        length = args.sequence or run.sequence
        # A model's own maximum, such as 128 Ki, would make windows of hundreds
        # of pages.
        length = length or (
            min(shape.sequence, _SEQUENCE) if hub else shape.sequence
        )
        if shape.positions == "learned" and length > shape.sequence:
            raise UsageError(
                f"--sequence {length}: the model has learned {shape.sequence} positions."
                f" Write --sequence {shape.sequence} or less."
            )
        batches = evaluation_batches(run, corpora, shape.vocab, length)
        reader = Evaluator(model, weights)
        del weights  # the model holds them now
        # On standard error, so that the output can be piped.
        bar = Progress(console=Console(stderr=True), transient=True)
        with bar:
            task = bar.add_task("batches", total=None)
            found = text_loss(
                reader,
                batches,
                lambda done, total: bar.update(
                    task, completed=done, total=total
                ),
            )
    figures: dict[str, Any] = {
        "source": source,
        "data": paths,
        "sequence": length,
        "tokens": found.tokens,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
    }
    # None if the size of the text in bytes is unknown, as of chats.
    bits = found.bits_per_byte
    rows = [
        ("loss", f"{found.loss:.4f}", "nats per token"),
        ("perplexity", f"{found.perplexity:.4f}", ""),
        ("bits per byte", "unknown" if bits is None else f"{bits:.4f}", ""),
    ]
    whole_text = f"{found.tokens:,} tokens of {', '.join(paths)}"
    which = f"{_part_of(args, paths)} in windows of {length:,}"
    return result(
        args,
        figures,
        f"{source}: {whole_text}, {which}\n{text_table((), rows, left='lrl', indent=2)}",
    )


def _part_of(args: argparse.Namespace, paths: list[str]) -> str:
    """Describe the evaluated part of the data."""
    from pathlib import Path

    from ..training.data.token_files import has_tokens

    # Only prepared data has parts; a file of text is evaluated whole.
    in_parts = any(path == PYTHON or has_tokens(Path(path)) for path in paths)
    parts = {"validation": "what is held out", "train": "what is trained on"}
    return parts[args.split] if in_parts else "all of it"


def _tasks(args: argparse.Namespace, source: str) -> int:
    layout = layout_of(args, source)
    from ..training.text import vocabulary_of

    vocabulary = vocabulary_of(source, args.tokenizer)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    with generator_of(args, source, layout) as generator:
        scores = task_scores(
            generator,
            vocabulary,
            names,
            limit=args.limit,
            shots=args.shots,
            longest=args.sequence,
        )
    rows = task_rows(scores)
    figures = {"source": source, "tasks": scores}
    return result(
        args, figures, f"{source}\n{text_table((), rows, left='llr')}"
    )

"""`phalanx demo`: trains a small decoder on four local ranks, kills one, resumes in
another layout, compares every loss with one process bit by bit, samples a line of text
from the model, and writes a report.

Takes about half a minute on two idle cores. Exit code 0: the loss fell and all losses
are bit-identical; 1: they are not.
"""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

from ..layout import Layout
from ..layout.choices import AUTO, GLOO
from ..layout.journal import JournalReader, read_journal
from ..layout.run import Run
from .parser import Parser
from .usage import progress, result, try_folder

# Each has four microbatches of two sequences.
FIRST, THEN = "dp2 pp2 zero1 1f1b:2 exact", "dp4 zero3 exact"
ALONE = "accum:4 exact"
STEPS, SAVE, KILL = 40, 10, 25
_RUN = f"""
steps = {STEPS}
batch = 8
sequence = 64
model = {{layers = 4, hidden = 64, heads = 4, kv_heads = 2, ffn = 160, vocab = 256}}
optimizer = {{lr = 4e-3, warmup_steps = 10}}
checkpoint = {{every = {SAVE}}}
validation = {{batches = 4}}
sample = {{every = {STEPS}, prompt = "def ", tokens = 50}}
"""


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output(
        "--out", folder=True, default="runs/demo", help="folder to create"
    )
    args = parser.read(argv)
    begun = time.monotonic()
    out, alone = Path(args.out), Path(f"{args.out}-one-process")
    try_folder(str(alone))
    for old in (out, alone):
        if (
            old / "metrics.jsonl"
        ).is_file():  # only what an earlier demo wrote
            shutil.rmtree(old)
    figures = _play(out, alone)
    figures["seconds"] = round(time.monotonic() - begun, 1)
    text = f"{figures['seconds']} s. The page of the run: {figures['report']}"
    return result(
        args, figures, text, good=figures["agrees"] and figures["fell"]
    )


def _play(out: Path, alone: Path) -> dict[str, Any]:
    from ..layout.files import write_text
    from ..report import report
    from ..report.step import step_extras

    shape = _run_of(out, FIRST).shape
    progress(
        f"A decoder of {shape.total:,} parameters learns the Python library's text."
    )
    progress(f"\n1. Four ranks as {FIRST}; one is killed after step {KILL}.")
    killed = _killed(out)
    progress(f"   {killed}")
    progress(
        f"\n2. The same command, now as {THEN}: it continues from the last checkpoint."
    )
    _watch(out, kill=False)
    _train(out, THEN)
    progress("\n3. The same run on one process, never interrupted.")
    _train(alone, ALONE)
    losses, truth = losses_of(out), losses_of(alone)
    same = sum(losses.get(step) == loss for step, loss in truth.items())
    # Both must have every step, once.
    agrees = losses.keys() == truth.keys() and same == len(truth)
    all_of = "All" if agrees else f"ONLY {same} OF THE"
    progress(f"   {all_of} {len(truth)} losses are bit-identical.")
    text = _sampled(out)
    progress(f"\n4. The trained model writes: {text!r}\n")
    page = out / "report.html"
    write_text(page, report(out, step_extras(out, None, None)).html())
    return {
        "first": FIRST,
        "then": THEN,
        "killed": killed,
        "first_loss": losses.get(1),
        "last_loss": losses.get(STEPS),
        "fell": losses.get(STEPS, 9.0) < losses.get(1, 0.0) - 1.0,
        "same_bits": same,
        "agrees": agrees,
        "sample": text,
        "report": str(page),
    }


def _run_of(out: Path, layout: str) -> Run:
    return Run.parse(_RUN, "demo", (f"layout={layout}", f"out={out}"))


def _killed(out: Path) -> str:
    """Train until a rank is killed, and return the launcher's message."""
    from ..comm import RankFailed

    _watch(out, kill=True)
    try:
        _train(out, FIRST)
    except RankFailed as error:
        return str(error).splitlines()[0]
    return "no rank was killed: the run had already ended"


def _train(out: Path, layout: str) -> None:
    from ..comm import launch
    from ..training.loop import train

    ranks = Layout.parse(layout).ranks
    backend = GLOO if ranks > 1 else AUTO
    launch(train, ranks, _run_of(out, layout), layout, True, backend=backend)


def _watch(out: Path, *, kill: bool) -> None:
    """Watch the run in a thread: print the loss now and then, and kill a rank at its
    step."""
    journal = JournalReader(out / "metrics.jsonl")
    # A second watch of this run must not see the first one's records.
    journal.more()  # skip earlier records

    def look() -> None:
        while True:
            for record in journal.more():
                if line := _line(record):
                    progress(f"   {line}")
                if record["event"] == "end":
                    return
                if (
                    kill
                    and record["event"] == "step"
                    and record["step"] >= KILL
                ):
                    # Ranks are children of this process.
                    ranks = [
                        child.pid or 0
                        for child in multiprocessing.active_children()
                    ]
                    if ranks:
                        # Any rank will do: the last one started.
                        os.kill(max(ranks), signal.SIGKILL)
                    return
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()


def _line(record: dict[str, Any]) -> str:
    """Return the line to print for a record of the journal; empty for most."""
    match record["event"]:
        case "step" if record["step"] % 10 == 0 or record["step"] == 1:
            return f"step {record['step']:3}  loss {record['loss']:.4f}"
        case "checkpoint":
            return f"saved {record['path']}"
        case "resume":
            return str(record["text"])
        case "validation":
            return f"validation loss {record['loss']:.4f} nats per byte"
    return ""


def losses_of(out: Path) -> dict[int, float]:
    """Return the loss of every step; of a repeated step, the last one."""
    records = read_journal(out / "metrics.jsonl")
    # Later records of a step replace earlier ones.
    return {r["step"]: r["loss"] for r in records if r["event"] == "step"}


def _sampled(out: Path) -> str:
    """Return the text that the run wrote after its last step, with its prompt."""
    records = read_journal(out / "metrics.jsonl")
    texts = [
        r["prompt"] + r["text"] for r in records if r["event"] == "sample"
    ]
    return texts[-1] if texts else ""

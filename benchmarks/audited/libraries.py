"""Cells of libraries beside torch and transformers.

Each cell records a script of `scripts/` by its command, as `audit run` does: no line of the script knows
of it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_audit.runs import load

from .cells import shards
from .forks import WHOLE

SCRIPTS = Path(__file__).parent / "scripts"
_AUDIT = [sys.executable, "-m", "torch_audit"]
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
_CORNER = "accumulation 2, uneven rows, clip"


@dataclass(frozen=True)
class ScriptCell:
    """A script with the words of its reference and of its layout."""

    library: str
    layout: str
    corner: str
    script: str
    one: tuple[str, ...]
    many: tuple[str, ...]
    launched: bool = True  # by torchrun; Lightning starts its ranks itself
    float64: bool = True  # with perturbed references in float32 if not
    model: str = "Llama"
    repro: str = ""

    @property
    def sharded(self) -> bool:
        return shards(self.layout)

    @property
    def conditions(self) -> str:
        return f"{self.corner}; {'float64' if self.float64 else 'float32'}"

    @property
    def row(self) -> str:
        return f"{self.library} | {self.model} | {self.layout} | {self.conditions}"


def cells() -> list[ScriptCell]:
    return [
        *_accelerate(), *_lightning(), *_trl(), *_deepspeed(), *_megatron(),
    ]  # fmt: skip


def _accelerate() -> list[ScriptCell]:
    layouts = (
        ("ddp", "DDP 2", "4"), ("fsdp2", "FSDP2 2", "4"), ("cp", "cp 2", "2"),
    )  # fmt: skip
    return [
        ScriptCell(
            "accelerate", name, _CORNER, "accelerate_lm.py", ("one", alone),
            (layout, "2"),
        )
        for layout, name, alone in layouts
    ]  # fmt: skip


def _lightning() -> list[ScriptCell]:
    layouts = (
        ("ddp", "DDP 2", "2", "4"), ("fsdp2", "FSDP2 2", "2", "4"),
        ("tp", "tp 2", "2", "2"),
    )  # fmt: skip
    return [
        ScriptCell(
            "lightning", name, _CORNER, "lightning_lm.py", ("auto", "1", alone),
            (layout, ranks, "2"), launched=False, float64=layout == "ddp",
        )
        for layout, name, ranks, alone in layouts
    ]  # fmt: skip


def _trl() -> list[ScriptCell]:
    return [
        ScriptCell(
            "trl", f"{kind.upper()}Trainer, {name}", _CORNER, "trl_lm.py",
            (kind, "one", "4", "OUT"), (kind, layout, "2", "OUT"),
        )
        for layout, name in (("ddp", "DDP 2"), ("fsdp2", "FSDP2 2"))
        for kind in ("sft", "dpo")
    ]  # fmt: skip


def _deepspeed() -> list[ScriptCell]:
    corners = (
        ("1", ()), ("2", ()), ("3", ()), ("3", ("tied",)), ("3", ("lora",)),
    )  # fmt: skip
    return [
        ScriptCell(
            "deepspeed", f"ZeRO-{stage} 2", ", ".join([_CORNER, *word]),
            "deepspeed_lm.py", ("0", "4", *word), (stage, "2", *word), float64=False,
        )
        for stage, word in corners
    ]  # fmt: skip


def _megatron() -> list[ScriptCell]:
    return [
        ScriptCell(
            "megatron-core", "tp 2", "accumulation 2", "megatron_lm.py", ("1", "1"),
            ("2", "2"), float64=float64, model="GPT, tied",
        )
        for float64 in (True, False)
    ]  # fmt: skip


def record(
    cell: ScriptCell, out: Path, words: Sequence[str], options: Sequence[str]
) -> str:
    """Records a script; the reason in a sentence if it does not run."""
    launcher = []
    if cell.launched and "--one" not in options:
        launcher = [*_TORCHRUN, "--nproc-per-node=2"]
    given = [str(out.parent) if x == "OUT" else x for x in words]
    script = str(SCRIPTS / cell.script)
    command = [sys.executable, *launcher, script, *given]
    audit = [*_AUDIT, "run", "--out", str(out), *options, "--", *command]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        audit, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    print(done.stderr[-3000:], file=sys.stderr)
    return sentence_of(done.stderr)


def sentence_of(text: str) -> str:
    """The last error in a program's output that is not its launcher's."""
    errors = re.findall(r"(?:\w*Error|torch_audit|WRONG): .*", text)
    # Errors of the launcher, and the recorder's word that nothing was recorded, follow from it.
    follows = ("ChildFailed", "torch_audit: the command ended")
    first = [x for x in errors if not x.startswith(follows)]
    return (first or errors or ["no error was printed"])[-1][:240]


def conduct(cell: ScriptCell, folder: Path) -> tuple[str, str]:
    """The result of a cell in a word, and what was seen."""
    dtype = ["--float64"] if cell.float64 else []
    one, many = folder / "one", folder / "many"
    # The layout first: what it refuses needs no reference.
    jobs = [(many, cell.many, dtype), (one, cell.one, ["--one", *dtype])]
    perturbed = []
    if not cell.float64:
        jobs.append((folder / "ulp", cell.one, ["--one", "--perturb", "3"]))
        names = [str(folder / f"ulp-{seed}") for seed in (1, 2, 3)]
        perturbed = ["--perturbed", *names]
    for out, words, options in jobs:
        if reason := record(cell, out, words, options):
            return "refused", reason
    if cell.sharded and not load(many).first.ranks[0].meshes:
        return "refused", WHOLE
    done = subprocess.run(
        [*_AUDIT, "compare", str(one), str(many), *perturbed],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr, file=sys.stderr)
    if done.returncode == 2:
        return "not comparable", _line(done.stdout, 2)
    if done.returncode:
        return "refuted", _line(done.stdout, 2)
    worst = re.search(r"largest difference of a gradient: (\S+)", done.stdout)
    return "equal", f"{float(worst[1]):.0e}" if worst else "0"


def _line(text: str, number: int) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return lines[number] if number < len(lines) else text.strip()

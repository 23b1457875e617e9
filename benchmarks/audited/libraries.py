"""Rows of docs/audited.md for libraries beside torch and transformers: python -m audited.libraries [WORD ...]

Each cell records a script of `scripts/` by its command, as `audit run` does: no line of the script knows
of it. Needs a Python with accelerate, trl, lightning and deepspeed; a cell whose library is missing is
left out.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
_AUDIT = [sys.executable, "-m", "torch_audit"]
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
_TORCHRUN += ["--nproc-per-node", "2"]


@dataclass(frozen=True)
class ScriptCell:
    """A script with the words of its reference and of its layout."""

    library: str
    layout: str
    corner: str
    script: str
    one: str
    many: str
    launched: bool = True  # by torchrun; Lightning starts its ranks itself
    float64: bool = True  # with perturbed references in float32 if not

    @property
    def row(self) -> str:
        dtype = "float64" if self.float64 else "float32"
        corner = f"{self.corner}; {dtype}"
        return f"{self.library} | Llama | {self.layout} | {corner}"


def cells() -> list[ScriptCell]:
    corner = "accumulation 2, uneven rows, clip"
    found = []
    for layout, name in (("ddp", "DDP 2"), ("fsdp2", "FSDP2 2")):
        found += [
            ScriptCell(
                "lightning", name, corner, "lightning_lm.py", "auto 1 4",
                f"{layout} 2 2", launched=False, float64=layout == "ddp",
            ),
            ScriptCell(
                "accelerate", name, corner, "accelerate_lm.py", "one 4",
                f"{layout} 2",
            ),
        ]  # fmt: skip
        for kind in ("sft", "dpo"):
            title = f"{kind.upper()}Trainer, {name}"
            one, many = f"{kind} one 4 OUT", f"{kind} {layout} 2 OUT"
            found.append(
                ScriptCell("trl", title, corner, "trl_lm.py", one, many)
            )
    for layout in ("tp", "cp"):
        name = f"{layout} 2"
        found.append(
            ScriptCell(
                "accelerate", name, corner, "accelerate_lm.py", "one 4",
                f"{layout} 2",
            )
        )  # fmt: skip
    for stage in (1, 2, 3):
        name = f"ZeRO-{stage} 2"
        found.append(
            ScriptCell(
                "deepspeed", name, corner, "deepspeed_lm.py", "0 4",
                f"{stage} 2", float64=False,
            )
        )  # fmt: skip
    return found


def record(
    cell: ScriptCell, out: Path, words: str, options: Sequence[str]
) -> str:
    """Records a script; the reason in a sentence if it does not run."""
    launcher = [] if "--one" in options or not cell.launched else _TORCHRUN
    given = [str(out.parent) if x == "OUT" else x for x in words.split()]
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


def main(words: list[str]) -> None:
    for cell in cells():
        if words and not any(word in cell.row for word in words):
            continue
        try:
            library = f"{cell.library} {version(cell.library)}"
        except PackageNotFoundError:
            print(f"{cell.library} is not installed", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            result, seen = conduct(cell, Path(folder))
        row = cell.row.replace(cell.library, library, 1)
        print(f"| {row} | {result} | {seen} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

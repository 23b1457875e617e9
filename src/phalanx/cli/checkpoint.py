"""`phalanx checkpoint`: shows, verifies, exports and imports what a run has saved."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..draw import text_table
from ..layout.choices import FAMILIES, STORED
from ..layout.files import open_regular, reason
from ..layout.run import CHECKPOINTS
from .outputs import try_folder
from .usage import Parser, UsageError, print_json, say

__all__ = ["run"]

_EPILOG = """\
  phalanx checkpoint show runs/first
  phalanx checkpoint verify runs/first/checkpoints/step-00000100
  phalanx checkpoint export runs/first --out exported --dtype BF16
  phalanx checkpoint import Llama-3.2-1B --out runs/second

DIR is a run's folder or that of its checkpoints, of which the newest is taken (verify: all), or one
checkpoint. `import` makes RUN/checkpoints, from which `phalanx train out=RUN` begins, with its model.
Exported and imported are Llama, Mistral, Qwen2 and Qwen3 in the layout of Hugging Face.
Exit code 1: damage was found."""


def run(argv: list[str]) -> int:
    """Show, verify, export or import a checkpoint."""
    parser = Parser(
        "phalanx checkpoint", "What a run has saved, and its weights elsewhere.", _EPILOG
    )
    parser.add_argument("what", choices=("show", "verify", "export", "import"))
    parser.add_argument("source", metavar="DIR", help="a run, a checkpoint, or weights to import")
    parser.add_argument("--out", metavar="DIR", help="where exported or imported weights go")
    parser.add_argument(
        "--family", default="", choices=FAMILIES, help="mistral, where llama is meant"
    )
    parser.add_argument("--dtype", default="", type=str.upper, choices=STORED, help="of the export")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    args = parser.read(argv)
    if args.what in ("export", "import") and not args.out:
        raise UsageError(f"phalanx checkpoint {args.what} DIR needs --out DIR.")
    try_folder(args.out)
    verbs = {"show": _show, "verify": _verify, "export": _export, "import": _import}
    return verbs[args.what](args)


_NAME = "Name a run's `out`, or one checkpoint in it."
_THEIRS = "Name a folder with config.json and model.safetensors."
_NONE = (
    f"{{path}} holds no checkpoint: neither manifest.json nor step-... nor {CHECKPOINTS}/step-...;"
    " name a run's `out`, or one checkpoint in it."
)


def _checkpoints(source: str) -> list[Path]:
    path = Path(source)
    if not path.is_dir():
        raise UsageError(f"{path} holds no checkpoint: there is no such folder. {_NAME}")
    named = [next(folder.glob("step-*"), None) for folder in (path, path / CHECKPOINTS)]
    if os.path.lexists(path / "manifest.json"):
        _refuse_irregular(path / "manifest.json")
    elif not any(named):
        raise UsageError(_NONE.format(path=path))
    from ..train.checkpoint import steps

    if (path / "manifest.json").exists():
        return [path]
    found = steps(path) or steps(path / CHECKPOINTS)
    if not found:
        raise UsageError(_NONE.format(path=path))
    return found


def _refuse_irregular(file: Path, way_out: str = _NAME) -> None:
    try:
        open_regular(file).close()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {reason(error)}. {way_out}") from None


def _show(args: argparse.Namespace) -> int:
    found = _checkpoints(args.source)
    from ..train.checkpoint_manifest import read_manifest

    manifest = read_manifest(found[0])
    progress, kinds = manifest.progress, dict[str, int]()
    numbers = 0
    for tensor in manifest.tensors:
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + 1
        if tensor.kind == "weight":
            size = 1
            for n in tensor.shape:
                size *= n
            numbers += size
    figures: dict[str, object] = {
        "path": str(found[0]),
        "step": progress.step,
        "sequences": progress.cursor,
        "seed": progress.seed,
        "layout": progress.layout,
        "shape": progress.shape.name if progress.shape else None,
        "parameters": numbers,
        "tensors": kinds,
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files),
        "optimizer": manifest.optimizer,
        "updates": manifest.updates,
        "versions": dict(manifest.versions),
    }
    if args.json:
        print_json(figures | {"older": [str(path) for path in found[1:]]})
        return 0
    if found[1:]:
        figures["older"] = ", ".join(path.name for path in found[1:])
    rows = []
    for key, value in figures.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        rows.append((key, f"{value:,}" if type(value) is int else value))
    say(text_table((), rows, left="rl"), end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    paths = _checkpoints(args.source)
    from ..train.checkpoint_manifest import verify_checkpoint

    verdicts = {str(path): verify_checkpoint(path) for path in paths}
    if args.json:
        print_json({"sound": not any(verdicts.values()), "faults": verdicts})
    else:
        for path, faults in verdicts.items():
            say("\n".join(faults) or f"{path}: every byte is as it was written")
    return 1 if any(verdicts.values()) else 0


def _export(args: argparse.Namespace) -> int:
    from ..train.checkpoint_exchange import export_weights
    from ..train.checkpoint_manifest import verify_checkpoint

    path = _checkpoints(args.source)[0]
    faults = verify_checkpoint(path)
    if faults:
        say("\n".join(faults))
        return 1
    files = export_weights(path, Path(args.out), family=args.family, dtype=args.dtype)
    return _written(args, files)


def _import(args: argparse.Namespace) -> int:
    if not Path(args.source).is_dir():
        raise UsageError(f"there is no folder {args.source}. {_THEIRS}")
    _refuse_irregular(Path(args.source, "config.json"), _THEIRS)
    from ..train.checkpoint_exchange import import_weights

    # Where a run looks for what it goes on from.
    return _written(args, [import_weights(Path(args.source), Path(args.out, CHECKPOINTS))])


def _written(args: argparse.Namespace, files: list[Path]) -> int:
    if args.json:
        print_json({"written": [str(file) for file in files]})
    else:
        say("\n".join(f"wrote {file}" for file in files))
    return 0

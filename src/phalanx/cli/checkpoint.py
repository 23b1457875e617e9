"""`phalanx checkpoint`: shows, verifies, exports and imports checkpoints.

  phalanx checkpoint show runs/first
  phalanx checkpoint verify runs/first/checkpoints/step-00000100
  phalanx checkpoint export runs/first --to exported --dtype BF16
  phalanx checkpoint export runs/lora --to adapter --adapter
  phalanx checkpoint import Llama-3.2-1B --out runs/second

DIR is one checkpoint, or the folder of a run or of its checkpoints. Of a folder the
newest checkpoint is used; verify reads all of them. `import` creates RUN/checkpoints,
from which `phalanx train out=RUN` starts with the imported model. Exported and imported
folders are Hugging Face models, like those that `phalanx train model=hf:FOLDER` trains.
Exit code 1: damage was found.
"""

import argparse
import math
from collections import Counter
from pathlib import Path

from ..api.load import checkpoints_in
from ..drawing import text_table
from ..layout.adapters import ADAPTER_NAMES
from ..layout.choices import STORED
from ..layout.families import FAMILIES
from ..layout.hub import push
from ..layout.run import CHECKPOINTS
from .parser import Parser, chosen
from .usage import UsageError, complain, refuse_irregular, result, say


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    commands = {
        "show": _show,
        "verify": _verify,
        "export": _export,
        "import": _import,
    }
    return chosen(parser, argv, commands)


def _parser(
    text: str | None, source: str = "a run, or a checkpoint"
) -> Parser:
    parser = Parser(text)
    parser.add("source", metavar="DIR", help=source)
    return parser


_THEIRS = "Name a folder with config.json and model.safetensors."


def _show(argv: list[str]) -> int:
    """`phalanx checkpoint show`: shows the contents of a checkpoint and the run that it
    belongs to."""
    args = _parser(_show.__doc__).read(argv)
    path, *older = checkpoints_in(args.source)
    from ..training.checkpoint_format import read_manifest

    manifest = read_manifest(path)
    weights = [
        tensor.shape for tensor in manifest.tensors if tensor.kind == "weight"
    ]
    figures: dict[str, object] = {
        "path": str(path),
        "step": manifest.step,
        "sequences": manifest.cursor,
        "seed": manifest.seed,
        "layout": manifest.layout,
        "shape": manifest.shape.name if manifest.shape else None,
        "parameters": sum(map(math.prod, weights)),
        "tensors": dict(Counter(tensor.kind for tensor in manifest.tensors)),
        "files": len(manifest.files),
        "bytes": sum(file.size for file in manifest.files),
        "optimizer": manifest.optimizer,
        "updates": manifest.updates,
        "versions": dict(manifest.versions),
    }
    shown = figures | (
        {"older": ", ".join(path.name for path in older)} if older else {}
    )
    rows = []
    for key, value in shown.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        rows.append((key, f"{value:,}" if type(value) is int else value))
    table = text_table((), rows, left="rl")
    return result(
        args, figures | {"older": [str(path) for path in older]}, table
    )


def _verify(argv: list[str]) -> int:
    """`phalanx checkpoint verify`: compares every byte with its checksum."""
    args = _parser(_verify.__doc__).read(argv)
    paths = checkpoints_in(args.source)
    from ..training.checkpoint_format import verify_checkpoint

    faults = {str(path): verify_checkpoint(path) for path in paths}
    lines = [
        line
        for p, f in faults.items()
        for line in f or [f"{p}: every byte matches its checksum"]
    ]
    sound = not any(faults.values())
    return result(
        args, {"sound": sound, "faults": faults}, "\n".join(lines), good=sound
    )


def _export(argv: list[str]) -> int:
    """`phalanx checkpoint export`: writes a folder that transformers can load."""
    parser = _parser(_export.__doc__)
    parser.add_output(
        "--to", folder=True, required=True, help="folder to write"
    )
    named = "model_type to write if several fit, such as mistral for llama"
    parser.add(
        "--family", default="", choices=FAMILIES, metavar="NAME", help=named
    )
    parser.add(
        "--dtype",
        default="",
        type=str.upper,
        choices=STORED,
        help="dtype of the weights",
    )
    parser.add(
        "--adapter",
        action="store_true",
        help=f"export only the {ADAPTER_NAMES} adapter, for peft; default: merged",
    )
    what = "also upload the folder to the hub, as OWNER/NAME; private if it is new"
    parser.add("--push", default="", metavar="NAME", help=what)
    args = parser.read(argv)
    path = checkpoints_in(args.source)[0]
    from ..training.checkpoint_exchange import export_adapter, export_weights
    from ..training.checkpoint_format import verify_checkpoint

    if faults := verify_checkpoint(path):
        say("\n".join(faults))
        return 1
    export = export_adapter if args.adapter else export_weights
    written = export(path, Path(args.to), family=args.family, dtype=args.dtype)
    code = _written(args, written)
    if args.push:
        complain(f"pushed to {push(Path(args.to), args.push)}")
    return code


def _import(argv: list[str]) -> int:
    """`phalanx checkpoint import`: converts a Hugging Face model to a checkpoint."""
    parser = _parser(_import.__doc__, "the model's folder")
    parser.add_output(
        "--out",
        folder=True,
        required=True,
        help="folder of the run that starts from it",
    )
    args = parser.read(argv)
    if not Path(args.source).is_dir():
        raise UsageError(f"there is no folder {args.source}. {_THEIRS}")
    # A folder of another kind is reported before torch is loaded.
    refuse_irregular(Path(args.source, "config.json"), _THEIRS)
    from ..training.checkpoint_exchange import import_weights

    # where a run looks for checkpoints to resume from
    return _written(
        args, [import_weights(Path(args.source), Path(args.out, CHECKPOINTS))]
    )


def _written(args: argparse.Namespace, files: list[Path]) -> int:
    lines = "\n".join(f"wrote {file}" for file in files)
    return result(args, {"written": [str(file) for file in files]}, lines)

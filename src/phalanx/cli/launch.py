"""`phalanx launch`: writes the script that starts a run on a cluster, as a person would
for that system, or submits it.

  phalanx launch slurm run.toml --nodes 4 --gpus 8 --time 24:00:00
  phalanx launch k8s run.toml --nodes 4 --image team/phalanx --submit
  phalanx launch torchrun run.toml --nodes 2 --gpus 8 --master node1

The layout needs as many ranks as there are GPUs. With --gpus 0 ranks run on CPUs, as
many on each node as the layout needs. Edit the printed text for anything else that a
system requires.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent

from ..layout.choices import GLOO, NCCL
from ..layout.environment import PORT
from ..layout.files import printable
from ..layout.run import Run, refuse_random_by_name
from ..layout.url import PREFIX, Url
from .parser import Parser, whole
from .usage import UsageError, result

_FOLDER = Path(__file__).parent / "jobs"
# Template of each system, and the command that submits it.
SYSTEMS = {
    "slurm": ("slurm.sh", ["sbatch"]),
    "k8s": ("k8s.yaml", ["kubectl", "create", "-f"]),
    "kubeflow": ("kubeflow.yaml", ["kubectl", "create", "-f"]),
    "ray": ("ray.txt", [sys.executable]),
    "sky": ("sky.yaml", ["sky", "jobs", "launch", "--yes"]),
    "torchrun": ("torchrun.sh", ["bash"]),
}
# seconds that a run gets to save, before a time limit or after a request to end
GRACE = 120
# The name of a job set is part of its pods' names, which have at most 63 characters.
_LONGEST_NAME = 40
# Plain words that YAML does not read as text.
_YAML_WORDS = {
    "y",
    "n",
    "yes",
    "no",
    "on",
    "off",
    "true",
    "false",
    "null",
    "nan",
    "inf",
}
# Options of some systems only, with the template value that each fills in.
_OF_SOME = {
    "time": "time", "image": "image", "volume": "volume", "accelerator": "sky_devices",
    "master": "master",
}  # fmt: skip
# Time formats of sbatch, and the seconds of each part.
_TIMES = {
    r"(\d+)": (60,),
    r"(\d+):(\d+)": (60, 1),
    r"(\d+):(\d+):(\d+)": (3600, 60, 1),
    r"(\d+)-(\d+)": (86400, 3600),
    r"(\d+)-(\d+):(\d+)": (86400, 3600, 60),
    r"(\d+)-(\d+):(\d+):(\d+)": (86400, 3600, 60, 1),
}


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add(
        "system",
        choices=tuple(SYSTEMS),
        metavar="SYSTEM",
        help=", ".join(SYSTEMS),
    )
    add(
        "words",
        nargs="+",
        metavar="RUN.toml key=value",
        help="a run file, and keys to set in it",
    )
    add("--nodes", type=whole(1, 1 << 14), default=1)
    add(
        "--gpus",
        type=whole(0, 64),
        default=8,
        metavar="G",
        help="GPUs of each node; 0: CPUs",
    )
    add("--name", default="", help="name of the job; default the run file's")
    add("--time", type=_time_limit, default="24:00:00", metavar="LIMIT",
        help="time limit, for Slurm")  # fmt: skip
    add("--image", type=_word, default="phalanx", metavar="IMAGE",
        help="container image, for Kubernetes")  # fmt: skip
    add("--volume", type=_word, default="phalanx", metavar="CLAIM",
        help="shared volume, for Kubernetes")  # fmt: skip
    add("--accelerator", type=_word, default="H100", metavar="NAME",
        help="kind of GPU, for SkyPilot")  # fmt: skip
    add("--master", type=_word, default="localhost", metavar="HOST",
        help="a node that all others can reach, for torchrun")  # fmt: skip
    add(
        "--submit",
        action="store_true",
        help="submit it instead of printing it",
    )
    args = parser.read(argv, intermixed=True)
    _refuse_unused(args.system, argv)
    # Checked against the words: defaults are no wish of the user.
    file, submit = SYSTEMS[args.system]
    values = _values(args)
    text = filled(file, values)
    if not args.submit:
        figures = {
            name: values[name] for name in ("system", "nodes", "ranks")
        } | {"text": text}
        return result(args, figures, text)
    if shutil.which(submit[0]) is None:
        what = "is not installed here. Leave --submit out to print the text."
        raise UsageError(f"{submit[0]} {what}")
    suffix = Path(file).suffix
    # Submitting programs read the file before they return.
    with tempfile.NamedTemporaryFile(
        "w", prefix="phalanx-", suffix=suffix, encoding="utf-8"
    ) as script:
        script.write(text)
        script.flush()
        return subprocess.run([*submit, script.name], check=False).returncode


def filled(name: str, values: Mapping[str, object]) -> str:
    """Fill in a template of `jobs`.

    The name of a value or template that is alone on its line stands for several lines
    with that indent, or for none.
    """

    def replaced(match: re.Match[str]) -> str:
        # Either a whole line, or a name inside one.
        margin, lines, word = match.groups()
        part = lines or word
        text = str(values[part]) if part in values else filled(part, values)
        return (
            text
            if word
            else indent(f"{text.rstrip()}\n", margin)
            if text
            else ""
        )

    text = (_FOLDER / name).read_text(encoding="utf-8")
    return re.sub(
        r"(?m)^( *)\{\{([\w.]+)\}\}\n|\{\{([\w.]+)\}\}", replaced, text
    )


def _refuse_unused(system: str, argv: Sequence[str]) -> None:
    """Refuse an option of other systems, such as a time limit that this system would
    ignore."""
    # "--time=1:00" names the option, too.
    given = {word.partition("=")[0] for word in argv}
    for option, name in _OF_SOME.items():
        if f"--{option}" in given and name not in _names_in(
            SYSTEMS[system][0]
        ):
            others = [
                other
                for other, (file, _) in SYSTEMS.items()
                if name in _names_in(file)
            ]
            raise UsageError(
                f"--{option} is not an option of {system}: it is for {', '.join(others)}."
                f" Leave it out, and edit the printed text for {system}."
            )


def _names_in(file: str) -> set[str]:
    """Return the names of the values that a template uses, including those of templates
    it includes."""
    names = set(
        re.findall(
            r"\{\{([\w.]+)\}\}", (_FOLDER / file).read_text(encoding="utf-8")
        )
    )
    # Templates include others, whose names have a dot.
    return names.union(*(_names_in(name) for name in names if "." in name))


def _refuse_secrets(url: Url) -> None:
    """Refuse a password in a job: clusters store scripts and config maps where others
    can read them."""
    if url.secrets:
        raise UsageError(
            "checkpoint.remote contains a password or a token, and clusters store the text of jobs where"
            f" others can read it. Write {str(url)!r}, or another name than {PREFIX}..., and set the"
            " variable in the environment of the job."
        )


def _values(args: argparse.Namespace) -> dict[str, object]:
    """Return the values that fill in the templates."""
    # A run file is the word without "=".
    files = [word for word in args.words if "=" not in word]
    if len(files) != 1:
        raise UsageError("name one run file, and set keys of it as key=value.")
    words = [word for word in args.words if "=" in word]
    plan, nodes, gpus = Run.load(files[0], tuple(words)), args.nodes, args.gpus
    refuse_random_by_name(plan)
    _refuse_secrets(Url(plan.checkpoint.remote))
    layout, *fallbacks = (each.layout_of() for each in (plan, *plan.fallbacks))
    # Without GPUs, as many ranks as the layout needs on a node.
    ranks = gpus or (layout.ranks // nodes if layout else 1)
    if layout and layout.ranks != nodes * ranks:
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; --nodes {nodes} with --gpus"
            f" {gpus} make {nodes * ranks}."
        )
    name = _job_name(args.name or Path(files[0]).stem)
    command = shlex.join(["phalanx", "train", files[0], *words])
    for text in (command, plan.out):
        # A line end in a command would begin another one.
        if printable(text) != text or "\n" in text:
            raise UsageError(
                f"{printable(text)!r} has a character that a job's text cannot contain."
                " Write the key into the run file."
            )
    # Elastic launchers may start with as few nodes as a fallback needs.
    needed = [-(-each.ranks // ranks) for each in (layout, *fallbacks) if each]
    fewest = max(1, min([nodes, *needed]))
    # In a container the run file has another path, and Ray's workers have their own
    # folders.
    mounted = [
        "/etc/phalanx/run.toml",
        *words,
        f"out={Path('/workspace', plan.out)}",
    ]
    file = Path(files[0]).read_text(encoding="utf-8").rstrip("\n") + "\n"
    accelerators = f"accelerators: {args.accelerator}:{gpus}"
    return vars(args) | {
        "name": name,
        "image": _yaml_word(args.image),
        "volume": _yaml_word(args.volume),
        "run_yaml": _yaml_text(file, margin=4),
        "run_python": _python_text(file),
        "command": command,
        "out": plan.out,
        "ranks": ranks,  # for each node
        "workers": nodes * ranks,
        "restarts": plan.train.restarts,
        "grace": GRACE,
        "port": PORT,
        "journal": shlex.quote(f"{plan.out}/metrics.jsonl"),
        "sbatch_gpus": f"#SBATCH --gpus-per-node={gpus}" if gpus else "",
        "elastic_nodes": nodes if fewest == nodes else f"{fewest}:{nodes}",
        "container_words": ", ".join(map(_yaml_quoted, mounted)),
        "resources": "resourcesPerNode"
        if args.system == "kubeflow"
        else "resources",
        "limits": f'nvidia.com/gpu: "{gpus}"' if gpus else f'cpu: "{ranks}"',
        # Workers of Ray have their own folders, so `out` is absolute.
        "ray_words": repr([*words, f"out={Path(plan.out).absolute()}"]),
        "backend": NCCL if gpus else GLOO,
        "use_gpu": bool(gpus),
        "sky_devices": accelerators if gpus else f"cpus: {ranks}+",
        "sky_run": _yaml_quoted(command),
    }


# ---- values as a job's text needs them


def _job_name(text: str) -> str:
    """Return a name that all systems accept: lowercase letters, digits and hyphens,
    starting with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    # A name that begins with a digit is none for Kubernetes.
    if not name[:1].isalpha() or name in _YAML_WORDS:
        name = f"run-{name}".strip("-")
    return name[:_LONGEST_NAME].strip("-")


def _word(text: str) -> str:
    """Check an option that must be one word without special characters of YAML or a
    shell."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", text):
        what = (
            f"is {text[:60]!r}; write letters, digits and any of . _ : / @ -"
        )
        raise UsageError(f"{what}, a letter or digit first.")
    return text


def _time_limit(text: str) -> str:
    """Check a time limit in sbatch's format, which must leave time to train and to
    save."""
    # Slurm's words for no limit.
    if text.lower() in ("0", "unlimited", "infinite"):
        return text
    for pattern, units in _TIMES.items():
        if match := re.fullmatch(pattern, text, re.ASCII):
            seconds = sum(
                # Nine digits are more than any limit, and quick to convert.
                int(x[:9]) * unit
                for x, unit in zip(match.groups(), units, strict=True)
            )
            if seconds <= GRACE:
                raise UsageError(
                    f"is {text!r}, {seconds} s; a run is asked to save {GRACE} s before the limit."
                    " Write more."
                )
            return text
    raise UsageError(
        f"is {text[:60]!r}; write minutes, hours:minutes:seconds or days-hours, such as 24:00:00."
    )


def _yaml_word(text: str) -> str:
    """Return a word as YAML, quoted if it would be read as a number, truth value or
    date."""
    plain = (
        text[0].isalpha()
        and not text.endswith(":")
        and text.lower() not in _YAML_WORDS
    )
    return text if plain else _yaml_quoted(text)


def _yaml_quoted(text: str) -> str:
    """Return a text in YAML's double quotes, whose escapes include those of JSON."""
    return re.sub(
        # Beyond ASCII as \U escapes, which JSON and YAML share.
        r"[^\t\n -~]",
        lambda match: f"\\U{ord(match[0]):08x}",
        json.dumps(text, ensure_ascii=False),
    )


def _yaml_text(text: str, margin: int) -> str:
    """Return lines of text as a YAML block, or quoted if a block would change them.

    A block takes its indent from its first line, and drops trailing spaces of blank
    lines.
    """
    lines = text.removesuffix("\n").split("\n")
    spaces = any(line.isspace() for line in lines)
    # The first line must not begin with a space: YAML takes it for indent.
    if lines[0][:1].strip() and not spaces and all(map(_shows, lines)):
        return "|\n" + indent(text, " " * margin).removesuffix("\n")
    return _yaml_quoted(text)


def _python_text(text: str) -> str:
    """Return lines of text as a Python string: triple-quoted, or line by line if that
    needs escapes."""
    lines = text.removesuffix("\n").split("\n")
    # A text that needs no escapes stays readable.
    if '"""' not in text and "\\" not in text and all(map(_shows, lines)):
        return f'"""\\\n{text}"""'
    return "".join(
        ["(\n", *(f"    {line + chr(10)!r}\n" for line in lines), ")"]
    )


def _shows(line: str) -> bool:
    """True if a terminal, YAML and Python all leave every character of the line
    unchanged."""
    return line.replace("\t", " ").isprintable()

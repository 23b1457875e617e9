"""`phalanx launch`: writes what starts a run on a cluster, as a person would for that system, or submits it.

  phalanx launch slurm run.toml --nodes 4 --gpus 8 --time 24:00:00
  phalanx launch k8s run.toml --nodes 4 --image team/phalanx --submit
  phalanx launch torchrun run.toml --nodes 2 --gpus 8 --master node1

The layout needs as many ranks as there are GPUs; --gpus 0: ranks on CPUs, as many on each node as the
layout needs. What a system asks for beyond this is edited in what is printed.
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
# Of each system its text, and what hands it over.
SYSTEMS = {
    "slurm": ("slurm.sh", ["sbatch"]),
    "k8s": ("k8s.yaml", ["kubectl", "create", "-f"]),
    "kubeflow": ("kubeflow.yaml", ["kubectl", "create", "-f"]),
    "ray": ("ray.txt", [sys.executable]),
    "sky": ("sky.yaml", ["sky", "jobs", "launch", "--yes"]),
    "torchrun": ("torchrun.sh", ["bash"]),
}
# seconds before a time limit, or after a request to end, in which a run saves
GRACE = 120
# The name of a job set is part of its pods' names, which have at most 63 characters.
_LONGEST_NAME = 40
# Plain words that YAML reads as something else than text.
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
# Options that only some systems' texts have, with what each of these is filled in as.
_OF_SOME = {
    "time": "time", "image": "image", "volume": "volume", "accelerator": "sky_devices",
    "master": "master",
}  # fmt: skip
# Times that sbatch takes, and the seconds of each part.
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
    add("system", choices=tuple(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS))
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
        help="a node that all reach, for torchrun")  # fmt: skip
    add(
        "--submit",
        action="store_true",
        help="hand it to the system instead of printing it",
    )
    args = parser.read(argv, intermixed=True)
    _refuse_unused(args.system, argv)
    file, submit = SYSTEMS[args.system]
    values = _values(args)
    text = filled(file, values)
    if not args.submit:
        figures = {name: values[name] for name in ("system", "nodes", "ranks")} | {
            "text": text
        }
        return result(args, figures, text)
    if shutil.which(submit[0]) is None:
        what = "is not installed here. Leave --submit out and take the text."
        raise UsageError(f"{submit[0]} {what}")
    suffix = Path(file).suffix
    with tempfile.NamedTemporaryFile(
        "w", prefix="phalanx-", suffix=suffix, encoding="utf-8"
    ) as script:
        script.write(text)
        script.flush()
        return subprocess.run([*submit, script.name], check=False).returncode


def filled(name: str, values: Mapping[str, object]) -> str:
    """A file of `jobs` with its values. A name of a value or of another such file that is alone on its
    line stands for lines with that indent, or for none."""

    def replaced(match: re.Match[str]) -> str:
        margin, lines, word = match.groups()
        part = lines or word
        text = str(values[part]) if part in values else filled(part, values)
        return text if word else indent(f"{text.rstrip()}\n", margin) if text else ""

    text = (_FOLDER / name).read_text(encoding="utf-8")
    return re.sub(r"(?m)^( *)\{\{([\w.]+)\}\}\n|\{\{([\w.]+)\}\}", replaced, text)


def _refuse_unused(system: str, argv: Sequence[str]) -> None:
    """Refuse an option of other systems: a time limit, say, that this system would never hear of."""
    given = {word.partition("=")[0] for word in argv}
    for option, name in _OF_SOME.items():
        if f"--{option}" in given and name not in _names_in(SYSTEMS[system][0]):
            others = [
                other for other, (file, _) in SYSTEMS.items() if name in _names_in(file)
            ]
            raise UsageError(
                f"--{option} does not go with {system}: it is for {', '.join(others)}."
                f" Leave it out, and edit what is printed for {system}."
            )


def _names_in(file: str) -> set[str]:
    """The values that a file of `jobs` is filled in with, and those that it includes."""
    names = set(
        re.findall(r"\{\{([\w.]+)\}\}", (_FOLDER / file).read_text(encoding="utf-8"))
    )
    return names.union(*(_names_in(name) for name in names if "." in name))


def _refuse_secrets(url: Url) -> None:
    """Refuse a password in a job: clusters keep scripts and config maps where others read them."""
    if url.secrets:
        raise UsageError(
            "checkpoint.remote holds a password or a token, and a cluster keeps the text of jobs where"
            f" others can read it. Write {str(url)!r}, or another name than {PREFIX}..., and set the"
            " variable in the environment of the job."
        )


def _values(args: argparse.Namespace) -> dict[str, object]:
    """Values that fill in the launch templates."""
    files = [word for word in args.words if "=" not in word]
    if len(files) != 1:
        raise UsageError("name one run file, and keys of it as key=value.")
    words = [word for word in args.words if "=" in word]
    plan, nodes, gpus = Run.load(files[0], tuple(words)), args.nodes, args.gpus
    refuse_random_by_name(plan)
    _refuse_secrets(Url(plan.checkpoint.remote))
    layout, *fallbacks = (each.layout_of() for each in (plan, *plan.fallbacks))
    ranks = gpus or (layout.ranks // nodes if layout else 1)
    if layout and layout.ranks != nodes * ranks:
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; --nodes {nodes} with --gpus"
            f" {gpus} are {nodes * ranks}."
        )
    name = _job_name(args.name or Path(files[0]).stem)
    command = shlex.join(["phalanx", "train", files[0], *words])
    for text in (command, plan.out):
        if printable(text) != text or "\n" in text:
            raise UsageError(
                f"{printable(text)!r} has a character that no line of a job's text can have."
                " Write the key into the run file."
            )
    needed = [-(-each.ranks // ranks) for each in (layout, *fallbacks) if each]
    fewest = max(1, min([nodes, *needed]))
    # In a container the run file lies elsewhere; Ray's workers have folders of their own.
    mounted = ["/etc/phalanx/run.toml", *words, f"out={Path('/workspace', plan.out)}"]
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
        "ranks": ranks,  # of each node
        "workers": nodes * ranks,
        "restarts": plan.train.restarts,
        "grace": GRACE,
        "port": PORT,
        "journal": shlex.quote(f"{plan.out}/metrics.jsonl"),
        "sbatch_gpus": f"#SBATCH --gpus-per-node={gpus}" if gpus else "",
        "elastic_nodes": nodes if fewest == nodes else f"{fewest}:{nodes}",
        "container_words": ", ".join(map(_yaml_quoted, mounted)),
        "resources": "resourcesPerNode" if args.system == "kubeflow" else "resources",
        "limits": f'nvidia.com/gpu: "{gpus}"' if gpus else f'cpu: "{ranks}"',
        "ray_words": repr([*words, f"out={Path(plan.out).absolute()}"]),
        "backend": NCCL if gpus else GLOO,
        "use_gpu": bool(gpus),
        "sky_devices": accelerators if gpus else f"cpus: {ranks}+",
        "sky_run": _yaml_quoted(command),
    }


# ---- values as a job's text has them


def _job_name(text: str) -> str:
    """A name that all systems accept: lower case, digits and hyphens, and a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha() or name in _YAML_WORDS:
        name = f"run-{name}".strip("-")
    return name[:_LONGEST_NAME].strip("-")


def _word(text: str) -> str:
    """The type of an option that is one word without anything that YAML or a shell reads as more."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", text):
        what = f"is {text[:60]!r}; write letters, digits and any of . _ : / @ -"
        raise UsageError(f"{what}, a letter or digit first.")
    return text


def _time_limit(text: str) -> str:
    """The type of a time limit as sbatch takes it, which leaves time to train and to save."""
    if text.lower() in ("0", "unlimited", "infinite"):
        return text
    for pattern, units in _TIMES.items():
        if match := re.fullmatch(pattern, text, re.ASCII):
            seconds = sum(
                int(x[:9]) * unit for x, unit in zip(match.groups(), units, strict=True)
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
    """A word as YAML, quoted where it would be read as a number, a truth value or a date."""
    plain = (
        text[0].isalpha() and not text.endswith(":") and text.lower() not in _YAML_WORDS
    )
    return text if plain else _yaml_quoted(text)


def _yaml_quoted(text: str) -> str:
    """A text in YAML's double quotes, whose escapes include those of JSON."""
    return re.sub(
        r"[^\t\n -~]",
        lambda match: f"\\U{ord(match[0]):08x}",
        json.dumps(text, ensure_ascii=False),
    )


def _yaml_text(text: str, margin: int) -> str:
    """Lines of text as a YAML block, or in quotes where a block would change them.

    A block takes its indent from its first line, and drops spaces from lines that have nothing else.
    """
    lines = text.removesuffix("\n").split("\n")
    spaces = any(line.isspace() for line in lines)
    if lines[0][:1].strip() and not spaces and all(map(_shows, lines)):
        return "|\n" + indent(text, " " * margin).removesuffix("\n")
    return _yaml_quoted(text)


def _python_text(text: str) -> str:
    """Lines of text as a Python string: in triple quotes, or line by line where these would end
    early or something would be read as an escape."""
    lines = text.removesuffix("\n").split("\n")
    if '"""' not in text and "\\" not in text and all(map(_shows, lines)):
        return f'"""\\\n{text}"""'
    return "".join(["(\n", *(f"    {line + chr(10)!r}\n" for line in lines), ")"])


def _shows(line: str) -> bool:
    """True if a terminal, YAML and Python all leave every character of the line as it is."""
    return line.replace("\t", " ").isprintable()

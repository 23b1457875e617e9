"""Models and data sets of the Hugging Face Hub, by name: hf:OWNER/NAME.

huggingface_hub downloads them to its own cache, with its tokens and its offline mode.
Files of a snapshot are links to blobs there, and phalanx reads folders without
following links. So a folder beside the snapshot has the same files as hard links, which
take no space.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .mesh import LayoutError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"  # the name of that folder
LINKED = "phalanx"  # the folder next to the snapshots
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_DATA = (
    "*.parquet",
    "*.json",
    "*.jsonl",
    "*.jsonl.*",
    "*.json.*",
    "*.txt",
    "*.arrow",
)

_TRAIN, _HELD = "train", "validation"
_SPLITS = (
    "dataset_dict.json"  # in a folder that `datasets` saved with its splits
)
# Files are named after their split, such as train-00000-of-00002.parquet or
# data/val.jsonl.
_SPLIT = re.compile(r"(?:^|/)(train|validation|valid|val|dev|test)(?![a-z])")
_SPLIT_NAMES = {_TRAIN: _TRAIN} | dict.fromkeys(
    (_HELD, "valid", "val", "dev"), _HELD
)


class HubError(LayoutError):
    """A name whose files the hub does not provide: the reason, and a way out."""


def is_hub_name(name: str) -> bool:
    """True for NAME or OWNER/NAME, unless it is a file or folder here."""
    return bool(_NAME.fullmatch(name)) and not os.path.lexists(name)


@cache
def config_folder(name: str) -> str:
    """A folder with a model's config.json: the one named, or one in the hub's cache."""
    # "gpt2" may be a folder here, which takes precedence over the hub.
    if not is_hub_name(name):
        return name
    found = _config_file(name)
    if isinstance(found, HubError):
        raise found
    return str(_linked(Path(found).parent))


@cache
def model_folder(name: str) -> str:
    """A folder with a model's weights and tokenizer: as named, or in the hub's cache."""
    if not is_hub_name(name):
        return name
    # From the cache first: a complete snapshot needs no network.
    with suppress(HubError):
        folder = _snapshot(name, "model", _MODEL, local=True)
        if _has_weights(folder):
            return str(_linked(folder))
    # Not complete: download what is missing.
    folder = _snapshot(name, "model", _MODEL)
    if not _has_weights(folder):
        raise HubError(
            f"hf:{name} has no {WEIGHTS} on the hub, or not all its parts."
        )
    return str(_linked(folder))


@cache
def data_folder(name: str) -> str:
    """A folder with the files of a data set of the hub; its scripts are not run.

    OWNER/NAME, or OWNER/NAME/FOLDER for one of its folders.
    """
    # "owner/name/folder/below" -> the data set "owner/name" and "folder/below"
    # in it.
    owner, _, rest = name.partition("/")
    repository, _, below = rest.partition("/")
    named = f"{owner}/{repository}" if repository else owner
    if not _NAME.fullmatch(named):
        raise HubError(
            f"hf:{name} is no name of a data set. Write hf:OWNER/NAME."
        )
    patterns = tuple(f"{below}/{each}" for each in _DATA) if below else _DATA
    folder: Path | None = None
    with suppress(HubError):
        kept = _snapshot(named, "dataset", patterns, local=True)
        folder = kept if _has_files(kept / below) else None
    folder = folder or _snapshot(named, "dataset", patterns)
    if not _has_files(folder / below):
        raise HubError(
            f"hf:{name} has no parquet, JSON or text files on the hub. Scripts of data sets are not run:"
            " load it with datasets, save_to_disk(FOLDER), and write data = FOLDER."
        )
    return str(_linked(folder, below, splits=True))


def push(folder: Path, name: str) -> str:
    """Upload a folder as a model of the hub, private if it is new; returns its address."""
    hub = _hub()
    try:
        api = hub.HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder))
    except Exception as error:
        raise HubError(
            f"{folder} is complete, and cannot be pushed to {name}: {_first_line(error)} Log in with"
            " `hf auth login`, or set HF_TOKEN."
        ) from error
    return str(address)


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise HubError(
            "names of the hub need huggingface_hub: pip install huggingface_hub"
        ) from error


@cache
def _config_file(name: str) -> str | HubError:
    """The path of a model's configuration in the cache, or the reason why it is not there. The
    reason is kept too: without a network it takes half a minute to find."""
    hub = _hub()
    # A string is a path; other results mean unknown or known not to exist.
    known = hub.try_to_load_from_cache(name, CONFIG)
    if isinstance(known, str):
        return known
    try:
        found: str = hub.hf_hub_download(name, CONFIG)
    except Exception as error:
        return _unreachable(name, "model", error)
    return found


def _snapshot(
    name: str, kind: str, patterns: tuple[str, ...], *, local: bool = False
) -> Path:
    """The folder of a snapshot; with `local`, from the cache only."""
    try:
        folder: str = _hub().snapshot_download(
            name,
            repo_type=kind,
            allow_patterns=list(patterns),
            local_files_only=local,
        )
    # `_hub` raises it if the package is missing: the message is complete.
    except HubError:
        # The package raises errors of its own, of requests and of the file
        # system.
        raise
    except Exception as error:
        raise _unreachable(name, kind, error) from error
    return Path(folder)


def _unreachable(name: str, kind: str, error: Exception) -> HubError:
    options = "" if kind == "model" else f" --repo-type {kind}"
    return HubError(
        f"hf:{name} is no folder here, is not in the cache of huggingface_hub, and cannot be downloaded:"
        f" {_first_line(error)} Where there is a network: hf download {name}{options}; or name a folder."
    )


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0].strip() if lines else type(error).__name__
    return text if text.endswith(".") else f"{text}."


def _has_weights(folder: Path) -> bool:
    if (folder / WEIGHTS).is_file():
        return True
    try:
        # A model in parts lists them in an index; all of them must be here.
        table = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        parts = set(table["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(part)).is_file() for part in parts)


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(
        path.is_file() for path in folder.rglob("*.*")
    )


def _linked(snapshot: Path, below: str = "", *, splits: bool = False) -> Path:
    """A folder with the files of a snapshot, or of a folder in it, as plain files.

    With `splits`, files are in folders named after the training and validation splits,
    as `datasets` saves them. The test split is left out.
    """
    # CACHE/models--OWNER--NAME/snapshots/REVISION
    out = snapshot.parent.parent / LINKED / snapshot.name / below
    begun, files = snapshot / below, list(_files(snapshot / below))
    names = {path: path.relative_to(begun).as_posix() for path in files}
    # Only if the names tell splits: other data is divided by `prepare`.
    if splits and any(_SPLIT.search(name) for name in names.values()):
        names = _by_split(names)
    try:
        for path, name in names.items():
            link = out / name
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another rank was faster
                # Hard links to the blobs, so that nothing is copied and no
                # link is followed.
                os.link(os.path.realpath(path), link)
        # The file that tells `datasets` which folders are splits.
        if any(name.startswith(f"{_TRAIN}/") for name in names.values()):
            (out / _SPLITS).write_text(json.dumps({"splits": [_TRAIN, _HELD]}))
    except OSError as error:
        raise HubError(
            f"{out} cannot be written: {error.strerror}. Download the files into a folder of your own:"
            " hf download NAME --local-dir FOLDER, and name that."
        ) from error
    return out


def _by_split(names: Mapping[Path, str]) -> dict[Path, str]:
    """The files of the training and validation splits, below the names of the splits."""
    placed = {}
    for path, name in names.items():
        found = _SPLIT.search(name)
        split = _SPLIT_NAMES.get(found[1]) if found else None
        if split:
            placed[path] = f"{split}/{name}"
    return placed


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())

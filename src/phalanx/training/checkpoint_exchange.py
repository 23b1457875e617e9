"""Conversion of checkpoints from and to Hugging Face: `config.json` and sharded
safetensors with an index, and adapters in peft's format.

`layout/families.py` recognises the model in a folder and maps the names of its weights.
Weights are read from their files box by box, so that a rank reads only what it keeps.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..layout import Shape, families
from ..layout.adapters import ADAPTER_NAMES, adapts
from ..layout.codec import decode
from ..layout.files import write_text
from ..layout.hub import HubError, model_folder
from ..layout.shape import HUB
from ..parallel import Model, build_model, load_model
from . import checkpoint_format as stored
from .adapters import ADAPTER_FILES
from .checkpoint import SAVING, commit, make_hidden, steps, write_own
from .checkpoint_format import DTYPES, WEIGHT, CheckpointError, read_into
from .checkpoint_load import TensorReader, own_model
from .folder import Folder
from .lock import hold_run

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# file, header entry, byte offset in the file
Placed = tuple[str, stored.HeaderEntry, int]
T = TypeVar("T")
SHARD = 4 << 30  # maximum bytes of a weights file
# Files of a tokenizer, and of text generation.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_weights(
    path: Path, out: Path, *, family: str = "", dtype: str = ""
) -> list[Path]:
    """Write a checkpoint in Hugging Face's format and return the files.

    The tokenizer is copied from the folder that the run started from.
    """
    manifest = stored.read_manifest(path)
    shape = manifest.shape
    if shape is None:
        raise CheckpointError(
            f"{path}: does not record the model's shape, which config.json needs."
        )
    weights = {
        each.name: each for each in manifest.tensors if each.kind == WEIGHT
    }
    # Models that transformers' own code runs keep its names and its
    # configuration.
    own = own_model(manifest)
    if own.startswith(HUB) and families.code_of(own)[0]:
        family, data = "", _tensors_of(load_model(own))
    else:
        family = families.family_of(shape, family)
        # Equal sizes do not make it the same model; compare every weight.
        ours = {
            name: tuple(each.shape)
            for name, each in build_model(shape).weights.items()
        }
        if other := next(
            (n for n, each in weights.items() if ours.get(n) != each.shape), ""
        ):
            raise CheckpointError(
                f"{path}: {other} is not a weight of the built-in decoder. Models of your own have no"
                " counterpart in Hugging Face."
            )
        # Numbers of dimensions, by which a family finds its transposed
        # tensors.
        dims = {
            name: len(each.shape)
            for name, each in weights.items()
            if not adapts(name)
        }
        data = families.ahead_sources(
            families.FAMILIES[family], dims, shape.layers, shape.predictors
        )
    make_empty(out)
    plain = [name for name in weights if not adapts(name)]
    kind = DTYPES[dtype or weights[plain[0]].dtype]
    theirs = {source.name: source for source in data.values()}
    # Bias updates of router balancing are lost in 16 bits; Hugging Face keeps it in
    # float32 too.
    wide = torch.promote_types(kind, torch.float32)
    # A router's bias in float32, everything else in the requested dtype.
    kinds = {
        name: wide if name.endswith(families.BALANCES) else kind
        for name in theirs
    }
    # Bytes of each tensor of theirs, to divide them into files.
    sizes = [
        sum(math.prod(weights[each].shape) for each in source.packed)
        * kinds[name].itemsize
        for name, source in theirs.items()
    ]
    shards = list(_shards(theirs, sizes))
    names = [
        f"model-{n:05}-of-{len(shards):05}.safetensors"
        for n in range(1, len(shards) + 1)
    ]
    files: dict[str, str] = {}
    with TensorReader(path, manifest) as reader:
        for file, shard in zip(names, shards, strict=True):
            tensors: dict[str, Tensor] = {}
            for name in shard:
                source = theirs[name]
                # Our weights that their tensor packs, with adapters merged.
                parts = [
                    _merged(reader, each).to(kinds[name])
                    for each in source.packed
                ]
                # Rows alternate (gate, up, gate, up, ...) or follow one
                # another.
                groups = getattr(shape, source.groups) if source.groups else 1
                whole = (
                    torch.stack(parts, 2).flatten(1, 2)
                    if source.alternating
                    else _in_groups(parts, groups)
                )
                # One tensor for each expert, where we have one for all.
                if "*" in name:
                    tensors |= {
                        name.replace("*", str(e)): x
                        for e, x in enumerate(whole.unbind())
                    }
                    continue
                # (out, in) to (in, out).
                tensors[name] = (
                    whole.mT.contiguous() if source.transposed else whole
                )
            stored.write_file(out / file, tensors, {"format": "pt"})
            files |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
    copied, known = list[str](), dict[str, Any]()
    if begun := begun_with(manifest):
        copied, known = _tokenizer(Path(begun), out)
    # The model may know more positions than this run used.
    if shape.positions != "learned" and type(known.get("sequence")) is int:
        # the model's own, not that of this run
        shape = replace(shape, sequence=known.pop("sequence"))
    plain_kind = str(kind).removeprefix("torch.")
    if family:
        config = families.config_of(shape, family, plain_kind)
        config |= {name: known[name] for name in TOKENS if name in known}
    else:  # keep the original configuration
        config = {n: x for n, x in known.items() if n != "sequence"} | {
            "dtype": plain_kind
        }
    for name, table in ((INDEX, index), (families.CONFIG, config)):
        write_text(
            out / name, json.dumps(table, indent=2) + "\n", durable=True
        )
    return [out / name for name in (*names, INDEX, families.CONFIG, *copied)]


def make_empty(out: Path) -> None:
    """Create the folder of an export, which must not contain files."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose a new folder.")


def begun_with(manifest: stored.Manifest) -> str:
    """Return the folder of the Hugging Face model that the checkpoint's run started
    from, or ""."""
    run = manifest.config.get("run")
    begun = str(run.get("model", "")) if isinstance(run, dict) else ""
    if not begun.startswith(HUB):
        return ""
    # "hf:OWNER/NAME" or a folder; the cache may have been emptied since.
    try:
        return model_folder(begun.removeprefix(HUB))
    except HubError:  # it is no longer in the cache, and cannot be downloaded
        return ""


def _merged(reader: TensorReader, name: str) -> Tensor:
    """Return a whole weight with its adapter merged."""
    whole = reader.whole(reader.tensors[WEIGHT, name])
    shape = reader.manifest.shape
    adapter = None if shape is None else shape.adapter
    if shape is None or adapter is None:
        return whole
    return ADAPTER_FILES[adapter.key].merged(reader, shape, name, whole)


def _tensors_of(model: Model) -> dict[str, families.HubTensor]:
    """Map the weights of a model that runs transformers' own code to their tensors in
    files."""
    assert model.original is not None
    return {
        name: families.HubTensor(theirs, (name,))
        for name, theirs in model.original.files.items()
    }


def _tokenizer(source: Path, out: Path) -> tuple[list[str], dict[str, Any]]:
    """Copy the tokenizer if its folder still exists. Return the copied names and the
    model's configuration."""
    if not (source / families.CONFIG).is_file():
        return [], {}
    folder = Folder(source, CheckpointError)
    copied = [name for name in TOKENIZER if (source / name).is_file()]
    for name in copied:
        # "x": a file that exists already is not overwritten.
        with folder.open(name) as read, (out / name).open("xb") as written:
            shutil.copyfileobj(read, written)
    known = folder.json(families.CONFIG, families.LIMIT)
    return copied, known | {
        "sequence": families.hub_shape(str(source)).sequence
    }


def _shards(items: Iterable[T], sizes: Iterable[int]) -> Iterator[list[T]]:
    """Group items into runs of about `SHARD` bytes."""
    run, total = list[T](), 0
    for item, size in zip(items, sizes, strict=True):
        # A tensor larger than `SHARD` has a file of its own.
        if run and total + size > SHARD:
            yield run
            run, total = [], 0
        run.append(item)
        total += size
    yield run


def export_adapter(
    path: Path, out: Path, *, family: str = "", dtype: str = ""
) -> list[Path]:
    """Write a checkpoint's adapter for `PeftModel.from_pretrained` and return the
    files."""
    manifest = stored.read_manifest(path)
    shape = manifest.shape
    if shape is None or shape.adapter is None:
        raise CheckpointError(
            f"{path}: its run trained no {ADAPTER_NAMES}; export it without --adapter."
        )
    data = families.FAMILIES[families.family_of(shape, family)]
    files = ADAPTER_FILES[shape.adapter.key]
    with TensorReader(path, manifest) as reader:
        tensors, config = files.exported(reader, shape, data, dtype)
    config |= {"base_model_name_or_path": begun_with(manifest)}
    make_empty(out)
    stored.write_file(out / ADAPTER, tensors, {"format": "pt"})
    write_text(
        out / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n", durable=True
    )
    return [out / ADAPTER, out / ADAPTER_CONFIG]


# ---- import


class HubReader(TensorReader):
    """Reads the weights of a Hugging Face folder under our names, like those of a
    checkpoint."""

    def __init__(self, source: Path) -> None:
        folder = Folder(source, CheckpointError)
        shape = families.hub_shape(str(source))
        # For transposed (in, out) matrices: the row length, and the first column of our
        # weight.
        self.columns: dict[str, tuple[int, int]] = {}
        # For experts that share one tensor, or a pair of mxfp4: the tensor and its
        # places.
        self.experts: dict[str, tuple[families.HubTensor, list[Placed]]] = {}
        # For weights packed in groups: the rows of ours and of theirs in a group, and
        # the first of ours in theirs.
        self.groups: dict[str, tuple[int, int, int]] = {}
        super().__init__(source, self._manifest(folder, shape))

    def _manifest(self, folder: Folder, shape: Shape) -> stored.Manifest:
        tensors, data = _tensors(folder), families.FAMILIES.get(shape.name)
        # Blocks behind the last one predict further tokens: our model has
        # none.
        if data and data.further:
            blocks = tuple(f"{data.layers}.{n}." for n in range(shape.layers))
            behind = f"{data.layers}."
            tensors = {
                # Tensors of the model's blocks, and those outside of any.
                n: x
                for n, x in tensors.items()
                if n.startswith(blocks) or behind not in n
            }
        if data and data.unread:
            tensors = {
                name: place
                for name, place in tensors.items()
                if not name.startswith(data.unread)
            }
        model = (
            build_model(shape) if data else load_model(f"{HUB}{folder.path}")
        )
        ours = {n: tuple(p.shape) for n, p in model.weights.items()}
        if data is None:
            where = _tensors_of(model)
        else:
            if not any(name.startswith(data.layers) for name in tensors):
                # Saved from the bare model without its head: names lack the prefix.
                first = data.layers.partition(".")[0] + "."
                tensors = {
                    n if n == "lm_head.weight" else first + n: x
                    for n, x in tensors.items()
                }
            where = families.sources(
                data, {name: len(dims) for name, dims in ours.items()}
            )
        shape = model.shape or shape
        # The shape that each of their tensors must have.
        wanted = {
            one: dims[1:] if "*" in each.name else dims
            for each in where.values()
            for one in each.names(shape.experts)
            for dims in [_dims_of(each, ours)]
        }
        plain = dict(decoded_names(tensors, str(folder.path)))
        _refuse_others(folder, plain, wanted, shape)
        files = sorted({file for file, _, _ in tensors.values()})
        described = []
        for name, dims in ours.items():
            source, box = where[name], tuple((0, n) for n in dims)
            parts = [plain[each] for each in source.names(shape.experts)]
            file, entry, offset = parts[0]
            # one tensor for each expert, one after the other
            if "*" in source.name:
                places = [
                    # `offset` of each expert's own file; together they are one
                    # weight of ours.
                    _whole(
                        name, ((e, e + 1), *box[1:]), files.index(file), offset
                    )
                    for e, (file, _, offset) in enumerate(parts)
                ]
            else:
                # Rows of the weights that precede this one in their packed
                # tensor.
                before = source.packed[: source.packed.index(name)]
                first_row = sum(ours[each][0] for each in before)
                if source.alternating or (source.transposed and len(dims) > 2):
                    # Plain bf16, or mxfp4 as blocks and scales.
                    stored_as = [source.name] * (source.name in tensors)
                    stored_as = stored_as or [
                        source.name + _BLOCKS,
                        source.name + _SCALES,
                    ]
                    self.experts[name] = (
                        source,
                        [tensors[each] for each in stored_as],
                    )
                # Stored as (in, out): our rows are their columns, which are
                # read one by one.
                elif source.transposed:
                    self.columns[name] = entry.shape[1], first_row
                elif source.groups:
                    groups = getattr(shape, source.groups)
                    self.groups[name] = (
                        dims[0] // groups,
                        entry.shape[0] // groups,
                        first_row // groups,
                    )
                else:
                    # Rows of ours are adjacent in theirs: skip those of the
                    # weights before.
                    offset += (
                        first_row
                        * math.prod(dims[1:])
                        * DTYPES[entry.dtype].itemsize
                    )
                places = [_whole(name, box, files.index(file), offset)]
            described.append(
                stored.StoredTensor(
                    WEIGHT, name, entry.dtype, dims, tuple(places)
                )
            )
        # 8 bytes, the least size of a file: only names are needed to read.
        named = tuple(stored.StoredFile(file, (), 8) for file in files)
        return stored.Manifest(
            0, shape=shape, files=named, tensors=tuple(described)
        )

    def _rows(
        self,
        tensor: stored.StoredTensor,
        part: list[stored.StoredShard],
        first: int,
        last: int,
    ) -> Tensor:
        if tensor.name in self.experts:
            return torch.stack(
                [self._expert(tensor.name, e) for e in range(first, last)]
            )
        if tensor.name in self.groups:
            return self._grouped_rows(tensor, part[0], first, last)
        if tensor.name not in self.columns:
            return super()._rows(tensor, part, first, last)
        (place,), (width, column) = part, self.columns[tensor.name]
        turned = torch.empty(
            tensor.shape[1], last - first, dtype=DTYPES[tensor.dtype]
        )
        # Row n of theirs holds feature n of all our rows `first` to `last`.
        for row, numbers in enumerate(turned):
            at = row * width + column + first
            read_into(
                self._file(place.file),
                place.offset + at * turned.element_size(),
                numbers,
            )
        return turned.T

    def _grouped_rows(
        self,
        tensor: stored.StoredTensor,
        place: stored.StoredShard,
        first: int,
        last: int,
    ) -> Tensor:
        own, theirs, before = self.groups[tensor.name]
        found = torch.empty(
            last - first, *tensor.shape[1:], dtype=DTYPES[tensor.dtype]
        )
        width = found[0].nbytes
        # Rows of one group are adjacent in the file.
        row = first
        while row < last:
            group, inside = divmod(row, own)
            stop = min(last, (group + 1) * own)
            at = group * theirs + before + inside
            run = found[row - first : stop - first]
            read_into(
                self._file(place.file),
                place.offset + at * width,
                run.view(-1),
            )
            row = stop
        return found

    def _expert(self, name: str, number: int) -> Tensor:
        """Return one expert's weight. In packed tensors, such as gate and up, the rows
        alternate."""
        (source, places), names = (
            self.experts[name],
            [each.name for each in self.manifest.files],
        )
        parts = []
        # One tensor, or the blocks and the scales of mxfp4.
        for file, entry, offset in places:
            slab = torch.empty(
                entry.shape[1:], dtype=(DTYPES | stored.BYTES)[entry.dtype]
            )
            at = offset + number * slab.nbytes
            # Experts lie one after another, each in `slab.nbytes` bytes.
            read_into(self._file(names.index(file)), at, slab.view(-1))
            parts.append(slab)
        whole = parts[0].mT if source.transposed else parts[0]
        # decoded values are (out, in) already
        whole = decode_fp4(*parts) if len(parts) == 2 else whole
        # Every second row, from 0 for gate and from 1 for up.
        return whole[source.packed.index(name) :: len(source.packed)]


def _in_groups(parts: Sequence[Tensor], groups: int) -> Tensor:
    """The rows of all parts, in `groups` groups that each have a run of every part."""
    runs = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(runs, 1).flatten(0, 1)


def _dims_of(
    source: families.HubTensor, ours: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the shape of a Hugging Face tensor that packs our weights: stacked for all
    experts, or of one."""
    dims = list(ours[source.packed[0]])
    # Alternating weights are stacked in dim 1, behind the expert; others in
    # dim 0.
    at = int(source.alternating)
    dims[at] = sum(ours[name][at] for name in source.packed)
    # The last two dims swapped.
    return (*dims[:-2], *dims[:-3:-1]) if source.transposed else tuple(dims)


def _whole(
    key: str, box: stored.Box, file: int = 0, offset: int = 0
) -> stored.StoredShard:
    """Return a shard that stores the whole box in one place of a file, under a key."""
    dims = tuple(b - a for a, b in box)
    return stored.StoredShard(key, box, dims, file, offset, 0, math.prod(dims))


def _refuse_others(
    folder: Folder,
    tensors: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
    shape: Shape,
) -> None:
    """Refuse weights that do not match the configuration."""
    wrong = [
        f"{name} is {list(tensors[name][1].shape) if name in tensors else 'missing'},"
        f" {list(dims)} is wanted"
        for name, dims in wanted.items()
        if name not in tensors or tensors[name][1].shape != dims
    ]
    wrong += [
        f"{name} holds raw bytes"
        for name, x in tensors.items()
        if x[1].dtype not in DTYPES
    ]
    # Tied models may still store the output's copy of the embedding.
    known = set(wanted) | ({"lm_head.weight"} if shape.tied else set())
    wrong += [
        f"the model has no {name}" for name in sorted(set(tensors) - known)
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{folder.path}: {'; '.join(wrong[:5])}{more}.")


def import_weights(source: Path, out: Path) -> Path:
    """Convert a Hugging Face folder to a checkpoint of step 0: weights without
    optimizer state."""
    with HubReader(source) as reader:
        if steps(out):
            raise CheckpointError(
                f"{out} holds checkpoints; choose a new folder."
            )
        with hold_run(out):
            name = f"{HUB}{source.absolute()}"
            own = {"model": {"own": name}} if families.code_of(name)[0] else {}
            return _write(reader, out, {"run": {"model": name}, **own})


# Computed values that old checkpoints stored.
_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def _tensors(folder: Folder) -> dict[str, Placed]:
    """Return every tensor by name: its file, header entry and byte offset."""
    if (folder.path / INDEX).exists():
        index = folder.json(INDEX, families.LIMIT).get("weight_map")
        index = decode(
            _Index,
            {"weight_map": index},
            str(folder.path / INDEX),
            folder.error,
        )
        files = sorted(set(index.weight_map.values()))
    elif (folder.path / ONE).exists():
        files = [ONE]
    else:
        raise CheckpointError(
            f"{folder.path}: has neither {INDEX} nor {ONE}; pickled weights (.bin, .pt) are not opened."
        )
    tensors: dict[str, Placed] = {}
    for file in files:
        for name, (entry, offset) in stored.read_header(folder, file).items():
            if name in tensors:
                # Two files with one name leave open which one is meant.
                folder.refuse(
                    file,
                    f"holds {name[:80]!r}, which {tensors[name][0]} has already.",
                )
            # Old versions stored these buffers; they are computed from the
            # configuration.
            if not name.endswith(_COMPUTED):
                tensors[name] = file, entry, offset
    return tensors


def _write(reader: TensorReader, out: Path, config: Mapping[str, Any]) -> Path:
    """Write a checkpoint in the run's format, as if each file came from a rank."""
    hidden = make_hidden(out / f"{SAVING}00000000")
    reports, every = [], reader.manifest.tensors
    sizes = [
        math.prod(each.shape) * DTYPES[each.dtype].itemsize for each in every
    ]
    # As if each run of `SHARD` bytes came from a rank of its own.
    for number, run in enumerate(_shards(every, sizes)):
        tensors = {each.title: reader.whole(each) for each in run}
        own = tuple(
            replace(each, shards=(_whole(each.title, each.whole),))
            for each in run
        )
        manifest = stored.Manifest(
            0, shape=reader.manifest.shape, config=config, tensors=own
        )
        reports.append(
            write_own(hidden / stored.file_of(number), manifest, tensors)
        )
    commit(out, hidden, reports, 1)
    return steps(out)[0]


# ---- mxfp4: 4-bit floats, two in a byte; 32 share a power-of-two scale (OCP
# Microscaling 1.0)

_BLOCKS, _SCALES = "_blocks", "_scales"
# e2m1: sign, two bits of exponent, one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_fp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode mxfp4 to bfloat16, which represents every value exactly.

    `blocks` are bytes (..., n, 16), `scales` biased exponents (..., n); the result is
    (..., 32 n).
    """
    # Index 0 to 7 positive, 8 to 15 negative: the sign is the highest bit.
    known = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=torch.bfloat16)
    # The low half of a byte comes first.
    low_first = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    # The exponent's bias is 127, as in float32.
    exponents = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(known[low_first.to(torch.int64)], exponents).flatten(-2)


def decoded_names(
    tensors: Mapping[str, Placed], where: str
) -> Iterator[tuple[str, Placed]]:
    """Yield all tensors under the names and shapes that they have after decoding
    mxfp4."""
    for name, (file, entry, offset) in tensors.items():
        plain, of = name.removesuffix(_BLOCKS), name.removesuffix(_SCALES)
        if plain != name and plain + _SCALES in tensors:
            *rows, groups, width = (
                entry.shape if len(entry.shape) > 1 else (0, 0)
            )
            scales = tensors[plain + _SCALES][1]
            right = (
                width == 16
                and scales.shape == (*rows, groups)
                and len(rows) == 2
            )
            if not right or {entry.dtype, scales.dtype} != {*stored.BYTES}:
                raise CheckpointError(
                    f"{where}: {name} {list(entry.shape)} and its scales {list(scales.shape)} are not"
                    " mxfp4, which has (experts, rows, n, 16) and (experts, rows, n) bytes."
                )
            # (experts, columns, rows): 2 values a byte, in groups of 16 bytes.
            shape = (rows[0], groups * 2 * width, rows[1])
            yield (
                plain,
                (
                    file,
                    replace(
                        entry, dtype=stored.NAMES[torch.bfloat16], shape=shape
                    ),
                    offset,
                ),
            )
        # Scales are read with their blocks.
        elif of == name or of + _BLOCKS not in tensors:
            yield name, (file, entry, offset)


@dataclass(frozen=True)
class _Index:
    weight_map: Mapping[str, str]

"""Reads tables of published runs strictly as data: a case, or why there is none."""

import csv
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from ..layout import Axis, Layout, Mesh, Shape, legal
from ..layout.adapter_row import AdapterRow
from ..layout.adapters import ADAPTERS
from ..layout.pieces import work_of_pieces
from .case import Case
from .device import Device, MachineError, device, devices
from .hardware import Hardware, Roofline, hardware_of
from .link import Level, clusters, joined
from .link import link as cable
from .profile import SoftwareProfile, profile_named
from .space import spread
from .table_experts import named_as_routed, routed_sizes, unsized

# Patterns in the order of trial: special versions of a device stand before its
# plain name.
_DEVICES = (
    (r"A100(?!.*80 ?G).*40", "a100-40"), (r"A100", "a100-80"), (r"A800", "a800"), (r"H100.*PCI", "h100-pcie"),
    (r"H100.*HBM2e", "h100-96"), (r"H800", "h800"), (r"V100.*32", "v100-32"), (r"V100", "v100-16"),
    (r"H100.*NVL\b", "h100-nvl"), (r"GH200", "gh200"), (r"H200", "h200"), (r"G?H100", "h100-sxm"),
    (r"GB300", "gb300"), (r"B300", "b300"), (r"GB200", "gb200"), (r"B200", "b200"), (r"H20\b", "h20"),
    (r"MI350", "mi350x"), (r"MI355", "mi355x"), (r"5090", "rtx-5090"), (r"\bL4\b", "l4"),
    (r"A10G", "a10g"), (r"\bT4\b", "t4"), (r"MI250", "mi250x"), (r"MI300", "mi300x"),
    (r"MI325", "mi325x"), (r"L40S", "l40s"), (r"4090", "rtx-4090"), (r"3090", "rtx-3090"),
    (r"v5e|v5 ?lite", "tpu-v5e"), (r"v5p", "tpu-v5p"), (r"v6e|trillium", "tpu-v6e"),
    (r"trainium ?2|trn2", "trainium2"), (r"gaudi ?3", "gaudi-3"),
)  # fmt: skip
_WORDS = tomllib.loads(
    (Path(__file__).parent / "words.toml").read_text(encoding="utf-8")
)
_COMMON = _WORDS.pop("common")
# Words without meaning of their own: "bf16 mixed precision", "states of the optimizer
# on CPU".
_FILLING = frozenset(_WORDS["filling"]["words"])
_DENIALS = frozenset(_WORDS.pop("filling")["denials"])
# Words by column and meaning; a word in `common` stands for all of its
# spellings.
_MEANINGS: dict[str, dict[str, list[str]]] = {
    column: {
        is_: [w for word in words for w in _COMMON.get(word, [word])]
        for is_, words in known.items()
    }
    for column, known in _WORDS.items()
}
_TIMES = ("step_time_s", "tok_s_gpu", "tflops_gpu")
_MEASURED = (*_TIMES, "peak_mem_gb")
# Columns that may say that a row trains adapters.
_TITLES = ("model", "row_id", "framework", "notes", "method", "task")
_DENIED = r"\b(?P<denied>(?:no|not|non|without|vs|than)[. -]+)?"
_ZERO = r"(?:zero-?)?(?:stage-?)?([0-3])"
_WHERE_TO = re.compile("->|=>|→|-to-(?=cpu|host)")  # optimizer->CPU
# In mixed precision the narrowest format counts: matmuls use it.
_NARROWEST_FIRST = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32")


class CellError(MachineError):
    """A cell of a table that cannot be right, with its column."""

    def __init__(self, column: str, text: str, why: str) -> None:
        super().__init__(f"{column}: {text[:40]!r} {why}")


@dataclass(frozen=True)
class PublishedRow:
    """One published run. `case` is None if it cannot be predicted; `why` is the reason."""

    source: str
    name: str
    model: str
    device: str
    ranks: int
    case: Case | None
    hardware: Hardware | None
    profile: SoftwareProfile
    step: float = 0.0  # measured seconds; 0 if there are none
    memory: float = 0.0  # bytes
    out_of_memory: bool = False
    why: str = ""
    notes: str = ""
    batch: float = 0.0
    empty: bool = False  # a stage would have no block
    line: int = 0  # in the table's file
    software: str = ""  # as the table names it

    @property
    def family(self) -> str:
        """The first word of the source's name: related sources share it."""
        found = re.match(r"[A-Za-z]+", self.source)
        return found[0].lower() if found else self.source

    @property
    def group(self) -> tuple[str, str, str, int, int]:
        """The setting of a run: runs with an equal group compare layouts for it."""
        sequence = self.case.sequence if self.case else 0
        return (self.source, self.model, self.device, self.ranks, sequence)


def read_table(
    path: str | Path, profile: SoftwareProfile | None = None
) -> tuple[PublishedRow, ...]:
    """All rows of a table in the format of the published measurements."""
    # `utf-8-sig`: spreadsheets begin a CSV file with a byte-order mark.
    try:
        with open(
            path, newline="", encoding="utf-8-sig", errors="replace"
        ) as file:
            lines = csv.reader(file)
            columns = [name.strip().lower() for name in next(lines, [])]
            # Line numbers of the file, since a quoted cell may span several
            # lines.
            numbered = [
                (lines.line_num, [cell.strip() for cell in line])
                for line in lines
                if line
            ]
    except (OSError, csv.Error) as error:
        raise MachineError(f"cannot read the table {path}: {error}.") from None
    need = {"source", "hardware", "gpus", "layers", "hidden", "seq"}
    if not numbered or not need <= set(columns):
        lacks = sorted(need - set(columns)) or ["rows"]
        raise MachineError(
            f"{path} is not a table of runs: it lacks {', '.join(lacks)}."
        )
    return tuple(
        _row(number, columns, cells, profile, Path(path).stem)
        for number, cells in numbered
    )


def _row(
    number: int,
    columns: list[str],
    cells: list[str],
    chosen: SoftwareProfile | None,
    stem: str,
) -> PublishedRow:
    fields = dict.fromkeys(columns, "") | dict(
        zip(columns, cells, strict=False)
    )
    profile = chosen or profile_named(fields.get("framework", ""))
    # What was read before a mistake still describes the row.
    kind, case, hardware, why = None, None, None, ""
    ranks, step, memory, batch, status = 0, 0.0, 0.0, 0.0, ""
    try:
        if any(cells[len(columns) :]):
            raise CellError(
                "cells",
                str(len(cells)),
                f"in a row of a table with {len(columns)} columns",
            )
        # A run out of memory may say so in place of a measurement.
        measured = (fields.get(key, "").lower() for key in _MEASURED)
        oom = any(text in _MEANINGS["status"]["oom"] for text in measured)
        status = "oom" if oom else _meaning(fields, "status")
        ranks = _count(fields, "gpus", 0)
        batch = _number(fields, "global_batch")
        kind = device_of_row(fields["hardware"])
        made = _case(fields, profile)
        _refuse_format(made, kind, fields.get("precision", ""))
        hardware = _hardware(
            kind.name,
            ranks,
            fields.get("inter_link", ""),
            _count(fields, "gpus_per_node", 8),
        )
        if status == "ok":
            unit = (
                2**30
                if "gib" in fields.get("mem_unit", "").lower()
                or profile.logs_gib
                else 1e9
            )
            memory = _number(fields, "peak_mem_gb") * unit
            step = _seconds(fields, made)
        # FLOPs of a step without recomputation: no row can beat the peak. Adapters
        # leave out the gradients of all other weights.
        flops = 4 if made.shape.adapter else 6
        work = flops * batch * sum(work_of_pieces(made.shape))
        if (
            0
            < step
            < work / (ranks * kind.peak(made.dtype or made.layout.precision))
        ):
            column = next(key for key in _TIMES if _number(fields, key))
            raise CellError(
                column,
                fields[column],
                f"is faster than the peak of {ranks} x {kind.name}",
            )
        case = made
    except CellError as error:
        why = f"line {number}, {error}"
    except MachineError as error:  # for many rows at once
        why = str(error)
    except ValueError as error:
        why = f"line {number}: {' '.join(str(error).split())}"
    return PublishedRow(
        source=fields["source"] or stem,
        name=fields.get("row_id", ""),
        model=fields.get("model", ""),
        device=kind.name if kind else "",
        ranks=ranks,
        case=case,
        hardware=hardware,
        profile=profile,
        step=step,
        memory=memory,
        out_of_memory=status == "oom",
        why=why,
        notes=fields.get("notes", ""),
        batch=batch,
        empty=case is not None and _empty(case, profile),
        line=number,
        software=fields.get("framework", ""),
    )


def _number(fields: Mapping[str, str], key: str) -> float:
    """The number in a cell; 0 if it has none."""
    text = fields.get(key, "")
    if text.lower() in ("", "-", "n/a", "none"):
        return 0.0
    # "1,024" is a number; "1,5" is not taken for one.
    plain = (
        text.replace(",", "")
        if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text)
        else text
    )
    try:
        number = float(plain)
    except ValueError:
        raise CellError(key, text, "is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise CellError(key, text, "is not finite or is below 0")
    return number


def _count(fields: Mapping[str, str], key: str, usual: int = 1) -> int:
    """The whole number in a cell; `usual` if it has none, an error if `usual` is 0."""
    number, text = _number(fields, key), fields.get(key, "")
    # 0 ranks along an axis is a mistake, not a missing value.
    none = not number and (
        not usual or (text.startswith("0") and key in ("tp", "pp", "dp"))
    )
    if none or number != int(number):
        raise CellError(key, text, "is not a whole number above 0")
    return int(number) or usual


def _meaning(fields: Mapping[str, str], key: str, kind: str = "") -> str:
    """The meaning of a cell's word, as listed in `words.toml`."""
    text, kind = fields.get(key, ""), kind or key
    # A spreadsheet writes ZeRO stage 3 as "3.0".
    lower = re.sub(r"\.0$", "", text.lower())
    # First with the words in brackets, then without them: "selective (torch)".
    for spelled in (
        re.sub(r"[()]", " ", lower),
        re.sub(r"\(.*?\)", " ", lower),
    ):
        # Blanks, hyphens and underscores are one: "full_recompute" ->
        # "full-recompute".
        word = re.sub(r"[\s_-]+", "-", spelled.strip())
        joined = re.sub("[-/+,&<>=→←]+", "-", word).strip("-")
        # "optimizer -> CPU" is known by its first part, too.
        for each in (word, _WHERE_TO.split(word)[0].strip("-"), joined):
            meaning = _known(each, kind)
            if meaning is not None:
                return meaning
    meaning = _by_parts(lower, kind)
    if meaning is not None:
        return meaning
    words = (
        word
        for words in _MEANINGS[kind].values()
        for word in words
        if len(word) > 1
    )
    raise CellError(
        key, text, f"is not known: write one of {', '.join(words)}"
    )


def _known(word: str, kind: str) -> str | None:
    """The meaning of one word or several with separators; None if unknown."""
    bag = _bag(word)
    for meaning, words in _MEANINGS[kind].items():
        if word in words or (bag and bag in map(_bag, words)):
            return meaning
    if kind == "zero" and (found := re.fullmatch(_ZERO, word)):
        return found[1]
    if kind == "zero" and (
        found := re.fullmatch(r"stage-?([0-3])-zero|([0-3])-zero", word)
    ):
        return found[1] or found[2]
    # Both parts must mean the same, except that the narrowest precision
    # counts.
    parts = [part.strip("-") for part in re.split("[/+,&]|-with-|-and-", word)]
    if len(parts) == 1 or not all(parts):
        return None
    meanings = {_known(part, kind) for part in parts}
    if kind == "precision" and meanings <= set(_NARROWEST_FIRST):
        return min(
            meanings & set(_NARROWEST_FIRST), key=_NARROWEST_FIRST.index
        )
    return meanings.pop() if len(meanings) == 1 else None


def _by_parts(text: str, kind: str) -> str | None:
    """The meaning of a text that consists of known words in any order, or None.

    Of several number formats the narrowest counts: matmuls use it.
    """
    found: dict[str, set[str]] = {}
    parts = {part for part in re.split(r"[^a-z0-9]+", text) if part}
    parts -= _FILLING
    if parts & _DENIALS:
        return None
    for meaning, words in _MEANINGS[kind].items():
        bags = [bag for bag in map(_bag, words) if bag and bag <= parts]
        if bags:
            found[meaning] = set().union(*bags)
    if kind == "precision" and found:
        return min(
            found.keys() & set(_NARROWEST_FIRST), key=_NARROWEST_FIRST.index
        )
    whole = [meaning for meaning, bag in found.items() if bag == parts]
    return whole[0] if len(whole) == 1 else None


@lru_cache(maxsize=1024)
def _bag(word: str) -> frozenset[str]:
    """The meaningful parts of a word, unordered; empty if they have one letter in all."""
    parts = frozenset(word.split("-")) - _FILLING
    return parts if len("".join(parts)) > 1 else frozenset()


def _refuse_format(case: Case, device: Device, text: str) -> None:
    """Raise if the device has no matmuls in a case's format, or the planner no price."""
    name = case.dtype or case.layout.precision
    if not Roofline.multiplies(name):
        raise CellError(
            "precision",
            text,
            f"is not planned: there is no price for {name} matmuls",
        )
    if not device.peak(name):
        raise CellError(
            "precision", text, f"is not supported by {device.name}"
        )


def device_of_row(hardware: str) -> Device:
    """Return the device of the catalogue that a row's `hardware` names."""
    for pattern, name in _DEVICES:
        if re.search(pattern, hardware, re.IGNORECASE) and name in devices():
            return device(name)
    raise CellError("hardware", hardware, "is not in the catalogue of devices")


def _case(fields: Mapping[str, str], profile: SoftwareProfile) -> Case:
    """The row as a case; its profile provides what the row does not state."""
    shape = _shape(fields, profile)
    n = {key: _count(fields, key) for key in ("gpus", "tp", "pp", "cp", "vpp")}
    if not fields.get("tp") and not fields.get("pp") and not fields.get("dp"):
        raise MachineError("the row does not give its layout")
    inner, ep = n["tp"] * n["pp"] * n["cp"], _count(fields, "ep")
    dp = _count(fields, "dp", max(1, n["gpus"] // inner))
    if dp * ep * inner == n["gpus"]:
        dp *= ep  # the table counts ranks of ep separately from dp
    if dp * inner != n["gpus"]:
        product = f"{dp} x {n['tp']} x {n['pp']} x {n['cp']} = {dp * inner}"
        raise CellError(
            "gpus",
            fields["gpus"],
            f"is not dp x tp x pp x cp = {product}",
        )
    # Sequences of a step over all ranks.
    batch = _number(fields, "global_batch")
    if fields["source"].endswith("-layer"):
        raise MachineError("the row is the time of one layer, not of a step")
    if not batch:
        raise MachineError("the row does not give its batch")
    schedule = _meaning(fields, "schedule") if n["pp"] > 1 else "accum"
    # Without a microbatch: one sequence in a pipeline, else up to 4.
    rows = _number(fields, "micro_batch") or (
        1.0 if n["pp"] > 1 else min(batch / dp, 4.0)
    )
    # A microbatch that is the whole batch is that of all ranks.
    if dp > 1 and rows == batch:
        rows = batch / dp
    # Microbatches of a rank, rounded: batches are often given rounded.
    count = max(1, round(batch / dp / rows))
    if fields.get("micro_batch") and abs(count * rows * dp / batch - 1) > 0.01:
        raise CellError(
            "micro_batch",
            fields["micro_batch"],
            f"x dp={dp} is not a part of {batch:g}",
        )
    zero, precision = (
        int(_meaning(fields, "zero") or profile.zero),
        _meaning(fields, "precision"),
    )
    # A zb-v rank has two stages; interleaved ones as many as given.
    chunks = 2 if schedule in ("zb-v", "dualpipe-v") else 1
    if schedule == "interleaved" or (n["vpp"] > 1 and schedule == "1f1b"):
        schedule = "interleaved"
        chunks = max(2, n["vpp"] if fields.get("vpp") else _chunks(shape, n))
    shard = _count(fields, "hsdp_shard", dp)
    if dp % shard:
        raise CellError(
            "hsdp_shard", fields["hsdp_shard"], f"does not divide dp={dp}"
        )
    # Without ZeRO, sharding has no meaning: all of dp is one group.
    shard = shard if zero else dp
    if shard % ep:
        raise CellError(
            "ep",
            fields["ep"],
            f"does not divide the {shard} ranks of data parallelism",
        )
    # From the outermost axis: pipelines cross servers first, tp stays inside.
    parts = {
        "pp": (n["pp"],),
        "dp": (dp // shard, shard // ep),
        "cp": (n["cp"], 1),
        "ep": (ep,),
        "tp": (n["tp"],),
    }
    mesh = Mesh(tuple(Axis(*each) for each in parts.items()))
    divided = profile.divides_sequence
    if fields.get("sp"):
        divided = bool(_meaning(fields, "sp", "flag"))
    # Experts on several servers: with `overlap`, two microbatches take turns.
    server = _count(fields, "gpus_per_node", 8)
    pod = device_of_row(fields["hardware"]).pod
    several_servers = ep * n["tp"] > max(server, pod)
    beside = profile.overlaps_exchange and several_servers and chunks > 1
    layout = Layout(
        mesh=mesh,
        seq=divided and n["tp"] > 1,
        overlap=beside and count > 1,
        zero=zero,
        schedule=schedule,
        chunks=chunks,
        microbatches=count,
        recompute=_meaning(fields, "act_ckpt") or profile.recompute,
        # fp8 and fp4 are formats of matmuls; everything else is in bf16.
        precision="bf16" if precision in ("fp8", "fp4") else precision,
        offload=tuple(filter(None, _meaning(fields, "offload").split(","))),
    )
    for broken in legal(layout, shape):
        if broken.rule in ("heads", "kv", "ffn"):
            raise CellError(
                "tp", str(n["tp"]), f"is impossible: {broken.what}"
            )
        if broken.rule in ("ep", "experts"):
            raise CellError("ep", str(ep), f"is impossible: {broken.what}")
    if n["pp"] > 1:
        less = "one layer less" in fields.get("inferred", "") + fields.get(
            "notes", ""
        )
        first, last = _ends(
            shape, n["pp"], less=less, balanced=profile.balanced
        )
        stages = _stages(shape.layers, n["pp"], chunks, first, last)
        layout = replace(
            layout, stages=stages, reduce="step" if zero > 1 else layout.reduce
        )
    dtype = precision if precision in ("fp8", "fp4") else ""
    return Case(
        shape, layout, batch / dp / count, _count(fields, "seq", 0), dtype
    )


def _chunks(shape: Shape, n: Mapping[str, int]) -> int:
    """Chunks of an interleaved schedule that names none: some three blocks each."""
    per = shape.layers // n["pp"]
    # Chunks with whole numbers of blocks.
    fit = [v for v in range(2, per + 1) if per % v == 0]
    return min(fit, key=lambda v: abs(per / v - 3), default=2)


def _stages(
    layers: int, pp: int, chunks: int, first: int, last: int
) -> tuple[int, ...]:
    """Blocks of every virtual stage; with chunks, spread as evenly as possible."""
    if chunks == 1 and pp == 2 and first + last == layers:
        return (first, last)
    if chunks > 1 or pp == 2 or not (first or last):
        return spread(layers, pp * chunks)
    return (first, *spread(layers - first - last, pp - 2), last)


def _ends(
    shape: Shape, pp: int, *, less: bool, balanced: bool
) -> tuple[int, int]:
    """Blocks of the first and last stage; 0: as many as the others.

    With `less` both have one block fewer, for the embedding and the head. If
    `balanced`, stages are filled one after the other up to their share of the cost,
    with the head's in the last. Our own `stage_pieces` evens that out instead.
    """
    if less or not balanced:
        # Two blocks fewer in all, one at each end.
        fewer = less and (shape.layers + 2) % pp == 0
        return ((shape.layers + 2) // pp - 1,) * 2 if fewer else (0, 0)
    _, block, *_, head = work_of_pieces(shape)
    # The head's work, as a number of blocks, is shared out with the blocks.
    each = (shape.layers + head / block) / pp
    last = max(0, min(shape.layers - pp + 1, round(each - head / block)))
    return -(-(shape.layers - last) // (pp - 1)), last


def _empty(case: Case, profile: SoftwareProfile) -> bool:
    """True if a stage has no block.

    There are too many stages, or stages are divided by cost and the head costs as much
    as two.
    """
    pp, shape = case.layout.pp, case.shape
    if pp == 1 or not profile.balanced:
        return pp > shape.layers
    _, block, *_, last = work_of_pieces(shape)
    head = last / block
    return pp > shape.layers or head > 2 * (shape.layers + head) / pp


def _shape(fields: Mapping[str, str], profile: SoftwareProfile) -> Shape:
    """The model of a row, with its adapters if it trains any."""
    whole = _whole_shape(fields)
    titles = " ".join(fields.get(column, "") for column in _TITLES)
    for row in ADAPTERS:
        rank = _first(fields, row.columns)
        # A row that does not give the rank.
        if not rank and _trains_adapters(row, titles):
            rank = row.usual_rank
        if rank:
            return row.with_rank(whole, rank, profile.adapted)
    return whole


def _trains_adapters(row: AdapterRow, titles: str) -> bool:
    """True if `titles` say that these adapters are trained, without a negation."""
    word = re.compile(rf"{_DENIED}(?P<bits>q?){row.name}\b", re.IGNORECASE)
    named = [match for match in word.finditer(titles) if not match["denied"]]
    if any(match["bits"] for match in named):
        raise CellError(
            "notes", titles, "has weights in 4 bits: no price is known"
        )
    return bool(named)


def _whole_shape(fields: Mapping[str, str]) -> Shape:
    """The model of a row, from its sizes.

    If it routes tokens and the row lacks the sizes for it, the model's published shape
    by name.
    """
    sizes = routed_sizes(partial(_first, fields))
    if not sizes and _routes(fields):
        return _published_shape(fields)
    return replace(_dense_shape(fields), **sizes)


def _routes(fields: Mapping[str, str]) -> bool:
    return _count(fields, "ep") > 1 or named_as_routed(fields.get("model", ""))


def _first(fields: Mapping[str, str], names: Sequence[str]) -> int:
    """The first nonzero count among these columns, or 0."""
    return next(
        (_count(fields, name) for name in names if _number(fields, name)), 0
    )


def _published_shape(fields: Mapping[str, str]) -> Shape:
    """The catalogue's shape for the model that a row names, if its sizes agree."""
    title = fields.get("model", "")
    known = {name: Shape.load(name) for name in Shape.names()}
    # By the title before the first comma of its source, or by its name here.
    titles = {
        _plain(shape.source.partition(",")[0]): shape
        for shape in known.values()
    }
    titles |= {_plain(name): shape for name, shape in known.items()}
    shape = titles.get(_plain(re.sub(r"\(.*?\)", " ", title)))
    if shape is None or not shape.routed.count:
        raise MachineError(unsized(title, known))
    for column, size in (("layers", shape.layers), ("hidden", shape.hidden)):
        given = _number(fields, column)
        if given and given != size:
            raise CellError(
                column,
                fields[column],
                f"differs from the {size} of {shape.name}",
            )
    return replace(shape, sequence=_count(fields, "seq", 0))


def _plain(title: str) -> str:
    """A model's name without case and punctuation: deepseekv3 for DeepSeek-V3."""
    return re.sub(r"[^a-z0-9]", "", title.lower())


def _dense_shape(fields: Mapping[str, str]) -> Shape:
    gated = bool(_meaning(fields, "glu", "flag"))
    if not _number(fields, "layers") or not _number(fields, "hidden"):
        raise MachineError("the row does not give its model's layers or width")
    heads, hidden = _count(fields, "heads"), _count(fields, "hidden")
    # Hidden over heads is only the usual head size.
    size = _number(fields, "head_dim") or hidden / heads
    return Shape(
        name=fields.get("model", ""),
        layers=_count(fields, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(fields, "kv_heads", heads),
        # A fractional size was derived wrongly: round it to a multiple of 8.
        head_dim=int(size) if size == int(size) else 8 * round(size / 8),
        ffn=_count(fields, "ffn", 4 * hidden),
        vocab=_count(fields, "vocab", 51200),
        sequence=_count(fields, "seq", 0),
        gated=gated,
        # No column has these: a gated MLP stands for Llama's other choices.
        norm="rms" if gated else "layer",
        positions="rope" if gated else "learned",
        tied=bool(_meaning(fields, "tied", "flag")),
        bias="none" if gated else "all",
    )


def _seconds(fields: Mapping[str, str], case: Case) -> float:
    """Measured seconds of a step.

    Given, or from tokens per second, or from a FLOP rate with the formula that the
    source names.
    """
    if step := _number(fields, "step_time_s"):
        return step
    ranks = _number(fields, "gpus")
    if rate := _number(fields, "tok_s_gpu"):
        return case.tokens / (rate * ranks)
    if rate := _number(fields, "tflops_gpu"):
        return _formula(fields, case) / (rate * 1e12 * ranks)
    return 0.0


def _formula(fields: Mapping[str, str], case: Case) -> float:
    """FLOPs of a step, by the formula of the row's source."""
    s, l = case.sequence, case.shape.layers  # noqa: E741
    h, v, tokens = case.shape.hidden, case.shape.vocab, case.tokens
    text = fields.get("mfu_formula", "")
    # Narayanan et al. 2021, with recomputation: 96 B s l h^2 (1 + s / 6h + V /
    # 16 l h).
    if text.startswith(("96", "Megatron-DeepSpeed")):
        return 96.0 * tokens * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    # the share of (query, key) pairs that the source counts
    pairs = 0.5 if "causal" in text.lower() else 1.0
    # 6 FLOPs a parameter and token; attention adds 12 l h s a token.
    model = (
        6.0 * case.shape.active * tokens + 12.0 * pairs * l * h * s * tokens
    )
    # the embedding is a lookup, without FLOPs
    return model - (0.0 if case.shape.tied else 6.0 * v * h * tokens)


@lru_cache(maxsize=256)
def _hardware(name: str, ranks: int, link: str, node: int) -> Hardware:
    """A row's hardware: its device's cluster, with its own servers and network."""
    # Amazon's network has its own measured levels.
    efa = (
        "h100-efa-fading" if "bandwidth falls" in link.lower() else "h100-efa"
    )
    family = {"h100-sxm": efa if "efa" in link.lower() else "h100"}.get(
        name, name
    )
    inside, port = device(name).pod or node, _port(link, node)
    whole = clusters().get(family) or joined(name, 2 * inside, node)
    near, far = whole.levels
    levels: tuple[Level, ...] = (replace(near, size=min(inside, ranks)),)
    if ranks > inside:
        # Whole servers, rounded up.
        far = replace(far, size=-(-ranks // inside))
        far = (
            replace(far, share=far.share * port / far.bandwidth)
            if port
            else far
        )
        levels += (
            replace(far, latency_us=8.0)
            if "omni-path" in link.lower()
            else far,
        )
    return hardware_of(replace(whole, levels=levels), ranks)


def _port(link: str, node: int) -> float:
    """Bytes per second of a device, from a row's text about its network; 0: unknown."""
    # Different spellings of one unit: "400 Gbps", "3.2 Tb".
    link = re.sub(r"(?i)gbps|gbit/s", "Gb/s", link)
    link = re.sub(
        r"([\d.]+) ?T(?=b)",
        lambda found: f"{1000 * float(found[1]):g} G",
        link,
    )
    # "8x HDR": cables by their InfiniBand generation.
    named = re.search(r"(?i)(\d+) ?x ?(?:infiniband )?([ehnx]dr)\b", link)
    if named and not re.search(r"\dx? ?Gb", link):
        link = f"{named[1]}x{cable('infiniband-' + named[2].lower()).bandwidth * 8e-9:g} Gb"
    # A rate for each device: given, or a server's divided by its devices. 8
    # bits a byte.
    for pattern, unit in (
        (r"()\((\d+(?:\.\d+)?) GB/s/GPU", 1.0),
        (r"(\d+) ?x ?(\d+) ?Gb", 8.0 * max(node, 1)),
        (r"()(\d+) Gb/s (?:per|a) (?:node|server)", 8.0 * max(node, 1)),
        (r"()(\d+) Gb/s(?:/| per | a )(?:GPU|device)", 8.0),
    ):
        if found := re.search(pattern, link):
            return int(found[1] or 1) * float(found[2]) / unit * 1e9
    return 0.0

"""Tables of published runs, read strictly as data: each row a case that can be predicted, or why not."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from phalanx.layout import Axis, Layout, LayoutError, Mesh, Shape
from phalanx.plan import MachineError
from phalanx.plan.device import Device, device, devices
from phalanx.plan.hardware import Hardware, hardware_of
from phalanx.plan.link import Cluster, Level, cluster
from phalanx.plan.profile import SoftwareProfile, profile_named
from phalanx.plan.space import spread
from phalanx.plan.step import Case

__all__ = ["Row", "read_table"]

_DEVICES = (
    (r"A100.*40", "a100-40"), (r"A100", "a100-80"), (r"H100.*PCI", "h100-pcie"),
    (r"H100.*HBM2e", "h100-96"),
    (r"H100.*NVL\b", "h100-nvl"), (r"G?H200", "h200"), (r"G?H100|H800", "h100-sxm"),
    (r"GB200", "gb200"), (r"B200", "b200"), (r"MI250", "mi250x"), (r"MI300", "mi300x"),
    (r"MI325", "mi325x"), (r"L40S", "l40s"), (r"4090", "rtx-4090"), (r"v5e|v5 ?lite", "tpu-v5e"),
    (r"v5p", "tpu-v5p"), (r"v6e|trillium", "tpu-v6e"), (r"trainium ?2|trn2", "trainium2"),
    (r"gaudi ?3", "gaudi-3"),
)  # fmt: skip
_SCHEDULES = {
    "": "1f1b", "none": "1f1b", "1f1b": "1f1b", "1f1b-i": "interleaved", "gpipe": "gpipe",
    "interleaved-1f1b": "interleaved", "interleaved": "interleaved", "afab": "gpipe",
    "zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-2p": "zb-h2", "zb-h2": "zb-h2", "zb-v": "zb-v",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published run. `case` is None where it cannot be predicted; then `why` says why."""

    source: str
    name: str
    model: str
    device: str
    ranks: int
    case: Case | None
    hardware: Hardware | None
    profile: SoftwareProfile
    step: float = 0.0  # seconds as measured, 0 if the run has none
    memory: float = 0.0  # bytes
    out_of_memory: bool = False
    why: str = ""
    notes: str = ""
    batch: float = 0.0
    empty: bool = False  # a stage would hold nothing

    @property
    def family(self) -> str:
        """Sources that are siblings have one: the first word of their name."""
        found = re.match(r"[A-Za-z]+", self.source)
        return found[0].lower() if found else self.source

    @property
    def group(self) -> tuple[str, str, str, int, int]:
        """Runs that answer the same question: which layout is best for it."""
        sequence = self.case.sequence if self.case else 0
        return (self.source, self.model, self.device, self.ranks, sequence)


def read_table(path: str | Path, profile: SoftwareProfile | None = None) -> tuple[Row, ...]:
    """All rows of a table in the format of the published measurements."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            said = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MachineError(f"cannot read the table {path}: {error}.") from None
    need = {"source", "hardware", "gpus", "layers", "hidden", "seq"}
    if not said or not need <= set(said[0]):
        lacks = sorted(need - set(said[0] if said else ()))
        raise MachineError(f"{path} is no table of runs: it lacks {', '.join(lacks)}.")
    return tuple(
        _row({k: (v or "").strip() for k, v in each.items() if k}, profile) for each in said
    )


def _row(said: Mapping[str, str], chosen: SoftwareProfile | None) -> Row:
    profile = chosen or profile_named(said.get("framework", ""))
    ranks = int(_number(said, "gpus"))
    try:
        kind = _device(said["hardware"])
        case = _case(said, profile)
        hardware = _hardware(kind.name, ranks, said.get("inter_link", ""), said["hardware"],
                     int(_number(said, "gpus_per_node") or 8))  # fmt: skip
        why = ""
    except (LayoutError, MachineError, ValueError) as error:
        kind, case, hardware, why = None, None, None, str(error)
    status = said.get("status", "ok")
    step = _seconds(said, case) if case else 0.0
    unit = 2**30 if "GiB" in said.get("mem_unit", "") or profile.logs_gib else 1e9
    return Row(
        source=said["source"], name=said.get("row_id", ""), model=said.get("model", ""),
        device=kind.name if kind else "", ranks=ranks, case=case, hardware=hardware,
        profile=profile,
        step=step if status == "ok" else 0.0,
        memory=_number(said, "peak_mem_gb") * unit if status == "ok" else 0.0,
        out_of_memory="oom" in status, why=why, notes=said.get("notes", ""),
        batch=_number(said, "global_batch"),
        empty=case is not None and _empty(case, profile),
    )  # fmt: skip


def _number(said: Mapping[str, str], key: str) -> float:
    text = said.get(key, "")
    try:
        return float(text) if text else 0.0
    except ValueError:
        raise MachineError(f"{key}={text!r} is no number.") from None


def _device(hardware: str) -> Device:
    for pattern, name in _DEVICES:
        if re.search(pattern, hardware, re.IGNORECASE) and name in devices():
            return device(name)
    raise MachineError(f"{hardware!r} is not in the catalogue of devices.")


def _case(said: Mapping[str, str], profile: SoftwareProfile) -> Case:
    """The row as a layout. What it does not say is taken as its profile's default."""
    shape = _shape(said)
    n = {key: int(_number(said, key) or 1) for key in ("gpus", "tp", "pp", "cp", "vpp")}
    if not said.get("tp") and not said.get("pp") and not said.get("dp"):
        raise MachineError("the row does not say its layout")
    dp = int(_number(said, "dp") or max(1, n["gpus"] // (n["tp"] * n["pp"] * n["cp"])))
    batch = _number(said, "global_batch")
    if said["source"].endswith("-layer"):
        raise MachineError("the row is the time of one layer, not of a step")
    if not batch:
        raise MachineError("the row does not say its batch")
    schedule = _SCHEDULES.get(said.get("schedule", "").lower(), "1f1b") if n["pp"] > 1 else "accum"
    rows = _number(said, "micro_batch") or _rows(batch / dp, n["pp"])
    count = max(1, round(batch / dp / rows))
    zero = int(_number(said, "zero"))
    if (n["vpp"] > 1 and schedule == "1f1b") or schedule == "interleaved":
        schedule, chunks = "interleaved", max(2, n["vpp"] if said.get("vpp") else _chunks(shape, n))
    else:
        chunks = 2 if schedule == "zb-v" else 1
    shard = int(_number(said, "hsdp_shard") or dp)
    if zero == 0 or dp % shard:
        shard = dp
    mesh = Mesh(
        (Axis("pp", (n["pp"],)), Axis("dp", (dp // shard, shard)), Axis("cp", (n["cp"], 1)),
         Axis("tp", (n["tp"],)))
    )  # fmt: skip
    layout = Layout(
        mesh=mesh, seq=said.get("sp") == "1" and n["tp"] > 1, zero=min(zero, 3), schedule=schedule,
        chunks=chunks, microbatches=count, recompute=_recompute(said.get("act_ckpt") or profile.recompute),
        precision="fp16" if "fp16" in said.get("precision", "") else "bf16",
        offload=("optimizer",) if "optim" in said.get("offload", "") else (),
    )  # fmt: skip
    if zero == 3 and n["pp"] > 1:
        layout = replace(layout, reduce="step")
    less = "one layer less" in said.get("inferred", "") + said.get("notes", "")
    if profile.balanced and not less:
        first, last = _filled(shape, n["pp"])
    else:
        first, last = _ends(shape.layers, n["pp"]) if less else (0, 0)
    if n["pp"] > 1:
        layout = replace(layout, stages=_stages(shape.layers, n["pp"], chunks, first, last))
    # With a scale for every row the products gain nothing over bf16 in what is published.
    fast = "fp8" in said.get("precision", "") and "rowwise" not in said.get("precision", "")
    dtype = "fp8" if fast else ""
    return Case(shape, layout, batch / dp / count, int(_number(said, "seq")), dtype)


def _rows(batch: float, pp: int) -> float:
    """The microbatch where a row says none: one sequence in a pipeline, else what can be at once."""
    return 1.0 if pp > 1 else min(batch, 4.0)


def _chunks(shape: Shape, n: Mapping[str, int]) -> int:
    """Chunks of an interleaved schedule that says none: three or so blocks in each."""
    per = shape.layers // n["pp"]
    fit = [v for v in range(2, per + 1) if per % v == 0]
    return min(fit, key=lambda v: abs(per / v - 3), default=2)


def _stages(layers: int, pp: int, chunks: int, first: int, last: int) -> tuple[int, ...]:
    """Blocks of every virtual stage. With chunks they are as even as can be."""
    if chunks > 1 or pp == 2 or not (first or last):
        return (
            (first, last) if chunks == 1 and first + last == layers else spread(layers, pp * chunks)
        )
    return (first, *spread(layers - first - last, pp - 2), last)


def _filled(shape: Shape, pp: int) -> tuple[int, int]:
    """Blocks of the first and last stage where stages are filled one after the other, each until it
    has its share of the cost, the head's with it; our own `stage_pieces` evens them out instead."""
    if pp == 1:
        return 0, 0
    block, head = shape.cost(1), shape.cost(shape.layers + 1)
    each = (shape.layers + head / block) / pp
    last = max(0, min(shape.layers - pp + 1, round(each - head / block)))
    return -(-(shape.layers - last) // (pp - 1)), last


def _ends(layers: int, pp: int) -> tuple[int, int]:
    """Blocks of the first and last stage where each holds one less, for embedding and head."""
    if pp > 1 and (layers + 2) % pp == 0:
        return (layers + 2) // pp - 1, (layers + 2) // pp - 1
    return 0, 0


def _empty(case: Case, profile: SoftwareProfile) -> bool:
    """Whether a stage has no block: too many stages, or a head that cached_costs as much as two of them
    where stages are cut by cost."""
    pp, shape = case.layout.pp, case.shape
    if pp == 1 or not profile.balanced:
        return pp > shape.layers
    head = shape.cost(shape.layers + 1) / shape.cost(1)
    return pp > shape.layers or head > 2 * (shape.layers + head) / pp


def _recompute(text: str) -> str:
    if text.startswith(("full", "all")):
        return "all"
    return "selective" if text.startswith("selective") else "none"


def _head(size: float) -> int:
    """A head's size; one that is no whole number was derived wrongly, and is taken as usual."""
    return int(size) if size == int(size) else 8 * round(size / 8)


def _shape(said: Mapping[str, str]) -> Shape:
    heads = int(_number(said, "heads") or 1)
    hidden = int(_number(said, "hidden"))
    gated = said.get("glu") == "1"
    if not _number(said, "layers") or not hidden:
        raise MachineError("the row does not say its model's layers or width")
    return Shape(
        name=said.get("model", ""), layers=int(_number(said, "layers")), hidden=hidden, heads=heads,
        kv_heads=int(_number(said, "kv_heads") or heads),
        head_dim=_head(_number(said, "head_dim") or hidden / heads),
        ffn=int(_number(said, "ffn") or 4 * hidden), vocab=int(_number(said, "vocab") or 51200),
        sequence=int(_number(said, "seq")), gated=gated, norm="rms" if gated else "layer",
        positions="rope" if gated else "learned", tied=said.get("tied", "") == "1",
        bias="none" if gated else "all",
    )  # fmt: skip


def _seconds(said: Mapping[str, str], case: Case) -> float:
    """Measured seconds of a step: said, or from tokens a second, or from the FLOP rate that a
    source states by a formula that it names."""
    if step := _number(said, "step_time_s"):
        return step
    ranks = _number(said, "gpus")
    if rate := _number(said, "tok_s_gpu"):
        return case.tokens / (rate * ranks)
    if rate := _number(said, "tflops_gpu"):
        return _formula(said, case) / (rate * 1e12 * ranks)
    return 0.0


def _formula(said: Mapping[str, str], case: Case) -> float:
    """FLOPs of a step as the row's source counts them."""
    s, l = case.sequence, case.shape.layers  # noqa: E741
    h, v, tokens = case.shape.hidden, case.shape.vocab, case.tokens
    text = said.get("mfu_formula", "")
    if text.startswith(("96", "Megatron-DeepSpeed")):
        return 96.0 * tokens * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    model = 6.0 * case.shape.total * tokens + 12.0 * l * h * s * tokens
    if case.shape.tied:
        return model
    return model - 6.0 * v * h * tokens  # the embedding is a lookup


@lru_cache(maxsize=256)
def _hardware(name: str, ranks: int, link: str, hardware: str, node: int) -> Hardware:
    """The cluster of a row: its device's family, with the network that the row tells of."""
    family = {"a100-80": "a100-80", "a100-40": "a100-40", "h100-sxm": "h100", "h200": "h200",
              "h100-96": "h100-96",              "b200": "b200", "gb200": "gb200", "mi300x": "mi300x",
              "tpu-v5p": "tpu-v5p", "trainium2": "trainium2"}.get(name)  # fmt: skip
    if "EFA" in link and name == "h100-sxm":
        family = "h100-efa"
    if family is None:
        raise MachineError(f"no cluster of {name} is in the catalogue")
    size = max(cluster(f"{family}x{max(ranks, 1)}").levels[0].size, 1) if ranks <= node else node
    whole = cluster(f"{family}x{-(-ranks // node) * node if ranks > node else ranks}")
    port = _port(link, size)
    levels = tuple(_with_port(level, port) if i else level for i, level in enumerate(whole.levels))
    if "Omni-Path" in link:
        levels = tuple(replace(x, latency_us=8.0) if i else x for i, x in enumerate(levels))
    made: Cluster = replace(whole, levels=levels)
    return hardware_of(made, ranks)


def _with_port(level: Level, port: float) -> Level:
    """The level with another rate of each device's port, in bytes a second."""
    return replace(level, share=level.share * port / level.bandwidth) if port else level


def _port(link: str, node: int) -> float:
    """Bytes a second of one device, from what a row says of its network; 0 if it says nothing."""
    if found := re.search(r"\((\d+(?:\.\d+)?) GB/s/GPU", link):
        return float(found[1]) * 1e9
    if found := re.search(r"(\d+) ?x ?(\d+) ?Gb", link):
        return int(found[1]) * int(found[2]) / 8 / max(node, 1) * 1e9
    if found := re.search(r"(\d+) Gb/s per node", link):
        return int(found[1]) / 8 / max(node, 1) * 1e9
    if found := re.search(r"(\d+) Gb/s/GPU", link):
        return int(found[1]) / 8 * 1e9
    return 0.0

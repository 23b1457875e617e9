"""The names that layouts, run files and flags choose from, with their properties.

Known before torch is loaded. A schedule, a dtype or a backend is spelled out only here.
"""

import difflib
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple


class ScheduleTraits(NamedTuple):
    """Traits of a schedule; its order of operations is in program/schedules.py."""

    least: int = 1  # fewest chunks of the model on each stage
    most: int = 1  # most chunks
    pipelined: bool = True  # runs over the stages of a pipeline
    whole_batch: bool = False  # takes the batch as one microbatch
    splits_backward: bool = (
        False  # input and weight gradients are separate operations
    )
    # Of P ranks, rank r holds the stages r and 2P - 1 - r; otherwise r, P + r, ...
    v_shape: bool = False
    searched: bool = False  # the order depends on the costs of operations
    # In a pair computed side by side, the forward comes before the backward.
    forward_first: bool = False


ACCUM, NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED = (
    "accum",
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
)
ZB_H1, ZB_H2, ZB_V, SEARCHED = "zb-h1", "zb-h2", "zb-v", "searched"
DUALPIPE_V = "dualpipe-v"
CHUNKS = 64  # the most chunks on a stage
SCHEDULES = {
    ACCUM: ScheduleTraits(pipelined=False),
    NAIVE: ScheduleTraits(whole_batch=True),
    GPIPE: ScheduleTraits(),
    ONE_F_ONE_B: ScheduleTraits(),
    INTERLEAVED: ScheduleTraits(2, CHUNKS),
    ZB_H1: ScheduleTraits(splits_backward=True),
    ZB_H2: ScheduleTraits(splits_backward=True),
    ZB_V: ScheduleTraits(2, 2, splits_backward=True, v_shape=True),
    DUALPIPE_V: ScheduleTraits(
        2, 2, splits_backward=True, v_shape=True, forward_first=True
    ),
    SEARCHED: ScheduleTraits(1, CHUNKS, splits_backward=True, searched=True),
}


def traits(schedule: str) -> ScheduleTraits:
    """The traits of a schedule; a custom one, FILE.py:NAME, allows any chunks."""
    return SCHEDULES.get(schedule, ScheduleTraits(1, CHUNKS))


class DtypeTraits(NamedTuple):
    """A number format: its names in a layout, in torch, and in a safetensors file."""

    torch: str
    bytes: int
    stored: str = ""  # in safetensors; "" if no checkpoint has it
    computes: bool = True  # layouts may compute in it
    compared: bool = True  # `verify` compares layouts in it


BF16, FP16, TF32, FP32, FP64, FP8 = (
    "bf16",
    "fp16",
    "tf32",
    "fp32",
    "fp64",
    "fp8",
)
DTYPES = {
    BF16: DtypeTraits("bfloat16", 2, "BF16"),
    FP16: DtypeTraits("float16", 2, "F16"),
    # float32, rounded on its way into a matmul
    TF32: DtypeTraits("float32", 4, compared=False),
    FP32: DtypeTraits("float32", 4, "F32"),
    FP64: DtypeTraits("float64", 8, "F64"),
    # used only in tables of devices
    FP8: DtypeTraits("float8_e4m3fn", 1, computes=False, compared=False),
}
PRECISIONS = tuple(name for name, dtype in DTYPES.items() if dtype.computes)
# By their names in torch and safetensors, widest first.
_WIDEST = sorted(DTYPES.items(), key=lambda item: -item[1].bytes)
COMPARED = {dtype.torch: name for name, dtype in _WIDEST if dtype.compared}
STORED = {dtype.stored: dtype.torch for _, dtype in _WIDEST if dtype.stored}


class MatmulTraits(NamedTuple):
    """A kind of fp8 matmul in blocks: elements that share a scale, and formats."""

    run: int = 0  # elements along the sum with one scale; 0: all
    square: bool = False  # a weight's scale covers as many rows as well
    power: bool = False  # scales are 8-bit powers of two; otherwise float32
    forward: str = "float8_e4m3fn"
    gradient: str = "float8_e4m3fn"
    routed: bool = False  # applies to routed MLPs too
    rate: str = FP8  # the number format whose rate devices state for it


# A scale that is the exponent of a float32; 255 means infinity or NaN.
EXPONENT = "float8_e8m0fnu"
FP8_TILE, MXFP8 = "fp8:tile", "mxfp8"
_WIDER = "float8_e5m2"  # one exponent bit more, one mantissa bit fewer
MATMULS = {
    FP8: MatmulTraits(),
    FP8_TILE: MatmulTraits(128, square=True),  # DeepSeek-V3 2024, 3.3.2
    MXFP8: MatmulTraits(32, power=True),  # OCP Microscaling Formats 1.0
}
MATMUL_RATES = tuple(dict.fromkeys(x.rate for x in MATMULS.values()))
# For each, gradients in the format with more range: `fp8:e5m2`,
# `fp8:tile,e5m2`.
MATMULS |= {
    f"{name}{',' if ':' in name else ':'}e5m2": traits._replace(
        gradient=_WIDER
    )
    for name, traits in MATMULS.items()
}
# And each of these with routed experts: `fp8:experts`,
# `fp8:tile,e5m2,experts`.
MATMULS |= {
    f"{name}{',' if ':' in name else ':'}experts": traits._replace(routed=True)
    for name, traits in MATMULS.items()
}
# A second spelling of row-wise scales, which prints as fp8.
MATMUL_WORDS = {name: name for name in MATMULS} | {
    "fp8:row": FP8,
    "fp8:row,e5m2": f"{FP8}:e5m2",
}

COMPILE, COMPILE_MAX = "default", "max"  # modes of torch.compile
GRAPHS = "graphs"  # compiled, and launched as CUDA graphs
COMPILED = ("", COMPILE, COMPILE_MAX, GRAPHS)  # "" is not compiled

AUTO, THREADS, SHM, GLOO, NCCL = "auto", "threads", "shm", "gloo", "nccl"
BACKENDS = (AUTO, THREADS, SHM, GLOO, NCCL)  # carry messages between ranks
LOCAL_RANKS = 256  # the most that one command starts on this machine
DEVICES = (AUTO, "cpu", "cuda")
PYTHON = "python"  # the built-in data: texts of Python's library as bytes
BYTES = 256  # the vocabulary of that data


@cache
def elsewhere(section: str) -> dict[str, str]:
    """Map other libraries' names to ours, from a section of elsewhere.toml."""
    # A row of ours lists the names of several libraries.
    data = (
        Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8")
    )
    rows = tomllib.loads(data)[section].items()
    return {other: ours for ours, others in rows for other in others.split()}


def near_word(word: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """A sentence that suggests the nearest known word, or ""."""
    near = difflib.get_close_matches(
        word[:60], list(known), n=1, cutoff=cutoff
    )
    return f" Did you mean {near[0]!r}?" if near else ""


def no_such(
    what: str, name: str, known: Iterable[str], cutoff: float = 0.4
) -> str:
    """The error text for an unknown name, with the nearest known one."""
    return f"unknown {what} {name[:60]!r}.{near_word(name, known, cutoff)}"

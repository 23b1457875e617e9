"""A layout: a mesh and its use, as one value that prints and parses back.

`"dp4 pp2 tp8 seq zero3 1f1b:16 recompute:all bf16"`. Everything left out has its
default, and printing writes only what differs from it. `legal.py` decides whether a
layout fits a model.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import choices
from .choices import (
    COMPILE,
    COMPILE_MAX,
    COMPILED,
    FP32,
    GRAPHS,
    MATMULS,
    PRECISIONS,
    SCHEDULES,
    near_word,
    traits,
)
from .exact import EXACT, exact_word, uncovered
from .graphs import unrecordable
from .hash_once import hash_once, state_without_hash
from .mesh import AXES, Axis, LayoutError, Mesh
from .rules import AXIS_OF, ROUTED
from .source import OWN, names_source

_OFFLOADS = ("weights", "optimizer", "activations")
_SHARING = ("tp", "cp")  # axes that may share experts together with ep
MICROBATCHES = 100_000  # the most in a step
PARTS = 1024  # the most of a product in a layout of `exact`
_AXIS = re.compile(r"(dp|pp|cp|tp|ep)[0-9].*", re.DOTALL)
# A number in a word. int() would also accept digits of other scripts, and endless ones.
_N = "[0-9]{1,6}"
# Of a schedule's word: `zb-h1`, `interleaved4`, or `file.py:name/4`; then
# `:16`, microbatches.
_SCHEDULE = re.compile(
    rf"(?:(?P<name>zb-h[12]|[a-z0-9-]*[a-z])(?P<chunks>(?:{_N})?)"
    rf"|(?P<own>{OWN})(?:/(?P<own_chunks>{_N}))?)"
    rf"(?::(?P<m>{_N}))?"
)
_RECOMPUTE = re.compile(r"none|all|sqrt|selective|fit|every=[1-9][0-9]{0,5}")
# Words with a fixed meaning: the field that each sets.
_FIXED: dict[str, dict[str, object]] = {
    "seq": {"seq": True},
    "overlap": {"overlap": True},
    EXACT: {"exact": 1},
}
_FIXED |= {f"zero{n}": {"zero": n} for n in range(4)}
_FIXED |= {
    f"{x}:{each}": {x: each}
    for x in ("gather", "reduce")
    for each in ("step", "micro")
}
_FIXED |= {
    "compile": {"compile": COMPILE},
    "compile:max": {"compile": COMPILE_MAX},
    "compile:graphs": {"compile": GRAPHS},
}
_FIXED |= {name: {"precision": name} for name in PRECISIONS}
_FIXED |= {
    word: {"matmul": name} for word, name in choices.MATMUL_WORDS.items()
}
_OPTIONS = """prefetch:1 recompute:none recompute:all recompute:sqrt recompute:every=2 recompute:selective
    recompute:fit offload:weights offload:optimizer offload:activations stages:2-2 experts:tp experts:cp
    exact:2 exact:1x2"""
_WORDS = [*SCHEDULES, *_OPTIONS.split(), *_FIXED]


@dataclass(frozen=True)
class Layout:
    """Every choice of how to train a model on a mesh; "" and 0 mean the default."""

    mesh: Mesh = Mesh()
    seq: bool = False
    zero: int = 0
    schedule: str = ""
    chunks: int = 0
    microbatches: int = 0
    gather: str = ""
    reduce: str = ""
    prefetch: int = 1
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    precision: str = FP32
    matmul: str = ""  # fp8 format of blocks' matmuls; "": the precision
    compile: str = ""
    experts: tuple[str, ...] = ()  # axes that share experts, together with ep
    overlap: bool = (
        False  # compute one microbatch's forward beside another's backward
    )

    # Every sum has one order, for the same bits in every layout: the number of equal
    # parts in which each product that tp may split is computed. 0: no such order.
    exact: int = 0
    # With `exact`: the number of equal runs of the sequence that are computed apart, so
    # that ranks of cp can share them.
    time_parts: int = 1

    __hash__ = hash_once
    __getstate__ = state_without_hash

    def __post_init__(self) -> None:
        # Defaults depend on other fields, so they are filled in after all of
        # them are known.
        fill = object.__setattr__
        if not self.schedule:
            fill(self, "schedule", _schedule(self.pp))
        if not self.chunks:
            fill(self, "chunks", traits(self.schedule).least)
        if not self.microbatches:
            fill(self, "microbatches", _microbatches(self.schedule, self.pp))
        if not self.gather:
            fill(self, "gather", _gather(self))
        if not self.reduce:
            fill(self, "reduce", _reduce(self))
        # In one order, whatever the user wrote, so that equal layouts compare
        # equal.
        for name, known in ("offload", _OFFLOADS), ("experts", _SHARING):
            chosen = getattr(self, name)
            if unknown := set(chosen) - set(known):
                raise LayoutError(
                    f"{name} {', '.join(unknown)}: choose {', '.join(known)}."
                )
            fill(self, name, tuple(word for word in known if word in chosen))
        _check_values(self)

    @property
    def ranks(self) -> int:
        return self.mesh.size

    @property
    def dp(self) -> int:
        return self.mesh.of("dp")

    @property
    def pp(self) -> int:
        return self.mesh.of("pp")

    @property
    def cp(self) -> int:
        return self.mesh.of("cp")

    @property
    def tp(self) -> int:
        return self.mesh.of("tp")

    @property
    def ep(self) -> int:
        return self.mesh.of("ep")

    @property
    def fastest_format(self) -> str:
        """The number format of the fastest matmuls."""
        return MATMULS[self.matmul].rate if self.matmul else self.precision

    @property
    def ep_axes(self) -> tuple[str, ...]:
        """The axes whose ranks share the experts: tokens travel over them."""
        return ("ep", *self.experts)

    @property
    def ep_ranks(self) -> int:
        return math.prod(map(self.mesh.of, self.ep_axes))

    def axes_of(self, dims: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The axes that shard each dim of a weight. Axes that share experts shard no
        dim inside an expert.
        """
        shared = self.experts if ROUTED in dims else ()
        # Ranks that share experts hold them whole; the first dim, experts, is
        # divided by all of them.
        cut = {"": (), "ep": self.ep_axes} | dict.fromkeys(shared, ())
        axes = (AXIS_OF.get(dim, "") for dim in dims)
        return tuple(cut.get(axis, (axis,)) for axis in axes)

    @property
    def data(self) -> int:
        """The number of ranks with sequences of their own, including those of ep."""
        return self.dp * self.ep

    @property
    def copies(self) -> int:
        """The number of ranks that use each non-expert weight and sum its gradients."""
        return self.data * self.cp

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes over which weights, gradients or optimizer state are sharded."""
        return ("dp.shard", "cp", "ep") if self.zero else ()

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes over which the shards are copies of each other."""
        return ("dp.replicate",) if self.zero else ("dp", "cp", "ep")

    @property
    def shards(self) -> int:
        """The number of ZeRO shards of a unit that holds no experts."""
        return self.mesh.of("dp.shard") * self.cp * self.ep if self.zero else 1

    @property
    def gathers_in_8_bits(self) -> bool:
        """True if ZeRO gathers the matrices of blocks in 8 bits.

        One copy of each square tile then serves both matmuls, and the host keeps no
        part of them.
        """
        # Only square tiles serve the matmul with the weight and with its
        # transpose alike.
        square = bool(self.matmul) and MATMULS[self.matmul].square
        return square and self.shards > 1 and not self.weights_on_host

    @property
    def weights_on_host(self) -> bool:
        """True if weights live on the host, where they are also updated."""
        return not {"weights", "optimizer"}.isdisjoint(self.offload)

    @property
    def copies_sharing(self) -> int:
        """The number of `copies` that divide the experts among them."""
        return self.ep * (self.cp if "cp" in self.experts else 1)

    @property
    def parts_apart(self) -> bool:
        """True if a block's experts are a separate piece.

        Either tokens travel to them, or the rest of the block is a compiled graph,
        which cannot take lengths unknown in advance.
        """
        return self.ep_ranks > 1 or bool(self.compile)

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def splits_backward(self) -> bool:
        """True if input and weight gradients are separate operations."""
        return traits(self.schedule).splits_backward

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse a layout. An unknown word is refused with the nearest known one."""
        # Axes in the order of the text, outermost first.
        axes = [
            Axis.parse(word) for word in text.split() if _AXIS.fullmatch(word)
        ]
        return cls(mesh=Mesh(tuple(axes)), **cls.written(text))  # type: ignore[arg-type]

    @staticmethod
    def written(text: str) -> dict[str, object]:
        """The fields that a text sets, except the mesh."""
        fields: dict[str, object] = {}
        for word in text.split():
            for key, value in (
                () if _AXIS.fullmatch(word) else _meaning(word).items()
            ):
                # "zero1 zero2" sets one field twice.
                if key in fields:
                    raise LayoutError(
                        f"{word!r} in {text!r}: {key} appears twice; write it once."
                    )
                fields[key] = value
        return fields

    @classmethod
    def parse_many(cls, text: str) -> "tuple[Layout, ...]":
        """Parse layouts separated by `;`."""
        return tuple(
            cls.parse(part) for part in text.split(";") if part.strip()
        )

    def __repr__(self) -> str:
        return f"Layout.parse({str(self)!r})"

    def __str__(self) -> str:
        words = [str(a) for a in self.mesh.axes]
        words += ["seq"] * self.seq
        words += ["experts:" + ",".join(self.experts)] * bool(self.experts)
        words += ["overlap"] * self.overlap
        words += [f"zero{self.zero}"] * (self.zero > 0)
        words += _schedule_words(self)
        # Defaults are not written, including those that follow from other
        # fields.
        words += [f"gather:{self.gather}"] * (self.gather != _gather(self))
        words += [f"reduce:{self.reduce}"] * (self.reduce != _reduce(self))
        words += [f"prefetch:{self.prefetch}"] * (self.prefetch != 1)
        words += [f"recompute:{self.recompute}"] * (self.recompute != "none")
        words += ["offload:" + ",".join(self.offload)] * bool(self.offload)
        words += ["stages:" + "-".join(map(str, self.stages))] * bool(
            self.stages
        )
        words += [self.precision] * (self.precision != FP32)
        words += [self.matmul] * bool(self.matmul)
        compiled = (
            "compile" if self.compile == COMPILE else f"compile:{self.compile}"
        )
        words += [compiled] * bool(self.compile)
        words += [exact_word(self)] * bool(self.exact)
        return " ".join(words)


def _schedule(pp: int) -> str:
    return choices.ONE_F_ONE_B if pp > 1 else choices.ACCUM


def _microbatches(schedule: str, pp: int) -> int:
    kind = traits(schedule)
    # A whole batch or no pipeline needs one microbatch; other schedules fill
    # every stage.
    return 1 if kind.whole_batch or not kind.pipelined else pp


def _gather(x: Layout) -> str:
    # With a pipeline, a gather for every microbatch would repeat the whole traffic m
    # times.
    return (
        "micro"
        if (x.zero == 3 and x.pp == 1) or "weights" in x.offload
        else "step"
    )


def _reduce(x: Layout) -> str:
    # A rank adds its own microbatches before it exchanges sums with others.
    return "micro" if x.zero >= 2 and not x.exact else "step"


def _schedule_words(x: Layout) -> list[str]:
    chunks = ""
    # V-shaped schedules always have two chunks, so their number is left out.
    if x.chunks > 1 and not traits(x.schedule).v_shape:
        # `interleaved4`, but `file.py:name/4`: a name may end in a digit.
        chunks = f"{x.chunks}" if x.schedule in SCHEDULES else f"/{x.chunks}"
    plain = x.microbatches == _microbatches(x.schedule, x.pp)
    if plain and not chunks and x.schedule == _schedule(x.pp):
        return []
    count = (
        ""
        if traits(x.schedule).whole_batch and plain
        else f":{x.microbatches}"
    )
    return [f"{x.schedule}{chunks}{count}"]


def _meaning(word: str) -> dict[str, object]:
    """The fields that one word of a layout sets."""
    if word in _FIXED:
        return _FIXED[word]
    # "prefetch:3" -> the key "prefetch" and the value "3".
    key, _, value = word.partition(":")
    if key == "prefetch" and re.fullmatch(_N, value):
        return {"prefetch": int(value)}
    if key == EXACT and (parts := re.fullmatch(f"({_N})(?:x({_N}))?", value)):
        of_products, of_time = map(int, (parts[1], parts[2] or 1))
        if not (of_products and of_time):
            raise LayoutError(f"{word!r}: write 1 part or more.")
        return {"exact": of_products, "time_parts": of_time}
    if key == "recompute" and _RECOMPUTE.fullmatch(value):
        return {"recompute": value}
    lists = {"offload": _OFFLOADS, "experts": _SHARING}
    # Any combination of the words of a list: "offload:weights,activations".
    if value and set(value.split(",")) <= set(lists.get(key, ())):
        return {key: tuple(value.split(","))}
    if key == "stages" and re.fullmatch(f"{_N}(-{_N})*", value):
        return {"stages": tuple(map(int, value.split("-")))}
    if key == "compile":
        raise LayoutError(
            f"{word[:60]!r}: choose compile, compile:max or compile:graphs."
        )
    match = _SCHEDULE.fullmatch(word)
    if not match or not (match["own"] or match["name"] in SCHEDULES):
        raise LayoutError(
            f"{word[:60]!r} is not a word of a layout.{_hint(word)} A layout looks like"
            " 'dp4 pp2 tp8 seq zero3 1f1b:16 recompute:all bf16'."
        )
    numbers = {
        "chunks": match["chunks"] or match["own_chunks"],
        "microbatches": match["m"],
    }
    given = {key: int(number) for key, number in numbers.items() if number}
    if zero := [key for key, number in given.items() if not number]:
        raise LayoutError(f"{word!r}: {zero[0]} is 0; write 1 or more.")
    return {"schedule": match["own"] or match["name"], **given}


def _hint(word: str) -> str:
    """Our spelling of a word from another library, or else our nearest word."""
    # "tensor_parallel=8" -> "tensor" and "8".
    other = re.match(r"([a-z]+)(?:[-_=:][a-z_]*)*([0-9]{0,7})", word.lower())
    if other and (ours := choices.elsewhere("layout").get(other[1], "")):
        return f" Write {ours.replace('N', other[2] or '8')}."
    # A known word in capital letters.
    if ours := next((known for known in _WORDS if known == word.lower()), ""):
        return f" Did you mean {ours!r}?"
    # "tp_8" or "tp-8" -> "tp8".
    if other and other[1] in AXES and other[2]:
        return f" Did you mean {other[1] + other[2]!r}?"
    return near_word(word, [*_WORDS, *(f"{a}2" for a in AXES)], 0.5)


def _check_values(x: Layout) -> None:
    """Refuse values that no model could use; `legal` checks what depends on a model."""
    known: dict[str, Sequence[object]] = {
        "zero": range(4),
        "precision": PRECISIONS,
    }
    known |= {"gather": ("step", "micro"), "reduce": ("step", "micro")}
    known |= {"matmul": ("", *MATMULS), "compile": COMPILED}
    wrong = [
        f"{name}={getattr(x, name)!r}: choose {', '.join(str(a) for a in allowed if a != '')}"
        for name, allowed in known.items()
        if getattr(x, name) not in allowed
    ]
    if not 1 <= x.microbatches <= MICROBATCHES:
        wrong.append(
            f"microbatches={x.microbatches}: write 1 to {MICROBATCHES:,}"
        )
    wrong += [f"prefetch={x.prefetch}: write 0 or more"] * (x.prefetch < 0)
    if not _RECOMPUTE.fullmatch(x.recompute):
        wrong.append(
            f"recompute={x.recompute!r}: choose none, all, every=C, sqrt, selective, fit"
        )
    if x.schedule not in SCHEDULES and not names_source(x.schedule):
        wrong.append(
            f"schedule={x.schedule!r}: choose {', '.join(SCHEDULES)}, or file.py:function"
        )
    if not (0 <= x.exact <= PARTS and 1 <= x.time_parts <= PARTS):
        times = "" if x.time_parts == 1 else f"x{x.time_parts}"
        wrong.append(f"exact:{x.exact}{times}: write 1 to {PARTS} parts")
    elif x.time_parts > 1 and not x.exact:
        wrong.append(
            f"time_parts={x.time_parts}: only exact computes runs of the sequence apart"
        )
    elif x.exact:
        wrong += uncovered(x)
    if x.compile == GRAPHS:
        wrong += unrecordable(x)
    matmul = MATMULS.get(x.matmul)
    if x.compile and matmul and matmul.power:
        why = "torch.compile makes no kernels with scales of 8 bits"
        other = next(name for name, z in MATMULS.items() if not z.power)
        wrong.append(
            f"{x.matmul} with compile: {why}. Use {other}, or leave compile out"
        )
    least, most = traits(x.schedule)[:2]
    if not least <= x.chunks <= most:
        span = f"{least}" if least == most else f"{least} to {most}"
        wrong.append(
            f"{x.schedule} takes {span} chunks a stage, not {x.chunks}"
        )
    if wrong:
        raise LayoutError("; ".join(wrong) + ".")

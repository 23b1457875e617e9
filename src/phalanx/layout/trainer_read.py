"""Reads another trainer's file as a job of ours: layout, model, batch and faults.

Nothing is dropped silently. `notes` name every assumption and every option without a
word in our layouts. A contradiction is a fault, with its key and its rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from .choices import (
    ACCUM,
    BF16,
    COMPILE,
    COMPILE_MAX,
    FP32,
    INTERLEAVED,
    ONE_F_ONE_B,
    traits,
)
from .codec import FileError
from .files import read_text
from .layout import Layout
from .mesh import Axis, LayoutError, Mesh
from .shape import Shape
from .trainer_facts import SIZES, Job, blocks_of_stages, shipped
from .trainer_table import (
    FLAGS,
    Options,
    Rule,
    Trainer,
    trainer_named,
    trainers,
)
from .trainer_text import SUFFIXES, options_of

VOCAB = 128_256  # tokens, if a file leaves the vocabulary to its tokenizer: Llama 3's
_COUNT = 1 << 28
# Whole numbers start at 0, but for these; -1 takes the ranks that are left.
_LEAST = {"dp_shard": -1, "shard_size": -1} | dict.fromkeys(
    (
        "tp",
        "pp",
        "cp",
        "ring",
        "ulysses",
        "ep",
        "dp_replicate",
        "microbatch",
        "batch",
    ),
    1,
)
_SPARSE = re.compile(r"\[([01])\]\*(\d{1,5})")
_REPEATED = re.compile(
    r"\(([^()*]{1,2000})\)\*(\d{1,4})|([a-zA-Z])\*(\d{1,4})"
)


class Fault(NamedTuple):
    """A contradiction in a file: the option, its value, and the rule that it violates."""

    key: str
    what: str
    rule: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}; {self.rule}."


@dataclass(frozen=True)
class Given:
    """Facts that the user states besides the file; 0 and None if not stated."""

    ranks: int = 0
    batch: int = 0
    sequence: int = 0
    microbatches: int = 0
    model: Shape | None = None


@dataclass(frozen=True)
class Reading:
    """A trainer's file in terms of a layout."""

    trainer: Trainer
    job: Job
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def read_trainer_file(
    path: str, name: str = "", given: Given = Given()
) -> Reading:
    """Read a trainer's file. Without a name, the keys of the file identify the trainer."""
    text = read_text(path, "trainer's file", LayoutError)
    # The ending decides how to read it; a script may have any.
    format = SUFFIXES.get(Path(path).suffix, FLAGS)
    options = options_of(text, format, path)
    trainer = (
        trainer_named(name) if name else _trainer_of(options, format, path)
    )
    if trainer.format != format:
        raise LayoutError(
            f"{path}: {trainer.title} is configured by {_format(trainer.format)}, and this"
            f" is {_format(format)}. Leave --trainer out, or name another file."
        )
    return read_options(options, trainer, given)


def _format(format: str) -> str:
    return "flags in a script" if format == FLAGS else f"{format.upper()}"


def _trainer_of(options: Options, format: str, path: str) -> Trainer:
    """The trainer with the most identifying marks among the options."""
    # A mark is an option, or the beginning of nested ones.
    marks = {
        name: sum(_marked(options, mark) for mark in trainer.known_by)
        for name, trainer in trainers().items()
        if trainer.format == format
    }
    best = max(marks, key=marks.__getitem__, default="")
    if not marks.get(best):
        names = ", ".join(
            f"{each.title} ({each.format})" for each in trainers().values()
        )
        raise LayoutError(
            f"{path} has no option by which a trainer is known. Known are {names};"
            " name one with --trainer."
        )
    return trainers()[best]


def _marked(options: Options, mark: str) -> bool:
    # "training" marks "training.seq_len" as well.
    return any(key == mark or key.startswith(f"{mark}.") for key in options)


def read_options(
    options: Options, trainer: Trainer, given: Given = Given()
) -> Reading:
    """The job that these options describe."""
    reader = _FileReader(options, trainer, given)
    job = reader.job()
    reader.check(job)
    return Reading(trainer, job, tuple(reader.faults), tuple(reader.notes))


def same(a: Any, b: Any) -> bool:
    """True if two values of an option are equal, however they are typed."""
    return _plain(a) == _plain(b)


def _plain(value: Any) -> str:
    # 1.0 and 1 are one value, in whatever format they were written.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip().lower()
    return {"false": "no", "none": "no", "null": "no", "true": "yes"}.get(
        text, text
    )


class _FileReader:
    """Reads one file."""

    def __init__(
        self, options: Options, trainer: Trainer, given: Given
    ) -> None:
        self.trainer, self.given = trainer, given
        # What the training script fills in, as transformers does.
        self.left = [
            key for key, value in options.items() if same(value, "auto")
        ]
        self.options = {k: v for k, v in options.items() if k not in self.left}
        self.faults: list[Fault] = []
        # The options with a number, under our names for them.
        self.notes: list[str] = []
        self.numbers = dict(self._numbers())
        asked = {"batch": given.batch, "sequence": given.sequence}
        self.numbers |= {name: value for name, value in asked.items() if value}
        # Groups in whose options a value is strange.
        self.unmatched: set[str] = set()
        self.chosen = {group: self._choice(group) for group in trainer.words}
        self._note_others()
        self._note_left()
        self.offload = [
            w for w in trainer.words["offload"] if self._made("offload", w)
        ]

    # ---- options

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        # Names that a trainer has had for a quantity: the first one present
        # counts.
        for quantity, names in self.trainer.read.items():
            for name in names:
                value = self.options.get(name, self.trainer.defaults.get(name))
                if value is not None:
                    yield quantity, self._number(name, value, quantity)
                    break

    def _number(self, name: str, value: Any, quantity: str) -> Any:
        if quantity in ("stage_layout", "sparse_blocks"):
            return value
        if (
            isinstance(value, list) and value
        ):  # several words follow the option
            # Text that is no number becomes NaN, which fails the check below.
            value = value[0]
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        # Only these two may be fractions.
        if quantity not in ("rope_theta", "eps"):
            least = _LEAST.get(quantity, 0)
            if not number.is_integer() or not least <= number <= _COUNT:
                what = f"is {str(value)[:60]!r}"
                rule = f"it is a whole number from {least}"
                self.faults.append(Fault(name, what, rule))
                return 0
            return int(number)
        return number if math.isfinite(number) else 0.0

    def _holds(self, made: Options) -> bool:
        return all(self._is(key, value) for key, value in made.items())

    def _is(self, key: str, value: Any) -> bool:
        """True if an option has this value; a flag without a value is true."""
        given = self.options.get(key, self.trainer.defaults.get(key))
        if value is True:
            # `--sequence-parallel` alone is true, as is any value but a false
            # one.
            return given is not None and _plain(given) not in ("no", "0")
        # False has to be written: a missing option is not known to be off.
        if value is False:
            return key in self.options and _plain(given) in ("no", "0")
        # A flag with several words has at least these.
        if isinstance(value, list):
            return isinstance(given, list) and set(value) <= set(
                map(str, given)
            )
        if isinstance(given, list) and given:
            given = given[0]
        return given is not None and same(given, value)

    def _made(self, group: str, word: str) -> int:
        """The options of the longest alternative for a word; 0 if none applies."""
        # A word may be said in several ways; the one with most options is the
        # most specific.
        rows = self.trainer.words[group][word]
        return max((len(row) for row in rows if self._holds(row)), default=0)

    def _choice(self, group: str) -> str:
        """The word of a group that the most options select."""
        words = self.trainer.words[group]
        held = {
            word: max(len(row) for row in rows if self._holds(row))
            for word, rows in words.items()
            if any(map(self._holds, rows))
        }
        if not held:
            self._note_unmatched(group)
        return max(held, key=held.__getitem__) if held else ""

    def _note_unmatched(self, group: str) -> None:
        """Notes the values of a group's options, if together they make none of its words."""
        rows = [
            row for each in self.trainer.words[group].values() for row in each
        ]
        known = {**self.trainer.defaults, **self.options}
        keys = dict.fromkeys(key for row in rows for key in row)
        values = [
            f"{key} {_shown(known[key])}" for key in keys if key in known
        ]
        known_values = self.trainer.values
        # A value that no word of ours has.
        strange = any(
            not any(self._is(key, value) for value in known_values[key])
            for key in keys
            if key in known and key in known_values
        )
        if strange:
            self.unmatched |= set(keys)
            self._note(f"{', '.join(values)}: a layout has no word for it.")

    def _note_others(self) -> None:
        """Note options whose value has no word in a layout."""
        known = self.trainer.values
        # Options that are read as numbers need no word.
        numbers = {
            name for names in self.trainer.read.values() for name in names
        }
        for key, given in self.options.items():
            values = known.get(key)
            if (
                not values
                or key in numbers
                or same(given, "no")
                or given in ("", [])
            ):
                continue
            if key in self.unmatched:
                continue
            if not any(self._is(key, value) for value in values):
                self._note(f"{key} {_shown(given)} has no word in a layout.")

    def _note_left(self) -> None:
        """Notes options that the script fills in; bf16 is assumed where it fills in the precision."""
        precisions = self.trainer.words["precision"].values()
        keys = {key for rows in precisions for row in rows for key in row}
        # The trainer's own words for a precision that its script decides.
        note = self.trainer.elsewhere.get("precision")
        if note and keys.isdisjoint(self.options):
            self.chosen["precision"] = BF16
            self._note(note)
        if not self.left:
            return
        known = set(self.trainer.options)
        if names := [key for key in self.left if key in known]:
            self._note(f"The training script decides {', '.join(names)}.")
        rows = self.trainer.words["precision"][BF16]
        keys = {key for row in rows for key in row}
        # No option for the precision, and the script fills one in.
        if self.chosen["precision"] in ("", FP32) and not keys.isdisjoint(
            self.left
        ):
            self.chosen["precision"] = BF16
            self._note("bf16 is assumed.")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def of(self, quantity: str, default: int = 1) -> int:
        return int(self.numbers.get(quantity) or default)

    # ---- the job

    def job(self) -> Job:
        self.shape = self._shape()
        self._count_ranks()
        words = self._words()
        mesh = self._mesh(words)
        fields = {**words, **self._schedule(mesh)}
        layout = Layout(mesh=mesh, **fields)
        if self.shape is not None and layout.pp > 1:
            layout = self._with_stages(layout, self.shape)
        for key, meaning in self.trainer.unread.items():
            given = self.options.get(key)
            if meaning and given is not None and not same(given, "no"):
                self._note(f"{key} is left out: {meaning}.")
        for group, word in self._near(layout):
            self._note(f"{self.trainer.near[f'{group}:{word}']}.")
        return Job(layout, self.shape, self.batch, self.of("sequence", 0))

    def _near(self, layout: Layout) -> Iterator[tuple[str, str]]:
        for group, word in self.chosen.items():
            # A choice of cp means nothing without cp.
            if group == "cp" and layout.cp == 1:
                continue
            if f"{group}:{word}" in self.trainer.near:
                yield group, word

    def _count_ranks(self) -> None:
        """Set the numbers of ranks, of ranks per model copy, and of sequences per step."""
        # A rank is described by cp as a whole, or by a ring times Ulysses.
        self.tp, self.pp = self.of("tp"), self.of("pp")
        ring, ulysses = self.of("ring"), self.of("ulysses")
        self.cp = self.of("cp", ring * ulysses)
        # Ranks that hold one copy of the model.
        self.copy = self.tp * self.pp * self.cp
        self.batch = self.of("batch", 0)
        # The number of ranks itself, or nodes times ranks on each.
        self.ranks = self.of("ranks", 0) or self.of("nodes", 0) * self.of(
            "per_node", 0
        )
        named = self.trainer.key(
            "ranks" if "ranks" in self.numbers else "nodes"
        )
        given = self.given.ranks
        if given and self.ranks and given != self.ranks:
            what = (
                f"starts {self.ranks:,} ranks, and the cluster has {given:,}"
            )
            self.faults.append(
                Fault(named, what, "one rank runs on each device")
            )
        self.ranks = self.ranks or given or self._ranks_of_batch()
        # The last way: what the options of data parallelism multiply to.
        if not self.ranks:
            data = max(self.of("data", 1), 1) * self.of("dp_replicate")
            data *= max(self.of("dp_shard"), 1)
            self.ranks = self.copy * data
            self._note(
                f"The file does not say how many ranks there are; {self.ranks:,} are"
                " assumed. Add --ranks or --cluster."
            )

    def _ranks_of_batch(self) -> int:
        """The ranks for which batch = microbatch x accumulation x data-parallel ranks."""
        each = self.of("microbatch", 0) * self.of("accumulation", 0)
        return self.copy * (self.batch // each) if self.batch and each else 0

    def _mesh(self, words: dict[str, Any]) -> Mesh:
        """The mesh; sets `words["experts"]` if ranks of tp or cp share experts."""
        data = max(self.ranks // self.copy, 1)
        replicas, shard = self._parts(data)
        # A trainer that says DDP by a shard size of 1.
        if self.trainer.shards_by_size and shard == 1:
            words["zero"] = 0
        # Without ZeRO there are no shards, so all are replicas.
        if not words["zero"]:
            replicas, shard = 1, replicas * shard
        expert = self._experts(words, replicas * shard)
        # Our dp does not count the ranks of ep, which theirs includes.
        if shard % expert == 0:
            shard //= expert
        axes = {
            "pp": Axis("pp", (self.pp,)),
            "dp": Axis("dp", (replicas, shard)),
            "ep": Axis("ep", (expert,)),
            "cp": Axis("cp", self._context()),
            "tp": Axis("tp", (self.tp,)),
        }
        # The order that the file chooses; then axes that it leaves open, from
        # the outermost.
        order = [*self.chosen.get("order", "").split(), "pp", "dp", *axes]
        return Mesh(tuple(axes[name] for name in dict.fromkeys(order)))

    def _parts(self, data: int) -> tuple[int, int]:
        """Replicas and shards of the data-parallel ranks."""
        shard = self.numbers.get("dp_shard") or -1
        if "dp_shard" in self.trainer.written:
            replicas = self.of("dp_replicate")
            # -1 takes the ranks that are left.
            if shard < 1:
                shard = max(data // replicas, 1)
            return replicas, shard
        size = self.numbers.get("shard_size") or -1
        replicas = self.of("replicas") if size < 1 else max(data // size, 1)
        if data % replicas:
            key = self.trainer.key("replicas" if size < 1 else "shard_size")
            what = f"cuts {data:,} data-parallel ranks into {replicas:,}"
            self.faults.append(Fault(key, what, "replicas are of one size"))
            return 1, data
        return replicas, data // replicas

    def _context(self) -> tuple[int, int]:
        way = self.chosen.get("cp", "")
        if self.of("ulysses") > 1:
            return max(self.cp // self.of("ulysses"), 1), self.of("ulysses")
        return (1, self.cp) if way == "ulysses" else (self.cp, 1)

    def _experts(self, words: dict[str, Any], data: int) -> int:
        """Our size of ep: theirs, without the ranks of tp and cp that share experts."""
        # `etp` divides an expert over tp; by default by the whole of tp.
        group, etp = self.of("ep"), self.of("etp", self.tp)
        if self.shape is None or not self.shape.experts or group == 1:
            given = self.trainer.key("etp") in self.options
            if (
                given
                and self.tp > 1
                and self.shape is not None
                and self.shape.experts
            ):
                self._note_whole_experts(etp)
            return 1
        shared, rest = [], group
        # Ranks of tp that do not divide experts share them.
        if self.tp > 1 and etp == 1:
            shared, rest = ["tp"], group // self.tp
        # cp comes next: their group of experts is cp x tp x part of dp.
        if self.cp > 1 and rest > 1:
            shared, rest = [*shared, "cp"], rest // self.cp
        inside = math.prod(
            {"tp": self.tp, "cp": self.cp}[axis] for axis in shared
        )
        # Our ep must be a part of dp.
        if rest < 1 or group != inside * rest or data % rest:
            what = f"{group} ranks share experts, with {inside} of tp and cp inside"
            rule = "here they are all ranks of tp and cp, times a part of dp"
            self.faults.append(Fault(self.trainer.key("ep"), what, rule))
            return 1
        words["experts"] = tuple(shared)
        return rest

    def _note_whole_experts(self, etp: int) -> None:
        if etp == 1:
            self._note(
                f"Every rank has all experts whole ({self.trainer.key('etp')} 1 without"
                " expert parallelism); here tp cuts each of them."
            )

    def _words(self) -> dict[str, Any]:
        """The fields of a layout that are choices."""
        chosen = self.chosen
        precision, _, matmul = (chosen.get("precision") or FP32).partition(" ")
        compiled = chosen.get("compile", "")
        fields: dict[str, Any] = {
            "zero": int((chosen.get("zero") or "zero0").removeprefix("zero")),
            "seq": chosen.get("seq") == "seq" and self.tp > 1,
            "precision": precision,
            "matmul": matmul,
            "recompute": chosen.get("recompute") or "none",
            "offload": tuple(self.offload),
            "overlap": bool(self._made("overlap", "overlap"))
            if "overlap" in self.trainer.words
            else False,
            "compile": {"compile": COMPILE, "compile:max": COMPILE_MAX}.get(
                compiled, ""
            ),
        }
        if fields["recompute"] == "every":
            fields["recompute"] = f"every={self.of('every')}"
        return fields

    def _schedule(self, mesh: Mesh) -> dict[str, Any]:
        """The schedule with its chunks and microbatches."""
        count = self._microbatches(mesh)
        if self.pp == 1:
            return {"schedule": ACCUM, "microbatches": count}
        schedule = self.chosen.get("schedule") or ONE_F_ONE_B
        chunks = self._chunks()
        # Chunks name an interleaved schedule, even where the file says 1F1B.
        if chunks > 1 and schedule == ONE_F_ONE_B:
            schedule = INTERLEAVED
        kind = traits(schedule)
        chunks = min(max(chunks, kind.least), kind.most)
        found: dict[str, Any] = {"schedule": schedule, "microbatches": count}
        found["chunks"] = chunks
        if "gather:micro" in self.trainer.words.get("gather", {}):
            found["gather"] = self._gather()
        return found

    def _gather(self) -> str:
        return "micro" if self._made("gather", "gather:micro") else ""

    def _chunks(self) -> int:
        # The stages that the file lists, divided by ranks of the pipeline.
        if text := self.numbers.get("stage_layout"):
            return max(len(blocks_of_text(text)) // self.pp, 1)
        layers = self.shape.layers if self.shape is not None else 0
        if per_chunk := self.of("layers_per_chunk", 0):
            return max(layers // (self.pp * per_chunk), 1)
        # torchtitan counts embedding and head as a layer each.
        if per_chunk := self.of("layers_of_chunk", 0):
            return max(math.ceil((layers + 2) / per_chunk) // self.pp, 1)
        return self.of("chunks")

    def _microbatches(self, mesh: Mesh) -> int:
        """The microbatches per step and rank; sets the batch if it follows."""
        # Ranks with sequences of their own.
        data = mesh.of("dp") * mesh.of("ep")
        each, steps = self.of("microbatch", 0), self.of("accumulation", 0)
        steps = self.given.microbatches or steps
        if "local_batch" in self.trainer.read:
            return self._local_batches(data)
        # batch = microbatch x accumulation x data-parallel ranks, solved for
        # what is missing.
        if not self.batch and each:
            self.batch = each * max(steps, 1) * data
        if not self.batch and self.given.model is not None:
            self.batch = self.given.model.batch
        if self.given.microbatches or not (each or self.batch):
            return max(steps, 1)
        # Accumulation is stated, and needs no batch.
        if steps and not each:
            return steps
        if not each and self.given.model is not None:
            self._note(
                "A microbatch of one sequence is assumed. Add --microbatches."
            )
        return max(self.batch // (max(each, 1) * data), 1)

    def _local_batches(self, data: int) -> int:
        local = self.of("local_batch", 1)
        # -1 means a local batch on every rank.
        if not self.batch or self.batch < 0:
            self.batch = local * data
        steps = max(self.batch // (local * data), 1)
        if self.pp == 1:
            return steps
        # torchtitan: a rank's local batch goes through the pipeline in parts.
        pieces = max(local // self.of("pipe_microbatch"), 1)
        if steps > 1:
            self._note(
                f"{self.trainer.title} fills and empties its pipeline {steps} times a step;"
                f" here all {steps * pieces} microbatches go through it at once."
            )
        return steps * pieces

    def _with_stages(self, layout: Layout, shape: Shape) -> Layout:
        """The layout with the trainer's blocks of stages, if ours differ."""
        blocks = self._blocks(layout, shape)
        if not blocks:
            return layout
        if len(blocks) != layout.virtual_stages or sum(blocks) != shape.layers:
            what = f"{len(blocks)} stages of {sum(blocks)} layers"
            rule = f"the model has {shape.layers} on {layout.virtual_stages} stages"
            self.faults.append(
                Fault(self.trainer.key("stage_layout"), what, rule)
            )
            return layout
        # Nothing to write if our own balance gives the same stages.
        with suppress(LayoutError):
            if blocks == blocks_of_stages(layout, shape):
                return layout
        return replace(layout, stages=blocks)

    def _blocks(self, layout: Layout, shape: Shape) -> tuple[int, ...]:
        """Blocks of every virtual stage in the file; empty if it leaves them open."""
        if text := self.numbers.get("stage_layout"):
            return blocks_of_text(text)
        stages, layers = layout.virtual_stages, shape.layers
        # Megatron: blocks of the first and last stage, and the rest spread
        # evenly.
        first, last = self.of("first_blocks", 0), self.of("last_blocks", 0)
        if (first or last) and layout.chunks == 1:
            inner = stages - bool(first) - bool(last)
            each, rest = divmod(layers - first - last, max(inner, 1))
            if not rest and each > 0:
                ends = [first] * bool(first), [last] * bool(last)
                return (*ends[0], *[each] * inner, *ends[1])
        # Without a list, some trainers require equal stages.
        if self.trainer.even_stages and layers % stages == 0:
            return (layers // stages,) * stages
        return ()

    # ---- the model

    def _shape(self) -> Shape | None:
        if self.given.model is not None:
            return self._as_long(self.given.model)
        if self.trainer.models:
            # torchtitan names its models: "llama3 8B".
            name = f"{self.options.get('model.name')} {self.options.get('model.flavor')}"
            if known := self.trainer.models.get(name):
                return self._as_long(shipped(known))
        if not all(self.of(name, 0) for name in ("layers", "hidden", "heads")):
            return None
        try:
            return self._as_long(Shape(**self._sizes()))
        except FileError as error:
            # The last word of the place is the size; the fault names its
            # option.
            for mistake in error.mistakes:
                key = self.trainer.key(mistake.place.rpartition(" ")[2])
                self.faults.append(Fault(key, mistake.what, mistake.way_out))
            return None

    def _as_long(self, shape: Shape) -> Shape:
        """The shape with the file's sequence length, on which stages depend."""
        sequence = self.of("sequence", 0)
        if not sequence or shape.positions == "learned":
            return shape
        return replace(shape, sequence=sequence)

    def _sizes(self) -> dict[str, Any]:
        numbers, chosen = self.numbers, self.chosen
        # A size that is 0 or missing keeps the shape's default.
        found = {name: numbers[name] for name in SIZES if numbers.get(name)}
        found["name"] = f"the model of {self.trainer.title}'s file"
        gated = chosen.get("mlp") == "gated silu"
        found |= {"gated": gated, "norm": chosen.get("norm") or "layer"}
        found |= {"positions": chosen.get("rope") or "learned"}
        found |= {"tied": chosen.get("output") != "untied"}
        found |= {"bias": chosen.get("bias") or "none"}
        found |= {"qk_norm": bool(self._made("qk_norm", "qk_norm"))}
        if "ffn" not in found and gated:
            # Megatron-Core: two thirds of 4 hidden, in multiples of 64.
            found["ffn"] = int(4 * found["hidden"] * 2 / 3) // 64 * 64
        if found["positions"] == "learned":
            found["sequence"] = self.of("positions", self.of("sequence"))
        # A file may name KV heads but not turn grouped attention on.
        grouped = self.trainer.words.get("grouped")
        if grouped and not self._made("grouped", "grouped"):
            found.pop("kv_heads", None)
        if not found.get("vocab"):
            found["vocab"] = VOCAB
            self._note(
                f"The vocabulary is the tokenizer's; {VOCAB:,} tokens are assumed. Add"
                f" {self.trainer.key('vocab')}."
            )
        if found.get("experts", 0):
            found |= self._expert_sizes(found)
        else:
            found.pop("top_k", None)
            found.pop("experts", None)
        if self._made("latent", "latent"):
            found |= self._latent_sizes()
            found.pop("kv_heads", None)
        return found

    def _expert_sizes(self, found: Mapping[str, Any]) -> dict[str, Any]:
        width = self.of("expert_ffn", 0) or found.get("ffn", 0)
        shared = self.of("shared_ffn", 0)
        sizes: dict[str, Any] = {"expert_ffn": width}
        # The shared expert's width as a number of routed experts.
        if shared and width:
            sizes["shared_experts"] = max(round(shared / width), 1)
            if shared % width:
                self._note(
                    f"{self.trainer.key('shared_ffn')} {shared} is counted as"
                    f" {sizes['shared_experts']} experts of {width}."
                )
        if blocks := self.numbers.get("sparse_blocks"):
            sizes["dense_layers"] = self._dense(blocks, found["layers"])
        return sizes

    def _dense(self, blocks: Any, layers: int) -> int:
        """The number of leading blocks without experts."""
        # Dense blocks come first in our shapes; any other pattern has no word.
        sparse = _sparse(blocks, layers)
        dense = sparse.index(1) if 1 in sparse else len(sparse)
        if len(sparse) != layers or 0 in sparse[dense:]:
            key = self.trainer.key("sparse_blocks")
            self._note(
                f"{key} {_shown(blocks)} has no word in a shape: experts are assumed in"
                f" all blocks from {dense} on."
            )
        return min(dense, layers - 1)

    def _latent_sizes(self) -> dict[str, Any]:
        # Sizes that the file leaves out are those of DeepSeek-V3.
        rope = self.of("rope_dim", 64)
        return {
            "kv_latent": self.of("kv_latent", 512),
            "q_latent": self.of("q_latent", 0),
            "rope_dim": rope,
            # Unrotated and rotated features together.
            "head_dim": self.of("nope_dim", 128) + rope,
            "value_dim": self.of("value_dim", 128),
        }

    # ---- rules

    def check(self, job: Job) -> None:
        """Add a fault for every rule of the trainer that the file violates."""
        values = self._known(job)
        for rule in self.trainer.divides:
            self._divides(rule, values)
        for rule in self.trainer.equals:
            self._equals(rule, values)
        for rule in self.trainer.needs:
            self._needs(rule, values)

    def _known(self, job: Job) -> dict[str, int]:
        layout = job.layout
        whole = {
            k: v for k, v in self.numbers.items() if isinstance(v, int) and v
        }
        derived = {
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.cp,
            "ranks": self.ranks,
        }
        # A sequence is cut into two parts for each rank of cp.
        derived |= {"cp_twice": 2 if self.cp > 1 else 1, "batch": self.batch}
        derived["data"] = max(self.ranks // self.copy, 1)
        if layout.chunks > 1:
            derived["chunks"] = layout.chunks
        if layout.pp > 1:
            derived["microbatches"] = layout.microbatches
        if job.shape is not None:
            derived |= {"layers": job.shape.layers, "heads": job.shape.heads}
            derived |= {"experts": job.shape.experts}
        if job.sequence:
            derived["sequence"] = job.sequence
        return whole | derived

    def _divides(self, rule: Rule, values: Mapping[str, int]) -> None:
        # `what` must be a multiple of the product of `by`.
        terms = rule.terms
        whole, parts = values.get(terms["what"], 0), terms["by"]
        unless = any(
            self.numbers.get(name) for name in terms.get("unless", ())
        )
        # `if` applies the rule only with more than one rank there.
        if (
            not whole
            or unless
            or values.get(terms.get("if", "tp"), 1) < 2 * ("if" in terms)
        ):
            return
        each = [values.get(name, 1) for name in parts]
        if not whole % math.prod(each):
            return
        shown = " x ".join(
            f"{name} {value}"
            for name, value in zip(
                map(self.trainer.key, parts), each, strict=True
            )
            if value > 1
        )
        # This name stands for the factor 2 itself.
        shown = shown.replace("cp_twice 2", "2")
        what = f"{whole:,} is no multiple of {shown}"
        self.faults.append(
            Fault(self.trainer.key(terms["what"]), what, rule.text)
        )

    def _equals(self, rule: Rule, values: Mapping[str, int]) -> None:
        # `what` must be the product of all terms.
        terms = rule.terms
        present = terms.get("if_any")
        if present and not any(key in self.options for key in present):
            return
        # -1 leaves a term open, and then any product is right.
        names = [name for name in terms["product"] if values.get(name, 1) > 0]
        left_open = len(names) < len(terms["product"])
        missing = {"microbatch", "accumulation", "dataset_sequence"} & set(
            names
        )
        # These have no default that could be multiplied.
        if left_open or any(not values.get(name) for name in missing):
            return
        whole = values.get(terms["what"], 0)
        product = math.prod(values.get(name, 1) for name in names)
        if whole and whole != product:
            shown = " x ".join(
                f"{self.trainer.key(name)} {values[name]:,}"
                for name in names
                if values.get(name, 1) > 1
            )
            key = self.trainer.key(terms["what"])
            what = f"{whole:,} is not {shown or 1}"
            self.faults.append(Fault(key, what, rule.text))

    def _needs(self, rule: Rule, values: Mapping[str, int]) -> None:
        # The option that makes the rule apply, named in its fault.
        terms = rule.terms
        key = self._cause(terms, values)
        if not key:
            return
        lacking = [
            _option(name, value)
            for name, value in terms.get("with", {}).items()
            if not self._is(name, value)
        ]
        against = [
            _option(name, value)
            for name, value in terms.get("without", {}).items()
            if self._is(name, value)
        ]
        any_of: Sequence[str] = terms.get("with_any", ())
        if any_of and not any(self._is(name, True) for name in any_of):
            lacking.append(any_of[0])
        against += [
            name
            for name in terms.get("without_any", ())
            if name in self.options
        ]
        above = terms.get("above_one")
        # A quantity that has to be above 1, such as tp for sequence
        # parallelism.
        if above and values.get(above, 1) < 2:
            lacking.append(f"{self.trainer.key(above)} above 1")
        if lacking:
            self.faults.append(
                Fault(key, f"needs {', '.join(lacking)}", rule.text)
            )
        if against:
            what = f"does not go with {', '.join(against)}"
            self.faults.append(Fault(key, what, rule.text))

    def _cause(
        self, terms: Mapping[str, Any], values: Mapping[str, int]
    ) -> str:
        """The option that makes a rule apply; "" if it does not apply."""
        # One option with one value, or any of several, or quantities above 1.
        for key, value in terms.get("if", {}).items():
            return key if key in self.options and self._is(key, value) else ""
        for key in terms.get("if_any", ()):
            given = self.options.get(key)
            off = given is None or same(
                given, terms.get("unless_value", "off")
            )
            if not off:
                return str(key)
        above = terms.get("if_above_one", ())
        if above and all(values.get(name, 1) > 1 for name in above):
            return self.trainer.key(above[-1])
        return ""


def _option(key: str, value: Any) -> str:
    return key if value is True else f"{key} {_shown(value)}"


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sparse(blocks: Any, layers: int) -> list[int]:
    """1 for each block with experts, from a frequency, a list, or Megatron's text."""
    if isinstance(blocks, list):
        return [int(same(each, 1)) for each in blocks]
    text = str(blocks)
    # Megatron: every n-th block has experts, from block 0.
    if text.isdigit() and int(text):
        return [int(block % int(text) == 0) for block in range(layers)]
    found: list[int] = []
    # "([0]*3+[1]*58)" -> three dense blocks and 58 with experts.
    for value, count in _SPARSE.findall(text):
        found += [int(value)] * int(count)
    # A file is not trusted: keep the list short.
    return found[:20_000]


def blocks_of_text(text: Any) -> tuple[int, ...]:
    """Blocks of every stage in Megatron-Core's notation, `Et*3|(tt|)*2tL`, or in lists."""
    if isinstance(text, list):
        # A list of layer names for each stage: decoder layers count.
        return tuple(str(stage).count("decoder") for stage in text)
    plain = str(text).replace(",", "").replace(" ", "")
    # Innermost repetitions first: `(t*2|)*3` -> `(tt|)*3` -> `tt|tt|tt|`.
    for _ in range(8):
        plain, found = _REPEATED.subn(
            lambda match: (match[1] or match[3]) * int(match[2] or match[4]),
            plain,
        )
        # Repetitions of repetitions may grow without end.
        if not found or len(plain) > 100_000:
            break
    return tuple(stage.count("t") for stage in plain.split("|"))

"""Files of a recorded run: one for each rank and step.

The first line names the format and the length of the header. The header is compressed JSON: it lists
parameters, modules and everything that is not a sketch. The numbers of the sketches follow in float64,
little-endian: for each kind those of each listed parameter or module.
"""

import json
import os
import sys
import zlib
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 3
_MAGIC = b"torch-audit"
WIDTH = 17  # a sum of squares and a sketch
# Of a module's outputs: a smaller sketch by rows, and one of the sum of all rows.
ROWS_WIDTH, SUM_WIDTH = 8, 4
MODULE_WIDTH = ROWS_WIDTH + SUM_WIDTH
SUFFIX = ".audit"
# Kinds of sketches, in the order in which a step makes them.
WEIGHT, GRADIENT, CLIPPED, UPDATED = KINDS = (
    "weight",
    "gradient",
    "clipped",
    "updated",
)
MODULE = "module"  # the kind of sketches whose indices are those of modules


class RecordError(ValueError):
    """A folder that holds no recorded run, or a file that is none of ours."""


@dataclass
class ParameterRecord:
    """A parameter as one rank has it."""

    names: list[str]
    shape: list[int]  # of the whole tensor
    count: int  # elements on this rank
    cover: int  # the number of these elements: see `sketch.coverage`
    whole: int  # the same of the whole tensor
    place: str
    dtype: str
    stepped: bool = False  # an optimizer was given it
    rate: float = 0.0  # the learning rate of its group
    summand: str = ""  # of the gradient: see `Place`
    gradient_cover: int = (
        0  # if this rank has other elements of the gradient than of the weight
    )


@dataclass
class ClipRecord:
    """A call that clips gradients by their norm."""

    parameters: list[int]
    most: float  # the largest norm allowed
    order: float  # of the norm
    norm: float  # the norm that the call returned, or this rank's part of it
    part: str = ""  # mesh coordinates over which the parts of other ranks are to be combined


@dataclass
class BatchRecord:
    """One call of the model: a hash for each row of its input."""

    rows: list[int]
    tokens: int  # elements that are not padding
    labels: int  # labels that count; 0: none were given
    whole: bool  # integers: token indices, not activations


@dataclass
class ModuleRecord:
    """The outputs of a module in all calls of a step, or the gradients of these outputs."""

    name: str
    backward: bool  # gradients of the outputs
    features: (
        int  # elements for each token, or for each sample; 0: a row is neither
    )
    width: int  # of the last axis
    elements: int  # of this rank's outputs
    # Mesh coordinates of this rank's shard or summand of the outputs; "" for a plain tensor.
    part: str


@dataclass
class StepRecord:
    """A step of one rank."""

    rank: int
    step: int
    world: int
    parameters: list[ParameterRecord] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    clips: list[ClipRecord] = field(default_factory=list)
    # In the order in which a rank has computed them.
    modules: list[ModuleRecord] = field(default_factory=list)
    meshes: dict[str, int] = field(default_factory=dict)  # sizes by dimension
    autocast: str = ""
    # Of a backward pass, counted by floating dtype.
    operations: dict[str, int] = field(default_factory=dict)
    perturbed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    refused: str = ""  # the reason why this program cannot be recorded
    # Numbers by kind and parameter.
    sketches: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the file in one move, so that a reader never sees half of one."""
        header = asdict(self)
        # Indices in the order in which the numbers follow.
        header["sketches"] = {
            kind: sorted(rows) for kind, rows in self.sketches.items()
        }
        numbers = array("d")
        for kind, rows in self.sketches.items():
            for index in header["sketches"][kind]:
                numbers.extend(rows[index])
        # Files are little-endian, as a run may be compared on another machine.
        if sys.byteorder == "big":
            numbers.byteswap()
        # Names and keys repeat, so compression saves most of them.
        packed = zlib.compress(json.dumps(header).encode())
        line = b"%b %d %d\n" % (_MAGIC, FORMAT, len(packed))
        path = folder / f"rank{self.rank:05}-step{self.step:04}{SUFFIX}"
        # Another name in the same folder: a rename there is atomic.
        draft = path.with_suffix(f".{os.getpid()}.new")
        draft.write_bytes(line + packed + numbers.tobytes())
        draft.replace(path)


def read(path: Path) -> StepRecord:
    """One file, as its rank wrote it."""
    line, _, rest = path.read_bytes().partition(b"\n")
    words = line.split()
    if words[:1] == [_MAGIC] and words[1:2] != [b"%d" % FORMAT]:
        raise RecordError(
            f"{path} was written by another version of torch-audit."
        )
    try:
        magic, _, length = words
        if magic != _MAGIC:
            raise ValueError
        text = zlib.decompress(rest[: int(length)])
        header: dict[str, Any] = json.loads(text)
        listed: dict[str, list[int]] = header.pop("sketches")
        header["parameters"] = [
            ParameterRecord(**x) for x in header["parameters"]
        ]
        header["batches"] = [BatchRecord(**x) for x in header["batches"]]
        header["clips"] = [ClipRecord(**x) for x in header["clips"]]
        header["modules"] = [ModuleRecord(**x) for x in header["modules"]]
        record = StepRecord(**header)
        numbers = array("d", rest[int(length) :])
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise RecordError(f"{path} is no file of a recorded run.") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    # Numbers lie one after the other, by kind and then by parameter.
    at = 0
    for kind, indices in listed.items():
        rows = record.sketches[kind] = {}
        width = MODULE_WIDTH if kind == MODULE else WIDTH
        for index in indices:
            rows[index] = numbers[at : at + width].tolist()
            at += width
    # Also if there are more numbers than the header lists.
    if at != len(numbers):
        raise RecordError(f"{path} is cut short.")
    return record

"""Files of a recorded run: one for each rank and step, a line of JSON and then numbers.

The line lists the parameters and everything that is not a sketch. The numbers follow in the order of
`kinds`: for each kind the 17 numbers of each listed parameter, in float64, little-endian.
"""

import json
import os
import sys
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
WIDTH = 17  # a sum of squares and a sketch
SUFFIX = ".audit"
# Kinds of sketches, in the order in which a step makes them.
WEIGHT, GRADIENT, CLIPPED, UPDATED = KINDS = (
    "weight",
    "gradient",
    "clipped",
    "updated",
)


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
    told: float  # the norm that the call returned, or this rank's part of it
    part: str = ""  # mesh coordinates over which the parts of other ranks are to be combined


@dataclass
class BatchRecord:
    """One call of the model: a hash for each row of its input."""

    rows: list[int]
    tokens: int  # elements that are not padding
    labels: int  # labels that count; 0: none were given
    whole: bool  # integers: token indices, not activations


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
        line = json.dumps({"format": FORMAT, **header}, separators=(",", ":"))
        path = folder / f"rank{self.rank:05}-step{self.step:04}{SUFFIX}"
        # Another name in the same folder: a rename there is atomic.
        draft = path.with_suffix(f".{os.getpid()}.new")
        draft.write_bytes(line.encode() + b"\n" + numbers.tobytes())
        draft.replace(path)


def read(path: Path) -> StepRecord:
    """One file, as its rank wrote it."""
    # JSON has no newline in this form, so the first one ends the header.
    line, _, data = path.read_bytes().partition(b"\n")
    try:
        header: dict[str, Any] = json.loads(line)
        if header.pop("format") != FORMAT:
            raise RecordError(
                f"{path} was written by another version of torch-audit."
            )
        listed: dict[str, list[int]] = header.pop("sketches")
        header["parameters"] = [
            ParameterRecord(**x) for x in header["parameters"]
        ]
        header["batches"] = [BatchRecord(**x) for x in header["batches"]]
        header["clips"] = [ClipRecord(**x) for x in header["clips"]]
        record = StepRecord(**header)
        numbers = array("d", data)
    except (ValueError, KeyError, TypeError) as error:
        # A ValueError itself.
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} is no file of a recorded run.") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    # Numbers lie one after the other, by kind and then by parameter.
    at = 0
    for kind, indices in listed.items():
        rows = record.sketches[kind] = {}
        for index in indices:
            rows[index] = numbers[at : at + WIDTH].tolist()
            at += WIDTH
    # Also if there are more numbers than the header lists.
    if at != len(numbers):
        raise RecordError(f"{path} is cut short.")
    return record

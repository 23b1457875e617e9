"""What a layout and a plan need to know of a model: its sizes, read from a data file.

The weights themselves are not told here; a model's own module and rule table say what they are.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .files import parse_toml, read_text
from .mesh import LayoutError

__all__ = ["Shape"]

_FOLDER = Path(__file__).parent / "shapes"
_CHOICES = {
    "kind": ("decoder", "mlp"),
    "norm": ("rms", "layer"),
    "positions": ("rope", "learned"),
    "bias": ("none", "qkv", "all"),
}


# The most that a size may be: tenfold of any model trained, and still quick to count.
_MOST = {
    "layers": 10_000, "hidden": 1 << 20, "heads": 1 << 16, "kv_heads": 1 << 16, "head_dim": 1 << 16,
    "ffn": 1 << 23, "vocab": 1 << 26, "sequence": 1 << 28, "batch": 1 << 24,
}  # fmt: skip
SHOWN = 20  # mistakes of one file

# Names under which the shapes that ship with phalanx are published.
_LLAMA = re.compile(r"(?:meta-)?llama-?3(?:\.[12])?-?(1b|8b|70b|405b)(?:-instruct)?")
_PUBLISHED = {
    "gpt2": "124m",
    "gpt-2": "124m",
    "gpt2-small": "124m",
    "gpt2-124m": "124m",
    "1t": "1t-gpt",
}


def _nearest(key: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(key[:60], known, 1, 0)[0]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, or of the deep MLP (then only name, layers, hidden and batch count)."""

    name: str
    layers: int
    hidden: int
    kind: str = "decoder"
    heads: int = 1
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    ffn: int = 0
    vocab: int = 0
    sequence: int = 1
    batch: int = 8  # sequences (rows of an MLP) of one step, over all ranks
    norm: str = "rms"
    positions: str = "rope"
    rope_theta: float = 10000.0
    # Llama 3.1's stretch of rope to longer sequences; a factor of 1 stretches nothing.
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192  # the sequence length of the first training
    gated: bool = True
    tied: bool = False
    bias: str = "none"
    qk_norm: bool = False
    eps: float = 1e-5
    source: str = ""

    def __post_init__(self) -> None:
        fill = object.__setattr__
        if not self.kv_heads:
            fill(self, "kv_heads", self.heads)
        if not self.head_dim:
            fill(self, "head_dim", self.hidden // max(self.heads, 1))
        if not self.ffn:
            fill(self, "ffn", self.hidden if self.kind == "mlp" else 4 * self.hidden)
        optional = {"vocab"} if self.kind == "mlp" else set()
        wrong = [
            f"{f.name}={getattr(self, f.name)}: must be 1 or more"
            for f in fields(self)
            if f.type == "int" and f.name not in optional and getattr(self, f.name) < 1
        ]
        wrong += [
            f"{key}={getattr(self, key)!r}: choose {', '.join(allowed)}"
            for key, allowed in _CHOICES.items()
            if getattr(self, key) not in allowed
        ]
        if self.rope_factor < 1 or not 0 < self.rope_low < self.rope_high:
            wrong.append(
                f"rope_factor={self.rope_factor}, rope_low={self.rope_low},"
                f" rope_high={self.rope_high}: the factor is 1 or more, and 0 < low < high"
            )
        wrong += [
            f"{key}={str(getattr(self, key))[:30]}: must be {most:,} or less"
            for key, most in _MOST.items()
            if getattr(self, key) > most
        ]
        wrong += [
            f"{key}={getattr(self, key)}: must be finite and more than 0"
            for key in ("eps", "rope_theta")
            if not 0 < getattr(self, key) < math.inf
        ]
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            wrong.append(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if wrong:
            raise LayoutError(f"shape {self.name!r}: " + "; ".join(wrong) + ".")

    @property
    def pieces(self) -> int:
        """The embedding, the blocks, and the head with the loss."""
        return self.layers + 2

    def parameters(self, piece: int) -> int:
        """Numbers in the weights of one piece; a tied output weight is counted with the embedding."""
        if self.kind == "mlp":
            return self.hidden * self.hidden if 0 < piece <= self.layers else 0
        norm = self.hidden * (2 if self.norm == "layer" else 1)
        if piece == 0:
            learned = self.sequence * self.hidden if self.positions == "learned" else 0
            return self.vocab * self.hidden + learned
        if piece <= self.layers:
            return self._attention() + self._feed_forward() + 2 * norm
        return norm + (0 if self.tied else self.vocab * self.hidden)

    def _attention(self) -> int:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = {"none": 0, "qkv": wide + 2 * narrow, "all": wide + 2 * narrow + self.hidden}
        return (
            self.hidden * (2 * wide + 2 * narrow)
            + bias[self.bias]
            + (2 * self.head_dim if self.qk_norm else 0)
        )

    def _feed_forward(self) -> int:
        ups = 2 if self.gated else 1
        bias = ups * self.ffn + self.hidden if self.bias == "all" else 0
        return (ups + 1) * self.hidden * self.ffn + bias

    @property
    def total(self) -> int:
        return sum(map(self.parameters, range(self.pieces)))

    def cost(self, piece: int) -> int:
        """Forward work of a piece for one sequence, in multiply-adds: what stages are balanced by.

        A lookup is nothing, the head multiplies by the whole vocabulary, attention counts causal.
        """
        if self.kind == "mlp":
            return self.parameters(piece)
        if piece == 0:
            return 0
        if piece > self.layers:
            return self.sequence * self.hidden * self.vocab
        wide = self.heads * self.head_dim
        matmuls = self.hidden * (2 * wide + 2 * self.kv_heads * self.head_dim)
        matmuls += (3 if self.gated else 2) * self.hidden * self.ffn
        return self.sequence * (matmuls + self.sequence * wide)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(sorted(p.stem for p in _FOLDER.glob("*.toml")))

    @classmethod
    def load(cls, name: str) -> Shape:
        """The shape of a name that ships with phalanx, or of somebody's TOML file."""
        if name.endswith(".toml"):
            return cls.parse(read_text(name, "shape", LayoutError), Path(name).stem)
        known = cls._known(name)
        if known:
            path = _FOLDER / f"{known}.toml"
            return cls.parse(path.read_text(encoding="utf-8"), known)
        near = difflib.get_close_matches(name[:60], cls.names(), n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LayoutError(
            f"there is no shape {name[:60]!r}.{hint} Shapes are {', '.join(cls.names())};"
            " or name a .toml file with the same keys."
        )

    @classmethod
    def _known(cls, name: str) -> str:
        """The shape that a name means: in capitals too, and as it is published (Llama-3-8B: 8b)."""
        plain = name.rpartition("/")[2].lower().replace("_", "-")
        llama = _LLAMA.fullmatch(plain)
        known = llama[1] if llama else _PUBLISHED.get(plain, plain)
        return known if known in cls.names() else ""

    @classmethod
    def parse(cls, text: str, name: str) -> Shape:
        """A shape from TOML; unknown keys and wrong types are refused, all at once."""
        return cls.of(parse_toml(text, f"shape {name!r}", LayoutError), name)

    @classmethod
    def of(cls, said: Mapping[str, Any], name: str) -> Shape:
        """A shape from a table of its sizes."""
        kinds: dict[str, type | tuple[type, ...]] = {
            "int": int,
            "str": str,
            "bool": bool,
            "float": (int, float),
        }
        known = {f.name: kinds[str(f.type)] for f in fields(cls)}
        wrong = [
            f"unknown key {key[:60]!r}, nearest is {_nearest(key, known)!r}"
            for key in list(said)[: len(known) + SHOWN]
            if key not in known
        ]
        wrong += [
            f"{key} = {repr(value)[:60]} is a {type(value).__name__}"
            for key, value in said.items()
            if key in known
            and (not isinstance(value, known[key]) or (type(value) is bool) != (known[key] is bool))
        ]
        wrong += [f"key {key!r} is missing" for key in ("layers", "hidden") if key not in said]
        if wrong:
            more = "; and more" if len(wrong) > SHOWN or len(said) > len(known) + SHOWN else ""
            raise LayoutError(f"shape {name!r}: " + "; ".join(wrong[:SHOWN]) + f"{more}.")
        return cls(**{"name": name, **said})

"""The sizes of a model from a data file: all that a layout and a plan need of it.

`pieces.py` derives pieces and weights from the sizes; a model's own module creates
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .adapter_row import AdapterRow
from .adapters import ADAPTERS, AdapterSizes
from .choices import elsewhere, no_such
from .codec import (
    FileError,
    Mistake,
    changed_repr,
    decode,
    key,
    load,
    out_of_bounds,
    parse,
)
from .hash_once import hash_once, state_without_hash
from .mesh import LayoutError
from .mixer_row import MixerRow
from .mixers import (
    MixerKeys,
    fill_sizes,
    mixer_mistakes,
    mixer_of_block,
    rows_in,
)
from .mlp_row import MlpRow, RoutedMlps
from .mlps import (
    MlpKeys,
    fill_widths,
    mlp_mistakes,
    mlp_of_block,
    mlps_in,
    routed_mlps,
)
from .mtp import MtpKeys, mtp_mistakes
from .pieces import PieceRow, block_linears, shape_rows

HUB = "hf:"  # the prefix of a folder that holds a Hugging Face model
_FOLDER = Path(__file__).parent / "shapes"

# Names of published weights whose sizes come with phalanx.
_LLAMA = re.compile(
    # "meta-llama/Llama-3.1-8B-Instruct" -> "8b".
    r"(?:meta-)?llama-?3(?:\.[12])?-?(1b|8b|70b|405b)(?:-instruct)?"
)
# layers.0-3.
_BLOCKS = re.compile(r"layers(?:\.([0-9]{1,5})(?:-([0-9]{1,5}))?)?")
_PUBLISHED = {
    **dict.fromkeys(("gpt2", "gpt-2", "gpt2-small", "gpt2-124m"), "124m"),
    **{name: name for name in ("deepseek-v3", "gpt-oss-20b", "gpt-oss-120b")},
}
_SHORT = {"1t": "1t-gpt"}


class ShapeError(FileError, LayoutError):
    """Sizes that no model can have, with every mistake in them."""


@dataclass(frozen=True)
class Shape(AdapterSizes, MtpKeys, MixerKeys, MlpKeys):
    """The sizes of a decoder, or of the MLP (name, layers, hidden and batch)."""

    # The upper limits are ten times those of any trained model, and still quick to
    # count.
    name: str
    layers: int = key(
        description="transformer blocks", minimum=1, maximum=10_000
    )
    hidden: int = key(
        description="width of the residual stream", minimum=1, maximum=1 << 20
    )
    kind: str = key("decoder", choices=("decoder", "mlp"))
    heads: int = key(1, "query heads", minimum=1, maximum=1 << 16)
    kv_heads: int = key(
        0, "key and value heads; 0: as many as heads", maximum=1 << 16
    )
    head_dim: int = key(0, "0: hidden / heads", maximum=1 << 16)
    # Latent attention: queries, keys and values are expanded from narrow vectors; rope
    # turns some features.
    kv_latent: int = key(
        0, "width of the keys' and values' latent; 0: none", maximum=1 << 20
    )
    q_latent: int = key(
        0, "width of the queries' latent; 0: none", maximum=1 << 20
    )
    rope_dim: int = key(
        0, "features of a head that rope turns; 0: all", maximum=1 << 16
    )
    value_dim: int = key(
        0, "features of a head's values; 0: head_dim", maximum=1 << 16
    )
    ffn: int = key(0, "width of the MLP; 0: 4 hidden", maximum=1 << 23)
    vocab: int = key(0, "tokens in the vocabulary", maximum=1 << 26)
    sequence: int = key(1, "tokens in a sequence", minimum=1, maximum=1 << 28)
    batch: int = key(
        8, "sequences in a step over all ranks", minimum=1, maximum=1 << 24
    )
    norm: str = key(
        "rms",
        "rms1 multiplies by 1 + weight",
        choices=("rms", "rms1", "layer"),
    )
    norms: str = key(
        "pre",
        "before attention and MLP, after them, or both",
        choices=("pre", "post", "both"),
    )
    positions: str = key("rope", choices=("rope", "learned"))
    rope_theta: float = key(10000.0, above=0)
    rope_local_theta: float = key(
        0.0, "rope_theta of blocks with a window; 0: the same"
    )
    rope_factor: float = key(
        1.0, "scaling of RoPE to a longer context; 1: none", minimum=1
    )
    rope_scaling: str = key(
        "llama3",
        "the kind of RoPE scaling",
        choices=("llama3", "linear", "dynamic", "yarn"),
    )
    rope_low: float = key(1.0, "its low_freq_factor; yarn: beta_slow", above=0)
    rope_high: float = key(
        4.0, "its high_freq_factor; yarn: beta_fast", above=0
    )
    rope_original: int = key(
        8192, "its original_max_position_embeddings", minimum=1
    )
    rope_attention: float = key(
        1.0, "yarn's factor for cosine and sine", above=0
    )
    rope_pairs: str = key(
        "halves",
        "features that rope turns together",
        choices=("halves", "neighbours"),
    )
    rope_truncated: bool = key(True, "yarn blends between integer indices")
    windows: tuple[int, ...] = key(
        (),
        "tokens that a block attends to, 0 for all; repeated over the blocks",
    )
    softcap: float = key(0.0, "c in attention scores c tanh(s / c); 0: none")
    logit_softcap: float = key(0.0, "c in logits c tanh(l / c); 0: none")
    query_scalar: float = key(
        0.0, "attention scores are divided by its square root; 0: head_dim"
    )
    sinks: bool = key(
        False, "a learned score for each head besides those of its tokens"
    )
    output_gate: bool = key(
        False, "attention's output is multiplied by a sigmoid of its input"
    )
    embed_scale: float = key(1.0, "factor of the token embeddings", above=0)
    gated: bool = key(True, "a gated MLP, such as SwiGLU")
    activation: str = key(
        "",
        "of the MLP; empty: silu if gated, else gelu",
        choices=("", "silu", "gelu", "clamped"),
    )
    tied: bool = key(False, "the output weight is the embedding")
    bias: str = key("none", choices=("none", "qkv", "all"))
    qk_norm: bool = key(False, "RMSNorm of queries and keys")
    qk_norm_wide: bool = key(False, "these norms cover all heads together")
    eps: float = key(1e-5, "added inside the norms", above=0)
    dropout: float = key(
        0.0,
        "share of features that training zeroes: of embeddings, heads' outputs, attention and MLP",
        maximum=0.99,
    )
    # The weights that are trained.
    freeze: tuple[str, ...] = key(
        (), "pieces that are not trained: embed, head, layers.0-3"
    )
    source: str = ""

    __repr__ = changed_repr  # shown by notebooks

    def __post_init__(self) -> None:
        mistakes = out_of_bounds(self)
        # Values that follow from others, in place of 0.
        fill = object.__setattr__
        if not self.kv_heads:
            fill(self, "kv_heads", self.heads)
        if not self.head_dim:
            fill(self, "head_dim", self.hidden // max(self.heads, 1))
        if not self.ffn:
            fill(
                self,
                "ffn",
                self.hidden if self.kind == "mlp" else 4 * self.hidden,
            )
        fill_sizes(self)
        fill_widths(self)
        # Conflicts only among values that are valid alone.
        if mistakes := mistakes or list(self._conflicts()):
            raise ShapeError(f"shape {self.name!r}", mistakes)

    __hash__ = hash_once
    __getstate__ = state_without_hash

    def _conflicts(self) -> Iterator[Mistake]:
        """Yield conflicts between sizes that are valid alone."""
        if not self.head_dim:
            what = f"heads = {self.heads} is more than hidden = {self.hidden}"
            yield Mistake("heads", what, "Write fewer heads, or head_dim")
        if not self.vocab and self.kind == "decoder":
            yield Mistake(
                "vocab",
                "vocab is missing",
                "Write how many tokens the model knows",
            )
        if self.rope_low >= self.rope_high:
            what = f"rope_low = {self.rope_low} is not below rope_high = {self.rope_high}"
            yield Mistake(
                "rope_low", what, "Write rope_low = 1.0 and rope_high = 4.0"
            )
        if len(self.windows) > self.layers:
            what = f"windows has {len(self.windows)} numbers for {self.layers} blocks"
            yield Mistake("windows", what, "Write at most one for each block")
        yield from self._untrainable()
        yield from mixer_mistakes(self)
        if self.heads % self.kv_heads:
            what = f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}"
            yield Mistake("kv_heads", what, "Write a divisor")
        if self.activation == "clamped" and not self.gated:
            what = "activation = 'clamped' without a gate"
            yield Mistake(
                "activation",
                what,
                "Leave out gated = false, or write gelu or silu",
            )
        yield from self._unlike_latents()
        yield from self._unpaired()
        yield from mtp_mistakes(self)
        yield from self._unlike_gates()
        yield from mlp_mistakes(self)

    def _unlike_latents(self) -> Iterator[Mistake]:
        if not self.kv_latent:
            if self.q_latent or self.value_dim:
                what = "q_latent or value_dim without kv_latent"
                yield Mistake("kv_latent", what, "Write it, or none of them")
            unturned = self.rope_dim > 0 and self.positions != "rope"
            if unturned or self.rope_dim > self.head_dim:
                yield self._turns_too_much()
            return
        # Each head expands its own key from the latent.
        if self.kv_heads != self.heads or self.bias != "none" or self.qk_norm:
            what = "latent attention has a key for each head, and no biases or norms of q and k"
            yield Mistake(
                "kv_latent", what, "Leave out kv_heads, bias and qk_norm"
            )
        if self.positions != "rope" or self.rope_dim > self.head_dim:
            yield self._turns_too_much()

    def _unpaired(self) -> Iterator[Mistake]:
        """An odd number of features for rope, which turns pairs."""
        turns = self.kind == "decoder" and self.positions == "rope"
        if turns and self.turned % 2:
            name = "rope_dim" if self.rope_dim else "head_dim"
            what = f"{name} = {self.turned} is odd, and rope turns pairs"
            way_out = "Write an even number"
            # It follows from these if it is not written.
            if name == "head_dim":
                way_out += ", or other heads: it is hidden / heads by default"
            yield Mistake(name, what, way_out)

    def _turns_too_much(self) -> Mistake:
        what = f"rope turns rope_dim = {self.rope_dim} of head_dim = {self.head_dim}"
        return Mistake(
            "rope_dim",
            what,
            "Write at most head_dim, and positions = 'rope'",
        )

    def _unlike_gates(self) -> Iterator[Mistake]:
        if self.output_gate and self.kv_latent:
            what = "output_gate beside latent attention, which has none"
            yield Mistake("output_gate", what, "Leave it out")

    def _untrainable(self) -> Iterator[Mistake]:
        for name in self.freeze:
            if not _BLOCKS.fullmatch(name) and name not in ("embed", "head"):
                what = f"freeze names {name[:40]!r}, which is no piece"
                yield Mistake(
                    "freeze",
                    what,
                    "Write embed, head, layers, layers.0 or layers.0-3",
                )
        last = max(
            (
                int(n)
                for name in self.freeze
                for n in re.findall("[0-9]+", name)
            ),
            default=0,
        )
        if last >= self.layers:
            what = f"freeze names block {last} of {self.layers}"
            yield Mistake(
                "freeze",
                what,
                f"Blocks are layers.0 to layers.{self.layers - 1}",
            )
        # The linears that this shape's blocks have.
        linears = block_linears(self)
        for row in ADAPTERS:
            for name in row.targets_of(self):
                if name not in linears:
                    what = f"{row.targets} names {name[:40]!r}"
                    way_out = f"Linears are {', '.join(linears)}"
                    yield Mistake(row.targets, what, way_out)
        adapter = self.adapter
        if adapter and self.freeze:
            what = f"freeze beside {adapter.name}, which already freezes all other weights"
            yield Mistake("freeze", what, "Leave it out")
        if adapter and self.kind != "decoder":
            what = f"{adapter.name} in a model that is not a decoder"
            yield Mistake(adapter.rank, what, "Leave it out")
        elif not adapter and len(self.frozen) == self.pieces:
            yield Mistake("freeze", "every piece is frozen", "Leave one out")

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        """The pieces without trained weights."""
        if self.adapter:
            # Blocks have adapters, all other pieces have no trained weights.
            every = range(self.pieces)
            return tuple(piece for piece in every if not self.is_block(piece))
        named = [
            match for name in self.freeze if (match := _BLOCKS.fullmatch(name))
        ]
        runs = [
            # "layers.3" -> 3 to 3, "layers.0-3" -> 0 to 3, "layers" -> all.
            (int(m[1] or 0), int(m[2] or m[1] or self.layers - 1))
            for m in named
        ]
        blocks = [
            n for n in range(self.layers) if any(a <= n <= b for a, b in runs)
        ]
        # As numbers of blocks: one before the first, one after the last.
        ends = {"embed": -1, "head": self.pieces - 2}
        return tuple(
            sorted(
                1 + n
                for n in (
                    *blocks,
                    *(ends[x] for x in ends if x in self.freeze),
                )
            )
        )

    @property
    def adapter(self) -> AdapterRow | None:
        """The kind of adapters that are trained in place of the weights, or None."""
        return next((row for row in ADAPTERS if row.rank_of(self)), None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the linear layers that carry adapters."""
        if self.adapter is None:
            return ()
        every = block_linears(self)
        targets = self.adapter.targets_of(self) or every
        return tuple(name for name in every if name in targets)

    @property
    def pieces(self) -> int:
        """The number of pieces: the embedding, the blocks, and the head with the loss.

        Each module that predicts later tokens has two between the blocks and the head.
        """
        return self.layers + 2 * self.predictors + 2

    def is_block(self, piece: int) -> bool:
        """True for a block, also one that predicts later tokens."""
        # Behind the blocks, joins and blocks alternate, up to the head.
        behind = piece - self.layers
        of_module = 0 < behind <= 2 * self.predictors and behind % 2 == 0
        return 0 < piece <= self.layers or of_module

    def is_join(self, piece: int) -> bool:
        """True for the input of a block that predicts later tokens."""
        return self.layers < piece < self.pieces - 1 and self.is_block(
            piece + 1
        )

    def mlp(self, piece: int) -> MlpRow | None:
        """The MLP of a decoder's block; None for other pieces."""
        if self.kind != "decoder" or not self.is_block(piece):
            return None
        # Blocks that predict later tokens are like the last one before them.
        like = min(piece, self.layers)
        return mlp_of_block(self, like - 1)

    def routes(self, piece: int) -> bool:
        """True if a piece distributes tokens among several MLPs."""
        mlp = self.mlp(piece)
        return mlp is not None and mlp.routed(self).count > 0

    @cached_property
    def routed(self) -> RoutedMlps:
        """The MLPs of a block among which tokens are distributed."""
        return routed_mlps(self)

    @property
    def mlp_widths(self) -> dict[str, int]:
        """The widths of MLPs that tp shards, by their keys."""
        if self.kind == "mlp":
            return {"ffn": self.ffn}
        widths = dict[str, int]()
        for row in reversed(mlps_in(self)):
            widths |= row.widths(self)
        return widths

    def mixer(self, piece: int) -> MixerRow | None:
        """The layer between tokens of a decoder's block; None for other pieces."""
        if self.kind != "decoder" or not self.is_block(piece):
            return None
        # Blocks that predict later tokens are like the last one before them.
        like = min(piece, self.layers)
        return mixer_of_block(self, like - 1)

    def window(self, piece: int) -> int:
        """The number of tokens that a block attends to; 0: all."""
        mixer = self.mixer(piece)
        if mixer is None or not mixer.pairs:
            return 0
        # Windows repeat over the blocks, of which the first is piece 1.
        like = min(piece, self.layers)
        return (
            self.windows[(like - 1) % len(self.windows)] if self.windows else 0
        )

    @property
    def rows(self) -> tuple[PieceRow, ...]:
        """A row for each piece, with its weights. No block is in parts."""
        return shape_rows(self, apart=False)

    @property
    def unit_counts(self) -> dict[str, int]:
        """The number of indivisible units of each dim that tp shards by whole units."""
        counts = dict[str, int]()
        for row in rows_in(self):
            counts |= row.unit_counts(self)
        return counts

    @property
    def turned(self) -> int:
        """The features of a head that rope rotates."""
        return self.rope_dim or self.head_dim

    @property
    def valued(self) -> int:
        """The features of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def pair_work(self) -> int:
        """Multiply-adds per pair of tokens over heads: score and weighted value."""
        return self.heads * (self.head_dim + self.valued)

    def mixing_work(self, piece: int, sequence: int) -> int:
        """Multiply-adds of a block for one token, beside its linears."""
        mixer = self.mixer(piece)
        return 0 if mixer is None else mixer.work(self, sequence)

    @property
    def total(self) -> int:
        """The elements of all weights. A tied output weight is the embedding's."""
        return sum(row.numel for row in self.rows)

    @property
    def trained(self) -> int:
        """The elements that are trained."""
        return sum(row.trained_numel for row in self.rows)

    @property
    def active(self) -> int:
        """The elements that a token uses; only the chosen of the routed MLPs count."""
        return sum(row.active_numel(self) for row in self.rows)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(sorted(p.stem for p in _FOLDER.glob("*.toml")))

    @classmethod
    def load(cls, name: str) -> Shape:
        """The shape of a built-in name, of a TOML file, or of a model in hf:FOLDER."""
        if name.startswith(HUB):
            # Imported here: families needs this module.
            from .families import hub_shape

            return hub_shape(name.removeprefix(HUB))
        if name.endswith(".toml"):
            own = Path(name).stem
            return load(cls, name, "shape", ShapeError, _pointers(), name=own)
        # A published name first: "llama-3-8b" and "8b" have one file.
        known = _published(name) or _plain(name)
        known = _SHORT.get(known, known)
        if known not in cls.names():
            raise LayoutError(
                f"{no_such('shape', name, cls.names(), 0.3)} Shapes are {', '.join(cls.names())};"
                " or name a .toml file with the same keys, or hf:FOLDER."
            )
        return cls.parse(
            (_FOLDER / f"{known}.toml").read_text(encoding="utf-8"), known
        )

    @classmethod
    def parse(cls, text: str, name: str) -> Shape:
        """Parse a shape from TOML; reports all unknown keys and wrong types at once."""
        place = f"shape {name!r}"
        return parse(cls, text, place, ShapeError, _pointers(), name=name)

    @classmethod
    def of(cls, table: Mapping[str, Any], name: str = "model") -> Shape:
        """A shape from a table of its sizes."""
        return decode(
            cls, {"name": name, **table}, f"shape {name!r}", ShapeError
        )


def published(name: str) -> bool:
    """True for a name of published weights whose sizes `Shape.load` knows.

    A size (8b), a file, hf:FOLDER and FILE.py:Class are not such names.
    """
    if name.startswith(HUB) or name.endswith(".toml") or ":" in name:
        return False
    # An owner before the name, as on the hub, also means published weights.
    return bool(_published(name)) or "/" in name


def _published(name: str) -> str:
    """The shape of a published model, or ""."""
    plain = _plain(name)
    llama = _LLAMA.fullmatch(plain)
    return llama[1] if llama else _PUBLISHED.get(plain, "")


def _plain(name: str) -> str:
    """A name without its owner, in small letters: llama-3-8b for meta-llama/Llama_3_8B."""
    return name.rpartition("/")[2].lower().replace("_", "-")


def _pointers() -> dict[str, str]:
    """The ways out for the words that other libraries have for our keys."""
    words = elsewhere("model").items()
    return {other: f"Write {ours}" for other, ours in words}

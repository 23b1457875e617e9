"""A decoder's sizes and choices; a shape's keys have these names.

The modules that read a combination of sizes document its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .delta_sizes import DeltaSizes
from .rope import Rope, RopeScaling

_CHOICES = {
    "norm": ("rms", "rms1", "layer"),
    "norms": ("pre", "post", "both"),
    "positions": ("rope", "learned"),
    "activation": ("", "silu", "gelu", "clamped"),
    "bias": ("none", "qkv", "all"),
}


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(DeltaSizes):
    """The sizes of a decoder. Zero means a default derived from the others.

    `sequence` limits learned positions only.
    """

    vocab: int = 1
    hidden: int
    layers: int = 1
    heads: int = 1
    # Query heads share a key head in runs of heads / kv_heads; 0: as many as heads.
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    sequence: int = 1024
    norm: str = "rms"
    norms: str = "pre"
    positions: str = "rope"
    # Rotary positions; blocks with a window use the local theta, if any, unscaled.
    rope_theta: float = 10000.0
    rope_local_theta: float = 0.0
    rope_scaling: RopeScaling | None = None
    rope_pairs: str = "halves"
    # Latent attention (DeepSeek-V2), if kv_latent > 0; the rest are its widths.
    kv_latent: int = 0
    q_latent: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    # windows[n % len(windows)] belongs to block n; 0 attends to all earlier tokens.
    windows: tuple[int, ...] = ()
    # c tanh(s / c) of attention scores and of logits (Gemma 2); 0: none
    softcap: float = 0.0
    logit_softcap: float = 0.0
    # Scores are divided by its square root; 0: head_dim.
    query_scalar: float = 0.0
    sinks: bool = False
    output_gate: bool = False
    embed_scale: float = 1.0
    activation: str = ""
    gated: bool = True
    tied: bool = False
    bias: str = "none"
    qk_norm: bool = False
    qk_norm_wide: bool = False
    dropout: float = 0.0
    eps: float = 1e-5
    # Experts: the first `dense_layers` blocks have a plain MLP of width `ffn` instead.
    experts: int = 0
    top_k: int = 1
    expert_ffn: int = 0
    shared_experts: int = 0
    shared_gate: bool = False
    # The choice is among the best `top_groups` groups (DeepSeek-V3 2024).
    expert_groups: int = 1
    top_groups: int = 1
    dense_layers: int = 0
    scores: str = "softmax"
    normalized: bool = True
    routed_scale: float = 1.0
    balance: str = "none"
    # Factors of the router's losses; see `experts.Router`.
    sequence_loss: float = 0.0
    batch_loss: float = 0.0
    z_loss: float = 0.0
    # Modules of multi-token prediction, and the factor of the mean of their losses.
    mtp: int = 0
    mtp_weight: float = 0.3
    # Layers between tokens: mixers[n % len(mixers)] belongs to block n. See `mixers.py`.
    mixers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "kv_heads", self.kv_heads or self.heads)
        fill(self, "head_dim", self.head_dim or self.hidden // self.heads)
        fill(self, "ffn", self.ffn or 4 * self.hidden)
        fill(self, "expert_ffn", self.expert_ffn or self.ffn)
        fill(self, "rope_dim", self.rope_dim or self.head_dim)
        fill(self, "value_dim", self.value_dim or self.head_dim)
        self.fill_delta(self.head_dim)
        fill(
            self,
            "activation",
            self.activation or ("silu" if self.gated else "gelu"),
        )
        if wrong := list(self._faults()):
            raise ValueError("Decoder: " + "; ".join(wrong) + ".")

    def _faults(self) -> Iterator[str]:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                known = [choice for choice in choices if choice]
                yield f"{name}={value!r}: choose {', '.join(known[:-1])} or {known[-1]}"
        if self.heads % self.kv_heads:
            yield f"kv_heads={self.kv_heads} does not divide heads={self.heads}"
        if self.positions != "learned" and self.rope_dim % 2:
            yield f"head_dim={self.rope_dim} is odd, and rope turns pairs"
        if "delta" in self.mixers and not self.delta_heads:
            yield "delta_heads=0 in a model with delta layers"
        if not 0 <= self.dropout < 1:
            yield f"dropout={self.dropout} is not in [0, 1)"

    def rope(self, window: int) -> Rope | None:
        """A block's rotary angles for its window, or None with learned positions."""
        if self.positions == "learned":
            return None
        if window and self.rope_local_theta:
            return Rope(self.rope_local_theta)
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct ropes of all blocks."""
        every = (self.rope(window) for window in self.windows or (0,))
        return tuple(dict.fromkeys(rope for rope in every if rope is not None))

    @property
    def turned_dim(self) -> int:
        """The number of features of a head that rope rotates."""
        return self.rope_dim

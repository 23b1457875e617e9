"""The MLP of a block that all tokens pass through, gated or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .fused import Gated, fuses
from .side_by_side import SideBySide
from .sizes import DecoderSizes

# Lines of the decoder's rule table: see `decoder.py`.
RULES = """\
layers.*.mlp*.gate.weight : ffn embed
layers.*.mlp*.gate.bias : ffn
layers.*.mlp*.up.weight : ffn embed
layers.*.mlp*.up.bias : ffn
layers.*.mlp*.down.weight : embed ffn
layers.*.mlp*.down.bias : embed
"""
LIMIT, ALPHA = 7.0, 1.702  # constants of gpt-oss


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The input of a gated MLP's down projection; `clamped`: gpt-oss (OpenAI 2025)."""
    if activation == "clamped":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    if activation == "silu" and fuses(gate):
        fused: Tensor = Gated.call(gate, up)
        return fused
    return (
        F.silu(gate)
        if activation == "silu"
        else F.gelu(gate, approximate="tanh")
    ) * up


class Mlp(SideBySide):
    """down(act(gate(x)) * up(x)) when gated, else down(act(up(x))); gelu in its tanh form."""

    side_by_side = ("gate", "up")

    def __init__(self, sizes: DecoderSizes, width: int) -> None:
        super().__init__()
        self.activation = sizes.activation
        up, bias = (sizes.hidden, width), sizes.bias == "all"
        self.gate = nn.Linear(*up, bias=bias) if sizes.gated else None
        self.up = nn.Linear(*up, bias=bias)
        self.down = nn.Linear(width, sizes.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            wide = self.up(x)  # (B, T, ffn)
            wide = (
                F.silu(wide)
                if self.activation == "silu"
                else F.gelu(wide, approximate="tanh")
            )
        else:
            gate, up = self.products(x)  # (B, T, ffn)
            wide = gated(gate, up, self.activation)
        y: Tensor = self.down(wide)  # (B, T, hidden)
        return y

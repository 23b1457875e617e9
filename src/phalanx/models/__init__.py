"""The built-in models in plain PyTorch: a decoder, and the MLP of the teaching examples.

Nothing here knows how a model is sharded. `decoder.describe` and `mlp.describe` return
a model's pieces and the names of its weights' dims.

Comments give shapes in the words of a shape's keys (`hidden`, `heads`, `kv_heads`,
`head_dim`, `ffn`, `vocab`, `experts`, `top_k`), with B for the sequences of a
microbatch, T for their tokens and n for rows of tokens sorted by expert. A module sees
only its rank's share of each. `parallel` writes that share out: (B, T / cp, heads / tp,
head_dim).
"""

from . import decoder, mlp
from .adapters import AdaptedLinear, adapt, draw_adapter, in_adapters
from .attention import Attention, Core
from .decoder import Decoder
from .experts import ExpertMlps, ExpertProducts, Merge, Router, Spread
from .experts_block import (
    ExpertBlock,
    ExpertsPart,
    MergingPart,
    RoutingPart,
)
from .loss import IGNORED, token_loss
from .mlp import DeepMlp
from .noise import Dropout, token_noise
from .norm import RMSNorm
from .rope import RopeScaling
from .sizes import DecoderSizes

__all__ = [
    "Decoder",
    "DecoderSizes",
    "DeepMlp",
    "RopeScaling",
    "Attention",
    "Core",
    "Dropout",
    "ExpertBlock",
    "ExpertMlps",
    "ExpertProducts",
    "ExpertsPart",
    "Merge",
    "MergingPart",
    "RoutingPart",
    "Spread",
    "AdaptedLinear",
    "adapt",
    "draw_adapter",
    "in_adapters",
    "RMSNorm",
    "Router",
    "IGNORED",
    "token_loss",
    "token_noise",
    "decoder",
    "mlp",
]

"""A block with experts, and its parts between which tokens travel to other ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .block import Block, NumberedPart, add_mlp, attend, through
from .dense import Mlp
from .experts import ExpertMlps, Experts, Router, Sending, SharedGate
from .routed import Chooser, ReceivingPart
from .sizes import DecoderSizes

# Lines of the decoder's rule table: see `decoder.py`.
RULES = """\
layers.*.mlp.router.weight : - embed
layers.*.mlp.router.*bias : -
layers.*.mlp.shared_gate.weight : - embed
layers.*.mlp.routed.gate : experts ffn embed
layers.*.mlp.routed.up : experts ffn embed
layers.*.mlp.routed.down : experts embed ffn
layers.*.mlp.routed.gate_bias : experts ffn
layers.*.mlp.routed.up_bias : experts ffn
layers.*.mlp.routed.down_bias : experts partial
"""


def experts_of(sizes: DecoderSizes) -> Experts:
    """The experts of a block, and the MLP that all its tokens pass through."""
    # Shared experts add up, so they are one MLP of their summed width.
    shared = sizes.shared_experts * sizes.expert_ffn
    beside = Mlp(sizes, shared) if shared else None
    gate = SharedGate(sizes.hidden) if sizes.shared_gate else None
    return Experts(Router(sizes), ExpertMlps(sizes), beside, gate)


class ExpertBlock(Block):
    """A block with experts. `valid` (B, T) marks the tokens that are not padding.

    Its router's losses are left out here: see `with_losses`.
    """

    mlp: Experts

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        noise = self.own_noise(noise)
        x = attend(self, x, positions, angles, documents, document_ids, noise)
        m = self.mlp(through(self.mlp_norm, x), valid)
        return add_mlp(self, x, m, noise)

    def with_losses(self) -> nn.Module:
        """Return the block as a module that also outputs its router's loss terms."""
        return BlockWithLosses(self) if self.mlp.router.has_losses else self

    def parts(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Split the block where tokens travel: routing, experts, merging.

        The three modules share the block's weights.
        """
        return RoutingPart(self), ExpertsPart(self), MergingPart(self)


class BlockWithLosses(NumberedPart):
    """A block with experts that also outputs the terms of its router's losses."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__(block._number)
        # The block's attribute names, so that the rules above match these weights too.
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.attn_post_norm, self.mlp_post_norm = (
            block.attn_post_norm,
            block.mlp_post_norm,
        )
        self.attn, self.mlp = block.attn, block.mlp
        self.attn_dropout, self.mlp_dropout = (
            block.attn_dropout,
            block.mlp_dropout,
        )

    @property
    def chooser(self) -> Chooser:
        """The router whose loss terms this module outputs."""
        return self.mlp.router

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> dict[str, Tensor]:
        noise = self.own_noise(noise)
        x = attend(self, x, positions, angles, documents, document_ids, noise)
        m, terms = self.mlp.with_terms(through(self.mlp_norm, x), valid)
        return {"x": add_mlp(self, x, m, noise), **terms}


class RoutingPart(NumberedPart):
    """The first part of a block with experts: attention, routing, and sorted tokens."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__(block._number)
        # As in the block: the attributes' names are the weights' names in the rules.
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.attn_post_norm = block.attn_post_norm
        self.attn = block.attn
        # The router, the shared experts and the sort by expert; no routed weights.
        self.mlp = Sending(block.mlp)
        self.attn_dropout = block.attn_dropout

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of the outputs for the next parts."""
        return ("x", *self.mlp.gives)

    @property
    def chooser(self) -> Chooser | None:
        """The router whose loss terms this module outputs, if it has losses."""
        router = self.mlp.router
        return router if router.has_losses else None

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> dict[str, Tensor]:
        noise = self.own_noise(noise)
        x = attend(self, x, positions, angles, documents, document_ids, noise)
        return {"x": x, **self.mlp(through(self.mlp_norm, x), valid)}


class ExpertsPart(ReceivingPart):
    """The second part of a block with experts: MLPs of the tokens received."""

    gives = ("sent",)

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"routed": block.mlp.routed.products()})

    def forward(self, sent: Tensor, routes: Tensor) -> dict[str, Tensor]:
        """Apply experts to `sent` (n, hidden), in runs `routes` (senders, experts)."""
        routed: Any = self.mlp["routed"]
        return {"sent": routed.on_runs(sent, routes)}


class MergingPart(NumberedPart):
    """The last part of a block with experts: adds their results to the residual."""

    def __init__(self, block: ExpertBlock) -> None:
        super().__init__(block._number)
        self.mlp_post_norm = block.mlp_post_norm
        self.merge = block.mlp.routed.merge
        self.mlp_dropout = block.mlp_dropout

    def forward(
        self,
        x: Tensor,
        sent: Tensor,
        gates: Tensor,
        order: Tensor,
        *,
        shared: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        # sent: (n, hidden), the experts' results, back where the tokens came from
        m = self.merge(sent, gates, order)  # (B, T, hidden)
        m = m if shared is None else m + shared
        return add_mlp(self, x, m, self.own_noise(noise))


# In the order of the data.
PARTS = (RoutingPart, ExpertsPart, MergingPart)

"""Differences of other software from ours within a piece, with their sources.

`cost` runs our own piece. A correction converts its cost to that of software with
certain facts in its profile. Each is a function of the piece's work and independent of
the others. They are applied in the order of `EVERY_PIECE`, `BLOCK` and `HEAD`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..layout import Layout, Shape
from ..layout.choices import DTYPES
from ..program import Load, MessageLoad, PieceCost
from .case import Case
from .profile import STORED, SoftwareProfile

# Bytes moved per 16-bit gradient element added to a 32-bit one, as costs assume.
ADDING = 10.0


class LossBytes(NamedTuple):
    """Bytes for each 16-bit logit, by the way in which the loss is computed."""

    kept: float  # in addition to the logits, until the backward
    temporary: float  # freed within the operation
    forward: float  # moved by the forward
    backward: float  # moved by the backward


# A float32 softmax is made from a float32 copy while the logits still exist
# ("wide-over"), or its gradient is made next to it ("wide").
CHUNKS = "chunks"  # as our head costs: the logits never exist as a whole
LOGITS_CHUNK = 1 << 28  # logits that our head makes at once on a GPU
LOSSES = {
    "over": LossBytes(0.0, 0.0, 14.0, 28.0),
    "beside": LossBytes(0.0, 2.0, 2.0, 4.0),
    "wide-over": LossBytes(2.0, 6.0, 38.0, 14.0),
    "wide": LossBytes(2.0, 8.0, 14.0, 22.0),
}


class Software(NamedTuple):
    """The software that runs a piece, and the piece's sharding."""

    profile: SoftwareProfile
    cut: Layout

    @property
    def selective(self) -> bool:
        return self.cut.recompute == "selective"

    @property
    def width(self) -> int:
        """The bytes of an activation."""
        return DTYPES[self.cut.precision].bytes


@dataclass(frozen=True)
class PieceWork:
    """The cost of one piece as some software runs it.

    `gathered` are messages that travel beside the matmuls of the backward.
    `repeats` is the share of the forward's matmuls that is recomputed in addition to
    `cost.recompute`.
    """

    cost: PieceCost
    gathered: tuple[MessageLoad, ...] = ()
    repeats: float = 0.0


# ---- for every piece


def gathers_columns_again(work: PieceWork, software: Software) -> PieceWork:
    """Gather inputs of column-parallel linears again in the backward, under `seq`.

    They are kept in shards, and gathered beside the input's gradient (Korthikanti et
    al. 2022, section 4.2.2).
    """
    if not (software.profile.regathers and software.cut.seq):
        return work
    cost = work.cost
    columns = [
        m
        for m in cost.forward.messages
        if (m.axis, m.op) == ("tp", "all_gather")
    ]
    # A rank keeps its own shard of each gathered input.
    kept = sum(message.bytes for message in columns) * (
        1 - 1 / software.cut.tp
    )
    others = tuple(m for m in cost.recompute.messages if m not in columns)
    recompute = replace(cost.recompute, messages=others)
    return replace(
        work,
        cost=replace(cost, recompute=recompute, kept=cost.kept - kept),
        gathered=tuple(columns),
    )


def sums_beside_weight_gradient(
    work: PieceWork, software: Software
) -> PieceWork:
    """Sum the gradients of inputs over tp beside the weight gradients' matmuls.

    Megatron's `LinearWithGradAccumulationAndAsyncCommunication`: a sum starts before
    the weight gradient, and ends after it.
    """
    if not software.profile.sums_beside:
        return work
    load = work.cost.input_gradient
    sums = tuple(
        m
        for m in load.messages
        if m.axis == "tp" and m.op in ("all_reduce", "reduce_scatter")
    )
    others = tuple(m for m in load.messages if m not in sums)
    cost = replace(work.cost, input_gradient=replace(load, messages=others))
    return replace(work, cost=cost, gathered=work.gathered + sums)


def ends_recomputation_early(work: PieceWork, software: Software) -> PieceWork:
    """End recomputation at the last tensor that a backward needs.

    See `set_checkpoint_early_stop`: a block's last matmul and its sum over tp are not
    repeated.
    """
    if not software.profile.ends_early or software.selective:
        return work
    recompute = work.cost.recompute
    # Only tp ends a block in a message; without it there is none to leave out.
    messages = (
        recompute.messages[:-1] if software.cut.tp > 1 else recompute.messages
    )
    recompute = replace(
        recompute, products=recompute.products[:-1], messages=messages
    )
    return replace(work, cost=replace(work.cost, recompute=recompute))


def keeps_scores(work: PieceWork, software: Software) -> PieceWork:
    """Keep attention's scores, without a fused kernel.

    Selective recomputation then recomputes attention, scores and all, and nothing else
    (Korthikanti et al. 2022, section 5).
    """
    stored = STORED.get(software.profile.attention)
    if stored is None:
        return work
    cost = work.cost
    attention = cost.forward.attention
    if software.selective:
        cost = replace(
            cost, recompute=Load(attention=attention), selected=cost.kept
        )
    # Scores of all heads on this rank: batch x heads x queries x keys.
    scores = sum(a.batch * a.heads * a.queries * a.keys for a in attention)
    kept = cost.kept + stored.kept * scores
    temporary = cost.temporary + stored.gradients * scores
    return replace(work, cost=replace(cost, kept=kept, temporary=temporary))


def repeats_products(work: PieceWork, software: Software) -> PieceWork:
    """Recompute a part of the matmuls under selective recomputation.

    In torchtitan's policy it is every second one.
    """
    repeats = software.profile.repeats
    if not (software.profile.fused_attention and software.selective):
        return work
    # Bytes of the outputs of all matmuls, of which selective recomputation
    # keeps a part.
    made = software.width * sum(
        p.batch * p.m * p.n for p in work.cost.forward.products
    )
    selected = max(0.0, work.cost.selected - repeats * made)
    return replace(
        work, cost=replace(work.cost, selected=selected), repeats=repeats
    )


# ---- for blocks and for the head


class Tokens(NamedTuple):
    """A rank's tokens of a microbatch, and sizes that corrections depend on."""

    shape: Shape
    tokens: float  # on a rank of cp
    cut: Layout
    sparse: bool = False  # a block with experts
    narrow: bool = False  # its products are in 8 bits or fewer
    busy: float = 1.0  # tokens at this rank's experts, relative to the mean

    @classmethod
    def of(
        cls,
        case: Case,
        cut: Layout,
        *,
        sparse: bool = False,
        narrow: bool = False,
        busy: float = 1.0,
    ) -> Tokens:
        tokens = case.rows * case.sequence / cut.cp
        return cls(case.shape, tokens, cut, sparse, narrow, busy)

    @property
    def gated(self) -> float:
        """Features of a gated MLP's product for each token, outside of experts."""
        shape = self.shape
        if self.sparse:
            return shape.routed.beside
        return shape.ffn

    @property
    def copies(self) -> float:
        """The number of ranks of tp that hold a token's hidden features."""
        return 1.0 if self.cut.seq else float(self.cut.tp)

    @property
    def routed(self) -> float:
        """Copies of a token that this rank's experts take."""
        return self.shape.routed.chosen * self.busy


def fuses_gated_mlp(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Compute gate and product in one kernel, which keeps nothing in between.

    Some software does not keep the product either, and computes it again.
    """
    return _keeps(work, software, of, -_gated_mlp(software, of) * of.gated)


def _gated_mlp(software: Software, of: Tokens) -> float:
    """The number of activations as wide as an MLP that software does not keep."""
    profile = software.profile
    if not of.shape.gated:
        return 0.0
    one_kernel = profile.fused or profile.fused_gate
    return float(one_kernel) + float(profile.drops_product)


def keeps_norm_copies(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Keep what an RMS norm of plain operations keeps, in float32 and before its weight.

    Its squares and its product read a copy of the input in 4 bytes, and the product
    with the weight reads the result in 2 (transformers' `LlamaRMSNorm`). A kernel, as
    ours, keeps its input and one number for each token.
    """
    if not _plain_norms(software, of):
        return work
    copies = (4.0 + 2.0) / software.width
    values = 2 * copies * of.shape.hidden * of.copies
    return _keeps(work, software, of, values)


def _plain_norms(software: Software, of: Tokens) -> bool:
    """True if a block's two RMS norms are operations one after the other."""
    profile = software.profile
    plain = profile.plain_norms and not profile.fused
    return plain and of.shape.norm == "rms" and software.width < 4


# Bytes for each value that an RMS norm of plain operations moves, beyond a kernel's.
# Forward: to float32 (2 + 4), squares (4 + 4), their mean (4), times 1 / rms (4 + 4), to
# bf16 (4 + 2), times the weight (2 + 2); a kernel reads and writes 2.
_NORM_FORWARD = 36.0 - 4.0
# Backward: times the weight (4) and the weight's gradient (8), to float32 (6), times
# 1 / rms (8) and the gradient of that (16), the mean's (4), the squares' (8 + 8 + 12), the
# sum of both gradients (12), to bf16 (6); a kernel moves 10.
_NORM_BACKWARD = 92.0 - 10.0
_NORM_STARTS = 7.0  # more kernels forward; twice as many backward


def moves_norm_copies(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Move what two RMS norms of plain operations read and write."""
    if not _plain_norms(software, of):
        return work
    values = 2.0 * of.shape.hidden * of.copies * of.tokens / of.cut.tp

    def more(load: Load, moved: float, starts: float) -> Load:
        return replace(
            load,
            moved=load.moved + moved * values,
            launches=load.launches + 2 * starts,
        )

    cost = work.cost
    changed = replace(
        cost,
        forward=more(cost.forward, _NORM_FORWARD, _NORM_STARTS),
        recompute=more(cost.recompute, _NORM_FORWARD, _NORM_STARTS),
        input_gradient=more(
            cost.input_gradient, _NORM_BACKWARD, 2 * _NORM_STARTS
        ),
    )
    return replace(work, cost=changed)


def keeps_narrow_inputs(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Keep the inputs of products in 8 bits instead of 16, under fp8.

    The outputs of norms and of the gated MLP have no other reader. The output of
    attention is read by its own backward, so its narrow copy is one more
    (TransformerEngine, `LayerNormLinear` and `Linear`).
    """
    if not (software.profile.narrow_inputs and of.narrow):
        return work
    shape = of.shape
    norms = 2.0 * shape.hidden * of.copies
    product = 0.0 if software.profile.drops_product else of.gated
    more = shape.heads * shape.head_dim - norms - product
    return _keeps(work, software, of, more / software.width)


# ---- for the parts of a block with experts


def fuses_routed_mlps(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Run experts as `fuses_gated_mlp` and `keeps_narrow_inputs` say.

    The tokens that arrive have no other reader than the experts' first products.
    """
    shape, profile = of.shape, software.profile
    less = _gated_mlp(software, of) * shape.routed.width
    if profile.narrow_inputs and of.narrow:
        product = 0.0 if profile.drops_product else shape.routed.width
        less += (shape.hidden * of.copies + product) / software.width
    return _keeps(work, software, of, -less * of.routed)


def starts_each_routed_mlp(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Start a kernel for each routed MLP's matmul, and for the casts of its inputs.

    Such an MLP has two linears, as gate and up are one. Its backward has two matmuls
    for each. (TransformerEngine's `GroupedLinear`, pull requests 853 and 2360.)
    """
    if not software.profile.experts_one_by_one:
        return work
    mlps = of.shape.routed.count / software.cut.ep_ranks
    linears = 2.0 * mlps
    casts = _CASTS * linears if of.narrow else 0.0
    cost = work.cost

    def more(load: Load, starts: float) -> Load:
        return replace(load, launches=load.launches + starts)

    changed = replace(
        cost,
        forward=more(cost.forward, linears + casts),
        recompute=more(cost.recompute, linears + casts),
        input_gradient=more(cost.input_gradient, 2 * linears + casts),
    )
    return replace(work, cost=changed)


# Assumed: kernels that cast a tensor to 8 bits, one that finds its scale or orders its scales, and
# one that rounds.
_CASTS = 2.0


def weighs_results_early(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Weight an expert's result before its last product.

    A gate's gradient then needs the experts' inner activations, which are kept anyway,
    and not the results that have come back.
    """
    if not software.profile.fused_experts:
        return work
    results = of.shape.routed.chosen * of.shape.hidden * of.copies
    return _keeps(work, software, of, -results)


def leaves_routed_alone(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Recompute nothing of the experts under selective recomputation.

    Narrow experts keep little besides the outputs of their products, which selective
    recomputation keeps.
    """
    if not (software.profile.fused_experts and software.selective):
        return work
    cost = replace(work.cost, selected=work.cost.kept, recompute=Load())
    return replace(work, cost=cost)


def keeps_rotated_values(
    work: PieceWork, software: Software, of: Tokens
) -> PieceWork:
    """Keep query and key before their rotation, too.

    One matmul computes query, key and value. The value is a view of its output, so the
    whole output stays, beside the rotated query and key.
    """
    shape = of.shape
    if not (software.profile.joint and shape.positions == "rope"):
        return work
    return _keeps(
        work, software, of, (shape.heads + shape.kv_heads) * shape.head_dim
    )


def _keeps(
    work: PieceWork, software: Software, of: Tokens, features: float
) -> PieceWork:
    """The work with `features` more activations kept for each token."""
    cost = work.cost
    more = features * (of.tokens / of.cut.tp) * software.width
    # A piece keeps its input at least, which it does not own.
    kept = max(0.0, cost.kept + more)
    return replace(work, cost=replace(cost, kept=kept))


# Kernels that our head starts in its backward, and a head with whole logits elsewhere:
# in the forward, and in the weight gradient of a divided backward.
_LOSS_STARTS, _WEIGHT_STARTS = 5.0, 2.0
# Bytes that our forward reads for each logit, if ranks of tp share the vocabulary: it
# takes the maxima of the logits and of their softmax, in float32.
_SHARED_SUMS = 8.0


def _with_whole_logits(
    cost: PieceCost, software: Software, shape: Shape, logits: float
) -> PieceCost:
    """The cost of our head ("chunks") as if the logits existed as a whole ("over").

    Our backward makes the logits, reads their softmax and multiplies their gradient
    with the weight and the input, all in one operation. Here the logits and the softmax
    belong to the forward, which recomputation repeats. In a divided backward the
    weight's gradient is an operation of its own. Until then the gradient of the logits
    stays, which has replaced them.
    """
    back = cost.input_gradient
    # With `exact`, a rank's part of the vocabulary has parts of its own.
    parts = max(1, software.cut.exact // software.cut.tp)
    made = back.products[:parts]
    into_input = back.products[parts : 2 * parts]
    into_weight = back.products[2 * parts :]
    # Before the soft cap and after it.
    copies = 2 if shape.logit_softcap else 1
    width = copies * software.width
    read = LOSSES["over"].forward
    if software.cut.tp > 1:
        read += _SHARED_SUMS
    moved = logits * read
    chunk = min(logits, LOGITS_CHUNK)
    # Ranks of tp agree on the softmax; their last message is the input's gradient.
    agreed = back.messages[:-1]
    forward = replace(
        cost.forward,
        products=made,
        moved=cost.forward.moved + moved,
        launches=cost.forward.launches + _LOSS_STARTS,
        messages=cost.forward.messages + agreed,
    )
    back = replace(
        back,
        products=into_input + into_weight,
        moved=back.moved - moved,
        launches=back.launches - _LOSS_STARTS,
        messages=back.messages[len(agreed) :],
    )
    later, kept_later = cost.weight_gradient, cost.kept + logits * width
    if software.cut.splits_backward and into_weight:
        added = ADDING * sum(each.m * each.n for each in into_weight)
        later = Load(into_weight, (), added, _WEIGHT_STARTS)
        back = replace(
            back,
            products=into_input,
            moved=back.moved - added,
            launches=back.launches - _WEIGHT_STARTS,
        )
        # The two factors of a product: gradient of the logits, and the input.
        inputs = into_weight[0].k * into_weight[0].n
        kept_later = software.width * (logits + inputs)
    return replace(
        cost,
        kept=cost.kept + logits * width,
        kept_after_i=kept_later,
        temporary=max(0.0, cost.temporary - chunk * width),
        forward=forward,
        input_gradient=back,
        weight_gradient=later,
        recompute=forward,
    )


def makes_loss(work: PieceWork, software: Software, of: Tokens) -> PieceWork:
    """Replace our loss in the head by the software's."""
    if software.profile.loss == CHUNKS:
        return work
    cost = work.cost
    # The logits on this rank, of which tp divides the vocabulary.
    logits = of.tokens * of.shape.vocab / of.cut.tp
    # A head without a vocabulary, as of the deep MLP, has no product at all.
    if cost.input_gradient.products and not cost.forward.products:
        cost = _with_whole_logits(cost, software, of.shape, logits)
    theirs, ours = LOSSES[software.profile.loss], LOSSES["over"]
    kept, temporary, forward, backward = (
        logits * (a - b) for a, b in zip(theirs, ours, strict=True)
    )
    moved = replace(cost.forward, moved=cost.forward.moved + forward)
    moved_back = replace(
        cost.input_gradient, moved=cost.input_gradient.moved + backward
    )
    narrow = software.width < 4  # 32-bit logits need no float32 copy
    changed = replace(
        cost,
        kept=cost.kept + kept * narrow,
        temporary=cost.temporary + temporary,
        forward=moved,
        input_gradient=moved_back,
    )
    return replace(work, cost=changed)


OfPiece = Callable[[PieceWork, Software], PieceWork]
OfTokens = Callable[[PieceWork, Software, Tokens], PieceWork]

BLOCK: Sequence[OfTokens] = (
    fuses_gated_mlp,
    keeps_rotated_values,
    keeps_norm_copies,
    moves_norm_copies,
    keeps_narrow_inputs,
)
ROUTED: Sequence[OfTokens] = (
    fuses_routed_mlps,
    starts_each_routed_mlp,
    leaves_routed_alone,
)
COMBINE: Sequence[OfTokens] = (weighs_results_early, leaves_routed_alone)
# A block with experts in one piece.
WHOLE: Sequence[OfTokens] = (
    *BLOCK,
    fuses_routed_mlps,
    starts_each_routed_mlp,
    weighs_results_early,
)
HEAD: Sequence[OfTokens] = (makes_loss,)
EVERY_PIECE: Sequence[OfPiece] = (
    gathers_columns_again,
    sums_beside_weight_gradient,
    ends_recomputation_early,
    keeps_scores,
    repeats_products,
)


def of_tokens(
    corrections: Sequence[OfTokens],
    cost: PieceCost,
    software: Software,
    of: Tokens,
) -> PieceCost:
    """Apply corrections that depend on the tokens of a microbatch."""
    work = PieceWork(cost)
    for correct in corrections:
        work = correct(work, software, of)
    return work.cost


def corrected(cost: PieceCost, software: Software) -> PieceWork:
    """Apply the corrections that hold for every piece."""
    work = PieceWork(cost)
    for correct in EVERY_PIECE:
        work = correct(work, software)
    return work


def costed_as(cut: Layout, profile: SoftwareProfile) -> Layout:
    """The cut to cost: if scores are kept, selective recomputation drops them alone."""
    return cut if profile.fused_attention else replace(cut, recompute="none")

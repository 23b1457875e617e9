"""Layers that distribute tokens among MLPs: everything that other files know of them.

A `Chooser` chooses MLPs for each token, `RoutedProducts` hold their stacked weights, and
a `ReceivingPart` is the part of a block that applies them to tokens from other ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

# Names of a chooser's outputs for its losses.
# (B, options): the number of times each sequence chose each option; no gradient
CHOICES = "choices"
# (B, options): each option's share of the scores, summed over the tokens of a sequence
SCORED = "scored"
# scalar: the squared log-sum-exp of the scores, summed over tokens
SQUARED = "squared"
TERMS = (SCORED, SQUARED)  # the losses are linear in these


class Chooser(nn.Module):
    """A layer that chooses among `options` for each token, with losses of its choices.

    Let f be the share of tokens that chose each option, and p the mean of its score.
    Its losses are options x sum f p (Fedus et al. 2021), over each sequence or
    over the batch, and the squared log-sum-exp of the scores (Zoph et al. 2022). f is a
    count over all tokens, without a gradient, and a rank may hold only some of them. So
    a forward returns the counts and the terms in which the losses are linear. The
    caller sums the counts over ranks, asks `term_gradients`, and starts backward from
    there.

    While `tally` (options) is a tensor, it counts the choices of each option.
    """

    # Factors of the losses: the per-sequence loss, the batch loss and the z-loss.
    sequence_loss: float
    batch_loss: float
    z_loss: float
    top_k: int

    def __init__(self, options: int) -> None:
        super().__init__()
        self.options = options
        self.tally: Tensor | None = None

    @property
    def has_losses(self) -> bool:
        return bool(self.sequence_loss or self.batch_loss or self.z_loss)

    def term_gradients(
        self, share: Tensor, of_sequences: Tensor, of_batch: Tensor
    ) -> dict[str, Tensor]:
        """Return the gradients of the loss terms.

        `share` is the weight of one token: 1 / (all tokens of the step). `of_sequences`
        (B, options) counts the choices of whole sequences, `of_batch` (1, options)
        those of the batch.
        """
        share = share.view(()).to(of_sequences.dtype)
        gradients = {}
        if self.sequence_loss or self.batch_loss:
            # The loss options * sum(f * p) is linear in p, and f is a count without a
            # gradient: d loss / d scored = share * options * factor * f.
            count = of_sequences.shape[1]
            f = of_sequences.new_zeros(1, count)  # (1 or B, options)
            if self.sequence_loss:
                f = f + self.sequence_loss * self._per_token(of_sequences)
            if self.batch_loss:
                f = f + self.batch_loss * self._per_token(of_batch)
            gradients[SCORED] = (share * count * f).expand_as(of_sequences)
        if self.z_loss:
            gradients[SQUARED] = share * self.z_loss
        return gradients

    def _per_token(self, choices: Tensor) -> Tensor:
        """The mean number of times a token chooses each option (sums to top_k)."""
        return self.top_k * choices / choices.sum(-1, keepdim=True)


class RoutedProducts(nn.Module):
    """The stacked weights of routed MLPs and their matmuls; tp shards them as a whole."""


class ReceivingPart(nn.Module):
    """The part of a block that receives tokens, and whose weights ep distributes."""


def losing_chooser(piece: nn.Module) -> Chooser | None:
    """The chooser whose loss terms a piece outputs, or None."""
    chooser: Chooser | None = getattr(piece, "chooser", None)
    return chooser

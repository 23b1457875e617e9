"""Logits of any model that is trained on tokens, computed from the whole sequence.

The pieces run as in training, with the tokens themselves as targets. The logits are
what the loss is computed from. Nothing is cached: each new token costs a pass over all
tokens before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..models.loss import CrossEntropy
from ..parallel import Model
from ..parallel.forward import forward_loss
from ..parallel.whole import TARGETS, TOKENS
from .sampling import GenerateError

# A log-probability is a logit, too.
_LOSSES = (F.cross_entropy, F.nll_loss)


class RecomputedReader:
    """A model whose pieces are run on the whole sequence again for each token."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        # A model of images or vectors has no next token.
        if TOKENS not in _entries_taken(model):
            raise GenerateError(
                "the model reads no tokens, so it cannot generate text."
            )
        self.model, self.dtype = model, dtype
        self.tokens: Tensor | None = None
        self.seen = _LogitsSeen()
        # Our own loss is a module with its own backward; torch's are
        # functions, seen below.
        for _, piece in model.pieces:
            for module in piece.modules():
                if isinstance(module, CrossEntropy):
                    module.register_forward_pre_hook(self.seen.of_module)

    def reset(self) -> None:
        self.tokens = None

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        known = self.tokens
        whole = tokens if known is None else torch.cat((known, tokens), 1)
        self.tokens = whole
        positions = torch.arange(whole.shape[1]).expand_as(whole)
        # Targets only have to be valid: the loss is not used.
        batch = {TOKENS: whole, TARGETS: whole, "positions": positions}
        self.seen.logits = None
        with self.seen:
            forward_loss(self.model, batch, self.dtype)
        every = self._by_token(self.seen.logits, whole)
        return every[:, -last:]

    @staticmethod
    def _by_token(logits: Tensor | None, tokens: Tensor) -> Tensor:
        """Bring logits into the shape (batch, time, vocabulary)."""
        # (B, V, T) of a loss over classes -> (B * T, V).
        if logits is not None and logits.dim() > 2:
            # torch's losses expect the classes in the second dimension
            logits = logits.movedim(1, -1).flatten(0, -2)
        if logits is None or logits.shape[0] != tokens.numel():
            raise GenerateError(
                "the model's loss shows no logits of every token. Compute it by F.cross_entropy or"
                " phalanx.models.loss.CrossEntropy, of all tokens; or call your own module with the"
                " weights of state_dict()."
            )
        return logits.view(*tokens.shape, -1)


class _LogitsSeen(TorchFunctionMode):
    """Notes the logits of the latest loss that was computed while it is on."""

    logits: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        # Called with the logits as the first argument or as `input`.
        if func in _LOSSES:
            self.logits = args[0] if args else named["input"]
        return func(*args, **named)

    def of_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        logits: Tensor = args[0]
        self.logits = logits.flatten(0, -2)


def _entries_taken(model: Model) -> set[str]:
    """The names of all entries of a batch that the pieces take."""
    numbers = range(len(model.pieces))
    names = {name for number in numbers for name in model.takes(number)}
    # A model in its own code takes tokens, although it does not name its
    # entries.
    return names | ({TOKENS} if model.as_it_is else set())

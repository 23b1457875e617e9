"""Seeded faults of multi-token prediction: its losses, targets and shared weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from phalanx.models.ahead import look_ahead
from phalanx.models.loss import ChunkedLogits, Logits
from phalanx.models.mtp import Join, PredictingHead
from phalanx.parallel import batch
from phalanx.parallel.pieces import Bundle, Piece
from phalanx.training.executor import Executor
from phalanx.verification import trial

from .fault import fault, swapped

GRADIENT = "step 0: the gradient of"


@fault(
    "mtp: its loss counts once for each stage",
    "ahead",
    "pp2 1f1b:3",
    GRADIENT,
)
def _() -> AbstractContextManager[None]:
    right = Piece.seed

    def seed(self: Piece, m: int, scale: Tensor) -> Bundle:
        found = right(self, m, scale)
        return {n: x if n == "x" else 2 * x for n, x in found.items()}

    return swapped(Piece, "seed", seed)


@fault("mtp: its loss has no weight", "ahead", "dp2 zero1", GRADIENT)
def _() -> AbstractContextManager[None]:
    right = Piece.seed

    def seed(self: Piece, m: int, scale: Tensor) -> Bundle:
        found = right(self, m, scale)
        return dict.fromkeys(found, found["x"])

    return swapped(Piece, "seed", seed)


@fault("mtp: its losses are added, not averaged", "ahead", "tp2", GRADIENT)
def _() -> AbstractContextManager[None]:
    right = Piece.seed

    def seed(self: Piece, m: int, scale: Tensor) -> Bundle:
        shares = {n: each.share for n, each in self.extra_losses.items()}
        found = right(self, m, scale)
        return {n: x / shares.get(n, 1.0) for n, x in found.items()}

    return swapped(Piece, "seed", seed)


def _ahead_by(
    targets: int, tokens: int, *, in_documents: bool = True
) -> AbstractContextManager[None]:
    """Look ahead by other numbers of tokens."""
    right = look_ahead

    def further(
        whole: Mapping[str, Tensor], modules: int
    ) -> dict[str, Tensor]:
        if not in_documents:
            whole = {n: x for n, x in whole.items() if n != "documents"}
        found = right(whole, modules)
        for name, by in (("ahead_targets", targets), ("ahead_tokens", tokens)):
            found[name] = torch.roll(found[name], by, dims=1)
        return found

    return swapped(batch, "look_ahead", further)


@fault(
    "mtp: the targets are those of the next token",
    "ahead",
    "dp2",
    GRADIENT,
)
def _() -> AbstractContextManager[None]:
    return _ahead_by(1, 0)


@fault(
    "mtp: the embedding is that of the token itself",
    "ahead",
    "cp2:ring",
    "step 0: the output of mtp.0",
)
def _() -> AbstractContextManager[None]:
    return _ahead_by(0, 1)


@fault(
    "mtp: it predicts across the end of a document",
    "ahead",
    "dp2 zero2 accum:3",
    "step 0: the output of mtp.0",
    packed=True,
)
def _() -> AbstractContextManager[None]:
    return _ahead_by(0, 0, in_documents=False)


@fault(
    "mtp: ranks of cp shift their own part of the row",
    "ahead",
    "cp2:ring",
    "step 0: the output of mtp.0",
)
def _() -> AbstractContextManager[None]:
    right = batch.microbatches

    def microbatches(
        *given: object, ahead: int = 0
    ) -> list[dict[str, Tensor]]:
        parts = right(*given)  # type: ignore[arg-type]
        return [{**x, **look_ahead(x, ahead)} for x in parts]

    return swapped(trial, "microbatches", microbatches)


@fault(
    "mtp: the embedding's gradient stays on the last stage",
    "ahead",
    "pp2 1f1b:3",
    "step 0: the gradient of embed.tokens.weight",
)
def _() -> AbstractContextManager[None]:
    return swapped(Executor, "_tie", lambda self, op: None)


@fault(
    "mtp: a lookup gives the shared embedding no gradient",
    "ahead",
    "dp2 zero1",
    "step 0: the gradient of embed.tokens.weight",
)
def _() -> AbstractContextManager[None]:
    right = Join.forward

    def forward(
        self: Join,
        x: Tensor,
        ahead_tokens: Tensor,
        hidden: Tensor | None = None,
    ) -> dict[str, Tensor]:
        tokens = self.tokens
        self.__dict__["tokens"] = lambda ids: tokens(ids).detach()
        try:
            return right(self, x, ahead_tokens, hidden)
        finally:
            del self.__dict__["tokens"]

    return swapped(Join, "forward", forward)


@fault(
    "mtp: the shared output projection learns from the next token alone",
    "ahead",
    "tp2",
    "step 0: the gradient of embed.tokens.weight",
)
def _() -> AbstractContextManager[None]:
    right = PredictingHead.forward

    def forward(
        self: PredictingHead,
        x: Tensor,
        targets: Tensor,
        ahead_targets: Tensor,
        hidden: Tensor,
    ) -> dict[str, Tensor]:
        output, calls = self.output, list[None]()

        def project(y: Tensor) -> Logits:
            logits: Logits = output(y)
            assert isinstance(logits, ChunkedLogits)
            calls.append(None)
            # The modules' logits are the first.
            first = len(calls) == 1
            return logits._replace(contribute=None) if first else logits

        self.__dict__["output"] = project
        try:
            return right(self, x, targets, ahead_targets, hidden)
        finally:
            del self.__dict__["output"]

    return swapped(PredictingHead, "forward", forward)


@fault(
    "mtp: modules take the last block's state, not that of the one before",
    "ahead",
    "pp2 1f1b:3",
    "step 0: the output of mtp.1",
)
def _() -> AbstractContextManager[None]:
    right = Join.forward

    def forward(
        self: Join,
        x: Tensor,
        ahead_tokens: Tensor,
        hidden: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if hidden is not None:
            x = hidden
        return right(self, x, ahead_tokens, hidden)

    return swapped(Join, "forward", forward)

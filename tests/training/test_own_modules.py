"""Modules as they are, cut into pieces by running them, equal their plain PyTorch scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import own_modules as own
from own_modules import MODULES, by_hand, in_pieces

import phalanx
from phalanx.comm import AloneWorld, launch
from phalanx.layout import Layout, LayoutError

LAYOUTS = (
    "dp2 zero3", "pp2 1f1b:2", "pp2 zb-h1:3", "accum:2 recompute:all offload:activations",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_pieces_equals_its_plain_script(
    name: str, layout: str
) -> None:
    losses, weights = by_hand(name)
    ranks = Layout.parse(layout).ranks
    for mine, theirs in launch(
        in_pieces, ranks, name, layout, backend="threads"
    ):
        assert mine == pytest.approx(losses, rel=1e-9)
        assert [*theirs] == [*weights]
        for key, weight in weights.items():
            torch.testing.assert_close(
                theirs[key], weight, rtol=1e-8, atol=1e-9
            )


# ---- what is not cut, with its reason


class _Turning(own.Turned):
    pass


class _Skip(_Turning):
    """Its blocks take what the embedding gave, beside what the block before gave."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, angles=first)
        y: Tensor = self.head(self.norm(x))
        return y


class _Reading(_Turning):
    """A head that is the embedding, by its weight."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, angles=x * 0)
        self.head(x)
        return self.norm(x) @ self.words.weight.mT


class _Twice(_Turning):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x, angles=torch.ones(tokens.shape[1], 12, dtype=x.dtype))
        y: Tensor = self.head(self.norm(x))
        return y


class _Deciding(_Turning):
    def forward(self, tokens: Tensor) -> Tensor:
        if int(tokens.max()) > 1_000:
            return tokens
        return super().forward(tokens)


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(17, 12), nn.Linear(12, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.words(tokens))
        return y


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (_Skip, "something else in pieces than whole"),
        (_Reading, "reads the weight weight of a Embedding"),
        (_Twice, "each block once"),
        (_Deciding, r"test_own_modules.py:\d+: if int\(tokens.max"),
        (_Bare, "no list of blocks"),
    ],
)
def test_a_module_that_cannot_be_cut_is_refused_with_its_reason(
    kind: type[nn.Module], text: str
) -> None:
    model = kind()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = own.batches("turned")[0]
    terms: dict[str, Any] = {"loss": own.cross_entropy}
    pieces = "recompute:all"
    with pytest.raises(LayoutError, match=text):
        phalanx.prepare(
            model,
            optimizer,
            pieces,
            example=batch,
            world=AloneWorld("cpu"),
            **terms,
        )
    # in one piece it is trained
    for example in (None, batch)[: 1 + (kind is not _Skip)]:
        run = phalanx.prepare(
            model,
            optimizer,
            example=example,
            world=AloneWorld("cpu"),
            **terms,
        )
        assert len(run.part.model.pieces) == 1
        assert run.step(batch).finite

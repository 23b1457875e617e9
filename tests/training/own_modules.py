"""Modules that nobody adapted, which phalanx cuts into pieces by running them; with their plain scripts."""

from __future__ import annotations

from typing import Any

import distill
import torch
from torch import Tensor, nn

import phalanx
from parallel import nanogpt
from phalanx.comm import World

ROWS, STEPS = 6, 3


class Gpt(nanogpt.GPT):
    """nanoGPT without its description: tied head, (logits, mean loss)."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(12),
            nn.Linear(12, 20),
            nn.Linear(20, 12),
        )

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = x + scale * self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Mlp(nn.Module):
    """A stack of residual MLPs over vectors, in an nn.Sequential of which nothing else is called."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 12)
        self.stack = nn.Sequential(*(Residual() for _ in range(3)))
        self.out = nn.Linear(12, 4)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, inputs: Tensor) -> Tensor:
        y: Tensor = self.out(
            self.stack(torch.relu(self.into(inputs) + self.shift))
        )
        return y


class Turned(nn.Module):
    """Its blocks share angles that it makes of the positions, and take them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(TurnedBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 17)
        self.register_buffer("rates", torch.arange(1.0, 13.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]), self.rates).to(
            x.dtype
        )
        for layer in self.layers:
            x = layer(x, angles=angles)
        y: Tensor = self.head(self.norm(x))
        return y


class TurnedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        before = torch.cumsum(x * torch.cos(angles), 1)
        y: Tensor = x + torch.tanh(self.mix(before))
        return y


def language() -> nn.Module:
    model: nn.Module = distill.Language(16, 4)
    return model


MODULES: dict[str, Any] = {
    "nanogpt": Gpt, "mlp": Mlp, "turned": Turned, "torch layers": language,
}  # fmt: skip


def made(name: str) -> nn.Module:
    model: nn.Module = MODULES[name]().double()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(
                weight.shape, generator=draw, dtype=torch.float64
            )
            weight.copy_(0.3 * drawn)
    return model


def batches(name: str) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(9)
    every = []
    for _ in range(STEPS):
        if name == "mlp":
            x = torch.randn(ROWS, 5, generator=draw, dtype=torch.float64)
            y = torch.randint(4, (ROWS,), generator=draw)
            every.append({"inputs": x, "targets": y})
        else:
            ids = torch.randint(17, (ROWS, 9), generator=draw)
            every.append(
                {"tokens": ids[:, :-1], "targets": ids[:, 1:].contiguous()}
            )
    return every


def cross_entropy(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    flat = logits.flatten(0, -2)
    targets = batch["targets"].flatten()
    return nn.functional.cross_entropy(flat, targets, reduction="sum")


def in_pieces(
    world: World, name: str, layout: str
) -> tuple[list[float], dict[str, Tensor]]:
    model, data = made(name), batches(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = None if name == "nanogpt" else cross_entropy
    run = phalanx.prepare(
        model, optimizer, layout, loss=loss, example=data[0], world=world
    )
    assert len(run.part.names) > 3
    return [
        run.step(batch).loss for batch in run.shard(data)
    ], run.state_dict()


def by_hand(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = made(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(name):
        first = batch["inputs" if name == "mlp" else "tokens"]
        if name == "nanogpt":
            loss = model(first, batch["targets"])[1]
        else:
            loss = (
                cross_entropy(model(first), batch) / batch["targets"].numel()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()

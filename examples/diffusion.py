"""A diffusion model of points in a loop of one's own: it learns the noise that was added to them.

python examples/diffusion.py
torchrun --nproc-per-node 2 examples/diffusion.py "pp2 1f1b:2"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import phalanx

ROWS, WIDTH, TIMES = 32, 48, 50


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.shift = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x) + self.shift(time)).relu())


class Denoiser(nn.Module):
    """Residual blocks that all see the time, as sines and cosines."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Residual() for _ in range(layers))
        self.register_buffer("rates", 1e3 ** -torch.linspace(0, 1, WIDTH // 2))

    def forward(self, points: Tensor, times: Tensor) -> Tensor:
        angles = (times[:, None] * self.rates).to(points.dtype)
        time, x = torch.cat((angles.sin(), angles.cos()), -1), self.enter(points)
        for block in self.blocks:
            x = block(x, time)
        return self.leave(x)


def denoising(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Ho et al. 2020, equation 14: the squared distance from the noise, as a sum over rows."""
    return (output - batch["noise"]).square().sum()


def noised(steps: int) -> Iterator[dict[str, Tensor]]:
    """Points of a circle with noise: none at time 0, and nearly nothing else at the last."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        turn = 2 * torch.pi * torch.rand(ROWS, generator=draw)
        circle = torch.stack((turn.cos(), turn.sin()), -1)
        noise = torch.randn(ROWS, 2, generator=draw)
        times = torch.randint(TIMES, (ROWS,), generator=draw)
        kept = (0.5 * torch.pi * times / TIMES).cos()[:, None]
        points = kept * circle + (1 - kept**2).sqrt() * noise
        yield {"points": points, "times": times, "noise": noise}


def main(world, layout: str = "", steps: int = 20) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Denoiser(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    own = {"loss": denoising, "example": next(noised(1)), "world": world, "clip": 1.0}
    run = phalanx.prepare(model, optimizer, layout, **own)
    for batch in run.shard(noised(steps)):
        result = run.step(batch)
        if run.first and result.step % 5 == 0:
            print(f"step {result.step}  loss {result.loss:.4f}")
    return run.state_dict()


if __name__ == "__main__":
    main(phalanx.join(), *sys.argv[1:2])

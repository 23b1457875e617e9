"""Modules that nobody adapted, in several layouts, beside their plain scripts.

python tests/training/ten_modules.py   # prints the table of docs/your-own-loop.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import plain_gpt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.comm import RankFailed, World, launch
from phalanx.layout import Layout

ROWS, STEPS, WORDS = 4, 2, 37
LAYOUTS = ("dp2 zero3", "pp2 1f1b:2", "tp2")


class Vit(nn.Module):
    """In the shape of timm's: a class token and positions that belong to the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 16))
        terms = {"batch_first": True, "norm_first": True, "dropout": 0.0}
        layers = (
            nn.TransformerEncoderLayer(16, 2, 32, **terms) for _ in range(3)
        )
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1)
        x = self.blocks(x + self.pos_embed)
        y: Tensor = self.head(self.norm(x)[:, 0])
        return y


class Perceptron(nn.Module):
    """A plain MLP: nothing in it is alike but its hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 20)
        self.hidden = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.leave = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        y: Tensor = self.leave(x)
        return y


class Bottleneck(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.one, self.two = norm(width), norm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(self.first(x)).relu()
        return (x + self.two(self.second(y))).relu()


class ResNet(nn.Module):
    """Two stages of residual blocks, of other widths each."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(*(Bottleneck(8, norm) for _ in range(2)))
        self.down = nn.Conv2d(8, 16, 1, stride=2)
        self.layer2 = nn.Sequential(*(Bottleneck(16, norm) for _ in range(2)))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x).relu())
        x = self.layer2(self.down(x))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class Dlrm(nn.Module):
    """Dense features through an MLP, tables of categories, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)
        )
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in (50, 20, 7))
        self.top = nn.Sequential(
            nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 10)
        )

    def forward(self, x: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(x)
        each = [table(categories[:, n]) for n, table in enumerate(self.tables)]
        vectors = torch.stack((dense, *each), 1)
        pairs = (vectors @ vectors.mT)[:, *torch.triu_indices(4, 4, 1)]
        y: Tensor = self.top(torch.cat((dense, pairs), 1))
        return y


class Encoder(nn.Module):
    """torch's own nn.TransformerEncoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(self.words(tokens)))
        return y


class UNet(nn.Module):
    """A diffusion model's shape: what goes down is used again on the way up, beside a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, 2, 1) for _ in range(2))
        self.up = nn.ModuleList(
            nn.Conv2d(16, 8, 3, padding=1) for _ in range(2)
        )
        self.leave = nn.Conv2d(8, 10, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.enter(x) + self.time(time)[:, :, None, None]
        skipped = []
        for layer in self.down:
            skipped.append(x)
            x = layer(x).relu()
        for layer in self.up:
            wide = F.interpolate(x, scale_factor=2)
            x = layer(torch.cat((wide, skipped.pop()), 1)).relu()
        y: Tensor = self.leave(x).mean((2, 3))
        return y


def gpt() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_layer": 3, "n_head": 2}
    model: nn.Module = plain_gpt.Plain(plain_gpt.PlainConfig(**sizes))
    return model


def _of_transformers(kind: str, config: str, **sizes: Any) -> nn.Module:
    transformers = __import__("transformers")
    made: nn.Module = getattr(transformers, kind)(
        getattr(transformers, config)(vocab_size=WORDS, **sizes)
    )
    return made


def mamba() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}
    return _of_transformers("MambaForCausalLM", "MambaConfig", **sizes)


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _of_transformers("BertForMaskedLM", "BertConfig", **sizes)


def llama() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 32}
    return _of_transformers("LlamaForCausalLM", "LlamaConfig", **sizes)


def t5() -> nn.Module:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_ff": 32,
        "num_layers": 2,
        "d_kv": 8,
    }
    sizes |= {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return _of_transformers("T5ForConditionalGeneration", "T5Config", **sizes)


def timm_vit() -> nn.Module:
    timm = __import__("timm")
    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 4, "depth": 3}
    sizes |= {"embed_dim": 16, "num_heads": 2, "num_classes": 10}
    made: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes)
    return made


def _group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


TEXT, IMAGE, ROW = "text", "image", "row"
GPT_PLAN = {
    "attn.c_attn": "colwise", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}  # fmt: skip
TIMM_PLAN = {
    "attn.qkv": "colwise", "attn.proj": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise",
}  # fmt: skip
# By name: what makes the module, what it reads, and a plan for tp.
MODULES: dict[str, tuple[Callable[[], nn.Module], str, Any]] = {
    "nanoGPT's model": (gpt, TEXT, GPT_PLAN),
    "ViT (timm)": (timm_vit, IMAGE, TIMM_PLAN),
    "ViT in timm's shape": (Vit, IMAGE, None),
    "T5 (transformers)": (t5, TEXT, None),
    "Mamba (transformers)": (mamba, TEXT, None),
    "BERT (transformers)": (bert, TEXT, None),
    "Llama as a bare module (transformers)": (llama, TEXT, None),
    "MLP": (Perceptron, ROW, None),
    "ResNet with GroupNorm": (lambda: ResNet(_group_norm), IMAGE, None),
    "ResNet with BatchNorm": (lambda: ResNet(nn.BatchNorm2d), IMAGE, None),
    "DLRM": (Dlrm, ROW, None),
    "nn.TransformerEncoder": (Encoder, TEXT, None),
    "UNet of a diffusion": (UNet, IMAGE, None),
}


def made(name: str) -> nn.Module:
    """The module in float64, with the same weights on all ranks."""
    model = MODULES[name][0]().double()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(
                weight.shape, generator=draw, dtype=torch.float64
            )
            weight.copy_(0.2 * drawn)
    return model


def batches(name: str) -> list[dict[str, Tensor]]:
    kind, draw = MODULES[name][1], torch.Generator().manual_seed(9)
    every = []
    for _ in range(STEPS):
        if kind == TEXT:
            ids = torch.randint(WORDS, (ROWS, 9), generator=draw)
            batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:].contiguous()}
            if name.startswith("T5"):
                labels = {"decoder_input_ids": batch["targets"]}
                batch = {"input_ids": batch["tokens"], **labels, **batch}
        else:
            shape = (ROWS, 12) if kind == ROW else (ROWS, 3, 8, 8)
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            time = torch.rand(ROWS, 1, generator=draw, dtype=torch.float64)
            categories = torch.randint(7, (ROWS, 3), generator=draw)
            batch = {"x": x, "time": time, "categories": categories}
            batch["targets"] = torch.randint(10, (ROWS,), generator=draw)
        every.append(batch)
    return every


def cross_entropy(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    logits = getattr(logits, "logits", logits)
    flat, targets = logits.flatten(0, -2), batch["targets"].flatten()
    return F.cross_entropy(flat, targets, reduction="sum")


def arguments_of(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments with which a plain script calls the module."""
    kind = MODULES[name][1]
    if name.startswith("T5"):
        return {key: batch[key] for key in ("input_ids", "decoder_input_ids")}
    if "transformers" in name:
        return {"input_ids": batch["tokens"]}
    more = {"UNet of a diffusion": ("time",), "DLRM": ("categories",)}.get(
        name, ()
    )
    if kind != TEXT:
        return {key: batch[key] for key in ("x", *more)}
    if name.startswith("nanoGPT"):
        return {"idx": batch["tokens"], "targets": batch["targets"]}
    return {"tokens": batch["tokens"]}


def in_layout(
    world: World, name: str, layout: str
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of a loop with phalanx; in pieces where the layout needs them."""
    model, data = made(name), batches(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pieces = data[0] if Layout.parse(layout).data == 1 else None
    run = phalanx.prepare(
        model, optimizer, layout, loss=cross_entropy, example=pieces,
        tp_plan=MODULES[name][2], world=world,
    )  # fmt: skip
    return [
        run.step(batch).loss for batch in run.shard(data)
    ], run.state_dict()


def by_hand(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = made(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches(name):
        output = model(**arguments_of(name, batch))
        loss = cross_entropy(output, batch) / batch["targets"].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@dataclass(frozen=True)
class Compared:
    """The largest distance from the plain script, relative to the largest value; or why it is refused."""

    error: float
    refused: str = ""

    def __str__(self) -> str:
        return self.refused or f"{self.error:.0e}"


def compared(name: str, layout: str) -> Compared:
    losses, weights = by_hand(name)
    try:
        given = name, layout
        every = launch(
            in_layout, Layout.parse(layout).ranks, *given, backend="threads"
        )
    except RankFailed as failed:
        return Compared(float("inf"), _reason(str(failed)))
    worst = 0.0
    for mine, theirs in every:
        pairs = zip(mine, losses, strict=True)
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in pairs))
        for key, weight in weights.items():
            if weight.is_floating_point():
                scale = float(weight.abs().max())
                worst = max(
                    worst, float((theirs[key] - weight).abs().max()) / scale
                )
    return Compared(worst)


# Of errors, in few words.
_REASONS = {
    "nothing says how": "no plan",
    "no list of blocks": "no list of blocks",
    "do not take activations": "no list of blocks",
    "BatchNorm": "batch statistics",
    "its module encoder returns": "two lists of blocks",
    "'StandIn' object is not iterable": "skips between two lists of blocks",
    "calls modules between its blocks": "several lists of blocks",
}


def _reason(error: str) -> str:
    """The first line of an error, in few words."""
    line = error.splitlines()[0]
    known = (short for text, short in _REASONS.items() if text in line)
    return next(known, line.partition("LayoutError: ")[2][:160])


def table() -> str:
    lines = [f"| module | {' | '.join(f'`{each}`' for each in LAYOUTS)} |"]
    lines.append("|---" * (1 + len(LAYOUTS)) + "|")
    for name in MODULES:
        if "(timm)" in name and find_spec("timm") is None:
            continue
        cells = " | ".join(str(compared(name, layout)) for layout in LAYOUTS)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

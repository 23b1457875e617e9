"""Modules that mix tokens outside the table are refused under seq and cp, and token-wise ones are not."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.cli import main
from phalanx.layout import Layout, LayoutError
from phalanx.parallel import Model, build_model, refuse_mixing, refuse_unfit
from phalanx.parallel.mixing import mixing
from phalanx.verification import SHAPES, verify

FILE = Path(__file__).parents[2] / "examples" / "stranger.py"
WIDTH = 32  # of the example
WAYS = ["tp2 seq", "cp2", "cp2:ulysses"]


def example() -> Any:
    spec = importlib.util.spec_from_file_location("stranger", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Apply(nn.Module):
    """A function of (batch, time, features) as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Attention(nn.Module):
    """As nanoGPT's: queries, keys and values of one product, and no child named core."""

    def __init__(self, *, start: float | None = None) -> None:
        super().__init__()
        self.c_attn, self.c_proj = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        if start is not None:
            nn.init.constant_(self.c_proj.weight, start)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, heads, time, size of a head)
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2)
            for y in self.c_attn(x).split(WIDTH, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return projected


class Convolution(nn.Module):
    """Causal, over the time of each feature."""

    def __init__(self, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.before = (kernel - 1) * dilation
        self.conv = nn.Conv1d(
            WIDTH, WIDTH, kernel, dilation=dilation, groups=WIDTH
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (self.before, 0))).mT


class Recurrent(nn.GRU):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Gated(nn.Module):
    """A gate that starts at 0 hides what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate.tanh() * x.mean(1, keepdim=True)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "attention whose output starts at 0": lambda: Attention(start=0.0),
    "convolution": lambda: Convolution(4),
    "convolution far back": lambda: Convolution(2, dilation=5),
    "recurrence": Recurrent,
    "mean": lambda: Apply(lambda x: x.mean(1, keepdim=True)),
    "mean behind a closed gate": Gated,
    "running sum": lambda: Apply(lambda x: x.cumsum(1)),
    "token shift": lambda: Apply(lambda x: F.pad(x, (0, 0, 1, -1))),
    "softmax over time": lambda: Apply(lambda x: x.softmax(1)),
    "sorted": lambda: Apply(lambda x: x.sort(1).values),
    "reversed": lambda: Apply(lambda x: x.flip(1)),
    "spectrum": lambda: Apply(lambda x: torch.fft.fft(x, dim=1).real),
    "counted from the start": lambda: Apply(
        lambda x: x * torch.arange(x.shape[1])[:, None]
    ),
}
TOKENWISE: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(
        nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)
    ),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "softmax over features": lambda: Apply(lambda x: x.softmax(-1)),
    "pointwise convolution": lambda: Convolution(1),
    "features reversed": lambda: Apply(lambda x: x.flip(2)),
}


def with_mixer(
    make: Callable[[], nn.Module], blocks: tuple[int, ...] = (0, 1, 2, 3)
) -> Model:
    """The example with a module beside attention and MLP in some blocks, every weight of it `-`."""
    there = example()
    plain = there.Block

    class Block(plain):  # type: ignore[misc, valid-type]
        def forward(
            self,
            x: Tensor,
            *,
            positions: Tensor,
            documents: Tensor | None = None,
        ) -> Tensor:
            y: Tensor = super().forward(
                x, positions=positions, documents=documents
            )
            mixer = getattr(self, "mixer", None)
            return y if mixer is None else y + mixer(x)

    there.Block = Block
    with torch.device("meta"):
        model = there.Stranger()
        for number in blocks:
            model.blocks[number].mixer = make()
    lines = [
        f"blocks.*.mixer.{name} : {' '.join('-' * x.dim())}".rstrip() + "\n"
        for name, x in model.blocks[blocks[-1]].mixer.named_parameters()
    ]
    there.RULES = "".join(lines) + there.RULES
    described: Model = there.describe(model)
    return described


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize("what", MIXING)
def test_what_mixes_tokens_outside_the_table_is_refused_by_name(
    what: str, layout: str
) -> None:
    if (what, layout) == ("reversed", "cp2"):
        pytest.skip(
            "the chunks of a ring's ranks lie mirrored: each rank reverses its own tokens"
        )
    model = with_mixer(MIXING[what])
    refuse_unfit(model, Layout.parse(layout))  # the table itself is in order
    with pytest.raises(
        LayoutError,
        match=r"blocks\.0(\.mixer)?\b.* mixes tokens|fails in blocks",
    ):
        refuse_mixing(model, Layout.parse(layout))
    for other in ("", "dp4 zero3", "tp2", "pp2 1f1b:2"):
        refuse_mixing(model, Layout.parse(other))


@pytest.mark.parametrize("what", TOKENWISE)
def test_what_works_token_by_token_is_taken_in_every_layout(what: str) -> None:
    model = with_mixer(TOKENWISE[what])
    for layout in (*WAYS, "tp4 seq", "cp4", "cp4:2x2", "dp2 cp2 tp2 seq"):
        assert mixing(model, Layout.parse(layout)) == ()


def test_one_block_that_differs_from_the_others_is_tried_too() -> None:
    for kernel in (1, 4):
        wrong = mixing(
            with_mixer(lambda k=kernel: Convolution(k), (2,)),
            Layout.parse("tp2 seq"),
        )
        assert len(wrong) == (kernel > 1)
        assert all(
            text.startswith("blocks.2.mixer (Convolution)") for text in wrong
        )


def test_the_embedding_and_the_head_are_tried_as_the_blocks_are() -> None:
    there = example()
    plain = there.Embed.forward, there.Head.forward
    mean = Apply(lambda x: x - x.mean(1, keepdim=True))

    def embed(self: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        return mean(plain[0](self, tokens, positions))

    def head(self: Any, x: Tensor, targets: Tensor) -> Tensor:
        return plain[1](self, mean(x), targets)

    for name, forward in (("Embed", embed), ("Head", head)):
        there = example()
        getattr(there, name).forward = forward
        with torch.device("meta"):
            model: Model = there.describe(there.Stranger())
        (wrong,) = mixing(model, Layout.parse("tp2 seq"))
        assert wrong.startswith(f"{name.lower()} ({name}) mixes tokens")


@pytest.mark.parametrize("name", ["gqa", "gpt"])
def test_models_of_our_own_and_the_example_are_taken_untried_and_tried(
    name: str,
) -> None:
    for layout in (*WAYS, "tp2 cp2 seq"):
        assert mixing(build_model(SHAPES[name]), Layout.parse(layout)) == ()
        there = example()
        with torch.device("meta"):
            assert (
                mixing(there.describe(there.Stranger()), Layout.parse(layout))
                == ()
            )


def test_a_model_that_cannot_be_tried_is_refused_with_its_error() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")

    (wrong,) = mixing(
        with_mixer(lambda: Apply(broken)), Layout.parse("tp2 seq")
    )
    assert (
        "cannot be tried on one process: blocks.0.mixer: RuntimeError: needs a GPU"
        in wrong
    )
    (wrong,) = mixing(
        with_mixer(lambda: Apply(lambda x: x / 0)), Layout.parse("tp2 seq")
    )
    assert "not finite" in wrong


def test_a_table_that_is_wrong_with_tp_alone_is_left_to_verify() -> None:
    there = example()
    there.RULES = there.RULES.replace(
        "attention.query.weight : heads", "attention.query.weight : -"
    )
    with torch.device("meta"):
        model: Model = there.describe(there.Stranger())
    assert mixing(model, Layout.parse("tp2 seq")) == ()


# ---- the commands


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The example with attention outside the table, as the way out of other refusals recommends."""
    text = FILE.read_text().replace("self.core", "self.mix")
    for name in ("query", "key", "value", "out"):
        for dims in ("heads embed", "kv embed", "embed heads"):
            text = text.replace(
                f"{name}.weight : {dims}", f"{name}.weight : - -"
            )
    path = tmp_path / "own.py"
    path.write_text(text)
    return f"{path}:Stranger"


def test_check_train_verify_and_plan_refuse_it_before_a_rank_starts(
    file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    layout = "tp2 seq fp32"
    for argv in (
        ["check", layout, "--model", file],
        ["train", f"model={file}", "steps=1", "batch=2", "--layout", layout],
        ["verify", "--model", file, "--layouts", layout],
        [
            "plan",
            "--model",
            file,
            "--cluster",
            "h100x2",
            "--explain",
            "tp2 seq bf16",
        ],
    ):
        assert main(argv) == 2, argv
        said = capsys.readouterr().err
        assert (
            "A trial of tp2 seq fails in blocks.0.attention.mix: RuntimeError"
            in said
        )
        assert "use no seq" in said
        assert "Traceback" not in said
    assert not Path("runs").exists() or not [
        *Path("runs").rglob("metrics.jsonl")
    ]


def test_a_plan_names_no_layout_that_the_model_refuses(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "plan",
        "--model",
        file,
        "--cluster",
        "h100x4",
        "--top",
        "50",
        "--json",
    ]
    assert main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    named = [
        each["layout"]
        for each in [*figures["layouts"], *figures["rules"]]
        if "layout" in each
    ]
    layouts = [Layout.parse(text) for text in named]
    assert layouts
    assert not any(layout.seq or layout.cp > 1 for layout in layouts)


@pytest.mark.parametrize(
    "what", ["attention", "convolution", "mean", "MLP", "LayerNorm"]
)
def test_what_is_refused_would_have_given_other_gradients_and_what_is_taken_does_not(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(with_mixer, MIXING.get(what) or TOKENWISE[what])
    monkeypatch.setattr(
        importlib.import_module("phalanx.verification.verify"),
        "refuse_mixing",
        _allow,
    )
    shape = make().shape
    assert shape is not None
    (verdict,) = verify(
        shape, [Layout.parse("tp2 seq fp64")], steps=1, make=make
    )
    assert verdict.passed == (what in TOKENWISE)


def _allow(model: Model, layout: Layout) -> None:
    """In place of the refusal."""

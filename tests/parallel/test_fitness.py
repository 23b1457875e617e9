"""What tp, a ring or flat weights would replace without a word is refused by name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from phalanx.cli.main import main
from phalanx.layout import Layout, LayoutError
from phalanx.models import Core, ExpertBlock
from phalanx.parallel import Model, build_model, refuse_unfit, start
from phalanx.parallel.block_parts import cut_blocks
from phalanx.parallel.fitness import misfits
from phalanx.verification import SHAPES, every_layout, verify

FILE = Path(__file__).parents[2] / "examples" / "stranger.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("stranger", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(
    change: Callable[[Any], Any] = lambda model: None, rules: str = ""
) -> Model:
    """The example's model after a change; `rules` stand before its own."""
    there = example()
    with torch.device("meta"):
        model = there.Stranger()
        change(model)
    there.RULES = rules + there.RULES
    described: Model = there.describe(model)
    return described


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)  # type: ignore[no-any-return]


class Adapted(nn.Linear):
    """A low-rank addition, as LoRA makes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.low = nn.Parameter(torch.empty(2, sizes[0]))


class Renamed(nn.Linear):
    """Nothing but another name: it computes what nn.Linear does."""


class Normalised(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(super().forward(tokens), dim=-1)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Transposed(nn.Module):
    """x @ weight with (in, out), as GPT-2's Conv1D."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(into, out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Smoothed(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            reduction="sum",
            label_smoothing=0.1,
        )


class Mean(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Everywhere(nn.Module):
    """No target is left out."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = targets.flatten().clamp(min=0)
        return F.cross_entropy(logits.flatten(0, -2), flat, reduction="sum")


class Squared(nn.Module):
    """The log of the partition function squared, beside the cross-entropy: PaLM's z-loss."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        entropy = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="sum"
        )
        return entropy + 1e-2 * logits.logsumexp(-1).square().sum()


class Window(Core):
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        near = positions.unsqueeze(-1) - positions.unsqueeze(-2) < 4
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = near.tril().unsqueeze(1)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )
        return y.transpose(1, 2)


class Capped(nn.Module):
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        y: Tensor = Core()(20 * (q / 20).tanh(), k, v, positions, documents)
        return y


def put(
    path: str, module: Callable[[Any], nn.Module]
) -> Callable[[Any], None]:
    """Replace the module there by what the function makes of it."""

    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(
            model.get_submodule(owner), name, module(model.get_submodule(path))
        )

    return change


def at(path: str, act: Callable[[Any], object]) -> Callable[[Any], None]:
    return lambda model: (act(model.get_submodule(path)), None)[1]


def forward_of_its_own(module: Any) -> None:
    module.forward = lambda x: 2 * F.linear(x, module.weight, module.bias)


OUT, UP, WORDS = "blocks.1.attention.out", "blocks.2.mlp.up", "embed.words"
SIZE = 32, 32
NO_HEADS = "blocks.1.attention.out.parametrizations.weight.* : embed heads\n"

# (change of the model, more rules, layout that must refuse it, what the message names)
REFUSED: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "a row's class has a forward": (
        put(OUT, lambda m: Scaled(*SIZE)),
        "",
        "tp2",
        f"{OUT} is a Scaled",
    ),
    "a column's class has a forward": (
        put(UP, lambda m: Scaled(32, 48)),
        "",
        "tp2",
        f"{UP} is a Scaled",
    ),
    "a class is called otherwise": (
        put(OUT, lambda m: Called(*SIZE)),
        "",
        "tp2",
        f"{OUT} is a Called",
    ),
    "a class has more parameters": (
        put(OUT, lambda m: Adapted(*SIZE)),
        f"{OUT}.low : - -\n",
        "tp4 seq",
        f"{OUT} has low",
    ),
    "a module has a forward": (
        at(OUT, forward_of_its_own),
        "",
        "tp2",
        f"{OUT} has a forward of its own",
    ),
    "a row has a forward hook": (
        at(OUT, lambda m: m.register_forward_hook(lambda m, a, y: 2 * y)),
        "",
        "tp2",
        f"{OUT} has hooks",
    ),
    "a row has a forward pre-hook": (
        at(OUT, lambda m: m.register_forward_pre_hook(lambda m, a: None)),
        "",
        "tp2",
        f"{OUT} has hooks",
    ),
    "a column has a backward hook": (
        at(UP, lambda m: m.register_full_backward_hook(lambda m, a, b: None)),
        "",
        "tp2",
        f"{UP} has hooks",
    ),
    "a lookup has a forward hook": (
        at(WORDS, lambda m: m.register_forward_hook(lambda m, a, y: 2 * y)),
        "",
        "tp2",
        f"{WORDS} has hooks",
    ),
    "a parametrization": (
        at(
            OUT,
            lambda m: parametrize.register_parametrization(
                m, "weight", Doubled()
            ),
        ),
        NO_HEADS,
        "tp2",
        f"{OUT}.parametrizations.weight",
    ),
    "a weight made by a hook": (
        at(
            OUT,
            lambda m: (
                m.register_parameter("weight_v", m.weight),
                m._parameters.pop("weight"),
            ),
        ),
        f"{OUT}.weight_v : embed heads\n",
        "dp2",
        f"the weight of {OUT} is computed",
    ),
    "a lookup's class has a forward": (
        put(WORDS, lambda m: Normalised(257, 32)),
        "",
        "tp2",
        f"{WORDS} is a Normalised",
    ),
    "max_norm": (
        put(WORDS, lambda m: nn.Embedding(257, 32, max_norm=1.0)),
        "",
        "",
        f"{WORDS} has max_norm=1.0",
    ),
    "scale_grad_by_freq": (
        put(WORDS, lambda m: nn.Embedding(257, 32, scale_grad_by_freq=True)),
        "",
        "accum:2",
        "scale_grad_by_freq",
    ),
    "sparse": (
        put(WORDS, lambda m: nn.Embedding(257, 32, sparse=True)),
        "",
        "dp2",
        f"{WORDS} has sparse",
    ),
    "max_norm of positions": (
        put("embed.places", lambda m: nn.Embedding(12, 32, max_norm=1.0)),
        "",
        "tp2",
        "embed.places has max_norm",
    ),
    "a product that is no Linear": (
        put("blocks.2.mlp.down", lambda m: Transposed(48, 32)),
        "blocks.2.mlp.down.weight : ffn embed\n",
        "tp2",
        "blocks.2.mlp.down is a Transposed",
    ),
    "a matrix of another name": (
        at(
            "blocks.2.mlp",
            lambda m: m.register_parameter(
                "gate", nn.Parameter(torch.empty(32, 48))
            ),
        ),
        "blocks.2.mlp.gate : embed ffn\n",
        "tp2",
        "blocks.2.mlp.gate is sharded by tp",
    ),
    "two dims cut": (
        lambda model: None,
        "blocks.3.mlp.up.weight : ffn heads\n",
        "tp2",
        "blocks.3.mlp.up.weight is sharded by tp in two",
    ),
    "label smoothing": (
        put("head.loss", lambda m: Smoothed()),
        "",
        "tp2",
        "head.loss is a Smoothed",
    ),
    "a mean": (
        put("head.loss", lambda m: Mean()),
        "",
        "tp2",
        "head.loss is a Mean",
    ),
    "ignored targets": (
        put("head.loss", lambda m: Everywhere()),
        "",
        "tp2",
        "head.loss is a Everywhere",
    ),
    "z-loss": (
        put("head.loss", lambda m: Squared()),
        "",
        "tp2",
        "head.loss is a Squared",
    ),
    "no loss there": (
        at("head", lambda m: delattr(m, "loss")),
        "",
        "tp2",
        "head has no child named 'loss'",
    ),
    "a loss with a hook": (
        at(
            "head.loss",
            lambda m: m.register_forward_hook(lambda m, a, y: 2 * y),
        ),
        "",
        "tp2",
        "it has hooks",
    ),
    "a window": (
        put("blocks.0.attention.core", lambda m: Window()),
        "",
        "cp2",
        "blocks.0.attention.core is a Window",
    ),
    "capped queries": (
        put("blocks.3.attention.core", lambda m: Capped()),
        "",
        "cp4:2x2",
        "core is a Capped",
    ),
    "torch's dropout": (
        at("blocks.0.mlp", lambda m: m.add_module("drop", nn.Dropout(0.1))),
        "",
        "dp2",
        "blocks.0.mlp.drop is a dropout of torch",
    ),
    "a hook on a weight's gradient": (
        at(UP, lambda m: m.weight.register_hook(lambda g: 2 * g)),
        "",
        "dp2",
        f"{UP}.weight has hooks",
    ),
    "a weight without a rule": (
        at(
            "head",
            lambda m: m.register_parameter(
                "more", nn.Parameter(torch.empty(3))
            ),
        ),
        "",
        "",
        "no rule names the parameter head.more",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_left_out_is_refused_by_name(what: str) -> None:
    change, rules, layout, said = REFUSED[what]
    with pytest.raises(LayoutError) as refused:
        refuse_unfit(changed(change, rules), Layout.parse(layout))
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


ONLY_WHERE_CUT = [
    what
    for what, (_, _, layout, _) in REFUSED.items()
    if layout.startswith(("tp", "cp"))
]


@pytest.mark.parametrize(
    "what",
    [
        w
        for w in ONLY_WHERE_CUT
        if w not in ("max_norm of positions", "no loss there")
    ],
)
def test_layouts_that_do_not_replace_it_take_it(what: str) -> None:
    change, rules, _, _ = REFUSED[what]
    for layout in ("", "dp2 zero3", "pp2 1f1b:2", "cp2:ulysses"):
        assert misfits(changed(change, rules), Layout.parse(layout)) == ()


def test_a_forward_set_on_a_linear_is_the_one_that_trains() -> None:
    def make() -> Model:
        return changed(at(OUT, forward_of_its_own))

    shape = make().shape
    assert shape is not None
    for verdict in verify(
        shape, Layout.parse_many("dp2 zero3; pp2 zb-h1:3"), make=make, steps=2
    ):
        assert verdict.passed, verdict


@pytest.mark.parametrize("name", SHAPES)
def test_the_built_in_models_are_taken_in_every_layout(name: str) -> None:
    model = build_model(replace(SHAPES[name], dropout=0.1))
    for layout in every_layout(SHAPES[name], 4, axes="dp cp tp"):
        assert misfits(model, layout) == ()


def test_a_class_that_only_has_another_name_is_taken() -> None:
    model = changed(put(OUT, lambda m: Renamed(*SIZE)))
    assert misfits(model, Layout.parse("tp2 cp2")) == ()


def test_weights_that_a_rule_keeps_whole_may_be_of_any_class() -> None:
    rules = "blocks.1.mlp.*.weight : - -\nblocks.1.mlp.*.bias : -\n"
    model = changed(put("blocks.1.mlp.up", lambda m: Scaled(32, 48)), rules)
    assert misfits(model, Layout.parse("tp2")) == ()


def padded(token: int) -> Callable[[], Model]:
    return lambda: changed(
        put(WORDS, lambda m: nn.Embedding(257, 32, padding_idx=token))
    )


@pytest.mark.parametrize("token", [0, 100, 256])
def test_a_padding_token_s_row_has_no_gradient_as_in_plain_torch(
    token: int,
) -> None:
    # The batches hold every token, so without `padding_idx` each row has a gradient.
    shape = padded(token)().shape
    assert shape is not None
    layouts = Layout.parse_many(
        "tp2; tp4 seq; dp2 tp2 zero3 accum:2; pp2 tp2 zb-h1:3"
    )
    for verdict in verify(shape, layouts, make=padded(token), steps=2):
        assert verdict.passed, verdict


def test_a_padding_token_s_row_starts_as_zeros_unless_the_model_draws_it() -> (
    None
):
    model = padded(7)()
    rows = start(model, "embed.words.weight", 0)
    assert not rows[7].any()
    assert rows.any(1).sum() == 256


SCALED = """
class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

"""


@pytest.mark.parametrize("verb", ["verify", "train"])
def test_the_commands_refuse_it_before_a_rank_starts(
    verb: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*args: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(
        sys.modules["phalanx.verification.verify"], "workers", none
    )
    monkeypatch.setattr("phalanx.comm.launch", none)
    text = FILE.read_text().replace(
        "class Attention(", f"{SCALED}class Attention("
    )
    text = text.replace("self.out = nn.Linear(", "self.out = Scaled(")
    file = tmp_path / "scaled.py"
    file.write_text(text)
    own = f"{file}:Stranger"
    argv = {
        "verify": ["verify", "--model", own, "--layouts", "dp2; tp2"],
        "train": [
            "train",
            f"model={own}",
            f"out={tmp_path / 'run'}",
            "--layout",
            "tp2",
        ],
    }[verb]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert (
        "blocks.0.attention.out is a Scaled: tp computes nn.Linear, without what it adds"
        in said
    )
    assert "Traceback" not in said


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).tril())


class Filled(Masked):
    def reset_buffers(self) -> None:
        self.mask.copy_(torch.ones(4, 4).tril())


def test_a_buffer_that_nobody_fills_is_refused() -> None:
    """It would be whatever the memory has in it: models are made on the meta device."""
    model = changed(
        lambda model: model.blocks[1].attention.add_module("masked", Masked())
    )
    (wrong,) = misfits(model, Layout())
    assert wrong.startswith(
        "blocks.1.attention.masked has the buffer mask but no method reset_buffers"
    )
    filled = changed(
        lambda model: model.blocks[1].attention.add_module("masked", Filled())
    )
    assert misfits(filled, Layout()) == ()


class _OwnExpertBlock(ExpertBlock):
    """Doubles what a block puts out: its parts would not know."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class _Wrapped(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        return self.block(x, positions=positions)


@pytest.mark.parametrize("kind", ["a subclass", "inside another module"])
def test_experts_of_a_class_that_does_not_say_where_tokens_leave_are_refused(
    kind: str,
) -> None:
    model = build_model(SHAPES["experts"])
    number, block = next(
        (n, piece)
        for n, (_, piece) in enumerate(model.pieces)
        if type(piece) is ExpertBlock
    )
    if kind == "a subclass":
        block.__class__ = _OwnExpertBlock
    else:
        pieces = list(model.pieces)
        pieces[number] = pieces[number][0], _Wrapped(block)
        model = replace(model, pieces=tuple(pieces))
    assert cut_blocks(model, Layout.parse("dp2")) is model
    with pytest.raises(
        LayoutError, match="which does not show where tokens leave it"
    ):
        cut_blocks(model, Layout.parse("ep2"))


def test_dropouts_of_every_block_are_refused_in_one_sentence() -> None:
    def dropping(model: Any) -> None:
        for block in model.blocks:
            block.mlp.add_module("drop", nn.Dropout(0.1))

    (wrong,) = misfits(changed(dropping, ""), Layout())
    assert "blocks.0.mlp.drop and 3 others are dropouts of torch" in wrong

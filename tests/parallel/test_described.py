"""Descriptions that compute something else than the class's own forward are refused, with the place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx.cli import main
from phalanx.layout import Layout, LayoutError
from phalanx.parallel import build_model, described_whole, load_model
from phalanx.verification import SHAPES, verify
from phalanx.verification.own_forward import OwnForward
from phalanx.verification.reference import Batch, Passed, Weights

FILE = Path(__file__).parents[2] / "examples" / "stranger.py"
NANOGPT = Path(__file__).parent / "nanogpt.py"
EMBED = "x = self.embed(tokens, positions)"
BLOCK = "x = block(x, positions=positions)"
HEAD = "return self.head(x, targets)"
LISTED = "for n, block in enumerate(model.blocks))"
FORWARD = "def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:"
COUNTED = f"{FORWARD}\n        positions = torch.arange(tokens.shape[1]).expand_as(tokens)"
WITH_DOCUMENTS = (
    COUNTED,
    "def forward(self, tokens, targets, positions, documents=None):",
)
Change = tuple[str, str]

WRONG: dict[str, tuple[Sequence[Change], str]] = {
    "a scaled embedding": (
        [(EMBED, f"{EMBED} * HIDDEN**0.5")],
        r"blocks\.0 gets an input in Stranger\.forward that differs from the output of the piece embed",
    ),
    "blocks listed in reverse": (
        [(LISTED, "for n, block in reversed([*enumerate(model.blocks)]))")],
        r"Stranger\.forward runs blocks\.0 where the list of pieces has blocks\.3",
    ),
    "a residual around a block": (
        [(BLOCK, f"x = x + {BLOCK.removeprefix('x = ')}")],
        r"blocks\.1 gets an input in Stranger\.forward that differs from the output of the piece blocks\.0",
    ),
    "a residual around all blocks": (
        [(EMBED, f"start = {EMBED}"), (BLOCK, BLOCK), (HEAD, "return self.head(x + start, targets)")],
        r"head gets an input in Stranger\.forward that differs from the output of the piece blocks\.3",
    ),
    "a block that is left out": (
        [("for block in self.blocks:", "for block in self.blocks[1:]:")],
        r"blocks\.1 gets an input .* differs from the output of the piece blocks\.0",
    ),
    "a block that runs twice": (
        [(HEAD, "return self.head(self.blocks[0](x, positions=positions), targets)")],
        r"runs blocks\.0 where the list of pieces has head",
    ),
    "documents that only the pieces see": (
        [WITH_DOCUMENTS],
        r"blocks\.0 has a different output in Stranger\.forward than as a piece .* other arguments",
    ),
    "a mean over all targets": (
        [(HEAD, f"{HEAD} / targets.numel()")],
        "which is neither this sum nor its mean",
    ),
    "a gradient that stops": (
        [(HEAD, "return self.head(x.detach() + 0 * x, targets)")],
        r"the gradient of blocks\.3\.mlp\.down\.bias differs between",
    ),
    "a parameter in no piece": (
        [("self.head = Head()", "self.head = Head()\n        self.scale = nn.Parameter(torch.ones(()))")],
        "the parameter scale of Stranger is in no piece",
    ),
    "an argument that no batch has": (
        [(FORWARD, "def forward(self, tokens, targets, mask):")],
        r"Stranger\.forward needs mask, which no batch has",
    ),
    "a forward that raises": (
        [(HEAD, "return self.head.output(tokens)")],
        r"Stranger\.forward cannot be run in head\.output: RuntimeError",
    ),
    "a forward that returns nothing": (
        [(HEAD, "self.head(x, targets)")],
        r"returns a NoneType, neither a loss nor logits",
    ),
}  # fmt: skip


def changed(
    tmp_path: Path, changes: Sequence[Change], file: Path = FILE
) -> str:
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
        if old == EMBED and "start = " in new:
            text = text.replace(new, f"{new}\n        x = start")
    path = tmp_path / "own.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("what", WRONG)
def test_a_description_that_computes_something_else_is_refused_with_the_place(
    what: str, tmp_path: Path
) -> None:
    changes, place = WRONG[what]
    model = load_model(f"{changed(tmp_path, changes)}:Stranger")
    with pytest.raises(LayoutError, match=place):
        described_whole(model)


RIGHT: dict[str, tuple[Sequence[Change], bool]] = {
    "a sum": ([], False),
    "a mean over the valid tokens": ([(HEAD, f"{HEAD} / (targets != -100).sum()")], True),
    "logits": ([(HEAD, "return self.head.output(self.head.norm(x))")], False),
    "a table with the loss": ([(HEAD, "return {'loss': self.head(x, targets), 'x': x}")], False),
    "documents": ([WITH_DOCUMENTS, (BLOCK, f"{BLOCK[:-1]}, documents=documents)")], False),
    "a first argument of any name": (
        [(COUNTED, COUNTED.replace("tokens", "idx")), ("self.embed(tokens,", "self.embed(idx,")], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_a_forward_may_return_a_sum_a_mean_or_logits(
    what: str, tmp_path: Path
) -> None:
    changes, mean = RIGHT[what]
    whole = described_whole(
        load_model(f"{changed(tmp_path, changes)}:Stranger")
    )
    assert whole is not None
    assert whole.mean == mean
    assert whole.name == "Stranger.forward"


def test_the_loss_of_a_mean_is_the_sum_over_the_tokens_that_count(
    tmp_path: Path,
) -> None:
    logits = torch.randn(
        2,
        3,
        5,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    targets = torch.tensor([[1, 2, -100], [4, -100, -100]])
    by_hand = 0.0
    for row, time in ((0, 0), (0, 1), (1, 0)):
        scores = logits[row, time]
        by_hand += float(scores.exp().sum().log() - scores[targets[row, time]])
    changes = [(HEAD, f"{HEAD} / (targets != -100).sum()")]
    whole = described_whole(
        load_model(f"{changed(tmp_path, changes)}:Stranger")
    )
    assert whole is not None
    module: torch.nn.Module = whole.module
    module.forward = lambda **given: torch.nn.functional.cross_entropy(  # type: ignore[method-assign]
        logits.flatten(0, 1), given["targets"].flatten()
    )
    batch = {
        "tokens": torch.zeros(2, 3, dtype=torch.int64),
        "targets": targets,
    }
    assert float(whole.loss(batch)) == pytest.approx(by_hand, rel=1e-14)
    nothing = {**batch, "targets": torch.full_like(targets, -100)}
    assert float(whole.loss(nothing).detach()) == 0.0  # and not 0 / 0


def test_a_class_without_a_forward_is_what_its_pieces_compute(
    tmp_path: Path,
) -> None:
    file = changed(tmp_path, [(FORWARD, "def other(self, tokens, targets):")])
    assert described_whole(load_model(f"{file}:Stranger")) is None
    assert described_whole(build_model(SHAPES["gqa"])) is None


@pytest.mark.parametrize("forward", [True, False])
def test_a_loss_that_is_no_sum_is_refused(
    forward: bool, tmp_path: Path
) -> None:
    changes = [('reduction="sum"', 'reduction="mean"')]
    changes += (
        [] if forward else [(FORWARD, "def other(self, tokens, targets):")]
    )
    model = load_model(f"{changed(tmp_path, changes)}:Stranger")
    with pytest.raises(
        LayoutError,
        match=r"the loss of head is .* it is not a sum over the tokens",
    ):
        described_whole(model)


def test_the_commands_refuse_it_before_a_rank_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes, _ = WRONG["a scaled embedding"]
    name = f"{changed(tmp_path, changes)}:Stranger"
    monkeypatch.chdir(tmp_path)
    for argv in (
        ["verify", "--model", name, "--layouts", "dp2"],
        [
            "train",
            f"model={name}",
            "steps=1",
            "batch=4",
            "--layout",
            "dp2 fp32",
            "--backend",
            "threads",
        ],
    ):
        assert main(argv) == 2, argv
        said = capsys.readouterr().err
        assert (
            "blocks.0 gets an input in Stranger.forward that differs from the output of the piece embed"
            in said
        )
        assert "Traceback" not in said
    assert not [*Path("runs").rglob("*.safetensors")]
    assert not [
        line
        for path in Path("runs").rglob("metrics.jsonl")
        for line in path.open()
        if '"step"' in line
    ]


# ---- nanoGPT


def test_nanogpt_is_taken_with_its_own_forward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"{NANOGPT}:GPT"
    whole = described_whole(load_model(name))
    assert whole is not None
    assert whole.mean
    assert (
        main(
            [
                "verify",
                "--model",
                name,
                "--layouts",
                "dp2 zero3; tp2; pp2 1f1b:3",
            ]
        )
        == 0
    )
    assert (
        "3 of 3 layouts of nanogpt agree with GPT.forward on one"
        in capsys.readouterr().out
    )
    # It counts positions itself, and so cannot be the one process of packed documents.
    assert (
        main(["verify", "--model", name, "--layouts", "dp2", "--packed"]) == 0
    )
    assert (
        "1 of 1 layouts of nanogpt agree with its pieces on one"
        in capsys.readouterr().out
    )


def test_attention_outside_the_table_is_refused_under_seq(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["verify", "--model", f"{NANOGPT}:GPT", "--layouts", "tp2 seq"])
        == 2
    )
    assert (
        "h.0.attn (CausalSelfAttention) mixes tokens"
        in capsys.readouterr().err
    )


def test_a_sum_that_nanogpt_forgets_is_named(tmp_path: Path) -> None:
    changes = [("x = tok_emb + pos_emb", "x = tok_emb")]
    with pytest.raises(
        LayoutError,
        match=r"h\.0 gets an input in GPT\.forward that differs from the output of the piece embed",
    ):
        described_whole(
            load_model(f"{changed(tmp_path, changes, NANOGPT)}:GPT")
        )


def test_the_one_process_is_the_forward_of_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward that changes once it has been compared differs from every layout."""
    make = partial(load_model, f"{FILE}:Stranger")
    shape, layout = make().shape, Layout.parse("dp2 fp64")
    assert shape is not None
    plain = OwnForward.__call__

    def doubled(self: OwnForward, weights: Weights, batch: Batch) -> Passed:
        passed = plain(self, weights, batch)
        passed.loss = 2 * passed.loss
        return passed

    (right,) = verify(shape, [layout], make=make, steps=1)
    assert right.passed
    assert right.against == "Stranger.forward"
    monkeypatch.setattr(OwnForward, "__call__", doubled)
    (wrong,) = verify(shape, [layout], make=make, steps=1)
    assert "the loss is" in wrong.first_difference

"""A loop of the user's own equals its plain PyTorch script, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_loops as loops
import pytest
import torch
from own_loops import CLIP, OPTIMIZERS, Trained, plain_loop, run_loop
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.api import own_loop
from phalanx.comm import AloneWorld, RankFailed, World, launch
from phalanx.generate import GenerateError, Sampling
from phalanx.layout import Layout, LayoutError
from phalanx.layout.recipe import module_recipe
from phalanx.models import Decoder

LAYOUTS = (
    "", "dp2", "dp2 zero3", "dp2x2 zero3", "accum:2", "pp2 1f1b:2", "tp2", "dp2 zero1 recompute:all",
)  # fmt: skip


def _close(mine: Trained, plain: Trained) -> None:
    for name in ("losses", "norms", "right", "last"):
        wanted = pytest.approx(getattr(plain, name), rel=1e-10)
        assert getattr(mine, name) == wanted, name
    assert [*mine.weights] == [*plain.weights]
    for name, weight in plain.weights.items():
        torch.testing.assert_close(
            mine.weights[name], weight, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_equals_its_plain_script_in_every_layout(layout: str) -> None:
    """A loss with a weight for each token and two metrics, parameter groups, a schedule, clipping."""
    ranks = Layout.parse(layout).ranks
    plain = plain_loop("AdamW", CLIP)
    given = layout, "AdamW", CLIP
    for mine in launch(
        run_loop, ranks, *given, backend="threads", timeout=30.0
    ):
        _close(mine, plain)


def test_ranks_that_are_processes_agree_with_the_plain_script() -> None:
    plain = plain_loop("AdamW", CLIP)
    given = "pp2 zero1 1f1b:2", "AdamW", CLIP
    for mine in launch(run_loop, 2, *given, backend="gloo", timeout=60.0):
        _close(mine, plain)


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name != "AdamW"]
)
def test_elementwise_optimizers_of_torch_are_taken_by_their_class(
    name: str,
) -> None:
    plain = plain_loop(name, 0.0)
    given = "dp2 zero3", name, 0.0
    for mine in launch(run_loop, 2, *given, backend="threads", timeout=30.0):
        _close(mine, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_one_rank_weights_are_those_of_the_plain_script_bit_for_bit(
    name: str,
) -> None:
    mine, plain = (
        run_loop(AloneWorld("cpu"), "", name, 0.0),
        plain_loop(name, 0.0),
    )
    for key, weight in plain.weights.items():
        assert mine.weights[key].equal(weight), key


class Guesser(nn.Module):
    """A module that nobody described; it returns its logits and their mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(self.words(idx)) * self.scale
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _guesser() -> Guesser:
    model = Guesser().double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.words.weight.copy_(torch.randn(11, 6, generator=draw))
    return model


def _guesses() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    pairs = torch.randint(11, (3, 2, 6, 4), generator=draw)
    pairs[1, 1, 0, :2] = -100  # targets that count nothing
    return [(each[0], each[1]) for each in pairs]


def _guessed(
    world: World, layout: str
) -> tuple[list[float], dict[str, Tensor]]:
    model = _guesser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = phalanx.prepare(model, optimizer, layout, world=world)
    losses = [run.step(batch).loss for batch in run.shard(_guesses())]
    return losses, run.state_dict()


@pytest.mark.parametrize("layout", ["", "dp2", "dp2 zero3", "accum:3"])
def test_a_module_that_nobody_described_is_one_piece_with_its_own_loss(
    layout: str,
) -> None:
    model, losses = _guesser(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for idx, targets in _guesses():
        loss = model(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ranks = Layout.parse(layout).ranks
    for mine, weights in launch(_guessed, ranks, layout, backend="threads"):
        assert mine == pytest.approx(losses, rel=1e-10)
        fresh = _guesser()
        fresh.load_state_dict(weights)
        torch.testing.assert_close(fresh.out.weight, model.out.weight)


def test_a_fused_optimizer_divides_clipped_gradients_itself() -> None:
    model, mine = _guesser(), _guesser()
    optimizer, fused = (
        torch.optim.AdamW(each.parameters(), lr=0.1, fused=True)
        for each in (model, mine)
    )
    run = phalanx.prepare(mine, fused, "", world=AloneWorld("cpu"), clip=0.05)
    for idx, targets in _guesses():
        optimizer.zero_grad()
        model(idx, targets)[1].backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
    for batch in run.shard(_guesses()):
        run.step(batch)
    weights = run.state_dict()
    # The kernel divides by the factor's reciprocal, which has 32 bits.
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            weights[name], weight.detach(), rtol=1e-6, atol=1e-8
        )


# ---- several runs


def _two_models(
    world: World, layout: str
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Two runs of one world, whose steps alternate."""
    runs, losses = [], ([], [])
    for lr in (0.5, 0.25):
        model = _guesser()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        runs.append(phalanx.prepare(model, optimizer, layout, world=world))
    for batches in zip(*(run.shard(_guesses()) for run in runs), strict=True):
        for run, batch, own in zip(runs, batches, losses, strict=True):
            own.append(run.step(batch).loss)
    states = [run.state_dict() for run in runs]
    return list(zip(losses, states, strict=True))


@pytest.mark.parametrize("layout", ["dp2 zero3", "auto"])
def test_two_runs_of_one_world_are_each_their_plain_script(
    layout: str,
) -> None:
    """As a student and its teacher, or one cell of a notebook that is run twice."""
    for found in launch(
        _two_models, 2, layout, backend="threads", timeout=20.0
    ):
        for lr, (losses, weights) in zip((0.5, 0.25), found, strict=True):
            model = _guesser()
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            wanted = []
            for idx, targets in _guesses():
                loss = model(idx, targets)[1]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                wanted.append(loss.item())
            assert losses == pytest.approx(wanted, rel=1e-10)
            plain = model.state_dict()["words.weight"]
            torch.testing.assert_close(weights["words.weight"], plain)


def test_a_step_that_was_interrupted_is_followed_by_no_other(
    tmp_path: Path,
) -> None:
    """Its microbatches are in the gradient buffers: another step would add to them."""
    asked = []

    def interrupted(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        asked.append(len(logits))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return logits.sum()

    run = _prepared(
        AloneWorld("cpu"),
        layout="accum:2",
        loss=interrupted,
        metrics=[],
        verify=False,
    )
    batch = loops.batches()[0]
    before = loops.tiny().state_dict()
    with pytest.raises(KeyboardInterrupt):
        run.step(batch)
    text = "step 1 ended in a KeyboardInterrupt.*Call prepare again"
    with pytest.raises(ValueError, match=text):
        run.step(batch)
    with pytest.raises(ValueError, match=text):
        run.save(tmp_path)
    assert not list(tmp_path.iterdir())
    for name, weight in run.state_dict().items():
        assert weight.equal(before[name]), name


# ---- checkpoints


def _saved(
    world: World, layout: str, folder: str, kind: str, first: int, last: int
) -> Trained:
    """The steps from `first` to `last`, after what the folder holds."""
    model = loops.tiny()
    optimizer = loops.optimizer_of(kind, model)
    scheduler = loops.scheduler_of(optimizer)
    run = phalanx.prepare(
        model, optimizer, layout, loss=loops.weighted_loss, count=loops.count_weights,
        metrics=["right", "weight"], world=world,
    )  # fmt: skip
    state = run.load(folder)
    assert (state is None) == (first == 0)
    assert run.steps == first
    if state:
        scheduler.load_state_dict(state["scheduler"])
    losses = []
    for batch in run.shard(loops.batches()[first:last]):
        losses.append(run.step(batch).loss)
        scheduler.step()
    run.save(folder, {"scheduler": scheduler.state_dict()})
    return Trained(losses, [], [], 0.0, run.state_dict())


# SGD keeps a momentum, and counts no updates.
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_loop_continues_in_another_layout_with_its_schedule(
    tmp_path: Path, kind: str
) -> None:
    plain, folder = plain_loop(kind, 0.0), str(tmp_path)
    launch(_saved, 2, "dp2 zero3", folder, kind, 0, 2, backend="threads")
    for mine in launch(
        _saved, 2, "pp2 1f1b:2", folder, kind, 2, 3, backend="threads"
    ):
        assert mine.losses == pytest.approx(plain.losses[2:], rel=1e-10)
        for name, weight in plain.weights.items():
            torch.testing.assert_close(
                mine.weights[name], weight, rtol=1e-10, atol=1e-13
            )


# ---- refusals


def _prepared(world: World, **changes: Any) -> Any:
    model = loops.tiny()
    terms: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": loops.weighted_loss,
        "metrics": ["right", "weight"],
        "world": world,
    }
    return phalanx.prepare(model, **terms | changes)


def _mean_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def test_a_loss_that_is_a_mean_is_refused_in_its_first_step() -> None:
    run = _prepared(AloneWorld("cpu"), loss=_mean_loss, metrics=[])
    with pytest.raises(
        LayoutError, match=r"no sum over rows.*reduction='sum'"
    ):
        run.step(loops.batches()[0])


def test_metrics_that_ranks_do_not_expect_are_refused() -> None:
    run = _prepared(AloneWorld("cpu"), metrics=["right"])
    with pytest.raises(
        LayoutError, match=r"\['right', 'weight'\].*\['right'\]"
    ):
        run.step(loops.batches()[0])


def _chosen(world: World) -> str:
    model = loops.tiny()
    optimizer = loops.optimizer_of("SGD", model)
    run = phalanx.prepare(
        model, optimizer, "auto", loss=loops.weighted_loss, count=loops.count_weights,
        metrics=["right", "weight"], world=world,
    )  # fmt: skip
    return str(run.layout)


def test_auto_is_dp_where_the_state_fits() -> None:
    assert launch(_chosen, 2, backend="threads") == ["dp2 fp64"] * 2


@pytest.mark.parametrize(
    ("billions", "layout"),
    # Bytes of an element in float32 with Adam: weight 4, gradient 4, moments 8; half of 80 GB is 40 GB.
    [(1, "dp8"), (3, "dp8 zero1"), (6, "dp8 zero2"), (20, "dp8 zero3")],
)
def test_auto_shards_what_does_not_fit_in_half_the_memory(
    billions: int, layout: str
) -> None:
    assert str(module_recipe(billions * 10**9, 8, 80e9, "fp32")) == layout


def test_auto_cuts_a_batch_into_microbatches_that_fit() -> None:
    # 4 ranks have 16 rows each of 3 GB, and 20 GB beside half of the memory
    made = module_recipe(10**9, 4, 40e9, "fp32", rows=64, kept=3e9)
    assert str(made) == "dp4 accum:3"
    # no more microbatches than rows
    made = module_recipe(10**9, 4, 40e9, "fp32", rows=8, kept=90e9)
    assert str(made) == "dp4 accum:2"


class Square(nn.Module):
    """A block that keeps its input and the input of its square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x * self.weight).pow(2)
        return y


def _chosen_with_example(world: World) -> str:
    model = nn.Sequential(Square(), Square())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(12, 1000, dtype=torch.float64)
    run = phalanx.prepare(
        model,
        optimizer,
        "auto",
        loss=lambda output, batch: output.sum(),
        example=rows,
        world=world,
    )
    return str(run.layout)


def test_auto_counts_what_a_row_of_the_example_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A row keeps four tensors of 8,000 bytes. Each of 2 ranks has 6 rows, 192 kB, and 80 kB for them.
    monkeypatch.setattr(own_loop, "available_memory", lambda: 320e3)
    layouts = launch(_chosen_with_example, 2, backend="threads")
    assert layouts == ["dp2 accum:3 fp64"] * 2


def _asked(world: World) -> str:
    layout = "auto" if world.rank else "dp2"
    model = loops.tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = phalanx.prepare(
        model,
        optimizer,
        layout,
        loss=loops.weighted_loss,
        metrics=["right", "weight"],
        world=world,
    )
    return str(run.layout)


def test_ranks_that_ask_for_other_layouts_end_with_both() -> None:
    with pytest.raises(
        RankFailed, match="layout: rank 1 has auto, rank 0 has dp2"
    ):
        launch(_asked, 2, backend="threads", timeout=30.0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout": "dp2"}, "torchrun --nproc-per-node 2"),
        ({"layout": "recompute:fit"}, "recompute:all"),
        ({"loss": None}, "metrics need a loss function"),
        ({"layout": loops.weighted_loss}, "not a function. .*loss=my_loss"),
        ({"loss": "mse"}, r"a function loss\(output, batch\), not 'mse'"),
        ({"metrics": "right"}, r"metrics=\['right'\]"),
    ],
)
def test_arguments_that_cannot_be_taken_are_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        _prepared(AloneWorld("cpu"), **changes)


def test_an_optimizer_of_whole_matrices_is_refused_with_the_way_out() -> None:
    world, weights = AloneWorld("cpu"), [nn.Parameter(torch.ones(2, 2))]
    refused: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.Muon(weights), "optimizer.name = muon"),
        (torch.optim.LBFGS(weights), "several times"),
        (torch.optim.NAdam(weights), "RAdam"),
        (_Ours(weights), "elementwise = True"),
        (torch.optim.SGD(weights), "not the model's"),
    ]
    for optimizer, text in refused:
        with pytest.raises(LayoutError, match=text):
            _prepared(world, optimizer=optimizer)


class _Ours(torch.optim.Optimizer):
    """Gradient descent by signs, as a user writes it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * weight.grad.sign()


class _OursByElements(_Ours):
    elementwise = True


def test_an_optimizer_of_ones_own_is_taken_if_it_says_that_it_is_elementwise() -> (
    None
):
    model = loops.tiny()
    before = model.embed.words.weight.detach().clone()
    run = phalanx.prepare(
        model,
        _OursByElements(model.parameters(), lr=0.25),
        world=AloneWorld("cpu"),
    )
    run.step(
        {name: loops.batches()[0][name] for name in ("tokens", "targets")}
    )
    moved = (run.state_dict()["embed.words.weight"] - before).abs()
    assert moved.max().item() == pytest.approx(0.25)
    assert moved[moved > 1e-9].min().item() == pytest.approx(0.25)


def test_a_weight_that_no_optimizer_trains_is_named() -> None:
    model = loops.tiny()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with pytest.raises(
        LayoutError, match=r"embed.words.weight .*requires_grad_"
    ):
        phalanx.prepare(model, optimizer, world=AloneWorld("cpu"))


def _shuffled(world: World) -> None:
    made = loops.batches()[world.rank :]
    run = _prepared(world, layout="dp2")
    next(run.shard(made))


def test_a_loader_that_shuffles_otherwise_on_another_rank_is_noticed() -> None:
    with pytest.raises(
        RankFailed, match=r"first batch of rank 1.*manual_seed"
    ):
        launch(_shuffled, 2, backend="threads", timeout=20.0)


def test_batches_that_give_a_rank_no_row_are_refused() -> None:
    run = _prepared(AloneWorld("cpu"), layout="accum:4")
    short = {name: x[:3] for name, x in loops.batches()[0].items()}
    with pytest.raises(ValueError, match=r"3 rows.*drop_last"):
        next(run.shard([short]))
    with pytest.raises(ValueError, match=r"3 rows.*drop_last"):
        run.step(short)


def test_a_batch_that_was_unpacked_into_its_names_is_refused() -> None:
    run = _prepared(AloneWorld("cpu"))
    names: Any = tuple(loops.batches()[0])
    text = r"the names tokens, targets.*for batch in run.shard"
    with pytest.raises(ValueError, match=text):
        run.step(names)


def test_a_class_in_the_place_of_its_module_is_refused() -> None:
    kind: Any = Guesser
    optimizer = torch.optim.SGD(_guesser().parameters(), lr=0.1)
    with pytest.raises(LayoutError, match="class Guesser: pass an instance"):
        phalanx.prepare(kind, optimizer, world=AloneWorld("cpu"))


def test_statistics_of_a_batch_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LayoutError, match=r"1 is a BatchNorm1d.*GroupNorm"):
        phalanx.prepare(model, optimizer, world=AloneWorld("cpu"))


def test_no_stage_is_cut_from_a_module_that_is_one_piece() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    terms: dict[str, Any] = {"loss": F.mse_loss, "backend": "threads"}
    for layout, text in (("pp2 1f1b:2", "one piece"), ("tp2", "how to shard")):
        with pytest.raises(RankFailed, match=text):
            launch(
                _whole, 2, model, optimizer, layout, backend=terms["backend"]
            )


def _whole(
    world: World, model: nn.Module, optimizer: Any, layout: str
) -> None:
    phalanx.prepare(model, optimizer, layout, world=world)


# ---- the decoder's head


def _own_losses(logits: Tensor, batch: Any) -> Tensor:
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
    )
    return losses.square().sum()


def _squared_by_hand(decoder: Decoder, batch: Any) -> Tensor:
    inputs, targets = batch
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    x = decoder.embed(inputs, positions)
    shared = {
        name: make({"positions": positions}, x.dtype)
        for name, make in decoder.derived.items()
    }
    for block in decoder.layers:
        x = block(x, positions=positions, **shared)
    logits = decoder.head.logits(x)
    return _own_losses(logits, {"targets": targets}) / targets.numel()


def test_a_loss_of_ones_own_gets_the_logits_of_a_decoder_whole() -> None:
    """The decoder's own loss makes them by chunks, in the backward."""
    ids = torch.arange(2 * 7).view(2, 7) % 19
    batch = ids[:, :-1], ids[:, 1:]
    decoder = _decoder()
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
    run = phalanx.prepare(
        decoder, optimizer, "", loss=_own_losses, world=AloneWorld("cpu")
    )
    (given,) = run.shard([batch])
    loss = run.step(given).loss
    with torch.no_grad():
        by_hand = float(_squared_by_hand(_decoder(), batch))
    assert loss == pytest.approx(by_hand, rel=1e-5)


# ---- text


def _decoder() -> Decoder:
    sizes: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 2, "ffn": 24}
    decoder = Decoder(vocab=19, **sizes)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw))
    return decoder


def _continued(
    world: World, layout: str
) -> tuple[list[int], dict[str, Tensor]]:
    decoder = _decoder()
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
    run = phalanx.prepare(decoder, optimizer, layout, world=world)
    ids = torch.arange(2 * 7).view(2, 7) % 19
    for batch in run.shard([(ids[:, :-1], ids[:, 1:])]):
        run.step(batch)
    greedy = Sampling(temperature=0)
    return run.generate([3, 1, 4], 5, greedy), run.state_dict()


def test_a_decoder_in_a_loop_continues_tokens_as_its_own_forward_does() -> (
    None
):
    for tokens, weights in launch(
        _continued, 2, "tp2 zero1", backend="threads"
    ):
        decoder, ids = _decoder(), [3, 1, 4]
        decoder.load_state_dict(weights)
        for _ in range(5):
            given = torch.tensor([ids])
            positions = torch.arange(len(ids)).unsqueeze(0)
            x = decoder.embed(given, positions)
            shared = {
                name: make({"positions": positions}, x.dtype)
                for name, make in decoder.derived.items()
            }
            for block in decoder.layers:
                x = block(x, positions=positions, **shared)
            ids.append(int(decoder.head.logits(x)[0, -1].argmax()))
        assert tokens == ids[3:]


def test_a_module_without_a_cache_reads_the_whole_text_again() -> None:
    greedy = Sampling(temperature=0)
    run = _prepared(AloneWorld("cpu"), loss=None, metrics=[])
    found = run.generate([1, 2], 5, greedy)
    model, tokens = loops.tiny(), torch.tensor([[1, 2]])
    for _ in range(5):
        following = model.logits(tokens)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, following), 1)
    assert found == tokens[0, 2:].tolist()


def test_a_module_of_unknown_vocabulary_says_how_it_is_sampled() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = phalanx.prepare(model, optimizer, world=AloneWorld("cpu"))
    with pytest.raises(GenerateError, match="state_dict"):
        run.generate([1, 2])


# ---- the example


def _preferring_by_hand(steps: int) -> dict[str, Tensor]:
    """The model of examples/dpo.py by a script in plain torch, with the loss as its paper has it."""
    import dpo

    torch.manual_seed(0)
    model = dpo.Pairs(dpo.Language(32, 2))
    start = {name: x.clone() for name, x in model.state_dict().items()}
    reference = dpo.Pairs(dpo.Language(32, 2))
    reference.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def logp(which: Any, batch: dict[str, Tensor], answer: int) -> Tensor:
        spoken = which(batch["pairs"])[:, answer].log_softmax(-1)
        targets = batch["answers"][:, answer]
        mine = spoken.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (mine * (targets != -100)).sum(-1)

    for batch in dpo.pairs(steps):
        ratios = []
        for answer in (0, 1):
            with torch.no_grad():
                known = logp(reference, batch, answer)
            ratios.append(logp(model, batch, answer) - known)
        loss = -torch.sigmoid(0.5 * (ratios[0] - ratios[1])).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def _denoising_by_hand(steps: int) -> dict[str, Tensor]:
    """The model of examples/diffusion.py by a script in plain torch."""
    import diffusion

    torch.manual_seed(0)
    model = diffusion.Denoiser(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in diffusion.noised(steps):
        away = model(batch["points"], batch["times"]) - batch["noise"]
        optimizer.zero_grad()
        away.square().sum(-1).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights: dict[str, Tensor] = model.state_dict()
    return weights


@pytest.mark.parametrize("layout", ["", "dp2 zero1", "pp2 1f1b:2"])
@pytest.mark.parametrize(
    ("name", "by_hand"),
    [("dpo", _preferring_by_hand), ("diffusion", _denoising_by_hand)],
)
def test_an_example_is_its_plain_script(
    name: str, by_hand: Callable[[int], dict[str, Tensor]], layout: str
) -> None:
    with loops.in_float64():
        wanted = by_hand(4)
    ranks = Layout.parse(layout).ranks
    given = name, layout, 4
    for weights in launch(
        loops.example, ranks, *given, backend="gloo", timeout=60.0
    ):
        for key, weight in wanted.items():
            torch.testing.assert_close(
                weights[key], weight, rtol=1e-8, atol=1e-9
            )
    text = Path(loops.EXAMPLES, f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80


def _distilled_by_hand(steps: int) -> dict[str, Tensor]:
    """The student of examples/distill.py, trained by a script in plain torch."""
    import distill

    torch.manual_seed(0)
    teacher = distill.Language(64, 4)
    student = distill.Language(32, 2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for batch in distill.texts(steps):
        with torch.no_grad():
            theirs = (teacher(batch["tokens"]) / 2.0).softmax(-1)
        logits = student(batch["tokens"])
        mine = (logits / 2.0).log_softmax(-1)
        soft = 4.0 * (theirs * (theirs.log() - mine)).sum(-1).mean()
        hard = F.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten()
        )
        optimizer.zero_grad()
        (0.8 * soft + 0.2 * hard).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return student.state_dict()


@pytest.mark.parametrize("layout", ["", "pp2 zero1 1f1b:2"])
def test_the_example_of_distillation_is_its_plain_script(layout: str) -> None:
    with loops.in_float64():
        wanted = _distilled_by_hand(4)
    ranks = Layout.parse(layout).ranks
    given = layout, 4
    for weights in launch(
        loops.distilled, ranks, *given, backend="gloo", timeout=60.0
    ):
        for name, weight in wanted.items():
            torch.testing.assert_close(
                weights[name], weight, rtol=1e-8, atol=1e-9
            )


def test_the_example_is_short() -> None:
    text = Path(loops.EXAMPLES, "distill.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80


def _light(world: World) -> float:
    """The loss of a batch whose weights are together less than one."""
    model = loops.tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = phalanx.prepare(
        model, optimizer, "dp2", loss=loops.weighted_loss, count=loops.count_weights,
        metrics=["right", "weight"], world=world,
    )  # fmt: skip
    batch = loops.batches()[0]
    light = {**batch, "weights": batch["weights"] * 1e-3}
    (own,) = run.shard([light])
    result = run.step(own)
    assert result.metrics["weight"] == pytest.approx(1.0)
    return result.loss


def test_a_count_below_one_divides_as_any_other() -> None:
    model, batch = loops.tiny(), loops.batches()[0]
    with torch.no_grad():
        total, _ = loops.weighted_loss(model.logits(batch["tokens"]), batch)
    wanted = pytest.approx(float(total / batch["weights"].sum()), rel=1e-10)
    assert launch(_light, 2, backend="threads", timeout=20.0) == [
        wanted,
        wanted,
    ]

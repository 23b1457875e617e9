"""Layouts give the gradients of one process, and the verifier that says so can say no."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from covered import covered, shared_out
from torch import Generator, Tensor

from phalanx.cli.main import main
from phalanx.comm import CommMisuse, RankFailed, World, regions
from phalanx.comm.launch import launch
from phalanx.layout import Layout, LayoutError, Shape, legal
from phalanx.models import delta
from phalanx.parallel import Model, build_model
from phalanx.parallel.local import LocalModel
from phalanx.verification import (
    SHAPES,
    batch_of,
    compare,
    covering,
    every_layout,
    verify,
)
from phalanx.verification.reference import Trace, TracedStep
from sampled import one_in
from seeded import FAULTS, Fault, catch, swapped

pytestmark = pytest.mark.long_tests


def failures(verdicts: object) -> list[str]:
    return [
        f"{v.layout}: {v.first_difference}" for v in verdicts if not v.passed
    ]  # type: ignore[attr-defined]


# of the others up to four: `make slow` has all layouts of eight
RANKS = {"gqa": 8, "mlp": 8}
# Shapes that differ only in what a block computes, so the default suite compares each
# layout with one of them. Five to seven ranks bring other sizes and no other choices.
DENSE = ("gqa", "gpt", "qwen", "odd", "gemma", "olmo")
SIZES = (1, 2, 3, 4, 8)
# The subset of a shape has parts, which workers can run beside each other.
COUNTS = dict.fromkeys(SHAPES, 4) | {"mlp": 2, "ahead": 6}
DEFAULT = {("mlp", 0), ("experts", 0), ("ahead", 0)}
CHOSEN = [
    pytest.param(
        name, part, marks=[pytest.mark.slow] * ((name, part) not in DEFAULT)
    )
    for name, parts in COUNTS.items()
    for part in range(parts)
]


@pytest.mark.parametrize("name", DENSE)
def test_layouts_shared_out_among_shapes_agree_with_one_process(
    name: str,
) -> None:
    """Every pair of choices is compared for one of the shapes."""
    layouts = shared_out(DENSE, SIZES)[name]
    assert len(layouts) > 8
    # Threads whose results are NaN until they are waited for, so that a missing wait shows. Two steps
    # show what an update leaves behind.
    assert failures(verify(SHAPES[name], layouts, steps=2)) == []


@pytest.mark.parametrize(("name", "part"), CHOSEN)
def test_layouts_that_cover_every_pair_of_choices_agree_with_one_process(
    name: str, part: int
) -> None:
    layouts = covered(name, RANKS.get(name, 4))
    assert len(layouts) > 60
    some = layouts[part :: COUNTS[name]]
    assert failures(verify(SHAPES[name], some, steps=2)) == []


def test_recomputation_to_fit_selective_and_offload_agree_in_combination() -> (
    None
):
    texts = """
        recompute:fit accum:3; pp2 1f1b:4 recompute:fit; dp2 zero3 recompute:fit accum:2;
        recompute:selective; tp2 seq recompute:selective; cp2 tp2 recompute:selective;
        pp2 zb-h1:3 recompute:selective; dp2 zero3 recompute:selective accum:3;
        offload:optimizer; dp2 zero1 offload:optimizer,weights accum:3;
        accum:3 offload:activations; dp2 zero3 offload:weights,activations accum:3;
        pp2 gpipe:3 recompute:all offload:activations; cp2:ulysses offload:weights recompute:sqrt;
        pp2 zb-h2:4 zero3 gather:micro offload:activations dp2; dp2 zero2 reduce:step accum:3;
        dp2 zero1 reduce:micro accum:3; dp2 zero3 prefetch:0; dp2 zero3 prefetch:3 accum:2;
        pp2 stages:1-3; pp2 stages:4-0 zero1 dp2; dp2 pp2 zero3 gather:step 1f1b:4
    """
    assert (
        failures(
            verify(SHAPES["gqa"], Layout.parse_many(" ".join(texts.split())))
        )
        == []
    )


def _with_frozen_weights(shape: Shape) -> Model:
    """A weight without its bias, a norm, a tied embedding."""
    model = build_model(shape)
    for name in (
        "embed.tokens.weight",
        "layers.0.attn.wq.weight",
        "layers.1.mlp_norm.weight",
    ):
        model.weights[name].requires_grad_(False)
    return model


TRAINED_IN_PART = """
    ; dp2 zero1 accum:3; dp2 tp2 seq zero3; dp2 pp2 zero2 1f1b:4; cp2 tp2 zero3 recompute:selective;
    tp4 seq; pp2 zb-h1:3; dp2x2 zero3 accum:2; dp2 zero3 offload:weights,optimizer
"""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gqa", 0),
        ("gpt", 1),
        pytest.param("gqa", 1, marks=pytest.mark.slow),
        pytest.param("gpt", 0, marks=pytest.mark.slow),
    ],
)
def test_adapters_and_frozen_weights_agree_with_one_process(
    name: str, part: int
) -> None:
    shape = SHAPES[name]
    layouts = Layout.parse_many(" ".join(TRAINED_IN_PART.split()))[part::2]
    adapted = replace(shape, lora_r=3)
    frozen = replace(shape, freeze=("embed", "layers.1"))
    make = partial(_with_frozen_weights, shape)
    found = [
        failures(verify(each, layouts, steps=2)) for each in (adapted, frozen)
    ]
    assert [*found, failures(verify(shape, layouts, steps=2, make=make))] == [
        [],
        [],
        [],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("packed", [False, True])
def test_experts_agree_in_every_pair_of_choices_of_eight_ranks(
    packed: bool, part: int
) -> None:
    """All choices that there are; and, packed and with Muon, those over which ranks share experts."""
    shape, optimizer = SHAPES["experts"], "muon" if packed else "adamw"
    every = every_layout(shape, 8, besides=True)
    some = tuple(x for x in every if x.ep in (2, 4, 8))
    layouts = covering(some if packed else every, 1)
    assert len(layouts) > 120
    assert {1, 2, 4, 8} - {x.ep for x in layouts} == ({1} if packed else set())
    found = verify(shape, layouts[part::4], packed=packed, optimizer=optimizer)
    assert failures(found) == []


def sharing(name: str, ranks: int) -> tuple[Layout, ...]:
    """Layouts whose experts are shared over tp, cp or both, beside ep, and in which every two choices
    that occur together still do."""
    shape = SHAPES[name]
    ways: list[tuple[str, ...]] = [("tp",), ("cp",), ("tp", "cp")]
    every = (
        replace(x, experts=way)
        for x in every_layout(shape, ranks, besides=True)
        for way in ways
    )
    return covering(tuple(x for x in every if not legal(x, shape)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name, part",
    [("experts", n) for n in range(4)] + [("latent", n) for n in range(4)],
)
def test_experts_agree_that_ranks_of_tp_and_cp_share(
    name: str, part: int, packed: bool
) -> None:
    layouts, optimizer = sharing(name, 8), "muon" if packed else "adamw"
    assert len(layouts) > 90
    some = layouts[part::4]
    found = verify(SHAPES[name], some, packed=packed, optimizer=optimizer)
    assert failures(found) == []


SHARED = """
    tp2 seq experts:tp accum:2; ep2 tp2 seq experts:tp zero3; cp2:ulysses tp2 seq experts:tp,cp zero1;
    ep2 cp2 experts:cp recompute:selective; tp2 cp2 experts:cp; pp2 tp2 seq experts:tp zb-h1:3 zero2
"""


@pytest.mark.parametrize("name", ["latent", "sinks"])
def test_experts_agree_that_other_axes_share(name: str) -> None:
    layouts = Layout.parse_many(" ".join(SHARED.split()))
    assert (
        failures(
            verify(SHAPES[name], layouts, steps=2, packed=name == "latent")
        )
        == []
    )


def test_experts_without_a_token_agree_over_ranks() -> None:
    """Five tokens of each rank choose among 16 experts, so that most have none."""
    shape = replace(
        SHAPES["experts"], experts=16, top_k=1, batch=8, sequence=5
    )
    layouts = Layout.parse_many(
        "ep8; ep3 dp2 zero3; ep4 tp2 seq; pp2 ep2 zb-h1:2"
    )
    assert failures(verify(shape, layouts, steps=1)) == []


def test_latents_and_groups_of_experts_agree_over_ranks() -> None:
    texts = "tp4 zero1; dp2 tp2 seq zero3; cp2 tp2 accum:2; pp2 cp2:ulysses zb-h1:2; ep2 tp2 seq"
    layouts = Layout.parse_many(
        f"{texts}; ep3 recompute:selective; pp2 ep2 zero2 1f1b:2"
    )
    assert failures(verify(SHAPES["latent"], layouts, steps=2)) == []


def test_delta_layers_with_documents_agree_over_ranks() -> None:
    """The state passes through runs of one to three tokens, in chunks of four."""
    texts = "tp4 seq zero1; cp2 tp2 accum:2; cp4:2x2; pp2 ep2 zero3 recompute:selective zb-h1:2"
    layouts = Layout.parse_many(f"{texts}; cp3; cp4:ulysses recompute:all")
    found = verify(SHAPES["delta"], layouts, steps=1, packed=True)
    assert failures(found) == []


def test_documents_are_numbered_once_for_all_delta_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in each of the three layers, nor in their recomputation."""
    numbered, complete = delta.numbered, LocalModel.complete
    calls, batches = list[int](), list[int]()

    def counted(documents: Tensor) -> Tensor:
        calls.append(len(documents))
        return numbered(documents)

    def completed(
        self: LocalModel, batch: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        batches.append(len(batch["tokens"]))
        return complete(self, batch)

    monkeypatch.setattr(delta, "numbered", counted)
    monkeypatch.setattr(LocalModel, "complete", completed)
    layouts = Layout.parse_many("cp2 accum:2 recompute:all")
    found = verify(SHAPES["delta"], layouts, steps=1, packed=True)
    assert failures(found) == []
    # The one process has the whole batch, and its layers number on their own.
    whole = max(calls)
    assert whole > max(batches)
    of_ranks = [rows for rows in calls if rows < whole]
    assert sorted(of_ranks) == sorted(batches)


@pytest.mark.slow
def test_delta_layers_with_an_odd_number_of_ulysses_ranks_agree() -> None:
    """Three ranks of Ulysses divide the two chunks of each of two ranks of a ring."""
    shape = replace(SHAPES["delta"], heads=6, kv_heads=3, sequence=25)
    layouts = Layout.parse_many("cp6:2x3; cp3:ulysses")
    assert failures(verify(shape, layouts, steps=1, packed=True)) == []


def test_sinks_biases_of_experts_and_losses_of_early_stages_agree_over_ranks() -> (
    None
):
    texts = "tp4 zero1; dp2 tp2 seq zero3; cp2 tp2 accum:2; pp2 cp2:ulysses zb-h1:2; ep2 tp2 seq"
    layouts = Layout.parse_many(
        f"{texts}; ep3 recompute:selective; pp2 ep2 zero2 1f1b:2"
    )
    assert (
        failures(verify(SHAPES["sinks"], layouts, steps=2, packed=True)) == []
    )


def test_a_loss_of_the_whole_batch_agrees_over_ranks() -> None:
    shape = replace(SHAPES["latent"], sequence_loss=0.0, batch_loss=0.3)
    layouts = Layout.parse_many(
        "dp2; cp2 tp2 seq; ep2 tp2 zero3; pp2 cp2:ulysses 1f1b:1"
    )
    assert failures(verify(shape, layouts, steps=1)) == []


def _drawn(shape: Shape) -> Model:
    def draw(name: str, weight: Tensor, generator: Generator) -> None:
        weight.normal_(0.0, 0.1, generator=generator)
        if name.endswith("router.bias"):
            weight.zero_()[-1] = 9.0

    return replace(build_model(shape), draw=draw)


@pytest.fixture
def nan_for_empty() -> Iterator[None]:
    """Memory that nobody has written is NaN, and of whole numbers the largest."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(7).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_for_empty")
@pytest.mark.parametrize("experts", [7, 16])
def test_no_row_that_nobody_has_written_is_used(experts: int) -> None:
    """Of 16 experts most have no token; of seven the last has all of them."""
    shape = replace(
        SHAPES["experts"], experts=experts, top_k=1, batch=9, sequence=5
    )
    layouts = Layout.parse_many(
        "ep3 dp2 zero3; ep4 tp2 seq; pp2 ep2 zb-h1:2; ep2 recompute:all"
    )
    make = (
        partial(_drawn, shape) if experts == 7 else partial(build_model, shape)
    )
    assert failures(verify(shape, layouts, steps=1, make=make)) == []


def test_all_tokens_to_one_expert_agree_over_ranks() -> None:
    """The choice of every token is the last expert of nine: all other ranks have none."""
    shape = replace(SHAPES["experts"], top_k=1, batch=9, sequence=5)
    layouts = Layout.parse_many(
        "ep8; ep2 tp2 seq; ep3 zero3; pp2 ep4 zb-h1:2; ep2 recompute:all"
    )
    assert (
        failures(verify(shape, layouts, steps=1, make=partial(_drawn, shape)))
        == []
    )


def test_a_forward_beside_a_backward_agrees_with_one_process() -> None:
    shape = replace(SHAPES["experts"], batch=10, freeze=("layers.1",))
    layouts = "ep2 pp2 dualpipe-v:5 zero2; ep2 tp2 seq accum:2 overlap recompute:selective"
    assert failures(verify(shape, Layout.parse_many(layouts), steps=1)) == []


@pytest.mark.parametrize("part", one_in(4, range(4)))
def test_packed_documents_agree_over_context_and_tensor_parallel_layouts(
    part: int,
) -> None:
    layouts = covering(every_layout(SHAPES["gqa"], 8, axes="dp cp tp"), 1)
    some = [x for x in layouts if x.cp > 1][part:30:4]
    assert len(some) > 6
    # One step, and the validation after it: what documents change is in each step alike.
    assert failures(verify(SHAPES["gqa"], some, packed=True, steps=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", range(4))
def test_every_legal_layout_up_to_eight_ranks_agrees(
    name: str, part: int
) -> None:
    assert (
        failures(verify(SHAPES[name], every_layout(SHAPES[name], 8)[part::4]))
        == []
    )


def test_thirty_layouts_of_four_gloo_processes_agree_in_one_world() -> None:
    every = [x for x in every_layout(SHAPES["gqa"], 4) if x.ranks == 4]
    layouts = covering(tuple(every), 30)[:30]
    assert len(layouts) == 30
    assert (
        failures(verify(SHAPES["gqa"], layouts, backend="gloo", steps=1)) == []
    )


# `make faults` has all of them.
@pytest.mark.parametrize(
    "row",
    one_in(3, [(f, dtype) for f in FAULTS for dtype in f.dtypes]),
    ids=lambda row: f"{row[0].name}-{row[1]}",
)
def test_a_seeded_fault_is_caught_and_named(row: tuple[Fault, str]) -> None:
    fault, dtype = row
    seen = catch(fault, dtype)
    assert seen.caught
    assert fault.names in seen.first_difference


IN_BOTH = {fault.name for fault in FAULTS if "bfloat16" in fault.dtypes}
OF_THE_SCALE = [
    f for f in FAULTS if f.dtypes == ("float16",) and f.name not in IN_BOTH
]


@pytest.mark.parametrize(
    "fault", one_in(3, OF_THE_SCALE), ids=lambda f: f.name
)
def test_a_fault_of_the_loss_scale_is_none_in_bfloat16(fault: Fault) -> None:
    """Which has no loss scale: what is caught in float16 is the scale and nothing beside it."""
    assert not catch(fault, "bfloat16").caught


def _unlisted(error: Exception) -> Fault:
    """A fault whose code raises an error as soon as the engine comes past it."""

    def wrong(*args: object) -> None:
        raise error

    row = next(each for each in FAULTS if each.name.startswith("row region"))
    return replace(
        row,
        name="unlisted",
        patch=lambda: swapped(regions, "reduce", wrong),
        names="",
    )


@pytest.mark.parametrize(
    "error",
    [
        NameError("name 'x' is not defined"),
        RuntimeError("shapes (3) and (4) do not match"),
    ],
)
def test_an_accident_in_a_seeded_fault_catches_nothing(
    error: Exception,
) -> None:
    seen = catch(_unlisted(error), "float64")
    assert not seen.caught
    assert not seen.named
    assert str(error) in seen.first_difference


def test_a_refusal_of_ours_catches_a_seeded_fault() -> None:
    seen = catch(
        _unlisted(CommMisuse("the parts of two ranks differ in size")),
        "float64",
    )
    assert seen.caught
    assert seen.first_difference.startswith(
        "CommMisuse: the parts of two ranks differ in size"
    )


def test_a_replacement_by_a_rank_that_is_a_thread_is_refused() -> None:
    """Ranks that each replaced the same name would leave a replacement in place for good."""

    def rank(world: World) -> None:
        with swapped(Fault, "__doc__", "replaced"):
            pass

    with pytest.raises(RankFailed, match="before the ranks start"):
        launch(rank, 2, backend="threads")


def test_every_layout_is_legal_and_listed_once() -> None:
    layouts = every_layout(SHAPES["gqa"], 4)
    assert len(set(map(str, layouts))) == len(layouts)
    assert all(not legal(x, SHAPES["gqa"]) for x in layouts)
    assert {x.ranks for x in layouts} == {1, 2, 3, 4}


def test_a_covering_subset_contains_every_pair_of_choices() -> None:
    layouts = every_layout(SHAPES["gqa"], 4, axes="dp tp")
    few = covering(layouts, 1)
    pairs = {(x.tp, x.zero, x.seq) for x in layouts}
    assert len(few) < len(layouts)
    assert {p[:2] for p in pairs} == {(x.tp, x.zero) for x in few}


@pytest.mark.parametrize(
    "name", [n for n, s in SHAPES.items() if s.kind == "decoder"]
)
@pytest.mark.parametrize("step", range(4))
def test_every_token_of_the_vocabulary_is_in_every_batch(
    name: str, step: int
) -> None:
    batch = batch_of(SHAPES[name], step)
    assert set(batch["tokens"].flatten().tolist()) == set(
        range(SHAPES[name].vocab)
    )
    # What is to be predicted is what comes next, where it counts.
    later, targets = batch["tokens"][:, 1:], batch["targets"][:, :-1]
    assert ((targets == later) | (targets == -100)).all()
    assert (targets == later).any()


def test_a_log_is_not_run_again(tmp_path: object) -> None:
    log = tmp_path / "log.jsonl"  # type: ignore[operator]
    told = {
        "layout": "dp2", "ranks": 2, "passed": False, "max_rel_error": 7.0, "first_difference": "x",
    }  # fmt: skip
    log.write_text(json.dumps(told) + "\n")
    verdicts = list(
        verify(SHAPES["mlp"], Layout.parse_many("dp2; tp2"), log=log)
    )
    assert [v.max_rel_error == 7.0 for v in verdicts] == [True, False]
    assert len(log.read_text().splitlines()) == 2


def test_a_true_gradient_of_zero_is_compared_on_the_scale_of_the_model() -> (
    None
):
    import torch

    def trace(noise: float) -> Trace:
        gradients = {"a": torch.tensor([1.0]), "b": torch.tensor([noise])}
        return Trace(
            {}, [TracedStep(1.0, 1.0, gradients, {"a": torch.ones(1)}, {})]
        )

    worst = max(
        d.error
        for d in compare(trace(1e-18), trace(-1e-18), lambda step: 0.01)
    )
    assert worst < 1e-10


def test_the_command_says_which_layouts_failed_and_exits_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "verify",
                "--model",
                "mlp",
                "--layouts",
                "dp2; dp2 tp2 zero3",
                "--json",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["failed"]) == (2, 0)
    assert set(said["layouts"][0]) >= {
        "layout",
        "ranks",
        "passed",
        "max_rel_error",
        "first_difference",
    }
    with next(
        each for each in FAULTS if each.name.startswith("row region")
    ).patch():
        assert main(["verify", "--layouts", "tp2"]) == 1
    assert "output of embed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nosuch"], "nosuch"),
        (["--layouts", "tp3"], "tp=3 does not divide heads=4"),
        (["--layouts", "tp2 sqe"], "sqe"),
        (["--dtype", "float8", "--layouts", "dp2"], "float8"),
        (["--backend", "pigeon", "--layouts", "dp2"], "pigeon"),
        (["--part", "5/4"], "5/4"),
        (["--ranks", "0"], "--ranks"),
        (["--model", "nofile.py:Thing"], "nofile.py"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_layout_that_does_not_fit_is_refused_before_ranks_start() -> None:
    layouts = Layout.parse_many("tp2 cp4:ulysses")
    with pytest.raises(LayoutError, match="ulysses=4 does not divide"):
        list(verify(SHAPES["gqa"], layouts))

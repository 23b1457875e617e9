"""Each quantity that `verify` compares: a mistake in it, and what is named first. Also what happens
when a layout raises, cannot fit, is not a number, or would not fit into memory."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from covered import covered
from torch import Tensor

import phalanx.verification
from phalanx.cli.main import main
from phalanx.comm import World
from phalanx.layout import Layout, Shape
from phalanx.layout.host import (
    available_memory,
    limited_memory,
    machine_memory,
)
from phalanx.models import Dropout
from phalanx.parallel import Model, Precision, build_model, local, model
from phalanx.parallel.tensor import _Installer
from phalanx.program import Op
from phalanx.training.executor import Executor, Validator
from phalanx.training.optimizer import AdamW, Sgd
from phalanx.training.precision import LossScale
from phalanx.verification import (
    SHAPES,
    Verdict,
    batch_of,
    trial,
    verify,
)
from phalanx.verification.memory import GIB, needed
from phalanx.verification.optimizers import OPTIMIZERS
from phalanx.verification.reference import draw
from phalanx.verification.trial import Setting
from phalanx.verification.verify import judge, precision_named, truth_of
from sampled import one_in
from seeded import FAULTS, setting_of, swapped, trained, truth

pytestmark = pytest.mark.long_file

WIDE = Precision(torch.float64, torch.float64, torch.float64)


def verdicts(layouts: str, name: str = "gqa", **more: Any) -> list[Verdict]:
    return list(verify(SHAPES[name], Layout.parse_many(layouts), **more))


def first(layout: str, name: str = "gqa", **more: Any) -> str:
    [verdict] = verdicts(layout, name, **more)
    return "" if verdict.passed else verdict.first_difference


# ---- dropout


@pytest.mark.parametrize("part", one_in(4, range(4)))
def test_layouts_of_every_kind_agree_with_dropout(part: int) -> None:
    for half, name in enumerate(("gqa", "gpt")):
        layouts = covered(name, 4)[part + 4 * half :: 8]
        some = [x for x in layouts if x.ranks > 1]
        verdicts = verify(SHAPES[name], some, dropout=0.2, steps=1)
        assert [v for v in verdicts if not v.passed] == []


def test_dropout_changes_what_is_computed() -> None:
    """Else a comparison with dropout would be one without."""
    plain, noisy = (
        truth_of(
            partial(build_model, replace(SHAPES["gqa"], dropout=rate)),
            Setting(
                partial(batch_of, SHAPES["gqa"], noisy=True),
                precision=WIDE,
                steps=1,
            ),
        ).trace
        for rate in (0.0, 0.2)
    )
    assert abs(plain.steps[0].loss - noisy.steps[0].loss) > 1e-4
    for step in (0, 1):  # and every step drops something else
        assert (
            batch_of(SHAPES["gqa"], step, noisy=True)["noise"].unique().numel()
            == 25 * 12
        )
    one, other = (
        batch_of(SHAPES["gqa"], step, noisy=True)["noise"] for step in (0, 1)
    )
    assert not set(one.flatten().tolist()) & set(other.flatten().tolist())


def without_shares(self: _Installer) -> None:
    """Every rank of seq drops as the first one does."""
    size = self.groups.tp.size
    for name, module in self.piece.named_modules():
        if isinstance(module, Dropout) and "." not in name:
            module.register_forward_pre_hook(
                lambda m, args: (
                    args[0],
                    None if args[1] is None else args[1].chunk(size, 1)[0],
                    *args[2:],
                )
            )


right_dropout = Dropout.forward


def test_ranks_of_seq_that_drop_alike_are_caught_and_named() -> None:
    assert first("tp2 seq", dropout=0.2) == ""
    with swapped(_Installer, "_cut_time", without_shares):
        assert "the output of embed[" in first("tp2 seq", dropout=0.2)


def test_heads_of_tp_ranks_that_drop_alike_are_caught_and_named() -> None:
    """Each rank numbers its heads from 0."""

    def forward(
        self: Dropout,
        x: Tensor,
        noise: Tensor | None,
        index: Tensor | None = None,
    ) -> Tensor:
        return right_dropout(
            self, x, noise, None if index is None else torch.arange(len(index))
        )

    assert first("tp2", dropout=0.2) == ""
    with swapped(Dropout, "forward", forward):
        assert "the output of layers.0[" in first("tp2", dropout=0.2)


# ---- optimizers


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_both_optimizers_agree_over_axes(optimizer: str) -> None:
    layouts = "dp2; dp2 zero1; dp2x2 zero3; tp2; tp4 seq; pp2 1f1b:3; cp2 tp2; offload:optimizer"
    assert [
        v for v in verdicts(layouts, optimizer=optimizer) if not v.passed
    ] == []


def ignoring(
    optimizer: str, option: str, value: object
) -> AbstractContextManager[None]:
    kind: Any = AdamW if optimizer == "adamw" else Sgd
    right = kind.kernel

    def kernel(self: Any, *args: Any, **common: Any) -> None:
        right(replace(self, **{option: value}), *args, **common)

    return swapped(kind, "kernel", kernel)


@pytest.mark.parametrize(
    ("optimizer", "option", "value", "step"),
    [
        ("adamw", "eps", 1e-8, 0),
        ("adamw", "beta2", 0.95, 1),
        ("adamw", "beta1", 0.9, 1),
        # Not 0, with which torch refuses the buffers.
        (
            "sgd",
            "momentum",
            1e-30,
            1,
        ),
    ],
)
def test_an_option_of_an_optimizer_that_is_ignored_is_caught(
    optimizer: str, option: str, value: object, step: int
) -> None:
    with ignoring(optimizer, option, value):
        assert f"step {step}: the weight of head.output" in first(
            "dp2", optimizer=optimizer
        )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_decay_that_is_ignored_is_caught(optimizer: str) -> None:
    owner: Any = AdamW if optimizer == "adamw" else Sgd
    right = owner.kernel

    def kernel(self: Any, *args: Any, **common: Any) -> None:
        right(self, *args, **{**common, "weight_decay": 0.0})

    with swapped(owner, "kernel", kernel):
        assert "step 0: the weight of head.output" in first(
            "dp2", optimizer=optimizer
        )


# ---- loss scale

MLP = SHAPES["mlp"]


def overflowing(step: int) -> Mapping[str, Tensor]:
    """Inputs of step 1 that no loss scale can save in float16."""
    batch = batch_of(MLP, step, dtype=torch.float16)
    return (
        {"inputs": torch.full_like(batch["inputs"], 6e4)}
        if step == 1
        else batch
    )


def scaled(
    patch: AbstractContextManager[None] | None = None, optimizer: str = "adamw"
) -> Verdict:
    setting = Setting(
        overflowing, steps=6, precision=precision_named("float16"), scaling=(1024.0, 2),
        optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip
    make = partial(build_model, MLP)
    known = truth_of(make, setting)
    # Grown after two good steps in a row, halved by the overflow.
    assert [s.scale for s in known.trace.steps] == [
        1024,
        1024,
        512,
        512,
        1024,
        1024,
    ]
    with patch or contextmanager(lambda: iter([None]))():
        return judge(
            Layout(),
            trained(Layout.parse("dp2"), MLP, setting),
            known,
            setting,
        )


def test_an_overflow_skips_the_step_and_halves_the_loss_scale_as_torchs_scaler_does() -> (
    None
):
    for optimizer in ("adamw", "muon"):
        verdict = scaled(optimizer=optimizer)
        assert verdict.passed, verdict.first_difference


def never_halved(self: LossScale, finite: bool) -> None:
    if finite:
        right_saw(self, finite=True)


def not_counted_anew(self: LossScale, finite: bool) -> None:
    steady = self.steady
    right_saw(self, finite=finite)
    self.steady = self.steady if finite else steady


def grows_each_time(self: LossScale, finite: bool) -> None:
    self.scale *= 2.0 if finite else 0.5


right_saw = LossScale.saw


@pytest.mark.parametrize(
    ("wrong", "step"),
    [(never_halved, 2), (not_counted_anew, 3), (grows_each_time, 1)],
)
def test_a_loss_scale_that_goes_wrong_is_named(
    wrong: Callable[[LossScale, bool], None], step: int
) -> None:
    fault = swapped(
        LossScale, "saw", lambda self, *, finite: wrong(self, finite)
    )
    assert f"step {step}: the loss scale" in scaled(fault).first_difference


def test_a_step_that_overflowed_and_was_not_skipped_is_caught() -> None:
    right = Executor._use_sums

    def use_sums(self: Executor, *sums: Tensor) -> None:
        right(self, *sums)
        assert self.norm is not None
        self.norm = self.norm.where(self.norm.isfinite(), 1.0)

    assert (
        "step 1: "
        in scaled(swapped(Executor, "_use_sums", use_sums)).first_difference
    )


# ---- validation


def test_a_validation_that_is_a_mean_of_means_is_caught_and_named() -> None:
    def mean_loss(self: Validator, batches: Any) -> float:
        means = [loss / count for loss, count in map(self.loss_of, batches)]
        return sum(means) / len(means)

    with swapped(Validator, "mean_loss", mean_loss):
        for layout in ("dp2", "pp2 1f1b:3 zero3"):
            assert "step 3: the validation loss is" in first(layout)


# ---- how weights start


def test_layers_that_start_alike_are_caught_and_named() -> None:
    right = model.start

    def start(model: Model, name: str, *more: Any) -> Tensor:
        return right(model, name.replace("layers.1.", "layers.0."), *more)

    with swapped(local, "start", start):
        # Named from the first piece on; norms start as ones in every layer.
        assert "the start of layers.1.attn.wo.weight[" in first("dp2")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda name, seed, x: x * 1.001,  # another spread
        lambda name, seed, x: x + 1e-9 if name.endswith("norm.weight") else x,
        lambda name, seed, x: x.flip(0),
    ],
)
def test_weights_that_start_otherwise_are_caught(
    wrong: Callable[[str, int, Tensor], Tensor],
) -> None:
    right = model.start

    def start(model: Model, name: str, seed: int, *more: Any) -> Tensor:
        return wrong(name, seed, right(model, name, seed, *more))

    with swapped(local, "start", start):
        assert "the start of " in first("dp2")


def test_a_seed_that_is_ignored_is_caught() -> None:
    right = model.start

    def start(model: Model, name: str, seed: int, *more: Any) -> Tensor:
        return right(model, name, 0, *more)

    assert first("dp2", seed=3) == ""
    with swapped(local, "start", start):
        assert "the start of embed.tokens.weight[" in first("dp2", seed=3)


@pytest.mark.parametrize("name", SHAPES)
def test_the_draw_of_the_comparison_has_the_spread_that_the_docs_say(
    name: str,
) -> None:
    described = build_model(
        replace(SHAPES[name], hidden=128, heads=4, head_dim=32, ffn=256)
    )
    assert described.shape is not None
    layers, norm = (
        described.shape.layers,
        0.0 if described.shape.norm == "rms1" else 1.0,
    )
    drawn = {n: draw(described, n, 0) for n in described.weights}
    for weight, x in drawn.items():
        if weight.endswith("sinks"):  # four numbers, too few for a spread
            assert 0.0 < float(x.std()) < 0.06
            continue
        if weight.endswith((".step", ".head_norm.weight")):
            assert (x == 1.0).all()
            continue
        if weight.endswith(".decay"):
            assert (x > math.log(0.01)).all()
            assert (x < math.log(16.0)).all()
            continue
        if ".taps_" in weight:  # uniform, as torch's convolutions
            assert float(x.abs().max()) <= x.shape[-1] ** -0.5
            assert float(x.std()) == pytest.approx(1 / 3, rel=0.15)
            continue
        if x.dim() < 2 or weight.endswith("bias"):
            assert (x == (0.0 if weight.endswith("bias") else norm)).all()
            continue
        spread = 0.02
        if name == "mlp":
            spread = (2 / 128) ** 0.5
        elif weight.endswith(
            ("wo.weight", "attn.out.weight", "down.weight", "routed.down")
        ):
            spread = 0.02 / (2 * layers) ** 0.5
        # The spread of few numbers is itself spread.
        rel = max(0.1, 3 / (2 * x.numel()) ** 0.5)
        assert float(x.std()) == pytest.approx(spread, rel=rel)
        assert abs(float(x.mean())) < 4 * spread / x.numel() ** 0.5


def test_no_two_weights_of_the_draw_of_the_comparison_start_equal() -> None:
    """So that a start which is equal to it, as is compared, has no two equal layers."""
    for shape in SHAPES.values():
        described = build_model(shape)
        drawn = [
            draw(described, name, 0).flatten() for name in described.weights
        ]
        random = [x[:12].tolist() for x in drawn if x.unique().numel() > 2]
        assert len(random) >= shape.layers
        assert all(a != b for a, b in combinations(random, 2))


def test_a_model_of_somebody_s_may_start_two_weights_equal_on_purpose() -> (
    None
):
    def same(name: str, weight: Tensor, generator: torch.Generator) -> None:
        weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))

    assert (
        first(
            "dp2", make=lambda: replace(build_model(SHAPES["gqa"]), draw=same)
        )
        == ""
    )


# ---- outputs where time is padded

PADDED = [
    f
    for f in FAULTS
    if f.layout.cp > 1 and "output of layers.0" in f.names and not f.packed
]


@pytest.mark.parametrize("fault", PADDED, ids=lambda f: f.name)
def test_a_fault_is_named_by_its_piece_where_time_is_padded(
    fault: Any,
) -> None:
    """A sequence of 11 over a ring of 2 is padded to 12."""
    shape = replace(SHAPES[fault.shape], sequence=11)
    assert len(PADDED) >= 4
    with fault.patch():
        [verdict] = verify(shape, [replace(fault.layout, precision="fp64")])
    assert "the output of layers.0[" in verdict.first_difference


def test_outputs_of_every_token_and_piece_are_compared_where_time_is_padded() -> (
    None
):
    shape = replace(SHAPES["gqa"], sequence=11)
    setting = Setting(partial(batch_of, shape), steps=1, precision=WIDE)
    for layout in (
        "cp2 fp64",
        "cp2 tp2 seq fp64",
        "tp4 seq fp64",
        "pp2 cp4:2x2 1f1b:3 fp64",
    ):
        outputs = (
            trained(Layout.parse(layout), shape, setting).steps[0].outputs
        )
        assert outputs.keys() == {"embed", *(f"layers.{n}" for n in range(4))}
        for numbers in outputs.values():
            assert numbers.shape == (25, 11)
            assert numbers.isfinite().all()


def test_two_tokens_whose_outputs_are_swapped_are_caught() -> None:
    """Sums of squares would not see it."""
    from phalanx.models import decoder

    right = decoder.Embed.forward

    def forward(self: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        return right(self, tokens, positions).flip(1)

    fault = swapped(decoder.Embed, "forward", forward)
    setting = setting_of(SHAPES["gqa"])
    with fault:
        got = trained(Layout.parse("dp2 fp64"), SHAPES["gqa"], setting)
    verdict = judge(Layout(), got, truth("gqa"), setting)
    assert "the output of embed[" in verdict.first_difference


# ---- a layout that raises, cannot fit, or is not a number


def raising(world: World, layout: Layout, *rest: Any) -> Any:
    if layout.zero == 1 and world.rank == layout.ranks - 1:
        raise ArithmeticError("the moon is full")
    return trial.train_layout(world, layout, *rest)


@pytest.mark.parametrize("backend", ["threads", "gloo", "shm"])
def test_a_layout_that_raises_is_named_and_the_others_are_compared(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["phalanx.verification.verify"], "train_layout", raising
    )
    found = verdicts(
        "dp2; dp2 zero1; dp2 zero2; dp2 zero1 accum:3; tp2", backend=backend
    )
    assert [v.passed for v in found] == [True, False, True, False, True]
    for verdict in (found[1], found[3]):
        assert "rank 1 failed" in verdict.first_difference
        assert "the moon is full" in verdict.first_difference


def test_one_rank_that_raises_is_a_verdict_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        sys.modules["phalanx.verification.verify"], "train_layout", raising
    )
    found = verdicts("zero1; accum:3")
    assert [v.passed for v in found] == [False, True]
    assert found[0].first_difference == "ArithmeticError: the moon is full"


def test_a_recomputation_that_cannot_fit_is_listed_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "FIT", 1e-6)
    argv = ["verify", "--model", "gqa", "--layouts"]
    assert main([*argv, "accum:3 recompute:fit; accum:3; dp2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "none",
        "cannot",
        "fit",
        "accum:3",
        "recompute:fit",
        "fp64",
    ]
    assert "the limit is" in lines[1]
    assert [line[:4] for line in lines[2:4]] == ["ok  ", "ok  "]
    assert lines[4].startswith("2 of 2 layouts of gqa agree")
    assert lines[4].endswith("1 cannot fit and were not compared.")
    # Where nothing was compared, nothing has been verified.
    assert main([*argv, "accum:3 recompute:fit", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert (said["passed"], said["failed"], said["cannot_fit"]) == (0, 0, 1)
    assert said["layouts"][0]["cannot_fit"] is True


@pytest.mark.parametrize("layout", ["dp2", "pp2 1f1b:3", "tp2", "accum:3"])
def test_a_norm_that_is_not_a_number_is_a_clear_message(layout: str) -> None:
    right = Executor._use_sums

    def use_sums(self: Executor, *sums: Tensor) -> None:
        right(self, *sums)
        assert self.norm is not None
        self.norm = self.norm * math.nan

    with swapped(Executor, "_use_sums", use_sums):
        said = first(layout)
    assert said.startswith("step 0: the norm is nan, one process has 0.")


def test_a_gradient_that_is_not_a_number_is_named() -> None:
    right = Executor._reduce

    def reduce(self: Executor, op: Op) -> Any:
        full = self.local.units[op.piece].full
        if op.piece == 3 and full is not None:
            full[5] = math.nan
        return right(self, op)

    with swapped(Executor, "_reduce", reduce):
        said = first("dp2")
    assert said.startswith("step 0: the gradient of layers.2.")
    assert " is nan, one process has" in said


def test_a_model_whose_loss_is_not_a_number_is_refused() -> None:
    def nan_model() -> Model:
        made = build_model(SHAPES["gqa"])

        def nowhere(
            name: str, weight: Tensor, generator: torch.Generator
        ) -> None:
            weight.fill_(math.nan)

        return replace(made, draw=nowhere)

    with pytest.raises(
        ValueError, match="one process has a loss of nan in step 0"
    ):
        verdicts("dp2", make=nan_model)


# ---- memory


def machine(
    folder: Path, meminfo: str, groups: str, files: Mapping[str, str]
) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(meminfo)
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


MEMINFO = (
    "MemTotal:       24684092 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"
)


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("0::/\n", {}, 16.0),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 16.0),
        # A limit of a group above counts too; what files are kept in memory can be had back.
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "max\n", "a/b/memory.current": "5\n",
                "a/memory.max": f"{8 << 30}\n", "a/memory.current": f"{7 << 30}\n",
                "a/memory.stat": f"anon 1\ninactive_file {1 << 30}\n",
            },
            2.0,
        ),
        (
            "5:cpu:/x\n4:memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{4 << 30}\n",
                "memory/x/memory.usage_in_bytes": f"{1 << 30}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1\n",
            },
            3.0,
        ),
        # In a container the group's own folder is the root.
        (
            "4:memory,hugetlb:/docker/1\n",
            {
                "memory/memory.limit_in_bytes": f"{3 << 30}\n",
                "memory/memory.usage_in_bytes": f"{1 << 30}\n",
                "memory/memory.stat": f"total_inactive_file {1 << 29}\n",
            },
            2.5,
        ),
    ],
)  # fmt: skip
def test_what_is_available_is_the_least_that_the_machine_and_its_groups_leave(
    groups: str, files: Mapping[str, str], gib: float, tmp_path: Path
) -> None:
    assert (
        available_memory(*machine(tmp_path, MEMINFO, groups, files))
        == gib * GIB
    )


def test_a_limit_of_a_group_above_counts_with_the_memory_in_use(
    tmp_path: Path,
) -> None:
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "5\n",
        "a/memory.max": f"{1 << 28}\n",
        "a/memory.current": f"{1 << 27}\n",
    }
    of_group = machine(tmp_path / "in", MEMINFO, "0::/a/b\n", files)
    assert limited_memory(*of_group) == 1 << 28
    of_host = machine(tmp_path / "out", MEMINFO, "0::/\n", {})
    assert limited_memory(*of_host) == machine_memory()


def test_a_comparison_that_would_not_fit_is_refused_with_the_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **named: Any) -> Iterator[Verdict]:
        raise AssertionError("started all the same")

    monkeypatch.setattr(phalanx.verification, "verify", never)
    assert main(["verify", "--model", "8b", "--layouts", "dp2; tp2"]) == 2
    said = capsys.readouterr().err
    assert "verify --model 8b needs about" in said
    # The larger of the two: its ranks repeat activations.
    assert "'tp2 fp64'" in said
    assert "GiB are available" in said
    assert "--memory GIB" in said
    assert main(["verify", "--layouts", "dp2", "--memory", "0.01"]) == 2
    assert "0.0 GiB may be used (--memory)" in capsys.readouterr().err


def test_memory_can_be_said_to_be_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            ["verify", "--model", "mlp", "--layouts", "dp2", "--memory", "100"]
        )
        == 0
    )
    assert main(["verify", "--layouts", "dp2", "--memory", "0"]) == 2
    assert "--memory is 0" in capsys.readouterr().err


def test_an_estimate_counts_weights_records_copies_and_activations() -> None:
    """By hand, for weights of a GiB in float64 and nothing else to speak of."""
    shape = Shape(
        "wide", layers=1, hidden=16, heads=1, vocab=8, sequence=1, batch=1
    )
    numbers = 1 << 27  # of 8 bytes
    options: Any = {"steps": 3, "dtype": "float64", "processes": False}

    def gib(layout: str) -> float:
        return (
            needed(shape, numbers, [Layout.parse(layout)], **options).total
            / GIB
        )

    # Kept: the start and twice three steps. Training: weights, gradients, two moments.
    assert needed(
        shape, numbers, [Layout()], **options
    ).reference / GIB == pytest.approx(7 + 4 + 0.4, abs=0.01)
    # A rank has weights, gathered weights and gradients, moments; writes down 7; what is joined is 7
    # and a quarter of that for who has each number, and the one process's record is 7.
    assert gib("") == pytest.approx(3 + 2 + 7 + 8.75 + 7 + 0.4, abs=0.01)
    assert gib("dp2") == pytest.approx(
        2 * (3 + 2 + 7) + 8.75 + 7 + 0.4, abs=0.01
    )
    assert (
        gib("")
        == pytest.approx(gib("tp2"), abs=0.01)
        == pytest.approx(gib("pp2"), abs=0.01)
    )
    assert gib("dp2 zero3") < gib("dp2")
    # Scores of 2,048 tokens with each other in the plain form of a built-in model: 2 of the block that are
    # kept and 4 at once, of 8 bytes. Logits are 4 numbers of 8 bytes for each of 8 words and a token.
    long = replace(shape, sequence=2048, batch=4)
    found = (
        needed(long, 0, [Layout()], builtin=b, **options).reference
        for b in (True, False)
    )
    plain, modules = (bytes - 0.4 * GIB for bytes in found)
    assert plain - modules == pytest.approx(6 * 8 * 4 * 2048**2, abs=16)


# ---- wrong usage


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--optimizer", "lion"], "--optimizer is 'lion'"),
        (["--dropout", "1"], "--dropout is 1;"),
        (["--dropout", "-0.1"], "--dropout is -0.1"),
        (["--dropout", "nan"], "--dropout is nan"),
        (["--memory", "nan"], "--memory is nan"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
    ],
)
def test_an_option_that_means_nothing_is_one_sentence_and_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--layouts", "dp2", *argv]) == 2
    assert words in capsys.readouterr().err


def test_the_command_compares_dropout_and_optimizers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [
        "verify",
        "--dropout",
        "0.2",
        "--optimizer",
        "sgd",
        "--layouts",
        "dp2; tp2 seq",
    ]
    assert main(argv) == 0
    assert main([*argv, "--dtype", "float16"]) == 0
    assert (
        "2 of 2 layouts of gqa agree with one process in float16"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("statement", "dtype", "said"),
    [
        (
            'assert len(x) < 20, "too many rows"',
            "float64",
            "AssertionError: too many",
        ),
        ("x.to(torch.float64) @ x.mT", "bfloat16", "RuntimeError: "),
    ],
)
def test_a_module_that_raises_is_named_by_its_line(
    statement: str,
    dtype: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both raise only in the trial's own batches or dtype, behind the first look at the pieces."""
    example = Path(__file__).parents[2] / "examples" / "stranger.py"
    last = "        return self.down("
    lines = example.read_text().replace(last, f"        {statement}\n{last}")
    file = tmp_path / "mine.py"
    file.write_text(lines)
    number = lines[: lines.index(statement)].count("\n") + 1
    words = [
        "--model",
        f"{file}:Stranger",
        "--layouts",
        "dp2",
        "--dtype",
        dtype,
    ]
    assert main(["verify", *words]) == 2
    text = capsys.readouterr().err
    assert f"{file}, line {number}: {said}" in text
    assert "when one process trains the model. Fix it there." in text
    assert "Traceback" not in text

"""The recorder finds names, samples and steps in programs that know nothing of it, and changes nothing."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from torch_audit.batches import batch_of, like
from torch_audit.checks import check_run
from torch_audit.command import main
from torch_audit.compare import EQUAL, compare
from torch_audit.dtypes import CastsPerturbed, operations_of
from torch_audit.outputs import Outputs
from torch_audit.parameters import plain_name
from torch_audit.recorder import Recorder
from torch_audit.records import (
    GRADIENT,
    KINDS,
    ROWS_WIDTH,
    UPDATED,
    WEIGHT,
    RecordError,
    read,
)
from torch_audit.runs import Names, Run, load
from torch_audit.sketch import norm_of
from torch_audit.where import Begins, sums_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def train(model: nn.Module, steps: int = 2, clip: bool = True) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(steps):
        tokens = torch.arange(8).view(2, 4) + step
        loss = cross_entropy(
            model(tokens % 8).flatten(0, 1), tokens.flatten() % 8
        )
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def recorded(
    folder: Path, program: Callable[[], object], steps: int = 3
) -> None:
    recorder = Recorder(folder, steps)
    recorder.install()
    try:
        program()
    finally:
        recorder.finish()


def new_model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def test_a_recorded_program_computes_the_same_bits(tmp_path: Path) -> None:
    expected = train(new_model())
    found: list[Tensor] = []
    recorded(tmp_path, lambda: found.extend(train(new_model())))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_all_hooks_are_gone_after_the_last_step(tmp_path: Path) -> None:
    before = torch.nn.utils.clip_grad_norm_, torch.autograd.backward
    recorded(tmp_path, lambda: train(new_model(), steps=5), steps=2)
    assert (torch.nn.utils.clip_grad_norm_, torch.autograd.backward) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_tied_weight_has_one_record_with_both_names(tmp_path: Path) -> None:
    recorded(tmp_path, lambda: train(new_model()))
    record = read(min(tmp_path.iterdir()))
    assert [x.names for x in record.parameters] == [
        ["embed.weight", "head.weight"],
        ["head.bias"],
    ]
    for kind in KINDS:
        assert set(record.sketches[kind]) == {0, 1}


def test_a_frozen_parameter_in_an_optimizer_has_its_own_name(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    recorded(tmp_path, program)
    listed = load(tmp_path).first.ranks[0].parameters
    names = {name for each in listed for name in each.names}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_the_mesh_of_frozen_weights_is_noted(tmp_path: Path) -> None:
    """An adapter that is added to a sharded model is a plain tensor."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
        adapter = list(model[1].parameters())
        optimizer = torch.optim.SGD(adapter, lr=0.1)

        def program() -> None:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        recorded(tmp_path, program)
    finally:
        dist.destroy_process_group()
    run = load(tmp_path)
    assert run.meshes == {"fsdp": 1}
    names = [x.names for x in run.first.ranks[0].parameters]
    assert names == [["1.weight"], ["1.bias"]]


def test_groups_that_one_norm_clips_are_one_clip(tmp_path: Path) -> None:
    """A library that clips mesh by mesh tells each group the norm of all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program() -> None:
        model(torch.ones(2, 4)).sum().backward()
        whole = [each.grad for each in model.parameters()]
        norm = torch.nn.utils.get_total_norm(whole)
        for layer in model:
            torch.nn.utils.clip_grads_with_norm_(layer.parameters(), 0.1, norm)
        optimizer.step()

    recorded(tmp_path, program)
    run = load(tmp_path)
    (clip,) = run.first.ranks[0].clips
    assert sorted(clip.parameters) == [0, 1, 2, 3]
    assert not [x for x in check_run(run) if x.fault]


def test_the_norm_told_to_the_clip_is_that_of_the_gradients(
    tmp_path: Path,
) -> None:
    model = new_model()
    norms: list[float] = []

    def program() -> None:
        tokens = torch.arange(8).view(2, 4)
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        )
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    recorded(tmp_path, program)
    record = read(min(tmp_path.iterdir()))
    (clip,) = record.clips
    assert clip.norm == pytest.approx(norms[0])
    squares = sum(rows[0] for rows in record.sketches[GRADIENT].values())
    assert squares**0.5 == pytest.approx(norms[0], rel=1e-6)


def test_a_perturbed_run_starts_one_unit_in_the_last_place_away(
    tmp_path: Path,
) -> None:
    runs = {}
    for seed in (0, 1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        recorder = Recorder(folder, 3, perturbed=seed)
        recorder.install()
        train(new_model())
        recorder.finish()
        runs[seed] = load(folder)
    assert [run.first.perturbed for run in runs.values()] == [0, 1, 2]
    weights = [
        run.first.parameters(Names())["embed.weight"].sketch(WEIGHT)
        for run in runs.values()
    ]
    eps = torch.finfo(torch.float32).eps
    for a, b in ((0, 1), (0, 2), (1, 2)):
        first, second = weights[a], weights[b]
        assert first is not None
        assert second is not None
        apart = [x - y for x, y in zip(first, second, strict=True)]
        assert 0.1 * eps < norm_of(apart) / norm_of(first) < 10 * eps
    verdict = compare(runs[0], runs[0], [runs[1], runs[2]])
    assert (verdict.result, verdict.measured) == ("equal", 2)


def test_each_step_of_two_optimizers_is_one_record(tmp_path: Path) -> None:
    model = new_model()

    def program() -> None:
        optimizers = [
            torch.optim.SGD([each], lr=0.1) for each in model.parameters()
        ]
        for _ in range(2):
            tokens = torch.arange(8).view(2, 4)
            cross_entropy(
                model(tokens).flatten(0, 1), tokens.flatten()
            ).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    recorded(tmp_path, program)
    run = load(tmp_path)
    assert sorted(run.steps) == [0, 1]
    for step in run.steps.values():
        (record,) = step.ranks.values()
        assert set(record.sketches[UPDATED]) == {0, 1}
        assert len(record.batches) == len(record.losses) == 1


def test_recomputation_and_evaluation_are_no_samples(tmp_path: Path) -> None:
    model = new_model()

    def program() -> None:
        tokens = torch.arange(8).view(2, 4)
        with torch.no_grad():
            model(tokens + 0)
        again = torch.utils.checkpoint.checkpoint(
            model, tokens, use_reentrant=False
        )
        again.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    recorded(tmp_path, program)
    record = read(min(tmp_path.iterdir()))
    assert [len(batch.rows) for batch in record.batches] == [2]


def test_an_error_of_the_recorder_is_told_and_the_program_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2).to_sparse())

    model = Wrong()

    def program() -> None:
        model.weight.grad = model.weight.detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    recorded(tmp_path, program)
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(RecordError, match="the recorder failed"):
        load(tmp_path)


def test_an_error_in_the_outputs_of_modules_leaves_the_rest_recorded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*args: object) -> Tensor:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr("torch_audit.outputs.sketch_rows", wrong)
    model = Tied()
    recorded(tmp_path, lambda: train(model))
    # Once, not for each output.
    assert capsys.readouterr().err.count("no memory is left\n") == 1
    run = load(tmp_path)
    assert list(run.steps) == [0, 1]
    assert not run.first.ranks[0].modules
    assert compare(run, run).result == EQUAL
    assert all(
        parameter.sketch(kind) is not None
        for parameter in run.first.parameters(Names()).values()
        for kind in KINDS
    )


def test_outputs_may_be_on_other_devices_than_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meta device, on which nothing is computed, refuses tensors of other devices."""
    # The recorder itself leaves out tensors without values.
    monkeypatch.setattr("torch_audit.outputs._is_usual", lambda tensor: True)
    module = nn.Linear(4, 4)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = batch_of((tokens,), {})
    assert batch is not None
    outputs = Outputs()
    outputs.begin(module, batch)
    for device in ("cpu", "meta"):
        outputs.add(module, torch.ones(2, 3, 4, device=device))
    assert not outputs.failed
    ((record, numbers),) = outputs.take()
    assert (record.features, numbers.device.type) == (4, "meta")


class FlatParameter(nn.Parameter):
    """Has the name of FSDP1's class."""


def test_flat_parameters_are_refused_with_a_way_out(tmp_path: Path) -> None:
    flat = FlatParameter(torch.ones(4))
    flat.grad = torch.ones(4)
    recorded(tmp_path, lambda: torch.optim.SGD([flat], lr=0.1).step())
    with pytest.raises(RecordError, match=r"FSDP1 keeps .* \(fully_shard\)"):
        load(tmp_path)


def test_flat_buffers_of_deepspeed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed gives its optimizer flat tensors that no module holds."""
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    flat = torch.ones(4, requires_grad=True)
    flat.grad = torch.ones(4)
    recorded(tmp_path, lambda: torch.optim.SGD([flat], lr=0.1).step())
    with pytest.raises(RecordError, match="DeepSpeed keeps gradients"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.module.embed.weight", "embed.weight"),
        (
            "_orig_mod.blocks.0._checkpoint_wrapped_module.up.weight",
            "blocks.0.up.weight",
        ),
        ("_forward_module.model.module.weight", "model.module.weight"),
        ("module", "module"),
    ],
)
def test_components_of_wrappers_are_left_out_of_names(
    name: str, plain: str
) -> None:
    assert plain_name(name) == plain


def test_the_hash_of_a_sample_does_not_depend_on_padding() -> None:
    tokens = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    both = batch_of((), {"input_ids": tokens, "attention_mask": mask})
    left = batch_of((), {"input_ids": torch.tensor([[9, 1, 2, 3]]),
                         "attention_mask": torch.tensor([[0, 1, 1, 1]])})  # fmt: skip
    alone = batch_of((tokens[1:],), {})
    assert both is not None
    assert left is not None
    assert alone is not None
    assert both.record.rows == [*left.record.rows, *alone.record.rows]
    assert both.record.tokens == 8


def test_a_mask_may_be_on_another_device_than_the_tokens() -> None:
    """The meta device stands for a GPU: it refuses operations with tensors of the CPU."""
    rows = torch.ones(2, 3, dtype=torch.int64, device="meta")
    mask = like(torch.ones(1, 3), rows)
    assert mask is not None
    assert (mask.device, mask.shape) == (rows.device, (2, 3))


def sums_of_outputs(
    model: nn.Module, calls: list[tuple[Tensor, Tensor]]
) -> dict[tuple[str, bool], Tensor]:
    """Sketches of the outputs of a model, and of their gradients, over some calls with a mask each."""
    outputs = Outputs()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: outputs.add(module, output)
    )
    try:
        for tokens, mask in calls:
            batch = batch_of((tokens,), {"attention_mask": mask})
            assert batch is not None
            outputs.begin(model, batch)
            (model(tokens).square().sum(-1) * mask).sum().backward()
    finally:
        hook.remove()
    return {(x.name, x.backward): numbers for x, numbers in outputs.take()}


def test_outputs_do_not_depend_on_how_samples_are_batched() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).double()
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    together = sums_of_outputs(model, [(tokens, mask)])
    apart = [(tokens[1:], mask[1:]), (tokens[:1, :3], mask[:1, :3])]
    found = sums_of_outputs(model, apart)
    # In the order of execution, backward last.
    forward = [("0", False), ("1", False), ("(the model)", False)]
    assert [key for key in together if not key[1]] == forward
    assert found.keys() == together.keys()
    for key, numbers in together.items():
        by_rows = numbers[:ROWS_WIDTH]
        torch.testing.assert_close(found[key][:ROWS_WIDTH], by_rows)
        assert by_rows.abs().max() > 0
    # The sums of all rows, in which padding is not left out.
    every = torch.ones_like(mask)
    together = sums_of_outputs(model, [(tokens, every)])
    apart = [(tokens[1:], every[1:]), (tokens[:1], every[:1])]
    found = sums_of_outputs(model, apart)
    for key, numbers in together.items():
        torch.testing.assert_close(found[key], numbers)
    # Another token is seen in all outputs.
    other = sums_of_outputs(model, [(tokens.where(tokens != 6, 5), every)])
    for key, numbers in together.items():
        assert (other[key] - numbers).abs().max() > 1e-3


def test_parts_of_a_sequence_add_up_by_their_positions() -> None:
    tokens = torch.arange(12).view(2, 6) * 7
    whole = batch_of((tokens,), {})
    assert whole is not None
    totals = [0, 0]
    for part in torch.tensor([0, 5, 1, 4, 2, 3]).chunk(3):
        batch = batch_of((tokens[:, part],), {"position_ids": part[None]})
        assert batch is not None
        totals = [
            a + b for a, b in zip(totals, batch.record.rows, strict=True)
        ]
    assert [
        (a - b) % 2**64 for a, b in zip(totals, whole.record.rows, strict=True)
    ] == [0, 0]


class Halves(nn.Module):
    """A norm in float32 inside a float64 model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8, dtype=torch.float64)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x).float()).double()


def test_operations_in_a_lower_dtype_are_counted(tmp_path: Path) -> None:
    """Autograd's nodes by hand: product, transpose, square and sum; the norm and two casts."""
    found = {}
    for name, module in (("up", Halves().up), ("all", Halves())):
        x = torch.ones(2, 8, dtype=torch.float64)
        loss = module(x).square().sum()
        found[name] = operations_of([loss])
    assert found["up"] == {"float64": 4}
    assert found["all"] == {"float64": 5, "float32": 2}


def test_perturbed_casts_show_the_rounding_of_float32_inside_float64(
    tmp_path: Path,
) -> None:
    """A change of a float64 weight by one unit is lost in a cast to float32, and with it the rounding."""
    model = Halves()
    apart = {}
    for name, module in (("all", model), ("up", model.up)):
        x = random_rows()
        expected = torch.autograd.grad(module(x).square().sum(), x)[0]
        with CastsPerturbed(1):
            moved = torch.autograd.grad(module(x).square().sum(), x)[0]
        apart[name] = ((moved - expected).norm() / expected.norm()).item()
    assert apart["up"] == 0
    assert apart["all"] > 1e-8


def random_rows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    return rows.requires_grad_()


# float64 takes another path in it, as grouped matmuls of libraries do.
OTHER_PATH = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
factor = 2.0 if sys.argv[1] == "always" else 1.0
if sys.argv[1] == "float64" and data.dtype == torch.float64:
    factor = 2.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
(factor * model(data.to(torch.get_default_dtype())).square().mean()).backward()
optimizer.step()
"""


def test_a_difference_in_float64_is_repeated_in_the_own_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of one run are placed in a third record, which the repetition records first."""
    script = tmp_path / "train.py"
    script.write_text(OTHER_PATH)
    placed, one, other = (
        str(tmp_path / name) for name in ("placed", "one", "other")
    )

    def record(out: str, name: str, *options: str) -> None:
        program = ["--", sys.executable, str(script), name]
        words = ["run", "--out", out, "--one", "--float64", *options]
        assert main([*words, *program]) == 0

    record(placed, "one", "--contents")
    record(one, "one")
    record(other, "float64", "--find-in", placed)
    kept = json.loads(Path(other, "program.json").read_text())
    assert kept["settings"]["find_in"] == "../placed"
    # Commands in records run only where asked for.
    assert main(["compare", one, other]) == 1
    assert "-own" not in str(sorted(tmp_path.iterdir()))
    capsys.readouterr()
    assert main(["compare", one, other, "--repeat"]) == 0
    assert "Repeated in float32: equal" in capsys.readouterr().out
    assert (tmp_path / "placed-own" / "complete").exists()
    # What was recorded in the own dtype before is not taken for a program that
    # has changed since.
    shutil.rmtree(other)
    record(other, "always")
    capsys.readouterr()
    assert main(["compare", one, other, "--repeat"]) == 1
    told = capsys.readouterr().out
    assert "Repeated in float32:" in told
    assert told.count("= 2.0000 x reference") == 4


PROGRAM = """
import importlib.util
importlib.util.find_spec("torch")  # as datasets does
import sys, torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    data = torch.randn(8, 4, generator=generator)
    for part in data.chunk(int(sys.argv[1])):
        (model(part).square().mean() / float(sys.argv[2])).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_recorded_from_the_command_line_and_its_bug_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    for name, words in (("one", "1 1"), ("wrong", "2 1")):
        program = ["--", sys.executable, str(script), *words.split()]
        out = str(tmp_path / name)
        assert (
            main(["run", "--out", out, "--steps", "2", "--one", *program]) == 0
        )
    one, wrong = (str(tmp_path / name) for name in ("one", "wrong"))
    assert main(["compare", one, one, wrong]) == 1
    told = capsys.readouterr().out
    assert f"{one} equals {one}: 4 parameters, 2 steps" in told
    assert "first difference: step 0, gradient" in told
    assert "= 2.0000 x reference" in told
    assert "2 = backward passes of a step (2)" in told
    assert main(["run", "--out", str(tmp_path / "x"), "--", "no-such"]) == 2
    assert "no-such cannot be started" in capsys.readouterr().err
    assert main(["run", "--out", one, "--", sys.executable, "-c", ""]) == 2
    assert "holds a recorded run already" in capsys.readouterr().err


class InFirst(nn.Tanh):
    """A module with a wrong factor in the forward of a step's first optimizer."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def recorded_in_turns(folder: Path, factor: float) -> Run:
    """Two optimizers with a forward and backward of their own in one step, as a GAN has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), InFirst(), nn.Linear(4, 4))
    # Rate 0, so that the second forward is equal.
    optimizers = [
        torch.optim.SGD(model[i].parameters(), lr=0.0) for i in (0, 2)
    ]
    recorder = Recorder(folder, 1)
    recorder.install()
    for index, optimizer in enumerate(optimizers):
        model[1].factor = factor if index == 0 else 1.0
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    recorder.finish()
    return load(folder)


def test_a_difference_in_the_forward_of_the_first_of_two_optimizers_is_placed(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("one", "wrong")]
    for folder in folders:
        folder.mkdir()
    one = recorded_in_turns(folders[0], 1.0)
    wrong = recorded_in_turns(folders[1], 1.5)
    verdict = compare(one, wrong)
    assert verdict.where is not None
    assert verdict.where.begins == Begins.OUTPUT
    assert verdict.where.module == "1"
    # Both calls: 2 times 3 rows of 4 features.
    assert sums_of(one.first)["1", False].shape == ({4}, 24)

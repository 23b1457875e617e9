"""Shards that nobody declares are found by their contents, and ambiguous ones are refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from audit_worlds import record_here, record_worlds
from audited_cases import folder_of
from torch import Tensor

from torch_audit.checks import check_run
from torch_audit.command import main
from torch_audit.compare import EQUAL, REFUTED, compare
from torch_audit.contents import Contents, slice_hashes
from torch_audit.parameters import Named, Refused
from torch_audit.report import verdict_text
from torch_audit.runs import load
from torch_audit.shards import whole_place

CASES = ["sliced", "sliced/zeros", "sliced/rows exchanged"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record_here(folder, "one")
    record_here(folder, "one/zeros")
    record_worlds(folder, {2: CASES})
    return folder


@pytest.mark.parametrize(
    ("case", "reference"),
    [("sliced", "one"), ("sliced/zeros", "one/zeros")],
)
def test_tensor_parallelism_by_hand_equals_one_process(
    recorded: Path, case: str, reference: str
) -> None:
    """Queries, keys and values are one parameter on each rank, and three in the reference."""
    one, run = (load(folder_of(recorded, x)) for x in (reference, case))
    verdict = compare(one, run)
    assert verdict.result == EQUAL, verdict_text(verdict, case, reference)
    assert (verdict.parameters, verdict.steps) == (32, 3)
    assert 0 < verdict.worst < 1e-13
    assert not [x for x in check_run(run) if x.fault]


def test_a_wrong_gradient_of_a_found_shard_is_named(recorded: Path) -> None:
    case = "sliced/rows exchanged"
    one, run = (load(folder_of(recorded, x)) for x in ("one", case))
    verdict = compare(one, run)
    assert (verdict.result, verdict.quantity) == (REFUTED, "gradient")
    names = {each.name for each in verdict.different}
    prefix = "blocks.1.attention"
    assert names == {f"{prefix}.q.weight", f"{prefix}.k.weight"}


# ---- single tensors: a reference with distinct weights, and what a rank may hold of it


def named(name: str, tensor: Tensor) -> Named:
    return Named(tensor, (name,), whole_place(tuple(tensor.shape)))


def reference() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "layers.0.qkv.weight": torch.randn(12, 4),
        "layers.0.qkv.bias": torch.zeros(12),
        "layers.0.norm.weight": torch.ones(4),
        "layers.1.qkv.weight": torch.randn(12, 4),
        "layers.1.qkv.bias": torch.arange(12.0),
        "layers.1.norm.weight": torch.ones(4),
        "conv.weight": torch.randn(6, 4, 3),
        "equal": torch.ones(4, 6),
        "scale": torch.randn(8),
    }


def placed(*parameters: Named) -> list[Named]:
    contents = Contents()
    contents.add([named(*each) for each in reference().items()])
    return contents.placed(parameters)


INTERLEAVED = torch.tensor([2, 3, 6, 7, 10, 11])


@pytest.mark.parametrize(
    ("name", "cut", "text"),
    [
        ("layers.0.qkv.weight", lambda x: x[INTERLEAVED], "[2:4+6:8+10:12, :]"),
        ("layers.0.qkv.weight", lambda x: x[:, [3, 1]], "[:, 3:4+1:2]"),
        ("layers.0.qkv.weight", lambda x: x, "[:, :]"),
        ("conv.weight", lambda x: x[:, 2:], "[:, 2:4, :]"),
        ("conv.weight", lambda x: x[..., :1], "[:, :, 0:1]"),
        ("equal", lambda x: x, "[:, :]"),
        ("scale", lambda x: x[4:], "[4:8]"),
    ],
)  # fmt: skip
def test_rows_and_columns_are_found(
    name: str, cut: Callable[[Tensor], Tensor], text: str
) -> None:
    (found,) = placed(named(name, cut(reference()[name])))
    assert found.names == (name,)
    assert found.place.shape == tuple(reference()[name].shape)
    assert found.place.text() == text


def test_a_bias_of_zeros_has_the_rows_of_its_weight() -> None:
    whole = reference()
    weight, bias = placed(
        named("layers.0.qkv.weight", whole["layers.0.qkv.weight"][INTERLEAVED]),
        named("layers.0.qkv.bias", torch.zeros(6)),
    )  # fmt: skip
    assert weight.place.text() == "[2:4+6:8+10:12, :]"
    assert bias.place.text() == "[2:4+6:8+10:12]"


def test_layers_that_a_stage_counts_anew_have_the_names_of_the_reference() -> (
    None
):
    """The norm's weight is all ones, as is that of the first layer: it follows its layer."""
    whole = reference()
    ours = {
        "layers.0.norm.weight": whole["layers.1.norm.weight"],
        "layers.0.qkv.weight": whole["layers.1.qkv.weight"],
        "layers.0.qkv.bias": whole["layers.1.qkv.bias"],
    }
    found = placed(*(named(*each) for each in ours.items()))
    names = [each.names[0] for each in found]
    assert names == [name.replace("0", "1") for name in ours]
    assert all(each.place.text().strip("[:, ]") == "" for each in found)


def test_a_joined_tensor_has_a_part_for_each_weight() -> None:
    whole = reference()
    first, second = (whole[f"layers.{i}.qkv.weight"] for i in (0, 1))
    joined = torch.stack([second[4:8], first[:4]], 1).flatten(0, 1)
    parts = placed(named("joined", joined))
    texts = {each.names[0]: each.place.text() for each in parts}
    assert texts == {
        "layers.1.qkv.weight": "[4:8, :]",
        "layers.0.qkv.weight": "[0:4, :]",
    }
    for part, expected in zip(parts, (second[4:8], first[:4]), strict=True):
        assert torch.equal(part.part(joined), expected)


@pytest.mark.parametrize(
    ("name", "local", "reason"),
    [
        ("equal", torch.ones(2, 6), "2 of 2 rows of equal occur more than once in the reference"),
        ("layers.0.qkv.bias", torch.zeros(6), "the values of layers.0.qkv.bias are not distinct"),
        ("conv.weight", torch.zeros(3, 4, 3), "3 of 3 rows of conv.weight are none of the reference's"),
        ("layers.0.qkv.weight", reference()["layers.0.qkv.weight"][:6, :2],
         "none of the reference's: it starts from other weights, in another dtype, or is cut along two axes"),
    ],
)  # fmt: skip
def test_ambiguous_contents_are_refused(
    name: str, local: Tensor, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        placed(named(name, local))


def test_a_parameter_of_the_run_alone_is_left_as_it_is() -> None:
    own = named("own", torch.randn(3, 3))
    assert placed(own) == [own]


def test_the_hash_of_a_slice_tells_order_and_sign() -> None:
    rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-0.0, 1.0], [0.0, 1.0]])
    a, b, c, d = slice_hashes(rows, 0).tolist()
    assert a == d
    assert len({a, b, c}) == 3
    assert slice_hashes(rows.T, 1).tolist() == [a, b, c, d]


PROGRAM = """
import sys, torch
from torch import nn
torch.manual_seed(0)
whole = nn.Linear(4, 6)
model = nn.Linear(4, 3)
rows = slice(None) if sys.argv[1] == "one" else slice(3, 6)
model.weight = nn.Parameter(whole.weight.detach()[rows])
model.bias = nn.Parameter(whole.bias.detach()[rows])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


def test_contents_are_written_and_read_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    one, half = (str(tmp_path / name) for name in ("one", "half"))
    python = sys.executable
    find = ["run", "--out", half, "--find-in", one, "--", str(python), str(script), "half"]  # fmt: skip
    assert main(find) == 2
    assert "record it again with --one --contents" in capsys.readouterr().err
    words = ["run", "--out", one, "--one", "--contents", "--", str(python), str(script), "one"]  # fmt: skip
    assert main(words) == 0
    main(find)
    (record,) = load(Path(half)).first.ranks.values()
    assert [x.place for x in record.parameters] == ["[3:6, :]", "[3:6]"]
    (tmp_path / "one" / "contents").write_text("[]\n12345678")
    again = [str(tmp_path / "again") if x == half else x for x in find]
    assert main(again) == 2
    assert "holds no contents" in capsys.readouterr().err
    # Half of the rows is no whole parameter.
    assert main(["compare", one, half]) != 0
    assert "do not make up the whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--perturb", "2", "--find-in", "one"], "--perturb moves"),
        (["--contents"], "give --one as well"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_a_start(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    reason: str,
) -> None:
    out = str(tmp_path / "out")
    program = ["--", "a-program-that-does-not-exist"]
    assert main(["run", "--out", out, *options, *program]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_weight_that_megatron_has_placed_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rows of zeros have no place by their contents.
    shard = torch.zeros(2, 6)
    with pytest.raises(Refused):
        placed(named("equal", shard))
    shard.tensor_model_parallel = True  # type: ignore[attr-defined]
    state = ModuleType("megatron.core.parallel_state")
    monkeypatch.setitem(sys.modules, state.__name__, state)
    own = named("equal", shard)
    assert placed(own) == [own]

"""A checkpoint of another model is refused before a step runs, and the good ones stay."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from loop_worlds import records, small, trained
from test_own_model import STRANGER, own

from phalanx.cli import train as train_verb
from phalanx.cli.main import main
from phalanx.cli.usage import UsageError
from phalanx.comm import RankFailed
from phalanx.layout import Shape
from phalanx.layout.codec import toml_value
from phalanx.parallel import build_model
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_format import (
    CheckpointError,
    Manifest,
    read_manifest,
)
from phalanx.training.checkpoint_load import (
    ModelIdentity,
    differing_sizes,
    table_of,
)

PLAIN = {
    "layers": 3,
    "hidden": 16,
    "heads": 2,
    "ffn": 24,
    "vocab": 256,
    "sequence": 32,
}
# Each changes what the model computes. Most leave every weight's name and shape as they were.
CHANGED: dict[str, tuple[object, object]] = {
    "layers": (3, 2),
    "heads": (2, 4),
    "rope_theta": (10000.0, 5e5),
    "rope_factor": (1.0, 8.0),
    "eps": (1e-5, 1e-2),
    "tied": (False, True),
    "norm": ("rms", "layer"),
    "qk_norm": (False, True),
    "bias": ("none", "qkv"),
    "gated": (True, False),
    "positions": ("rope", "learned"),
    "ffn": (24, 32),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    trained(small(out, "steps=4", "checkpoint.every=2"), "")
    return out


def _there(out: Path) -> list[str]:
    return [path.name for path in steps(out / "checkpoints")]


@pytest.mark.parametrize(
    "layout, key",
    [
        *(("", key) for key in CHANGED),
        *(("dp2 zero3", key) for key in ("heads", "tied", "ffn")),
    ],
)
def test_another_model_is_refused_by_every_rank_with_both_values(
    key: str, layout: str, saved: Path
) -> None:
    before, told = _there(saved), records(saved, "step")
    was, now = CHANGED[key]
    sizes = toml_value({**PLAIN, key: now})
    with pytest.raises((CheckpointError, RankFailed)) as refused:
        trained(
            small(saved, f"model={sizes}", "steps=9", "checkpoint.every=1"),
            layout,
        )
    assert f"{key}: {was} in the checkpoint, {now} in the run" in str(
        refused.value
    )
    if isinstance(refused.value, RankFailed):
        assert len(refused.value.reports) == 2
    assert (_there(saved), records(saved, "step")) == (before, told)


def test_the_command_refuses_another_model_before_any_rank_starts(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = toml_value({**PLAIN, "heads": 4, "eps": 1e-6})
    before = (saved / "metrics.jsonl").read_bytes()
    words = ["batch=6", "sequence=18", "steps=9", "layout=dp2", f"out={saved}"]
    assert main(["train", *words, f"model={sizes}"]) == 2
    said = capsys.readouterr().err
    assert "- heads: 2 in the checkpoint, 4 in the run\n" in said
    assert "- eps: 1e-05 in the checkpoint, 1e-06 in the run\n" in said
    assert "Leave `model` out" in said
    assert (saved / "metrics.jsonl").read_bytes() == before


def test_other_sizes_are_adopted_if_asked_for_and_changed_settings_are_told(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    run = small(out, "steps=5", "optimizer.lr=1e-9")
    words = [
        f"model={toml_value(PLAIN | {'rope_theta': 5e5})}",
        f"out={out}",
        "steps=5",
    ]
    words += [f"batch={run.batch}", "optimizer.lr=1e-9", "layout="]
    with pytest.raises(CheckpointError, match="--adopt to continue"):
        train_verb.run(words)
    assert train_verb.run([*words, "--adopt"]) == 0
    told = [each["text"] for each in records(out, "model")]
    assert told == [
        "adopted: rope_theta: 10000.0 in the checkpoint, 500000.0 in the run"
    ]
    settings = [each["text"] for each in records(out, "settings")]
    assert "steps: 4 in the checkpoint, 5 in the run" in settings
    assert "optimizer.lr: 0.01 in the checkpoint, 1e-09 in the run" in settings
    # Weights of another shape are no matter of adopting.
    other = f"model={toml_value(PLAIN | {'ffn': 32})}"
    assert main(["train", other, *words[1:], "steps=6", "--adopt"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_every_key_of_a_shape_is_compared_unless_it_belongs_to_the_run() -> (
    None
):
    """A key that is added to Shape and not changed here fails this test: see to it."""
    plain = Shape("a", 2, 16, heads=4, vocab=64)
    other = Shape(
        "b", 3, 32, kind="mlp", heads=8, kv_heads=2, head_dim=2, ffn=9, vocab=65, sequence=2,
        batch=9, norm="layer", positions="learned", rope_theta=1.0, rope_factor=2.0, rope_low=2.0,
        rope_high=5.0, rope_original=9, gated=False, tied=True, bias="all", qk_norm=True, eps=1.0,
        source="c", norms="post", rope_local_theta=2.0, rope_scaling="yarn", rope_attention=2.0,
        windows=(4,), softcap=1.0, logit_softcap=1.0, query_scalar=3.0, embed_scale=2.0,
        activation="silu", qk_norm_wide=True, z_loss=0.1, rope_pairs="neighbours",
        sinks=True, rope_truncated=False, dropout=0.5,
    )  # fmt: skip
    experts = replace(
        plain, experts=8, top_k=2, expert_ffn=3, shared_experts=1, dense_layers=1, scores="sigmoid",
        normalized=False, routed_scale=2.0, balance="bias", balance_rate=0.1,
        expert_groups=4, top_groups=2, sequence_loss=0.1, batch_loss=0.1, shared_gate=True,
    )  # fmt: skip
    delta = replace(
        plain, mixers=("delta", "attention"), delta_heads=4, delta_key_heads=2, delta_key_dim=3,
        delta_value_dim=5, delta_width=3, delta_chunk=4, output_gate=True,
    )  # fmt: skip
    ahead = replace(plain, mtp=1, mtp_weight=0.7)
    adapted = replace(plain, lora_r=2, lora_alpha=1.0, lora_targets=("wq",))
    latent = replace(plain, kv_latent=8, q_latent=8, rope_dim=2, value_dim=3)
    others = (
        other,
        experts,
        adapted,
        latent,
        delta,
        ahead,
        replace(plain, freeze=("embed",)),
    )
    wrong = [each for one in others for each in differing_sizes(plain, one)]
    keys = {each.partition(":")[0] for each in wrong}
    assert keys == {f.name for f in dataclasses.fields(Shape)} - {
        "name",
        "source",
        "batch",
        "dropout",
    }
    # A longer sequence is another model only where positions are weights.
    assert differing_sizes(plain, replace(plain, sequence=9)) == []


def test_a_shape_as_a_table_reads_back() -> None:
    for shape in (
        Shape.load("8b"),
        Shape.load("124m"),
        Shape("x", 2, 16, heads=4, kv_heads=2, vocab=9),
    ):
        text = "".join(
            f"{k} = {toml_value(v)}\n" for k, v in table_of(shape).items()
        )
        assert Shape.parse(text, "other") == shape


def test_a_manifest_without_a_shape_is_compared_by_all_of_its_weights(
    saved: Path,
) -> None:
    manifest = read_manifest(steps(saved / "checkpoints")[0])
    old = Manifest.parse(
        str(replace(manifest, shape=None, config={})), Path("old")
    )
    shape = manifest.shape
    assert shape is not None
    same = ModelIdentity.of(build_model(shape), shape)
    assert same.differences(old) == []
    assert same.notices(old) == [
        "the checkpoint does not record the model's shape: only weights were compared"
    ]
    fewer = replace(shape, layers=2)
    wrong = ModelIdentity.of(build_model(fewer), fewer).differences(old)
    assert all(w.startswith("has a weight 'layers.2.") for w in wrong[:5])
    assert wrong[-1] == "and 4 more weights"
    wider = replace(shape, ffn=25)
    assert (
        "layers.0.mlp.gate.weight is [24, 16], but [25, 16] in the model"
        in (ModelIdentity.of(build_model(wider), wider).differences(old))
    )


# ---- a run that names no model


def test_a_run_that_names_no_model_goes_on_with_that_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    sizes = toml_value({**PLAIN, "heads": 4, "rope_theta": 500.0})
    words = [f"out={out}", "layout=fp32", "validation.batches=0"]
    assert (
        train_verb.run(
            [*words, f"model={sizes}", "batch=6", "sequence=18", "steps=1"]
        )
        == 0
    )
    assert train_verb.run([*words, "steps=2"]) == 0
    assert "model: 'model' with 3 layers" in capsys.readouterr().out
    first, second = (
        read_manifest(path).shape for path in steps(out / "checkpoints")
    )
    assert first == second


# ---- models of users


def _file(folder: Path) -> tuple[Path, str]:
    file = folder / "mine.py"
    file.write_text(Path(STRANGER.rpartition(":")[0]).read_text())
    return file, f"{file}:Stranger"


def test_a_changed_source_is_a_notice_and_another_structure_a_refusal(
    tmp_path: Path,
) -> None:
    file, model = _file(tmp_path)
    out = tmp_path / "run"
    trained(own(out, "steps=1", model=model), "")
    trained(own(out, "steps=2", model=model), "")
    assert records(out, "model") == []
    file.write_text(file.read_text() + "\n# changed\n")
    trained(own(out, "steps=3", model=model), "")
    (notice,) = records(out, "model")
    assert (
        f"{file} has changed since the checkpoint was made (sha256"
        in notice["text"]
    )
    # describe() counts other heads: the weights are alike, the model is not.
    text = file.read_text()
    assert '"heads": HEADS' in text
    file.write_text(text.replace('"heads": HEADS', '"heads": HEADS // 2'))
    with pytest.raises(
        CheckpointError, match=r"counts: .* in the checkpoint, .* in the run"
    ) as no:
        trained(own(out, "steps=4", model=model), "")
    assert f"Undo the change to {model}" in str(no.value)


def test_another_class_of_the_same_sizes_is_a_notice(tmp_path: Path) -> None:
    file, model = _file(tmp_path)
    file.write_text(
        file.read_text() + "\n\nclass Other(Stranger):\n    pass\n"
    )
    out = tmp_path / "run"
    trained(own(out, "steps=1", model=model), "")
    trained(own(out, "steps=2", model=f"{file}:Other"), "")
    (notice,) = records(out, "model")
    assert "the code differs" in notice["text"]


def test_code_is_not_run_because_a_checkpoint_names_it(tmp_path: Path) -> None:
    _, model = _file(tmp_path)
    out = tmp_path / "run"
    trained(own(out, "steps=1", model=model), "")
    with pytest.raises(UsageError, match=r"Write model='.*mine\.py:Stranger'"):
        train_verb.run([f"out={out}", "steps=2", "layout=fp32"])

"""Frozen weights and low-rank adapters, against `peft` and `transformers` themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_worlds import hash_tensors
from loop_worlds import small, trained
from torch import Tensor, nn

from hub_models import VOCAB, adapter_name, saved, theirs, widened
from phalanx.comm import launch
from phalanx.layout.adapters import adapts
from phalanx.layout.run import Run, RunError
from phalanx.parallel import build_model, start
from phalanx.training.checkpoint_exchange import (
    export_adapter,
    export_weights,
    import_weights,
)
from phalanx.training.checkpoint_format import CheckpointError, read_manifest
from phalanx.training.checkpoint_load import TensorReader
from phalanx.training.loop import train
from phalanx.training.rank import batches_of

R, ALPHA = 3, 5.0
# Five sequences of 23 tokens: no axis divides either.
LAYOUTS = (
    "dp2 tp2 seq zero3 fp64",
    "pp2 cp2 zero1 1f1b:2 fp64",
    "dp2 cp2:ulysses zero2 accum:2 fp64",
    "tp4 fp64",
)
# peft's names of what has adapters, by family; of packed linears all parts have them.
TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "qwen2": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ],
}
WHERE = {"llama": LAYOUTS[:3], "qwen2": LAYOUTS[3:]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tokens.bin"
    draw = torch.Generator().manual_seed(3)
    torch.randint(0, VOCAB, (4000,), generator=draw).numpy().astype(
        "<u2"
    ).tofile(path)
    return path


def words(folder: Path, corpus: Path, *more: str) -> tuple[str, ...]:
    return (
        f"model=hf:{folder}", f"data={corpus}", "batch=5", "sequence=23", "steps=4", "seed=7",
        "document_masks=false", "optimizer.lr=1e-2", "optimizer.schedule=constant",
        "optimizer.eps=1e-3", "validation.batches=0", f"lora.r={R}", f"lora.alpha={ALPHA}", *more,
    )  # fmt: skip


# `peft` loads all of `transformers`, which takes a second: only a process that runs these tests does.
def with_adapter(base: Any, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(base, folder)


def their_steps(
    model: Any, run: Run, targets: list[str]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the adapters at the end, of peft under torch's AdamW on one process."""
    import peft

    batches, o, plain = (
        batches_of(run, run.shape),
        run.optimizer,
        build_model(run.shape),
    )
    starts = {
        name: start(plain, name, run.seed)
        for name in plain.weights
        if adapts(name)
    }
    with widened():
        wide: Any = transformers.AutoModelForCausalLM.from_config(
            model.config, attn_implementation="eager"
        )
        wide.load_state_dict(
            {name: x.double() for name, x in model.state_dict().items()}
        )
        config = peft.LoraConfig(
            r=R, lora_alpha=ALPHA, target_modules=targets, bias="none"
        )
        wide = peft.get_peft_model(wide, config)
        weights = {n: p for n, p in wide.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(starts[adapter_name(name)])
        update = torch.optim.AdamW(
            weights.values(),
            lr=o.lr,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
        )
        losses = []
        for step in range(run.steps):
            batch = batches.batch(step)
            scores = wide(batch["tokens"]).logits
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1), batch["targets"].flatten()
            )
            update.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights.values(), o.clip)
            update.step()
            losses.append(float(loss.detach()))
    return losses, {
        name.replace(".default", ""): x.detach() for name, x in weights.items()
    }


@pytest.mark.parametrize("name", TARGETS)
def test_four_steps_in_every_layout_are_those_of_peft(
    name: str, tmp_path: Path, corpus: Path
) -> None:
    model, targets = theirs(name), TARGETS[name]
    folder, wanted = saved(model, tmp_path / "hub"), None
    tokens = torch.randint(
        0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1)
    )
    for number, layout in enumerate(WHERE[name]):
        chosen = f"lora.targets={json.dumps(targets)}"
        more = (chosen, f"layout={layout}", f"out={tmp_path}/{number}")
        run = Run.parse("", "run", words(folder, corpus, *more))
        losses, weights = wanted = wanted or their_steps(model, run, targets)
        outcomes = launch(train, 4, run, layout, True, backend="threads")
        assert outcomes[0].loss == pytest.approx(losses[-1], rel=1e-9)
        path = run.checkpoints / "step-00000004"
        adapter, merged = (
            tmp_path / f"adapter-{number}",
            tmp_path / f"merged-{number}",
        )
        export_adapter(path, adapter)
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64
        )
        tuned = with_adapter(base, adapter)
        found = {
            n.replace(".default", ""): p
            for n, p in tuned.named_parameters()
            if "lora" in n
        }
        assert found.keys() == weights.keys()
        for key, weight in weights.items():
            error = (found[key] - weight).abs().max() / weight.abs().max()
            assert error < 1e-9, (layout, key, error)
            assert weight.abs().max() > 1e-3, "it was trained"
        export_weights(path, merged)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            merged, dtype=torch.float64
        )
        with torch.no_grad():
            first, second = tuned(tokens).logits, again(tokens).logits
            plain = tuned.get_base_model()
            with tuned.disable_adapter():
                before = tuned(tokens).logits
        assert plain is base
        assert (first - second).abs().max() < 1e-9 * first.abs().max()
        assert (first - before).abs().max() > 1e-4, (
            "the adapter does something"
        )


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi3", ["wq", "wv", "up", "wo"]),
        ("gpt2", ["wk", "up", "down", "wo"]),
        # `out` is in delta layers, and the others are in attention.
        ("qwen3_next", ["out", "wv", "wo"]),
    ],
)
def test_an_adapter_of_packed_linears_gives_the_merged_logits(
    name: str, targets: list[str], tmp_path: Path, corpus: Path
) -> None:
    folder = saved(theirs(name), tmp_path / "hub")
    more = (
        f"lora.targets={json.dumps(targets)}",
        f"out={tmp_path}/run",
        "steps=2",
    )
    run = Run.parse("", "run", words(folder, corpus, "layout=tp2", *more))
    launch(train, 2, run, "tp2", True, backend="threads")
    path = run.checkpoints / "step-00000002"
    export_weights(path, tmp_path / "merged")
    export_adapter(path, tmp_path / "adapter")
    tokens = torch.randint(
        0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        before = base(tokens).logits
        tuned = with_adapter(base, tmp_path / "adapter")
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged",
            dtype=torch.float64,
            experts_implementation="eager",
        )
        first, second = tuned(tokens).logits, merged(tokens).logits
    assert (first - second).abs().max() < 2e-6 * first.abs().max()
    assert (first - before).abs().max() > 1e-3, "the adapter does something"


def test_adapters_of_linears_that_are_packed_by_heads_are_refused_for_peft(
    tmp_path: Path, corpus: Path
) -> None:
    folder = saved(theirs("qwen3_next"), tmp_path / "hub")
    targets = 'lora.targets=["in_q","out"]'
    more = (targets, f"out={tmp_path}/run", "steps=1")
    run = Run.parse("", "run", words(folder, corpus, "layout=dp1", *more))
    launch(train, 1, run, "dp1", True, backend="threads")
    path = run.checkpoints / "step-00000001"
    said = "linear_attn.in_proj_qkvz.weight pack rows of several linears"
    with pytest.raises(CheckpointError, match=said):
        export_adapter(path, tmp_path / "adapter")


def test_a_run_that_goes_on_is_equal_to_the_bit_and_its_frozen_weights_have_no_state(
    tmp_path: Path, corpus: Path
) -> None:
    folder, layout = saved(theirs("llama"), tmp_path / "hub"), "dp2 zero3 bf16"
    states = []
    for name, stops in (("whole", (4,)), ("twice", (2, 4))):
        for steps in stops:
            more = (
                f"layout={layout}",
                f"out={tmp_path}/{name}",
                f"steps={steps}",
            )
            run = Run.parse("", "run", words(folder, corpus, *more))
            launch(train, 2, run, layout, True, backend="threads")
        states.append(hash_tensors(run.checkpoints / "step-00000004"))
    assert states[0] == states[1]
    stored = {
        each.title: each
        for each in read_manifest(run.checkpoints / "step-00000004").tensors
    }
    frozen, trained = (
        stored["weight/embed.tokens.weight"],
        "layers.0.attn.wq.lora.a.weight",
    )
    assert frozen.dtype == "BF16", (
        "what is not trained is kept as it is computed with"
    )
    assert (
        stored[f"exp_avg/{trained}"].dtype
        == stored[f"weight/{trained}"].dtype
        == "F32"
    )
    assert {
        n.partition("/")[2] for n in stored if n.startswith("exp_avg/")
    } == {n.partition("/")[2] for n in stored if ".lora." in n}


@pytest.mark.parametrize(
    "layout", ["dp2 zero3 bf16", "dp2 zero1 bf16", "tp2 bf16"]
)
def test_a_run_holds_what_by_hand_frozen_weights_and_adapters_take(
    layout: str, tmp_path: Path, corpus: Path
) -> None:
    folder = saved(theirs("qwen2"), tmp_path / "hub")
    more = (
        f"layout={layout}",
        f"out={tmp_path}/run",
        "steps=1",
        'lora.targets=["wq","down"]',
    )
    run = Run.parse("", "run", words(folder, corpus, *more))
    launch(train, 2, run, layout, True, backend="threads")
    events = map(
        json.loads,
        (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(),
    )
    held = next(event for event in events if event["event"] == "memory")[
        "ranks"
    ]
    # two blocks; wq and down are 32 by 32 and 32 by 40
    adapters = 2 * R * (32 + 32 + 40 + 32)
    base = sum(p.numel() for p in theirs("qwen2").parameters())
    parts = 2 if "dp2" in layout else 1
    for rank in held:
        measured, promised = rank["measured"], rank["promised"]
        assert measured["weights"] == promised["weights"]
        assert measured["optimizer"] == promised["optimizer"]
        if "tp" not in layout:
            whole = base / (2 if "zero3" in layout else 1)
            assert measured["optimizer"] == pytest.approx(
                8 * adapters / parts, rel=0.02
            )
            assert measured["weights"] == pytest.approx(
                2 * whole + 4 * adapters / parts, rel=0.02
            )


def test_pieces_that_a_run_freezes_stay_and_the_others_train(
    tmp_path: Path, corpus: Path
) -> None:
    folder = saved(theirs("qwen2"), tmp_path / "hub")
    more = (
        "layout=pp2",
        f"out={tmp_path}/run",
        "lora.r=0",
        "freeze=embed, layers.0",
    )
    run = Run.parse("", "run", words(folder, corpus, *more))
    launch(train, 2, run, "pp2", True, backend="threads")
    path = run.checkpoints / "step-00000004"
    export_weights(path, tmp_path / "out")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(
            each, dtype=torch.float32
        ).state_dict()
        for each in (folder, tmp_path / "out")
    )
    changed = {
        name for name in before if not torch.equal(before[name], after[name])
    }
    assert changed == {
        n
        for n in before
        if n.startswith(("model.layers.1", "model.norm", "lm_"))
    }


@pytest.mark.parametrize(
    "layout", ["ep2", "ep2 tp2 seq experts:tp zero1", "dp2 ep2 zero3"]
)
def test_frozen_experts_that_ranks_share_are_saved_whole(
    layout: str, tmp_path: Path
) -> None:
    """Each rank has other experts, and none of them is a copy. Another layout goes on from the save."""
    sizes = (
        "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256,experts=4,top_k=2}"
    )
    more = (sizes, "lora.r=2", "validation.batches=0", "train.check_copies=1")
    out = tmp_path / "run"
    trained(small(out, "steps=1", *more), layout)
    run = small(out, "steps=2", *more)
    trained(run, "dp2")
    path = out / "checkpoints" / "step-00000002"
    reader = TensorReader(path, read_manifest(path))
    model = build_model(run.shape)
    frozen = [name for name in model.weights if ".routed." in name]
    assert len(frozen) == 3
    for name in frozen:
        saved = reader.whole(reader.tensors["weight", name])
        assert torch.equal(
            saved, start(model, name, run.seed).to(saved.dtype)
        ), name


def test_an_adapter_is_exported_of_a_run_with_lora_only(
    tmp_path: Path, corpus: Path
) -> None:
    folder = saved(theirs("llama"), tmp_path / "hub")
    path = import_weights(folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="trained no LoRA"):
        export_adapter(path, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("lora.r=2", 'lora.targets=["q_proj","w9"]'),
            "lora_targets names 'w9'. Linears are wq",
        ),
        (("lora.r=2", "freeze=embed"), "freeze beside LoRA"),
        (("freeze=embed,layers.0-9",), "freeze names block 9 of 4"),
        (("freeze=layer.0",), "freeze names 'layer.0', which is no piece"),
        (("freeze=embed,layers,head",), "every piece is frozen"),
        (("lora_rank=2",), "Write lora.r"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_key(
    more: tuple[str, ...], said: str
) -> None:
    with pytest.raises(RunError) as refused:
        Run.parse("", "run", ("model=tiny", *more))
    assert said in str(refused.value)

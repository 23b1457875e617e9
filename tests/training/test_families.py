"""Models of Hugging Face, in our own decoder and in transformers' own code, against `transformers`."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from checkpoint_worlds import hash_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from hub_models import (
    CODE,
    FAMILIES,
    MORE_CODE,
    PLAIN,
    TIME,
    VOCAB,
    biases,
    in_float64,
    saved,
    theirs,
    widened,
)
from phalanx.cli.main import main
from phalanx.cli.train import run as main_train
from phalanx.cli.usage import UsageError
from phalanx.comm import launch
from phalanx.layout import Layout, LayoutError, Shape, host, staged_pieces
from phalanx.layout.families import (
    code_of,
    config_of,
    family_of,
    hub_shape,
    shape_of,
)
from phalanx.layout.journal import read_journal
from phalanx.layout.run import Run
from phalanx.models.ends import LossHead
from phalanx.parallel import (
    build_model,
    described_whole,
    load_model,
    transformers_frame,
)
from phalanx.training import checkpoint_exchange, checkpoint_load
from phalanx.training.checkpoint_exchange import (
    HubReader,
    export_weights,
    import_weights,
)
from phalanx.training.checkpoint_format import (
    CheckpointError,
    read_manifest,
    verify_checkpoint,
)
from phalanx.training.data.token_files import open_prepared
from phalanx.training.loop import train
from phalanx.training.rank import batches_of
from piece_rows import same_rows

PUBLISHED = {"deepseek-v3": 671_026_419_200, "gpt-oss-20b": 20_914_757_184}
WHOLE = ("stablelm", "olmo3")  # every rank of tp has all heads: no seq
LONG = ("deepseek_wide", *MORE_CODE)
EVERY = [n for n in (*FAMILIES, *CODE) if n not in LONG]
EVERY += [pytest.param(n, marks=pytest.mark.slow) for n in LONG]


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        0, VOCAB, (2, TIME + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def ours(folder: Path, **changed: Any) -> Any:
    """The pieces of our model with a folder's weights."""
    name = f"hf:{folder}"
    code = bool(code_of(name)[0])
    model = (
        load_model(name)
        if code
        else build_model(replace(Shape.load(name), **changed))
    )
    with HubReader(folder) as reader:
        whole = {
            t.name: reader.whole(t).float() for t in reader.manifest.tensors
        }
    names = {parameter: name for name, parameter in model.weights.items()}
    for _, piece in model.pieces:
        for module in piece.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(
                        whole[names[parameter]]
                    )
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.zeros(
                        buffer.shape, dtype=buffer.dtype
                    )
    return model


def logits(model: Any, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    pieces = [piece for _, piece in model.pieces]
    x = pieces[0](tokens, positions)
    for block in pieces[1:-1]:
        x = block(x, positions=positions)
    return pieces[-1].logits(
        x, *(() if isinstance(pieces[-1], LossHead) else (positions,))
    )


@pytest.mark.parametrize("name", EVERY)
def test_logits_and_loss_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    model = theirs(name)
    folder = saved(model, tmp_path / "hub")
    tokens, targets = batch()
    with torch.no_grad():
        wanted = model(tokens).logits
        found = logits(
            ours(folder, **({"sequence": TIME} if name == "dynamic" else {})),
            tokens,
        )
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()
    losses = [
        torch.nn.functional.cross_entropy(
            x.double().flatten(0, 1), targets.flatten()
        )
        for x in (found, wanted)
    ]
    assert abs(losses[0] / losses[1] - 1) < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_pieces_are_the_same_from_the_shape_and_the_model_of_a_family(
    name: str,
) -> None:
    kind, changed = FAMILIES[name]
    plain = {} if kind == "gpt2" else PLAIN
    config = transformers.AutoConfig.for_model(kind, **plain | changed)
    shape = shape_of(config.to_dict(), name)
    assert same_rows(shape) >= 2
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    numbers = sum(
        x.numel() for x in [*model.parameters(), *biases(model).values()]
    )
    assert (
        sum(row.numel for row in staged_pieces(Layout(), shape).rows)
        == numbers
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_that_ship_have_as_many_numbers_as_theirs(name: str) -> None:
    shape = Shape.load(name)
    config = config_of(shape, family_of(shape), "bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    assert sum(x.numel() for x in model.state_dict().values()) == shape.total
    mine = sum(w.numel() for w in build_model(shape).weights.values())
    assert mine == shape.total == PUBLISHED[name]


def test_weights_in_mxfp4_are_what_transformers_makes_of_them(
    tmp_path: Path,
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = theirs("gpt_oss", intermediate_size=64)
    table = {name: x.detach() for name, x in model.state_dict().items()}
    draw, known = torch.Generator().manual_seed(4), dict[str, Tensor]()
    for name in [
        n for n in table if n.endswith(("gate_up_proj", "down_proj"))
    ]:
        experts, into, out = table.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, out, into // 32, 16), generator=draw
        )
        scales = torch.randint(118, 126, blocks.shape[:-1], generator=draw)
        table[f"{name}_blocks"], table[f"{name}_scales"] = (
            blocks.byte(),
            scales.byte(),
        )
        known[name] = convert_moe_packed_tensors(blocks.byte(), scales.byte())
    model.load_state_dict(known, strict=False)
    folder = tmp_path / "hub"
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(table, folder / "model.safetensors")
    tokens, _ = batch()
    with torch.no_grad():
        found, wanted = logits(ours(folder), tokens), model(tokens).logits
    assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError, match="its weights are quantized"):
        Shape.load(f"hf:{folder}")
    table["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(
        5, 3, 2
    ).byte()
    save_file(table, folder / "model.safetensors")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"are not mxfp4, which has \(experts, rows, n, 16\)",
    ):
        HubReader(folder)


def test_tensors_that_predict_further_tokens_are_not_read(
    tmp_path: Path,
) -> None:
    """Qwen3-Next's folders have some whose names begin with mtp."""
    model = theirs("qwen3_next")
    table = {name: x.detach() for name, x in model.state_dict().items()}
    folder = tmp_path / "hub"
    model.config.save_pretrained(folder)
    for name in [n for n in table if n.endswith("experts.gate_up_proj")]:
        place = name.removesuffix(".gate_up_proj")
        both = table.pop(name).chunk(2, 1)
        down = table.pop(f"{place}.down_proj")
        for expert, weights in enumerate(zip(*both, down, strict=True)):
            for kind, x in zip(("gate", "up", "down"), weights, strict=True):
                table[f"{place}.{expert}.{kind}_proj.weight"] = x.clone()
    table["mtp.fc.weight"] = torch.zeros(3, 5)
    save_file(table, folder / "model.safetensors")
    tokens, _ = batch()
    with torch.no_grad():
        found, wanted = logits(ours(folder), tokens), model(tokens).logits
    assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max()
    table["other.fc.weight"] = torch.zeros(3, 5)
    save_file(table, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"other.fc.weight"):
        HubReader(folder)


def test_layer_types_are_those_of_all_blocks(tmp_path: Path) -> None:
    """Qwen3-Next's, which may be full attention in all of them."""
    theirs("qwen3_next").config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())

    def read(*types: str) -> Shape:
        path.write_text(json.dumps(config | {"layer_types": types}))
        return hub_shape(str(tmp_path))

    shape = read(*["full_attention"] * 3)
    assert shape.mixers == ("attention",)
    assert shape.delta_heads == 0
    with pytest.raises(LayoutError, match="layer_types names 2 of 3 blocks"):
        read("linear_attention", "full_attention")
    other = "sliding_attention"
    with pytest.raises(LayoutError, match=f"layer_types has {other}"):
        read("linear_attention", "full_attention", other)


# ---- training


def their_steps(model: Any, run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights at the end, of theirs under torch's AdamW on one process."""
    batches, o = batches_of(run, run.shape), run.optimizer
    with widened():
        wide = in_float64(model)
        weights = list(wide.parameters())
        groups = [
            {
                "params": [w for w in weights if w.dim() > 1],
                "weight_decay": o.weight_decay,
            },
            {
                "params": [w for w in weights if w.dim() == 1],
                "weight_decay": 0.0,
            },
        ]
        update = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
        losses, counts = [], dict[str, Tensor]()
        for name, module in wide.named_modules():
            if hasattr(module, "e_score_correction_bias"):
                module.register_forward_hook(
                    lambda m, x, out, n=name: counts.update({n: out[2].flatten().bincount(
                        minlength=len(m.weight)
                    )})
                )  # fmt: skip
        for step in range(run.steps):
            batch = batches.batch(step)
            scores = wide(batch["tokens"]).logits
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1), batch["targets"].flatten()
            )
            update.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, o.clip)
            update.step()
            # Experts with more tokens than the mean are chosen less, those with fewer more.
            for name, count in counts.items():
                above = count * len(count) - count.sum()
                router = wide.get_submodule(name)
                router.e_score_correction_bias -= (
                    run.shape.balance_rate * above.sign()
                )
            losses.append(float(loss.detach()))
    weights = {name: x.detach() for name, x in wide.named_parameters()}
    return losses, weights | biases(wide)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tokens.bin"
    draw = torch.Generator().manual_seed(3)
    torch.randint(0, VOCAB, (4000,), generator=draw).numpy().astype(
        "<u2"
    ).tofile(path)
    return path


# Five sequences of 23 tokens: no axis divides either.
LAYOUTS = (
    "dp2 tp2 seq zero3 fp64",
    "pp2 cp2 zero1 1f1b:2 fp64",
    "dp2 cp2:ulysses zero2 accum:2 fp64",
)


def _of_families() -> Iterator[Any]:
    """Each family with its layouts: all three in `make slow`, and two in turn before."""
    short = [name for name in (*FAMILIES, *CODE) if name not in LONG]
    for number, name in enumerate((*short, *LONG)):
        left_out = number % len(LAYOUTS)
        two = tuple(x for n, x in enumerate(LAYOUTS) if n != left_out)
        slow = [pytest.mark.slow] * (name in LONG)
        yield pytest.param(name, two, marks=slow, id=name)
        third = LAYOUTS[left_out : left_out + 1]
        yield pytest.param(
            name, third, marks=pytest.mark.slow, id=f"{name}-third"
        )


@pytest.mark.parametrize(("name", "layouts"), [*_of_families()])
def test_four_steps_in_three_layouts_are_those_of_transformers(
    name: str, layouts: tuple[str, ...], tmp_path: Path, corpus: Path
) -> None:
    model = theirs(name)
    folder = saved(model, tmp_path / "hub")
    words = (
        f"model=hf:{folder}", f"data={corpus}", "batch=5", "sequence=23", "steps=4",
        "document_masks=false", "optimizer.lr=1e-2", "optimizer.schedule=constant",
        "optimizer.eps=1e-3", "validation.batches=0",
    )  # fmt: skip
    wanted = None
    for number, layout in enumerate(layouts):
        if name in WHOLE:
            layout = layout.replace(" seq", "")
        run = Run.parse(
            "", "run", (*words, f"layout={layout}", f"out={tmp_path}/{number}")
        )
        if run.shape.positions == "learned":
            assert run.shape.sequence == 32
        losses, weights = wanted = wanted or their_steps(model, run)
        outcomes = launch(train, 4, run, layout, True, backend="threads")
        assert outcomes[0].loss == pytest.approx(losses[-1], rel=1e-9)
        path = run.checkpoints / "step-00000004"
        exported = tmp_path / f"exported-{number}"
        export_weights(path, exported)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            exported, dtype=torch.float64
        )
        for key, weight in [*again.named_parameters(), *biases(again).items()]:
            error = (weight - weights[key]).abs().max() / weights[
                key
            ].abs().max()
            assert error < 1e-9, (layout, key, error)
            moved = (weights[key] - model.state_dict()[key]).abs().max()
            assert moved >= run.shape.balance_rate, "it was trained"


@pytest.mark.parametrize("name", EVERY)
def test_what_is_exported_and_read_again_is_equal_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    model = theirs(name)
    folder = saved(model, tmp_path / "hub")
    first = import_weights(folder, tmp_path / "run")
    assert verify_checkpoint(first) == []
    export_weights(first, tmp_path / "exported")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", attn_implementation="eager"
    ).eval()
    assert type(again) is type(model)
    for key, weight in again.state_dict().items():
        assert torch.equal(weight, model.state_dict()[key]), key
    tokens, _ = batch()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    back = import_weights(tmp_path / "exported", tmp_path / "back")
    assert hash_tensors(back) == hash_tensors(first)
    assert read_manifest(back).shape == read_manifest(first).shape


def test_a_bias_that_balances_keeps_its_digits_in_an_export_of_16_bits(
    tmp_path: Path,
) -> None:
    model = theirs("deepseek_v3")
    first = import_weights(saved(model, tmp_path / "hub"), tmp_path / "run")
    export_weights(first, tmp_path / "exported", dtype="BF16")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype="auto"
    )
    assert again.lm_head.weight.dtype == torch.bfloat16
    for name, bias in biases(model).items():
        assert bias.bfloat16().float().ne(bias).any()
        assert torch.equal(biases(again)[name], bias)


def test_blocks_that_predict_further_tokens_are_left_out(
    tmp_path: Path,
) -> None:
    model = theirs("deepseek_v3")
    state = {n: x.clone() for n, x in model.state_dict().items()}
    more = {
        n.replace(".1.", ".2."): x.clone()
        for n, x in state.items()
        if ".layers.1." in n
    }
    model.save_pretrained(tmp_path / "hub", state_dict=state | more)
    found = logits(ours(tmp_path / "hub"), batch()[0])
    with torch.no_grad():
        assert (
            found - model(batch()[0]).logits
        ).abs().max() < 2e-6 * found.abs().max()


def test_a_rank_reads_the_bytes_that_it_keeps(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(theirs("phi3"), tmp_path / "hub")
    read: list[int] = []
    plain = checkpoint_load.read_into

    def counted(file: Any, offset: int, out: Tensor) -> None:
        read.append(out.numel() * out.element_size())
        plain(file, offset, out)

    for module in (checkpoint_load, checkpoint_exchange):
        monkeypatch.setattr(module, "read_into", counted)
    run = Run.parse("", "run", (
        f"model=hf:{folder}", f"data={corpus}", "batch=4", "steps=1", "sequence=8",
        "layout=dp4 zero3", f"out={tmp_path}/run", "validation.batches=0",
    ))  # fmt: skip
    launch(train, 4, run, "dp4 zero3", True, backend="threads")
    total = 4 * run.shape.total
    # Whole rows are read: the first and the last of a shard are read by two ranks.
    assert total <= sum(read) < 1.1 * total
    assert max(read) < total / 4


# ---- the command line


def tokenizer(folder: Path) -> None:
    """Words, and a token that closes a text."""
    words = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(VOCAB - 3))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: n for n, word in enumerate(words)}, "<unk>"
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)


def test_one_line_from_a_folder_to_training_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = theirs("gemma2")
    folder, out = saved(model, tmp_path / "hub"), tmp_path / "run"
    tokenizer(folder)
    draw = random.Random(0)
    texts = [
        " ".join(f"w{draw.randrange(VOCAB - 3)}" for _ in range(30))
        for _ in range(200)
    ]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": x}) + "\n" for x in texts)
    )
    words = [
        f"model=hf:{folder}", f"data={tmp_path}/texts.jsonl", f"out={out}", "sequence=16", "batch=4",
        "layout=dp2 zero3", "optimizer.lr=1e-9", "validation.batches=0",
    ]  # fmt: skip
    assert main(["train", *words, "steps=1"]) == 0
    assert main(["train", *words, "steps=2"]) == 0, "it goes on"
    corpus = open_prepared(out / "tokens")
    tokens = corpus.train.read(0, 93)
    documents = corpus.train.read_documents(0, 93)
    assert corpus.vocab == VOCAB
    assert set(tokens[30::31]) == {2}, "each text is closed"
    assert list(documents[::31]) == [0, 1, 2]
    # The loss of the first step is transformers' own.
    run = Run.parse("", "run", (*words, f"data={out}/tokens"))
    rows = batches_of(run, run.shape).batch(0)
    same = rows["documents"].unsqueeze(-1) == rows["documents"].unsqueeze(-2)
    both = same.tril(), same.tril().triu(-5)  # a window of 6
    masks = [
        torch.zeros(x.shape).masked_fill(~x, -torch.inf).unsqueeze(1)
        for x in both
    ]
    with torch.no_grad():
        scores = model(
            rows["tokens"], position_ids=rows["positions"],
            attention_mask=dict(zip(("full_attention", "sliding_attention"), masks, strict=True)),
        ).logits  # fmt: skip
    loss = nn.functional.cross_entropy(
        scores.flatten(0, 1), rows["targets"].flatten()
    )
    step = next(
        r for r in read_journal(out / "metrics.jsonl") if r["event"] == "step"
    )
    assert step["loss"] == pytest.approx(float(loss), rel=1e-5)
    # And back: what transformers loads, with its tokenizer.
    assert (
        main(["checkpoint", "export", str(out), "--to", str(tmp_path / "new")])
        == 0
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new"
    ).eval()
    assert again.config.max_position_embeddings == 32
    assert again.config.eos_token_id == 2
    probe, _ = batch()
    with torch.no_grad():
        wanted = model(probe).logits
        assert (
            again(probe).logits - wanted
        ).abs().max() < 1e-5 * wanted.abs().max()
    words_of = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert words_of("w3 w4")["input_ids"] == [6, 7]
    assert words_of.eos_token == "</s>"
    capsys.readouterr()
    with pytest.raises(UsageError, match="'python' is bytes"):
        main_train([words[0], f"out={tmp_path}/other"])


@pytest.mark.parametrize("name", ["olmo2", "gemma3"])
@pytest.mark.parametrize("command", [
    "check dp2 --model {}", "cost --model {}", "verify --model {} --layouts tp2 --steps 1",
    "plan --model {} --cluster h100x8 --seq 32 --batch-tokens 256 --top 1",
])  # fmt: skip
def test_other_commands_take_the_folder(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(theirs(name), tmp_path / "hub")
    assert main(command.format(f"hf:{folder}").split()) == 0
    assert name in capsys.readouterr().out


def test_a_run_of_transformers_own_code_is_compared_by_its_own_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are drawn, so the folder needs none."""
    folder = saved(theirs("granite"), tmp_path / "hub")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    words = [
        "verify",
        f"model=hf:{folder}",
        "layout=dp2 tp2 seq zero1",
        "batch=4",
    ]
    assert main([*words, "sequence=16", "steps=10", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["passed"] == 2
    assert "2 of 2 blocks, every kind of them" in figures["covered"]


def test_a_run_of_transformers_code_that_is_too_large_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = saved(theirs("granite"), tmp_path / "hub")
    monkeypatch.setattr(host, "available_memory", lambda: 1.0)
    words = [
        "verify",
        f"model=hf:{folder}",
        "layout=dp2",
        "batch=4",
        "sequence=16",
    ]
    assert main([*words, "steps=10"]) == 2
    assert "a folder whose config.json has fewer" in capsys.readouterr().err


def test_pieces_that_are_not_what_transformers_computes_are_not_compared(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = f"hf:{saved(theirs('granite'), tmp_path / 'hub')}"
    plain = transformers_frame.TransformersHead.logits
    assert main(["check", "dp2 tp2 seq", "--model", name]) == 0
    assert main(["check", "dp2 compile", "--model", name]) == 2
    assert main(["cost", "--model", name]) == 0
    words = ["verify", "--model", name, "--layouts", "dp2", "--steps", "1"]
    assert main(words) == 0
    with monkeypatch.context() as patch:
        patch.setattr(
            transformers_frame.TransformersHead,
            "logits",
            lambda *args: 1.01 * plain(*args),
        )
        assert main(words) == 2
    said = capsys.readouterr().err
    assert "GraniteForCausalLM.forward is " in said
    assert "transformers' code was not understood" in said
    embedded = transformers_frame.TransformersEmbed.forward

    def scaled(self: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        return 1.01 * embedded(self, tokens, positions)

    monkeypatch.setattr(
        transformers_frame.TransformersEmbed, "forward", scaled
    )
    train = [
        "train",
        f"model={name}",
        f"data={corpus}",
        f"out={tmp_path}/run",
        "steps=1",
        "batch=2",
    ]
    for argv in (
        words,
        [*train, "sequence=8", "--layout", "dp2 fp32", "--backend", "threads"],
    ):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert (
            "layers.0 gets an input in GraniteForCausalLM.forward that differs from the output"
            in said
        )


@pytest.mark.parametrize("name", [*CODE, *MORE_CODE])
def test_pieces_compute_what_the_whole_model_of_transformers_does(
    name: str, tmp_path: Path
) -> None:
    whole = described_whole(
        load_model(f"hf:{saved(theirs(name), tmp_path / 'hub')}")
    )
    assert whole is not None
    assert [*whole.parts] == [*range(1, len(whole.parts) + 1)], (
        "each block is compared"
    )


# ---- folders from elsewhere


def pickled(folder: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "ran",)

    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))


def with_code(folder: Path) -> None:
    table = json.loads((folder / "config.json").read_text())
    table |= {
        "model_type": "hostile",
        "auto_map": {"AutoConfig": "hostile.Config"},
    }
    (folder / "config.json").write_text(json.dumps(table))


def with_header(change: Any) -> Any:
    def write(folder: Path) -> None:
        path = min(folder.glob("*.safetensors"))
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = change(json.loads(content[8 : 8 + length]))
        text = (
            header
            if isinstance(header, bytes)
            else json.dumps(header).encode()
        )
        path.write_bytes(
            len(text).to_bytes(8, "little") + text + content[8 + length :]
        )

    return write


def overlapping(header: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in header if name != "__metadata__"]
    for name in names[1:]:
        header[name]["data_offsets"] = header[names[0]]["data_offsets"]
        header[name] |= {
            key: header[names[0]][key] for key in ("shape", "dtype")
        }
    return header


def oversized(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def climbing(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    table = json.loads(path.read_text())
    name = next(iter(table["weight_map"]))
    table["weight_map"][name] = "../outside.safetensors"
    path.write_text(json.dumps(table))


HOSTILE = {
    "pickled weights": (pickled, "pickled weights (.bin, .pt) are not opened"),
    "code names": (with_code, "Code that it names (auto_map) is not run"),
    "an oversized header": (oversized, "is not a safetensors file"),
    "overlapping tensors": (with_header(overlapping), "shares bytes with"),
    "a path that climbs": (climbing, "is not plain"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_folders_run_nothing_and_give_one_sentence(
    kind: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = HOSTILE[kind]
    folder = saved(theirs("qwen3"), tmp_path / "hub")
    (folder / "hostile.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    spoil(folder)
    code = main([
        "train", f"model=hf:{folder}", f"data={corpus}", f"out={tmp_path}/run", "batch=2", "steps=1",
        "layout=", "sequence=8",
    ])  # fmt: skip
    told = capsys.readouterr().err
    assert code in (1, 2)
    assert words in told
    assert "Traceback" not in told
    assert not (folder / "ran").exists()

"""Run files: what is right reads and prints back, what is wrong is refused with place and way out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout import Layout, Shape, legal
from phalanx.layout.choices import elsewhere
from phalanx.layout.codec import every_key, schema
from phalanx.layout.recipe import recipe
from phalanx.layout.run import Run, RunError, refuse_random_by_name
from phalanx.layout.shape import published

# what the file says, the place and value told, way out
WRONG: dict[str, tuple[str, str, str]] = {
    "no such key": ("batchsize = 3", "line 1: batchsize = 3", "'batch'"),
    "key of another table": ("[checkpoint]\nlr = 1", "line 2: checkpoint.lr = 1", "'optimizer.lr'"),
    "key that resembles nothing": ("zzz = 1", "line 1: zzz = 1", "Keys here are model"),
    "no such table": ("[optimiser]\nlr = 1", "line 1: optimiser", "'optimizer'"),
    "text for a number": ('steps = "many"', 'line 1: steps = "many" is text', "steps = 100"),
    "fraction for a whole": ("steps = 1.5", "steps = 1.5 is a number", "a whole number"),
    "true for a number": ("steps = true", "steps = true is true or false", "a whole number"),
    "number for true": ("document_masks = 1", "document_masks = 1 is a whole number", "true or false"),
    "number for text": ("data = 5", "data = 5 is a whole number", "Write text"),
    "date for a number": ("steps = 2020-01-01", "steps", "a whole number"),
    "list for a number": ("steps = [1, 2]", "steps = [1, 2] is a list of 2", "a whole number"),
    "number for a table": ("optimizer = 1", "optimizer = 1", "optimizer.lr"),
    "table for a number": ("[steps]\nn = 1", "steps", "a whole number"),
    "not finite": ("optimizer.lr = inf", "optimizer.lr = Infinity", "a number"),
    "not a number": ("optimizer.lr = nan", "optimizer.lr = NaN", "a number"),
    "no steps": ("steps = 0", "steps = 0 is out of bounds", "1 to 1,000,000,000,000"),
    "rate of nothing": ("optimizer.lr = 0", "optimizer.lr = 0", "more than 0"),
    "negative seed": ("seed = -1", "seed = -1", "0 to 4,611,686,018,427,387,903"),
    "low above peak": ("optimizer.min_lr = 1.5", "optimizer.min_lr = 1.5 is more than lr", "up to lr"),
    "one beta": ("optimizer.betas = [0.9]", "optimizer.betas = [0.9]", "two numbers"),
    "beta of one": ("optimizer.betas = [0.9, 1.0]", "optimizer.betas", "0 to 0.999999"),
    "unknown optimizer": ('optimizer.name = "adam"', 'optimizer.name = "adam"', "'adamw'"),
    "unknown schedule": ('optimizer.schedule = "cos"', 'optimizer.schedule = "cos"', "'cosine'"),
    "unknown choice": ('checkpoint.on_disk_full = "x"', 'on_disk_full = "x"', "stop, go-on"),
    "one checkpoint kept": ("checkpoint.keep = 1", "checkpoint.keep = 1", "2 or more"),
    "long warm-up": ("steps = 10\noptimizer.warmup_steps = 11", "line 2: optimizer.warmup_steps = 11", "10"),
    "long fall": (
        'steps = 10\n[optimizer]\nschedule = "wsd"\nwarmup_steps = 6\ndecay_steps = 5',
        "line 5: optimizer.warmup_steps + optimizer.decay_steps = 11", "decay_steps = 4",
    ),
    "decay of a cosine": ("optimizer.decay_steps = 5", "decay_steps = 5 has no effect", '"wsd"'),
    "momentum of adamw": ("optimizer.momentum = 0.9", "optimizer.momentum = 0.9", '"sgd"'),
    "muon's keys": ('optimizer.adjust_lr = "original"', "no effect on adamw", '"muon"'),
    "two precisions": (
        'precision = "bf16"\nlayout = "dp2 fp16"', "line 1: precision = 'bf16', and layout = 'dp2 fp16'",
        "one of them",
    ),
    "no such precision": ('precision = "bf61"', 'precision = "bf61" is unknown', "'bf16'"),
    "microbatch that does not divide": (
        'batch = 16\nlayout = "dp2"\nmicrobatch = 3',
        "line 3: microbatch = 3 on each of dp2 does not divide batch = 16", "1 or 2 or 4",
    ),
    "two numbers of microbatches": (
        'batch = 16\nlayout = "dp2 accum:2"\nmicrobatch = 2',
        "cuts batch = 16 over dp2 into 4 microbatches, and layout = 'dp2 accum:2' into 2", "one of them",
    ),
    "late profile": ("steps = 5\nprofile.steps = 3\nprofile.start = 4", "= 7 of 5", "earlier"),
    "no such shape": ('model = "tini"', "model = 'tini'", "'tiny'"),
    "shape of nothing": ("model = {layers = 2}", "model.hidden is missing", "model.hidden = 100"),
    "shape that cannot be": (
        "model = {layers = 2, hidden = 64, heads = 4, kv_heads = 3, vocab = 256}",
        "line 1: model.kv_heads = 3 does not divide heads = 4", "a divisor",
    ),
    "model of a number": ("model = 3", "model = 3 is a whole number", "text or a table"),
    "no such file of a model": ('model = "my.py:Net"', "no file my.py", "bring-your-model"),
    "no decoder": ('model = "mlp"', "'mlp' is not a decoder", "tiny"),
    "few words": ("model = {layers = 2, hidden = 64, vocab = 99}", "a vocabulary of 99", "256"),
    "many positions": ('model = "124m"\nsequence = 2048', "line 2: sequence = 2048", "1024"),
    "layout of no word": ('layout = "dp2 zeero3"', "line 1: layout = 'dp2 zeero3'", "'zero3'"),
    "layout that does not fit": ('layout = "tp3"', "tp=3 does not divide heads=4", "Nearest"),
    "layout for a larger batch": ('layout = "dp4"\nbatch = 2', "a batch of 2", "4 or more"),
    "no such data": ('data = "nowhere/at/all"', "data = 'nowhere/at/all' is not there", "python"),
    "no such machine": ('machine = "nothing.toml"', "machine = 'nothing.toml'", "phalanx doctor"),
    "tool that is not there": ("metrics.trackio = true", "trackio is not installed", "pip install"),
    "said twice": ("steps = 1\nsteps = 2", "this is not TOML", "docs/training.md"),
    "not TOML": ("steps 1", "this is not TOML", "docs/training.md"),
}  # fmt: skip
ARGUMENTS = {
    "nothing set": ("steps", "argument: 'steps' sets nothing", "key=value"),
    "no key": ("=3", "argument: '=3' sets nothing", "key=value"),
    "no such key": ("stepps=3", "argument 'stepps=3'", "'steps'"),
    "wrong type": (
        "steps=x",
        "argument 'steps=x': steps = \"x\" is text",
        "a whole number",
    ),
    "below a number": ("steps.x=3", "steps", "a whole number"),
    "wrong layout": ("layout=dp2 qq", "argument 'layout=dp2 qq'", "auto"),
}


@pytest.fixture(autouse=True)
def _no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_place_value_and_way_out(
    name: str,
) -> None:
    text, told, way_out = WRONG[name]
    with pytest.raises(RunError) as error:
        Run.parse(text, "my.toml")
    said = str(error.value)
    assert said.startswith("my.toml has ")
    assert told in said
    assert way_out in said


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_is_refused_with_place_value_and_way_out(
    name: str,
) -> None:
    argument, told, way_out = ARGUMENTS[name]
    with pytest.raises(RunError) as error:
        Run.parse("", "my.toml", (argument,))
    assert told in str(error.value)
    assert way_out in str(error.value)


def test_all_mistakes_are_told_at_once() -> None:
    whole = "\n".join(
        [
            'steps = "x"',
            'model = "tini"',
            'layout = "qq"',
            "[optimizer]",
            "lr = -1",
            "speed = 2",
        ]
    )
    with pytest.raises(RunError) as error:
        Run.parse(whole, "my.toml", ("seed=-4", "checkpoint.keep=0"))
    assert len(error.value.mistakes) == 7
    assert len({m.place for m in error.value.mistakes}) == 7


def test_a_wrong_run_is_refused_without_loading_torch(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("stepps = 1\n")
    code = (
        "import sys\nfrom phalanx.cli.train import run\n"
        f"try: run([{str(file)!r}, 'layout=tp3'])\n"
        "except ValueError as error: print(error)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "2 mistakes" not in done.stdout  # tp3 breaks two rules of its own
    assert "3 mistakes" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


RUNS = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(20, 10**9),
        "seed": st.integers(0, 2**31),
        "document_masks": st.booleans(),
        "out": st.text(
            st.characters(min_codepoint=32, max_codepoint=0x2FF),
            min_size=1,
            max_size=8,
        ),
        "optimizer": st.fixed_dictionaries(
            {"lr": st.floats(1e-9, 1e3), "warmup_steps": st.integers(0, 20)},
            optional={
                "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(
                    list
                )
            },
        ),
        "checkpoint": st.fixed_dictionaries(
            {"async": st.booleans(), "every": st.integers(0, 99)}
        ),
    },
)


@settings(deadline=None, max_examples=50)
@given(RUNS)
def test_what_is_printed_reads_back_the_same(said: dict[str, object]) -> None:
    arguments = [
        f"{name}.{inner}={json.dumps(v)}"
        if isinstance(value, dict)
        else f"{name}={json.dumps(value)}"
        for name, value in said.items()
        for inner, v in (
            value.items() if isinstance(value, dict) else [("", None)]
        )
    ]
    run = Run.parse("", "x", tuple(arguments))
    assert Run.parse(str(run), "x") == run
    table = tomllib.loads(str(run))
    for name, value in said.items():
        assert table[name] == value or value.items() <= table[name].items()  # type: ignore[attr-defined]


def test_a_model_told_by_its_sizes_reads_back_too() -> None:
    run = Run.parse(
        "batch = 3\nmodel = {layers = 2, hidden = 64, heads = 4, vocab = 300}",
        "x",
    )
    assert Run.parse(str(run), "x") == run
    assert run.shape == Shape("model", 2, 64, heads=4, vocab=300, batch=3)


def test_an_argument_wins_over_the_file_and_needs_no_quotes() -> None:
    run = Run.parse(
        'layout = "dp2"\n[optimizer]\nlr = 1',
        "x",
        ("layout=pp2 zero1", "optimizer.lr=2"),
    )
    assert (run.layout, run.optimizer.lr) == ("pp2 zero1", 2.0)


def test_the_schema_names_every_key_with_its_default_and_bounds() -> None:
    said = schema(Run, "phalanx run file")

    def keys(table: dict[str, object], prefix: str = "") -> list[str]:
        found = []
        for name, inner in table["properties"].items():  # type: ignore[attr-defined]
            deeper = "properties" in inner
            found += (
                keys(inner, f"{prefix}{name}.") if deeper else [prefix + name]
            )
        assert table["additionalProperties"] is False
        return found

    assert keys(said) == list(every_key(Run))
    optimizer = said["properties"]["optimizer"]["properties"]
    assert optimizer["lr"] == {
        "type": "number", "description": "peak learning rate", "exclusiveMinimum": 0, "default": 3e-4,
    }  # fmt: skip
    assert optimizer["name"]["enum"] == ["adamw", "sgd", "muon", "soap"]


OLD = {  # keys of earlier versions, and those of other libraries: what to write
    "masks=true": "document_masks", "optimizer.kind=adamw": "optimizer.name",
    "optimizer.warmup=1": "optimizer.warmup_steps", "optimizer.fall=1": "optimizer.decay_steps",
    "optimizer.least=0.1": "optimizer.min_lr", "optimizer.decay=0.1": "optimizer.weight_decay",
    "learning_rate=1e-3": "optimizer.lr", "optimizer.max_norm=1": "optimizer.clip",
    "weight_decay=0.1": "optimizer.weight_decay", "global_batch_size=8": "batch",
    "optimizer.adam_beta1=0.9": "optimizer.betas", "micro_batch_size=1": "microbatch",
    "gradient_accumulation_steps=4": "accum:N", "dtype=bf16": "precision", "seq_len=64": "sequence",
    "max_iters=3": "steps", "fsdp=8": "zero3", "checkpoint.interval=5": "checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("argument", OLD)
def test_an_old_or_foreign_name_is_refused_with_a_pointer_to_ours(
    argument: str,
) -> None:
    with pytest.raises(RunError, match="there is no key") as error:
        Run.parse("", "x", (argument,))
    (mistake,) = error.value.mistakes
    assert OLD[argument] in mistake.way_out


def test_dropout_of_a_run_wins_over_that_of_its_model_also_if_it_is_zero() -> (
    None
):
    model: dict[str, object] = {
        "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 61,
        "dropout": 0.1,
    }  # fmt: skip
    assert Run(model=model).shape.dropout == 0.1
    assert Run(model=model, dropout=0.3).shape.dropout == 0.3
    assert Run(model=model, dropout=0.0).shape.dropout == 0.0


def test_precision_and_microbatch_are_other_ways_to_write_the_layout() -> None:
    def of(*arguments: str) -> str:
        run = Run.parse("", "x", ("batch=16", *arguments))
        return str(run.layout_of(run.shape))

    assert (
        of("layout=dp2", "precision=bf16")
        == of("layout=dp2 bf16")
        == "dp2 bf16"
    )
    assert (
        of("layout=dp2", "microbatch=2")
        == of("layout=dp2 accum:4")
        == "dp2 accum:4"
    )
    assert (
        of("layout=dp2 pp2", "microbatch=1")
        == of("layout=dp2 pp2 1f1b:8")
        == "dp2 pp2 1f1b:8"
    )
    # The same twice is no conflict.
    assert (
        of("layout=dp2 accum:4 bf16", "microbatch=2", "precision=bf16")
        == "dp2 accum:4 bf16"
    )
    assert of("layout=dp2 fp32", "precision=fp32") == "dp2"
    assert Run.parse("", "x", ("microbatch=1",)).layout_of() is None  # auto
    # the default, but asked for
    with pytest.raises(RunError, match=r"fp32.*'dp2 bf16'"):
        of("layout=dp2 bf16", "precision=fp32")


def descriptions(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The description of each key of a schema, by its dotted name."""
    found: dict[str, str] = {}
    for name, inner in table["properties"].items():
        if "properties" in inner:
            found |= descriptions(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = inner["description"]
    return found


def test_the_docs_list_every_key_of_the_run_file_with_its_description() -> (
    None
):
    page = Path(__file__).parents[2] / "docs" / "training.md"
    section = (
        page.read_text().partition("## The keys")[2].partition("\n## ")[0]
    )
    rows = re.findall(
        r"^\| `([\w.]+)` \| .*? \| (.*) \|$", section, re.MULTILINE
    )
    assert dict(rows) == descriptions(schema(Run, "phalanx run file"))
    assert [key for key, _ in rows] == list(every_key(Run))


def test_the_docs_list_every_size_of_a_model_with_the_words_of_others() -> (
    None
):
    page = Path(__file__).parents[2] / "docs" / "model-keys.md"
    line = re.compile(
        r"^\| `(\w+)` \| .*? \| (.*?) \| (.*?) \|$", re.MULTILINE
    )
    rows = {
        key: (text, words)
        for key, text, words in line.findall(page.read_text())
    }
    of_run = {"name", "kind", "freeze", "lora_r", "lora_alpha", "lora_targets"}
    sizes = schema(Shape, "shape")["properties"]
    assert set(rows) == set(sizes) - of_run
    words = elsewhere("model")
    assert set(words.values()) <= set(rows)
    for key, (text, others) in rows.items():
        assert text == (sizes[key].get("description") or text), key
        known = [other for other, ours in words.items() if ours == key]
        assert others == ", ".join(f"`{other}`" for other in known), key


@pytest.mark.parametrize("name", [n for n in Shape.names() if n != "mlp"])
@pytest.mark.parametrize(
    "ranks", [1, 2, 3, 6, 8, 24, 128, 256, 512, 1024, 2000]
)
def test_the_recipe_is_legal_for_every_shape_and_number_of_ranks(
    name: str, ranks: int
) -> None:
    shape = Shape.load(name)
    batch = max(shape.batch, ranks)
    layout = recipe(shape, ranks, batch=batch, memory=80e9, precision="bf16")
    assert layout.ranks == ranks
    assert legal(layout, shape, batch=batch) == ()
    assert Layout.parse(str(layout)) == layout


def test_the_recipe_says_what_it_says() -> None:
    def of(name: str, ranks: int, **more: float) -> Layout:
        shape = Shape.load(name)
        return recipe(shape, ranks, batch=max(shape.batch, ranks), **more)  # type: ignore[arg-type]

    assert str(of("124m", 8)) == "dp8"  # plain data parallel
    assert str(of("124m", 128)) == "dp128"
    assert (of("8b", 8).zero, of("8b", 8).recompute) == (3, "all")  # above 1B
    assert of("8b", 512).mesh.of("dp.replicate") > 1  # above 256 devices HSDP
    assert of("8b", 256).mesh.of("dp.replicate") == 1
    assert of("8b", 512, memory=80e9).mesh.of("dp.shard") == 8
    # 2 GB of 128 fit in half of 8
    assert of("8b", 512, memory=8e9).mesh.of("dp.shard") == 64
    assert of("70b", 64).tp > 1  # above 50B
    assert of("70b", 64).pp > 1
    assert of("8b", 8).tp == of("8b", 512).pp == 1
    long = recipe(Shape.load("8b"), 8, batch=8, sequence=65536)
    assert long.cp == 4  # a place for every 16k tokens


def test_the_less_memory_the_more_microbatches() -> None:
    shape = Shape.load("1b")
    counts = [
        recipe(shape, 8, memory=m).microbatches for m in (400e9, 80e9, 20e9)
    ]
    assert counts == sorted(set(counts))


def test_the_layout_is_the_first_one_for_as_many_ranks_as_there_are() -> None:
    run = Run.parse(
        "layout = 'dp4 zero3'\ntrain.fallback = 'dp2 zero3; pp2 1f1b:4; tp1'\nbatch = 8"
    )
    chosen = {ranks: run.for_ranks(ranks).layout for ranks in (1, 2, 3, 4)}
    assert chosen == {1: "tp1", 2: "dp2 zero3", 3: "dp4 zero3", 4: "dp4 zero3"}
    assert run.for_ranks(3, fewer=True).layout == "dp2 zero3"
    assert run.for_ranks(2).train == run.train


def test_a_fallback_that_does_not_fit_the_model_is_refused_before_it_is_needed() -> (
    None
):
    with pytest.raises(
        RunError, match=r"line 1: layout = 'tp3': tp=3 does not divide heads=4"
    ):
        Run.parse("train.fallback = 'dp2; tp3'\nlayout = 'dp4'\nbatch = 8")


@pytest.mark.parametrize(
    "name",
    ["gpt2", "GPT-2", "gpt_2", "gpt2-small", "openai-community/gpt2", "llama3-8b", "Llama-3-8B",
     "llama-3.2-1b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B-Instruct", "deepseek-v3",
     "deepseek-ai/DeepSeek-V3", "gpt-oss-20b", "openai/gpt-oss-120b", "somebody/8b"],
)  # fmt: skip
def test_a_name_of_published_weights_is_refused_until_random_ones_are_asked_for(
    name: str, tmp_path: Path
) -> None:
    run = Run(model=name, out=str(tmp_path / "run"))
    # Sizes that are known, so that the name looks real.
    assert run.shape.total > 1e8
    with pytest.raises(
        RunError, match=rf"model = '{name}' names published weights.*hf:FOLDER"
    ) as e:
        refuse_random_by_name(run)
    assert "weights = 'random'" in str(e.value)
    refuse_random_by_name(replace(run, weights="random"))


def test_every_name_of_a_shape_is_a_size_or_a_published_name() -> None:
    published_too = {"deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"}
    assert {name for name in Shape.names() if published(name)} == published_too
    for name in (
        "8B",
        "1T",
        "shapes/mine.toml",
        "hf:folder/Llama-3.1-8B",
        "model.py:gpt2",
    ):
        assert not published(name)


def test_a_run_that_has_a_checkpoint_or_sizes_of_its_own_is_not_refused(
    tmp_path: Path,
) -> None:
    run = Run(model="gpt2", out=str(tmp_path))
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    refuse_random_by_name(run)
    table = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 256}
    for model in ("tiny", "8b", "124m", {**table, "name": "gpt2"}):
        refuse_random_by_name(Run(model=model, out=str(tmp_path / "other")))


def test_the_loss_of_pairs_has_no_modules_of_later_tokens() -> None:
    model = "{layers=1,hidden=8,heads=2,vocab=256,mtp=1}"
    with pytest.raises(RunError, match=r"loss = 'dpo' with mtp = 1.*mtp out"):
        Run.parse(f'loss = "dpo"\nmodel = {model}\n')


def test_exact_is_refused_with_the_loss_of_pairs() -> None:
    text = 'loss = "dpo"\nlayout = "dp2 exact"\n'
    with pytest.raises(RunError, match=r"loss = 'dpo', whose bits"):
        Run.parse(text)


def test_random_weights_are_not_asked_of_a_model_that_has_its_own() -> None:
    for model in ("hf:folder", "model.py:Class"):
        with pytest.raises(
            RunError, match=r"which has weights of its own\. Leave it out"
        ):
            Run.parse(f'model = "{model}"\nweights = "random"\n')


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("model={n_layer=2,hidden=16,layers=2}", "Write model.layers"),
        ("model={hidden_size=16,layers=2,hidden=8}", "Write model.hidden"),
        (
            "model={num_key_value_heads=1,layers=2,hidden=8}",
            "Write model.kv_heads",
        ),
        ("num_train_epochs=3", "Write epochs"),
        ("load_in_4bit=true", "4-bit weights"),
        ("qlora=true", "4-bit weights"),
    ],
)
def test_words_of_other_libraries_are_answered_with_ours(
    words: str, named: str
) -> None:
    with pytest.raises(RunError, match=named):
        Run.load("", (words,))


def test_a_warmup_is_compared_with_the_steps_that_epochs_take() -> None:
    words = ("optimizer.warmup_steps=500", "epochs=2")
    assert Run.load("", words).epochs == 2  # how many these are, the data says
    with pytest.raises(RunError, match="warmup_steps = 500 is longer"):
        Run.load("", words[:1])

"""The examples run, and the docs tell the truth: what a page quotes is the file, what it shows a
command printing is what the command prints."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.layout import Layout, LayoutError, plain_pieces
from phalanx.parallel import load_model
from phalanx.program import Costs, StepOptions, check, schedule, simulate

ROOT = Path(__file__).parents[2]
STRANGER = ROOT / "examples" / "stranger.py"
EARLY = f"{ROOT / 'examples' / 'early.py'}:early"
PAGES = [
    ROOT / name
    for name in (
        "README.md", "docs/a-step-op-by-op.md", "docs/add-a-schedule.md",
        "docs/add-a-way-to-split.md", "docs/bring-your-model.md", "docs/recomputation.md",
    )
]  # fmt: skip
# These print the same on every machine.
_SAME = re.compile(r"\.venv/bin/phalanx (draw|check) |cat |sed |grep ")


@pytest.mark.parametrize(
    "argv",
    [
        ["pp2 tp2 zero3 1f1b:3; cp2 tp4 seq"],
        ["cp4:2x2; dp3 pp2 zb-h1:3 recompute:all", "--packed"],
    ],
    ids=["plain", "packed"],
)
def test_a_stranger_s_model_agrees_with_one_process_over_every_axis(
    argv: list[str],
) -> None:
    model = f"{STRANGER}:Stranger"
    assert (
        main(["verify", "--model", model, "--steps", "2", "--layouts", *argv])
        == 0
    )


def test_a_stranger_s_weight_without_a_rule_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "short.py"
    file.write_text(
        STRANGER.read_text().replace("blocks.*.mlp.up.bias : ffn\n", "")
    )
    model = load_model(f"{file}:Stranger")
    with pytest.raises(
        LayoutError,
        match=r"no rule names the parameter blocks\.0\.mlp\.up\.bias",
    ):
        model.rules.dims("blocks.0.mlp.up.bias", 1)
    assert main(
        ["verify", "--model", f"{file}:Stranger", "--layouts", "tp2"]
    ) in (1, 2)
    args = capsys.readouterr()
    assert (
        "no rule names the parameter blocks.0.mlp.up.bias"
        in args.out + args.err
    )


def test_a_stranger_s_loss_that_is_a_mean_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mean.py"
    file.write_text(
        STRANGER.read_text().replace('reduction="sum"', 'reduction="mean"')
    )
    assert (
        main(
            [
                "verify",
                "--model",
                f"{file}:Stranger",
                "--layouts",
                "dp2",
                "--steps",
                "1",
            ]
        )
        == 2
    )
    assert "it is not a sum over the tokens" in capsys.readouterr().err


def test_the_example_schedule_hides_messages_and_holds_more_than_1f1b() -> (
    None
):
    slow = Costs({"F": 1, "B": 2, "send": 0.5})
    for stages in range(2, 6):
        plain, early = (
            schedule(name, stages, 2 * stages) for name in ("1f1b", EARLY)
        )
        assert simulate(early).makespan == simulate(plain).makespan
        layouts = [
            Layout.parse(f"pp{stages} {name}:{2 * stages}")
            for name in ("1f1b", EARLY)
        ]
        times = [_time(layout, slow) for layout in layouts]
        assert times[1] < times[0]
        assert check(_step(layouts[1])).held == tuple(
            min(2 * (stages - r) - 1, 2 * stages) for r in range(stages)
        )


def _step(layout: Layout):  # type: ignore[no-untyped-def]
    from phalanx.program import build

    return build(
        layout,
        plain_pieces([range(s, s + 1) for s in range(layout.pp)]),
        StepOptions(agree=False),
    )


def _time(layout: Layout, costs: Costs) -> float:
    return simulate(_step(layout), costs).makespan


def test_the_example_schedule_trains() -> None:
    layouts = f"pp2 {EARLY}:3; pp4 zero3 {EARLY}:5 recompute:sqrt"
    assert main(["verify", "--layouts", layouts, "--steps", "2"]) == 0


def test_the_pages_quote_the_examples_as_they_are() -> None:
    early = (ROOT / "examples" / "early.py").read_text()
    assert early in (ROOT / "docs" / "add-a-schedule.md").read_text()
    page = (ROOT / "docs" / "bring-your-model.md").read_text()
    quoted = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert quoted
    assert all(block in STRANGER.read_text() for block in quoted)


def _shown(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of a page's console blocks, each with the lines it is args to print."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(
        r"^```console\n(.*?)^```", page.read_text(), re.M | re.S
    ):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the project's, with this interpreter's phalanx in it."""
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    program = tmp_path / ".venv" / "bin" / "phalanx"
    program.parent.mkdir(parents=True)
    code = "import sys; from phalanx.cli.main import main; sys.exit(main())"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n'
    )
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_a_page_shows_is_what_its_commands_print(
    page: Path, folder: Path
) -> None:
    checked = 0
    for command, lines in _shown(page):
        if not _SAME.match(command):
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        printed = [
            line.rstrip()
            for line in (done.stdout + done.stderr).rstrip("\n").split("\n")
        ]
        assert _fits(lines, printed if printed != [""] else []), "\n".join(
            [command, *printed]
        )
        checked += 1
    assert checked or page.stem == "bring-your-model"


def _fits(told: list[str], printed: list[str]) -> bool:
    """Whether lines were printed; a line of three dots stands for any that were left out."""
    if not told:
        return not printed
    if told[0] != "...":
        return (
            bool(printed)
            and told[0] == printed[0]
            and _fits(told[1:], printed[1:])
        )
    return any(_fits(told[1:], printed[i:]) for i in range(len(printed) + 1))


def test_lines_left_out_are_told_from_lines_that_differ() -> None:
    assert _fits(["a", "...", "d"], ["a", "b", "c", "d"])
    assert _fits(["a", "..."], ["a"])
    assert not _fits(["a", "c"], ["a", "b"])
    assert not _fits(["a"], ["a", "b"])


def test_the_picture_of_the_readme_is_what_its_command_draws(
    tmp_path: Path,
) -> None:
    text = (ROOT / "README.md").read_text()
    command = next(re.finditer(r"phalanx (draw .*?) --out step\.svg", text))[1]
    out = tmp_path / "step.svg"
    assert main([*command.split(), "--out", str(out)]) == 0
    assert (
        out.read_text()
        == (ROOT / "docs" / "pictures" / "step.svg").read_text()
    )


# ---- examples that compare with other trainers

SCRIPT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
TURN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def _printed(example: str, *words: object) -> str:
    """Run an example and return its output."""
    script = ROOT / "examples" / example
    done = subprocess.run(
        [sys.executable, script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_the_character_model_has_the_validation_loss_of_the_plain_script(
    tmp_path: Path,
) -> None:
    sizes = ("--steps", 40, "--seeds", 1, "--rounds", 1)
    text = _printed("characters.py", "--out", tmp_path, *sizes)
    ends = re.findall(r"seed 0: validation loss ([\d.]+)", text)
    plain, ours = map(float, ends)
    # A byte drawn at random costs 5.55 nats; the windows come in another order.
    assert plain < 4.2
    assert abs(ours - plain) < 0.2
    # A second start trains anew, also with other settings.
    sizes = ("--steps", 4, "--seeds", 1, "--rounds", 0)
    again = _printed("characters.py", "--out", tmp_path, *sizes)
    assert len(re.findall("seed 0: validation loss", again)) == 2


def _imported(example: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module(example)


def _small_model(folder: Path) -> None:
    """Writes a small model in the place of SmolLM2's weights, with heads for tp3."""
    import tokenizers
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=True,
        eos_token_id=0, pad_token_id=0,  # as in SmolLM2, one token is both
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    names = ["</s>", "<|user|>", "<|assistant|>"]
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    words.decoder = tokenizers.decoders.ByteLevel()
    words.train_from_iterator(
        ["a text"],
        tokenizers.trainers.BpeTrainer(
            special_tokens=names,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="</s>",
        pad_token="</s>",
        chat_template=SCRIPT + TURN,
    ).save_pretrained(folder)


@pytest.mark.slow
def test_six_layouts_have_the_losses_of_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "SmolLM2-135M"
    _small_model(folder)
    text = _printed("smollm.py", "--out", tmp_path, "--steps", 2)
    worst = re.findall(r"difference of a loss: ([\de.+-]+)", text)
    assert len(worst) == 6
    assert max(map(float, worst)) < 1e-5
    # A second start trains anew.
    smollm = _imported("smollm", monkeypatch)
    first = tmp_path / "accum2"
    before = smollm.losses(first / "text") + smollm.losses(first / "chats")
    again = smollm.phases("accum:2", folder, first, 2)
    assert again == before


def test_a_record_that_a_kill_has_cut_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    smollm = _imported("smollm", monkeypatch)
    steps = [{"event": "step", "step": n, "loss": n / 2} for n in (1, 2, 3)]
    text = "\n".join(map(json.dumps, steps))
    (tmp_path / "metrics.jsonl").write_text(text[:-5])
    assert smollm.losses(tmp_path) == [0.5, 1.0]


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_more_ranks(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    _small_model(weights)
    sizes = ("--weights", weights, "--steps", 60)
    text = _printed("resized.py", "--out", tmp_path / "out", *sizes)
    (start,) = re.findall(r"tp3: resumed after step (\d+), 60 steps", text)
    assert 0 < int(start) < 60
    assert int(start) % 3 == 0
    assert "after, 'What does ZeRO-3 shard?'" in text

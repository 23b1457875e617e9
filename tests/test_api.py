"""`import phalanx` as a library: without torch, as the commands have it, and in a notebook."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from safetensors.torch import load_file

import phalanx
from phalanx.api import UsageError
from phalanx.cli import main
from phalanx.comm import RankFailed

ROOT = Path(__file__).parents[1]


def _fresh(
    code: str, *, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A program on standard input of a new interpreter, as a notebook's cells have no file either."""
    return subprocess.run(
        [sys.executable, "-"],
        input=code,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_importing_the_package_loads_no_torch() -> None:
    done = _fresh(
        "import phalanx, sys\n"
        "phalanx.check, phalanx.draw, phalanx.plan, phalanx.Layout, phalanx.Run, phalanx.Shape\n"
        "assert phalanx.simulate('1f1b', stages=4, microbatches=8).makespan == 33\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_name_is_there() -> None:
    assert set(phalanx.__all__) <= set(dir(phalanx))
    assert all(callable(getattr(phalanx, name)) for name in phalanx.__all__)


def test_help_of_every_function_names_each_keyword_that_it_takes() -> None:
    explained = {
        "plan": phalanx.plan,
        "draw": phalanx.draw,
        "verify": phalanx.verify,
    }
    for name, function in {**explained, "train": phalanx.train}.items():
        signature = inspect.signature(function)
        assert not {"args", "terms", "kwargs"} & set(signature.parameters)
        text = pydoc.plain(pydoc.render_doc(function))
        for parameter in signature.parameters:
            assert f"{parameter}: " in text  # in the signature
            # and in words
            assert name not in explained or re.search(
                rf"\n +{parameter}: ", text
            )
    assert {"model", "cluster", "batch_tokens"} <= set(
        inspect.signature(phalanx.plan).parameters
    )
    assert (
        inspect.signature(phalanx.draw)
        .bind("1f1b", stages=2, costs="F=1")
        .arguments
    )
    with pytest.raises(TypeError, match="stage"):
        inspect.signature(phalanx.simulate).bind("1f1b", stage=2)


def test_keywords_that_verify_passes_on_are_those_of_the_package() -> None:
    from phalanx.api.verify import VerifyTerms
    from phalanx.verification.verify import verify

    passed_on = inspect.signature(verify).parameters
    for name in VerifyTerms.__annotations__:
        assert passed_on[name].default is not inspect.Parameter.empty


def test_help_and_signatures_show_nothing_of_the_environment() -> None:
    """Jupyter saves what `phalanx.join?` shows with the notebook."""
    secrets = {"EXAMPLE_TOKEN": "an0th3r-s3cr3t", "HOME": "/h0m3-0f-s0m3b0dy"}
    program = """
        import importlib, inspect, os, pkgutil, pydoc
        import phalanx

        def functions(module):
            for value in vars(module).values():
                if inspect.isfunction(value) or inspect.isclass(value):
                    yield value
                for inner in vars(value).values() if inspect.isclass(value) else ():
                    inner = getattr(inner, "__func__", getattr(inner, "fget", inner))
                    if inspect.isfunction(inner):
                        yield inner

        secrets = os.environ["EXAMPLE_TOKEN"], os.environ["HOME"]
        names = [m.name for m in pkgutil.walk_packages(phalanx.__path__, "phalanx.")]
        assert len(names) > 150
        signatures = set()
        for name in ["phalanx", *(n for n in names if not n.endswith("__main__"))]:
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as missing:  # of a GPU's kernels
                assert missing.name == "triton", missing
                continue
            shown = {"help of " + name: pydoc.render_doc(module)}
            for each in functions(module):
                try:
                    signature = inspect.signature(each)
                except (ValueError, TypeError):  # an exception class has none
                    continue
                shown[f"{name}: {each.__qualname__}"] = repr(signature)
                signatures.add(each)
            for what, text in shown.items():
                assert not [s for s in secrets if s in text], what
        assert phalanx.join in signatures
        for name in phalanx.__all__:
            each = getattr(phalanx, name)
            text = pydoc.render_doc(each) + repr(inspect.signature(each))
            assert not [s for s in secrets if s in text], name
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_check_and_draw_print_what_the_commands_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout, costs = "dp2 pp2 zero3 1f1b:4", "F=1,B=2,G=0.2"
    assert main(["check", "pp3 tp5", "--model", "8b"]) == 1
    refused = phalanx.check("pp3 tp5", "8b")
    assert repr(refused) == str(refused)  # what a notebook shows
    assert capsys.readouterr().out == f"{refused}\n"
    assert not refused.fits
    assert refused.nearest[0] == phalanx.Layout.parse(str(refused.nearest[0]))
    assert main(["draw", layout, "--model", "tiny", "--costs", costs]) == 0
    assert capsys.readouterr().out == str(
        phalanx.draw(layout, "tiny", costs=costs)
    )


def test_a_picture_is_svg_in_a_notebook_and_a_file_by_its_suffix(
    tmp_path: Path,
) -> None:
    picture = phalanx.draw("1f1b", stages=2, microbatches=2)
    assert xml.fromstring(picture._repr_svg_()).tag.endswith("svg")
    assert xml.fromstring(
        phalanx.draw("mesh dp2 tp2")._repr_svg_()
    ).tag.endswith("svg")
    for suffix in ("svg", "html", "json"):
        picture.save(tmp_path / f"step.{suffix}")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: phalanx.draw("dp2 pp2"), "needs a model"),
        (lambda: phalanx.simulate("1f1b", stage=4), "stage is not a valid option"),
        (lambda: phalanx.draw("dp2 pp2", "8b", stages=4), "part of the layout"),
        (lambda: phalanx.check("dp2", "8bb"), "Did you mean '8b'"),
        (lambda: phalanx.verify(object, "dp2"), r"must be a torch.nn.Module"),
        (lambda: phalanx.load("nowhere"), "the folder does not exist"),
        (lambda: phalanx.plan("8b", "h100y8"), "unknown cluster"),
    ],
)  # fmt: skip
def test_a_wrong_call_gets_a_sentence(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()  # type: ignore[operator]


class _Mine:
    """An instance is no model by name."""


def _in_a_function() -> type:
    class Inner:
        """No name reaches it from outside."""

    return Inner


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (_Mine(), r"FILE.py:_Mine\(n_layer=6\).*phalanx.prepare"),
        (_in_a_function(), "FILE.py:Inner.*phalanx.verify takes a class"),
    ],
)
def test_a_module_where_a_name_is_asked_for_is_told_its_ways(
    model: object, sentence: str
) -> None:
    calls = (
        lambda: phalanx.check("dp2", model),
        lambda: phalanx.draw("dp2 pp2 1f1b:2", model),
        lambda: phalanx.plan(model, "h100x8"),
    )
    for call in calls:
        with pytest.raises(UsageError, match=sentence):
            call()


def test_a_class_is_the_model_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        Path(__file__)
        .parents[1]
        .joinpath("examples", "stranger.py")
        .read_text()
    )
    (tmp_path / "known_by_name.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("known_by_name").Stranger
    named = f"{tmp_path / 'known_by_name.py'}:Stranger"
    assert phalanx.Run(model=kind).own == named
    layout = "dp2 tp2"
    assert str(phalanx.check(layout, kind)) == str(
        phalanx.check(layout, named)
    )
    drawn = (phalanx.draw("pp2 1f1b:2", each) for each in (kind, named))
    assert len({str(each) for each in drawn}) == 1


def test_a_model_of_standard_input_is_verified_and_its_processes_are_refused() -> (
    None
):
    done = _fresh(
        "import sys; sys.path.insert(0, 'examples')\n"
        "import phalanx, stranger\n"
        "class Mine(stranger.Stranger): pass\n"
        "def describe(model): return stranger.describe(model)\n"
        "print(phalanx.verify(Mine, 'tp2', steps=1))\n"
        "def rank(world): return world.rank\n"
        "import threading, time\n"  # a process with threads is not forked
        "threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
        "assert phalanx.launch(rank, 2, backend='threads') == [0, 1]\n"
        "try: phalanx.launch(rank, 2, backend='gloo')\n"
        "except ValueError as error: print(error)\n"
        "import operator\n"
        "assert len(phalanx.launch(id, 2, backend='gloo')) == 2\n",
        folder=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 layouts of stranger agree" in done.stdout
    assert "Write backend='threads', or put it into a file" in done.stdout


def test_a_checkpoint_is_a_mapping_of_whole_tensors_in_any_layout(
    tmp_path: Path,
) -> None:
    words = [
        "steps=2",
        "batch=4",
        "sequence=8",
        "model={layers=2,hidden=16,heads=2,vocab=256}",
    ]
    run = phalanx.Run.parse(
        "", "run", (*words, "layout=tp2 zero3", f"out={tmp_path / 'run'}")
    )
    phalanx.launch(phalanx.train, 2, run, backend="threads")
    weights = phalanx.load(tmp_path / "run")
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(tmp_path / "run"),
                "--to",
                str(tmp_path / "hf"),
            ]
        )
        == 0
    )
    exported = load_file(next((tmp_path / "hf").glob("*.safetensors")))
    assert sorted(
        map(str, (tuple(x.shape) for x in weights.values()))
    ) == sorted(map(str, (tuple(x.shape) for x in exported.values())))
    assert sum(
        float(x.double().square().sum()) for x in weights.values()
    ) == pytest.approx(
        sum(float(x.double().square().sum()) for x in exported.values())
    )
    moments = phalanx.load(tmp_path / "run", kind="exp_avg")
    assert {name: x.shape for name, x in moments.items()} == {
        n: x.shape for n, x in weights.items()
    }
    with pytest.raises(UsageError, match="no tensors of the kind 'momentum'"):
        phalanx.load(tmp_path / "run", kind="momentum")


def test_ranks_log_what_they_did_and_why_they_ended(tmp_path: Path) -> None:
    words = [
        "steps=1",
        "batch=4",
        "sequence=8",
        "model={layers=2,hidden=16,heads=2,vocab=256}",
    ]
    run = phalanx.Run.parse(
        "", "run", (*words, "layout=dp2", f"out={tmp_path}")
    )
    phalanx.launch(phalanx.train, 2, run, "dp2", True, backend="threads")
    other = [word.replace("hidden=16", "hidden=32") for word in words]
    run = phalanx.Run.parse(
        "", "run", (*other, "layout=dp2", f"out={tmp_path}")
    )
    with pytest.raises(RankFailed, match="hidden"):
        phalanx.launch(phalanx.train, 2, run, "dp2", True, backend="threads")
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2" in text
        assert "Outcome(step=1" in text
        assert "Traceback" in text


def test_another_torch_than_was_tested_is_mentioned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from phalanx.comm import warn_of_torch

    warn_of_torch("2.13.0+cpu")
    assert not caplog.records
    warn_of_torch("2.14.1")
    assert "was tested with 2.11 to 2.13. pip install" in caplog.text
    project = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11,<2.14"' in project

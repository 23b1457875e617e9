"""The door: exit codes, sentences instead of tracebacks, no torch, quiet ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cli.main import VERBS
from torch_shm import CommMisuse

Capture = pytest.CaptureFixture[str]
START = (
    "import sys; from phalanx.cli import main; sys.exit(main(sys.argv[1:]))"
)

BAD = {
    "draw 1f1 --stages 4": "Did you mean '1f1b'",
    "draw 1f1b --stages 0": "--stages is 0",
    "draw 1f1b --stages -3": "--stages is -3",
    "draw 1f1b --microbatches 0": "--microbatches is 0",
    "draw interleaved --chunks 0": "--chunks is 0",
    "draw 1f1b --chunks 2": "1f1b takes 1 chunks",
    "draw 1f1b --stages four": "--stages is 'four'; write a whole number",
    "draw 1f1b --stges 4": "Did you mean --stages",
    "draw 1f1b --layers 3": "--layers 3 cannot fill 4 stages",
    "draw 1f1b --costs F=a": "'a' in 'F=a' is not a number",
    "draw 1f1b --costs F=1,F=2": "F appears twice",
    "draw 1f1b --costs x=1": "'x=1' is not KIND=TIME",
    "draw 1f1b --costs F=-1": "'F=-1'",
    "draw 1f1b --costs F=inf": "'F=inf'",
    "draw 1f1b --costs F=0,B=0": "nothing takes time",
    "draw 1f1b --repeat 0": "--repeat is 0",
    "draw 1f1b --zero 4": "is '4'; choose from 0, 1, 2, 3",
    "draw 1f1b --recompute most": "recompute='most'",
    "draw 1f1b --recompute fit": "needs --memory-limit",
    "draw 1f1b --memory-limit 2": "--memory-limit is for",
    "draw searched --memory-limit 0": "at least 1 microbatch",
    "draw 1f1b --out x.png": "use .svg, .html, .json, .txt",
    "draw 1f1b --out no/such/folder/x.svg": "cannot write no/such/folder/x.svg",
    "draw 1f1b --width 3": "--width is 3",
    "draw nofile.py:mine": "nofile.py",
    "draw": "required: WHAT",
    "draw program": "takes one file",
    "draw program nofile.txt": "cannot read the program nofile.txt",
    "draw program nofile.txt --zero 3": "--zero cannot be combined with a program file",
    "draw mesh dp2xx": "'dp2xx' is not an axis",
    "draw mesh dp2 --weight hats=4": "'hats=4'",
    "draw mesh dp99999": "too many for a picture",
    "draw recompute --layers 0": "--layers is 0",
    "draw pp2": "needs a model",
    "draw pp2 --model nope": "unknown shape 'nope'",
    "draw pp2 --model tiny --zero 3": "--zero is part of the layout",
    "draw pp2 tp3 --model tiny": "tp=3 does not divide heads=4",
    "draw pp2 zzz --model tiny": "'zzz' is not a word of a layout",
    "check": "name a layout",
    "check dp2": "needs a model",
    "check dp2 zerro3 --model tiny": "Did you mean 'zero3'",
    "check dp0 --model tiny": "dp",
    "check dp2 --model nope.toml": "nope.toml",
    "check nofile.txt": "cannot read the program nofile.txt",
    "drow": "Did you mean draw?",
}


@pytest.mark.parametrize("words", BAD, ids=str)
def test_bad_input_gets_a_sentence_with_the_place_and_exit_code_2(
    capsys: Capture, words: str
) -> None:
    assert main(words.split()) == 2
    args = capsys.readouterr()
    assert BAD[words] in args.err
    assert args.out == ""
    assert "Traceback" not in args.err


def test_a_typo_in_a_program_file_is_named_with_its_line(
    capsys: Capture, tmp_path: Path
) -> None:
    place = tmp_path / "step.txt"
    place.write_text("mesh pp1\nranks 0: 0F0 0X0\n")
    for verb in (["draw", "program"], ["check"]):
        assert main([*verb, str(place)]) == 2
        assert (
            f"{place}, line 2: '0X0' is not an operation"
            in capsys.readouterr().err
        )
    place.write_bytes(b"\xff\xfe\x00")
    assert main(["check", str(place)]) == 2
    assert "is not text" in capsys.readouterr().err


def test_without_a_verb_there_is_an_overview(capsys: Capture) -> None:
    for words in ([], ["--help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"  {verb} " in out for verb in VERBS)
        assert max(map(len, out.splitlines())) <= 80
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("phalanx 0.")


GROUPS = {
    "draw": "mesh recompute run",
    "plan": "cost calibrate",
    "audit": "run compare",
    "bench": "collectives matmul mfu overlap",
    "data": "prepare show verify",
    "checkpoint": "show verify export import",
    "doctor": "topology devices links clusters hierarchy",
}
COMMANDS = [
    *VERBS,
    *(
        f"{verb} {word}"
        for verb, words in GROUPS.items()
        for word in words.split()
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_in_eighty_columns(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: phalanx {command}" in out
    assert "--json" in out or command in (
        "audit",
        "bench",
        "data",
        "chat",
        "checkpoint",
        "completion",
    )
    # An example stands on one line, so that it can be copied.
    assert not [
        x
        for x in out.splitlines()
        if len(x) > 80 and not x.startswith("  phalanx ")
    ]


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("train --wire gloo", "It is now --backend"),
        ("train --backend shared", "is now shm"),
        ("report runs --stack x", "It is now --profile"),
        ("weigh", "It is now cost"),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_one(
    capsys: Capture, words: str, now: str
) -> None:
    assert main(words.split()) == 2
    assert now in capsys.readouterr().err


def test_what_the_overview_proposes_runs(
    capsys: Capture, tmp_path: Path
) -> None:
    import shlex

    assert main([]) == 0
    lines = [
        x.strip()
        for x in capsys.readouterr().out.splitlines()
        if x.startswith("  phalanx ")
    ]
    assert len(lines) >= 4
    for line in lines:
        words = [
            w if w != "step.html" else str(tmp_path / w)
            for w in shlex.split(line)[1:]
        ]
        assert main(words) == 0, line


def test_our_own_mistakes_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import phalanx.cli.draw as verb

    def broken(argv: list[str]) -> int:
        raise ValueError("not meant for the user")

    monkeypatch.setattr(verb, "run", broken)
    with pytest.raises(ValueError, match="not meant"):
        main(["draw", "1f1b"])


def test_drawing_and_checking_load_no_torch_but_where_a_model_is_costed(
    tmp_path: Path,
) -> None:
    step = str(tmp_path / "step.txt")
    layout = ["check", "dp2", "--model", "tiny"]
    assert main(layout) == 0  # its costs are cached now
    asked = (
        f"import sys; from phalanx.cli import main; assert main(['draw', '1f1b', '--out', {step!r}]) == 0;"
        f"assert main(['check', {step!r}]) == 0; assert main({layout!r}) == 0;"
        "print(sorted(m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_stops_early_is_no_error() -> None:
    words = ["draw", "1f1b", "--stages", "8", "--microbatches", "64", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", START, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(10)
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 0


def test_an_interrupt_ends_in_one_line_with_130(tmp_path: Path) -> None:
    place = tmp_path / "slow.py"
    place.write_text(
        "import signal\ndef mine(stages, microbatches, chunks):\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it\n"
        "    print('ready', flush=True)\n    signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", START, "draw", f"{place}:mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == b"phalanx: interrupted.\n"
        assert running.wait(60) == 130


def on_a_terminal(*words: str, **environment: str) -> str:
    """What a command writes where standard output is a terminal."""
    ours, theirs = pty.openpty()
    env = {
        k: v for k, v in os.environ.items() if k != "NO_COLOR"
    } | environment
    with subprocess.Popen(
        [sys.executable, "-c", START, *words], stdout=theirs, env=env
    ) as running:
        os.close(theirs)
        out = b""
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
            if not read:
                break
            out += read
        assert running.wait(60) == 0
    os.close(ours)
    return out.decode()


def test_a_terminal_gets_colour_unless_no_color_is_set() -> None:
    words = ["draw", "1f1b", "--stages", "2", "--microbatches", "2"]
    assert "\x1b[" in on_a_terminal(*words)
    assert "\x1b[" not in on_a_terminal(*words, NO_COLOR="1")


def test_json_is_one_document(capsys: Capture) -> None:
    for words in (
        ["draw", "1f1b"],
        ["draw", "mesh", "dp2"],
        ["check", "dp2", "--model", "tiny"],
    ):
        assert main([*words, "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_the_verb_of_a_package_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "phalanx_lab"
    ]:
        monkeypatch.delitem(sys.modules, name)
    elsewhere = [path for path in sys.path if "lab" not in Path(path).parts]
    monkeypatch.setattr(sys, "path", elsewhere)
    assert main(["lab"]) == 2
    assert "pip install ./lab" in capsys.readouterr().err


def test_what_shared_memory_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def refuse(argv: list[str]) -> int:
        raise CommMisuse("there is no room for shared memory")

    monkeypatch.setattr("phalanx.cli.doctor.run", refuse)
    assert main(["doctor"]) == 2
    assert (
        capsys.readouterr().err
        == "CommMisuse: there is no room for shared memory\n"
    )


def test_plans_and_checks_collect_no_garbage_in_a_process_of_their_own() -> (
    None
):
    count = (
        "import gc, sys; seen = []; gc.callbacks.append(lambda *_: seen.append(1));"
        " from phalanx.cli.main import main; seen.clear();"
        " sys.argv = ['phalanx', 'check', 'pp4 1f1b:64', '--model', '8b'];"
        " code = main(); print(code, len(seen))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", count],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split()[-2:] == ["0", "0"]

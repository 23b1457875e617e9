"""Common mistakes: one sentence with the place and a way out, exit code 2, no traceback, no escapes.

Each row is a command somebody has typed, or a file somebody has been given. The files stand in
`FILES`; a row names them. Most rows run in this process; what needs a process of its own follows.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cli import main

pytestmark = pytest.mark.long_file

Capture = pytest.CaptureFixture[str]
ESC = "\x1b]0;owned\x07\x1b[31m"
SIZES = "model={heads=2,vocab=256,"
DEEP = "[" * 5000 + "]" * 5000

FILES: dict[str, str | bytes] = {
    "good.toml": "steps = 3\n",
    "empty.json": "",
    "garbage.toml": bytes(range(256)),
    "latin.toml": b'data = "caf\xe9"\n',
    "zeros.toml": b"\0" * 64,
    "deep.toml": f"x = {DEEP}",
    "dotted.toml": "[" + ".".join(["a"] * 20000) + "]\nx = 1\n",
    "digits.toml": "steps = " + "9" * 10000,
    "hex.toml": "steps = 0x" + "f" * 10000,
    "keys.toml": "".join(f"key{i} = 1\n" for i in range(50_000)),
    "large.toml": b"#" * (1 << 20) + b"\n",
    "escapes.toml": '"\\u001b[2Jkey" = "\\u001b]0;owned\\u0007"\n',
    "shape.toml": 'layers = 2\nhidden = 32\nsource = "\\u001b[31m"\nkind = "\\u001b[31mred"\n',
    "deep.json": DEEP,
    "objects.json": '{"a":' * 5000 + "1" + "}" * 5000,
    "surrogate.json": '{"phalanx run": 1, "program": "\\ud800"}',
    "overflow.json": json.dumps(
        {"phalanx run": 1, "program": "mesh pp1\nranks 0: 0F0 0B0\n"}
    )[:-1] + ', "spans": [[0, "compute", "0F0", 0, 1e400]]}',
    "big.json": json.dumps(
        {"phalanx run": 1, "program": "mesh pp1\nranks 0: 0F0 0B0\n"}
    )[:-1] + ', "spans": [[0, "compute", "0F0", 0, 1' + "0" * 400 + "]]}",
    "escapes.txt": f"mesh pp1\nranks 0: {ESC}\n",
    "digits.txt": "mesh pp1\nranks 0: " + "9" * 5000 + "F0\n",
    "digits-tied.txt": "tied " + "9" * 5000 + ":0\n",
    "pieces.txt": "mesh pp1\nranks 0: 999999999F0\n",
    "mesh.txt": "mesh dp99999999999\n",
    "syntax.py": "import os\ndef mine(:\n    pass\n",
    "raises.py": (
        "class Net:\n    pass\n\n"
        "def mine(stages, microbatches, chunks):\n    return helper(stages)\n\n"
        "def helper(n):\n    return n / 0\n\n"
        "def describe(net):\n    raise KeyError('weights')\n"
    ),
    "leaves.py": "import sys\nsys.exit(0)\n",
    "imports.py": "import no_such_module_at_all\n",
    "zeros.py": b"\0\0\0",
    "nothing.py": "mine = None\n",
    "odd.py": (
        "from phalanx.program import Op\n"
        "def none(*a): return None\n"
        "def numbers(*a): return [[1, 2]] * a[0]\n"
        "def letters(*a): return ['FB'] * a[0]\n"
        "def kind(*a): return [[Op('x', 0, 0)]] * a[0]\n"
        "def huge(*a): return [[Op('F', 10**30, 0)]] * a[0]\n"
        "def escapes(*a): raise ValueError('\\x1b]0;owned\\x07')\n"
    ),
    f"{ESC.replace('/', '')}.toml": "steps = many\n",
    "afile": "no folder\n",
    "raw.bin": bytes(range(200, 256)) * 3,
    "text.txt": "some text to prepare\n",
    "log.jsonl": '{"layout": 1, "verdict": 2}\n',
}  # fmt: skip

# What is typed, and what the answer must contain: the place, and the way out.
ROWS: list[tuple[list[str], tuple[str, ...]]] = [
    # Run files.
    (["train", "missing.toml"], ("missing.toml", "No such file", "--print-config")),
    (["train", "."], (". has a mistake", "a folder")),
    (["train", "pipe.toml"], ("pipe.toml", "a named pipe, not a regular file", "--print-config")),
    (["train", "loop.toml"], ("loop.toml", "symbolic links")),
    (["train", "garbage.toml"], ("garbage.toml", "is not text", "byte 128")),
    (["train", "latin.toml"], ("latin.toml", "is not text", "byte 11")),
    (["train", "zeros.toml"], ("zeros.toml", "is not TOML", "docs/training.md")),
    (["train", "deep.toml"], ("deep.toml", "more than 32 deep", "Nest less")),
    (["train", "dotted.toml"], ("dotted.toml", "more than 32 deep", "Nest less")),
    (["train", "digits.toml"], ("digits.toml", "more than 4,300 digits")),
    (["train", "hex.toml"], ("hex.toml", "'steps'", "beyond 64 bits")),
    (["train", "keys.toml"], ("keys.toml line 1:", "key0", "49,980 more mistakes")),
    (["train", "large.toml"], ("large.toml", "1,048,577 bytes", "at most 1,048,576")),
    (["train", "sparse.toml"], ("sparse.toml", "1,000,000,000,000 bytes", "at most 1,048,576")),
    (["train", "escapes.toml"], ("escapes.toml", r"\x1b[2Jkey", "Keys here are")),
    (["train", f"{ESC}.toml"], (r"\x1b]0;owned\x07\x1b[31m.toml", "not TOML")),
    (["train", "bad\udcff.toml"], (r"bad\udcff.toml", "No such file")),
    (["train", "nul\0.toml"], (r"nul\x00.toml", "no file can have this name")),
    # Keys that are set by arguments.
    (["train", "steps=" + "9" * 23], ("steps", "beyond 64 bits", "Write less")),
    (["train", "steps=" + "9" * 10000], ("steps", "digits", "Write less")),
    (["train", "steps=1e23"], ("steps = 1e+23", "a whole number")),
    (["train", "steps=9000000000000"], ("steps", "1 to 1,000,000,000,000")),
    (["train", "batch=999999999999"], ("batch", "0 to 16,777,216")),
    (["train", "steps=-1"], ("steps = -1", "1 to")),
    (["train", "optimizer.lr=nan"], ("optimizer.lr", "a number")),
    (["train", "x=" + DEEP], ("x", "more than 32 deep")),
    (["train", ".".join(["a"] * 5000) + "=1"], ("sets nothing", "key=value")),
    (["train", "dtype=bf16"], ("no key 'dtype'", 'Write precision="bf16"')),
    (["train", "micro_batch_size=2"], ("micro_batch_size", "Write microbatch, or accum:N")),
    (["train", "zero_stage=3"], ("zero_stage", 'layout="dp8 zero3"')),
    (["train", "out=a\0b"], ("out", r"\x00", "Leave it out")),
    (["train", "out=a\udcff"], ("out", r"\udcff", "Leave it out")),
    (["train", f"{ESC}=1"], (r"\x1b]0;", "sets nothing", "key=value")),
    # Where a run writes.
    (["train", "out=good.toml"], ("out = 'good.toml' is no folder", "a new one")),
    (["train", "out=good.toml/run"], ("below 'good.toml'", "a new one")),
    (["train", "out=good.toml/a/b"], ("below 'good.toml'", "a new one")),
    (["train", "out=dangling"], ("dangling", "a link to nothing", "a new one")),
    (["train", "checkpoint.dir=good.toml/c"], ("checkpoint.dir", "below 'good.toml'")),
    (["train", "out=piped"], ("piped/metrics.jsonl", "a named pipe", "another folder")),
    (["train", "out=linked"], ("linked/metrics.jsonl", "a link", "another folder")),
    # Sizes that nobody has.
    (["train", SIZES + "layers=2,hidden=1000000000}"], ("model.hidden = 1000000000", "1 to 1,048,576")),
    (["train", "model={layers=2,hidden=32,vocab=100000000000}"], ("vocab=100000000000", "67,108,864")),
    (["train", SIZES + "layers=1000000000,hidden=32}"], ("model.layers = 1000000000", "1 to 10,000")),
    (["train", "model={layers=-1,hidden=32}"], ("model.layers = -1", "1 to 10,000")),
    (["train", "model={layers=2,hidden=32,heads=2,kv_heads=-2,vocab=256}"], ("kv_heads = -2", "0 to 65,536")),
    (["train", "model={layers=2,hidden=32,heads=2,vocab=256,eps=nan}"], ("eps=nan", "finite")),
    (["train", "model={layers=2,hidden=32,heads=2,vocab=256,rope_theta=inf}"], ("rope_theta=inf", "finite")),
    (["train", "model=405b", "layout=dp2"], ("405b", "GiB", "fewer ranks")),
    (["train", "layout=dp" + "9" * 5000], ("is not an axis", "seven digits")),
    (["train", "layout=dp9999999"], ("9,999,999 ranks", "at most 262,144")),
    (["train", "layout=dp2 accum:999999"], ("microbatches=999999", "100,000")),
    (["train", "layout=dp²"], ("layout", "is not a word of a layout")),
    (["train", "layout=dp2 prefetch:²"], ("prefetch:²", "is not a word of a layout")),
    (["train", "--ranks", "9" * 30], ("--ranks", "262,144")),
    (["check", "dp2", "--model", "tiny", "--batch", "9" * 30], ("--batch", "16,777,216")),
    (["check", "dp2", "--model", "tiny", "--seq", "9" * 5000], ("--seq",)),
    (["draw", "1f1b", "--stages", "999999999"], ("--stages is 999,999,999", "1 to 4,096")),
    (["draw", "1f1b", "--microbatches", "999999999"], ("--microbatches is 999,999,999", "1 to 100,000")),
    (["draw", "1f1b", "--layers", "999999999"], ("--layers is 999,999,999", "1 to 10,000")),
    (["draw", "1f1b", "--repeat", "999999999"], ("--repeat is 999,999,999", "1 to 10,000")),
    (["draw", "1f1b", "--width", "999999999"], ("--width is 999,999,999", "24 to 10,000")),
    (["draw", "1f1b", "--memory-limit", "nan"], ("--memory-limit",)),
    (["draw", "1f1b", "--costs", "F=1e400"], ("F=1e400", "finite")),
    (["check", "pp2 1f1b:100000", "--model", "405b", "--batch", "1000000"], ("operations", "fewer")),
    # Shapes.
    (["check", "dp2", "--model", "pipe.toml"], ("pipe.toml", "a named pipe")),
    (["check", "dp2", "--model", "garbage.toml"], ("garbage.toml", "is not text")),
    (["check", "dp2", "--model", "deep.toml"], ("deep", "more than 32 deep")),
    (["check", "dp2", "--model", "digits.toml"], ("digits", "4,300 digits")),
    (["check", "dp2", "--model", "keys.toml"], ("key0", "more mistakes")),
    (["check", "dp2", "--model", "sparse.toml"], ("sparse.toml", "at most 1,048,576")),
    (["check", "dp2", "--model", "shape.toml"], (r"\u001b[31mred", "Choose decoder, mlp")),
    (["check", "dp2", "--model", f"{ESC}"], (r"\x1b]0;owned", "Shapes are")),
    # Words of other libraries.
    (["check", "fsdp8", "--model", "tiny"], ("'fsdp8'", "'dp8 zero3'")),
    (["check", "FSDP", "--model", "tiny"], ("'FSDP'", "zero3")),
    (["check", "ddp4", "--model", "tiny"], ("'ddp4'", "'dp4'")),
    (["check", "hsdp4", "--model", "tiny"], ("'hsdp4'", "'dp2x4 zero3'")),
    (["check", "dp8 zero", "--model", "tiny"], ("'zero'", "zero3")),
    (["check", "dp8 zero-3", "--model", "tiny"], ("'zero-3'", "zero3")),
    (["check", "dp8 BF16", "--model", "tiny"], ("'BF16'", "Did you mean 'bf16'")),
    (["check", "DP8", "--model", "tiny"], ("'DP8'", "Did you mean 'dp8'")),
    (["check", "tp=2", "--model", "tiny"], ("'tp=2'", "Did you mean 'tp2'")),
    (["check", "pipeline4", "--model", "tiny"], ("'pipeline4'", "'pp4 1f1b:16'")),
    (["lab", "fsdp"], ("fsdp", "zero-3")),
    # Programs and recorded steps.
    (["check", "pipe.txt"], ("pipe.txt", "a named pipe")),
    (["check", "escapes.txt"], (r"\x1b]0;owned", "line 2", "Write 2F0")),
    (["check", "digits.txt"], ("line 2", "999,999")),
    (["check", "digits-tied.txt"], ("line 1", "tied PIECE:UNIT")),
    (["check", "pieces.txt"], ("line 2", "999,999")),
    (["check", "mesh.txt"], ("line 1", "seven digits")),
    (["draw", "program", "sparse.txt"], ("sparse.txt", "at most")),
    (["draw", "run", "pipe.json"], ("pipe.json", "a named pipe")),
    (["draw", "run", "empty.json"], ("is not JSON", "Expecting value")),
    (["draw", "run", "deep.json"], ("more than 32 deep",)),
    (["draw", "run", "objects.json"], ("more than 32 deep",)),
    (["draw", "run", "surrogate.json"], (r"\ud800",)),
    (["draw", "run", "overflow.json"], ("not a timeline",)),
    (["draw", "run", "big.json"], ("beyond 64 bits",)),
    (["draw", "run", "sparse.json"], ("sparse.json", "at most")),
    # Where a picture goes.
    (["draw", "1f1b", "--out", "good.toml/x.svg"], ("cannot write good.toml/x.svg", "another file")),
    (["draw", "1f1b", "--out", "folder.svg"], ("cannot write folder.svg", "directory")),
    (["draw", "1f1b", "--out", "full.svg"], ("cannot write full.svg", "No space left")),
    (["draw", "1f1b", "--out", "pipe.svg"], ("cannot write pipe.svg", "another file")),
    (["draw", "1f1b", "--out", "nul\0.svg"], ("cannot write", "this is not a valid file name")),
    # Code of the user's own: its file and line.
    (["draw", "missing.py:mine"], ("missing.py", "no file")),
    (["draw", "pipe.py:mine"], ("pipe.py", "a named pipe")),
    (["draw", "syntax.py:mine"], ("syntax.py, line 2: SyntaxError", "Fix it there")),
    (["draw", "zeros.py:mine"], ("zeros.py", "null bytes")),
    (["draw", "raises.py:mine"], ("raises.py, line 8: ZeroDivisionError", "Fix it there")),
    (["draw", "leaves.py:mine"], ("leaves.py, line 2: SystemExit",)),
    (["draw", "imports.py:mine"], ("imports.py, line 1: ModuleNotFoundError",)),
    (["draw", "nothing.py:mine"], ("nothing.py has no function", "'mine'")),
    (["draw", "odd.py:none"], ("returns a NoneType", "list of Op")),
    (["draw", "odd.py:numbers"], ("stage 0 has 1", "lists of Op")),
    (["draw", "odd.py:letters"], ("stage 0 has 'FB'", "lists of Op")),
    (["draw", "odd.py:kind"], ("stage 0 has Op(", "lists of Op")),
    (["draw", "odd.py:huge"], ("stage 0 has Op(", "lists of Op")),
    (["draw", "odd.py:escapes"], (r"\x1b]0;owned\x07", "odd.py, line 7")),
    (["check", "pp2 raises.py:mine:2", "--model", "tiny"], ("raises.py, line 8",)),
    (["train", "layout=pp2 missing.py:mine:2"], ("missing.py", "no file")),
    (["train", "layout=pp2 syntax.py:mine:2"], ("syntax.py, line 2",)),
    (["train", "layout=pp2 raises.py:mine:2"], ("raises.py, line 8: ZeroDivisionError",)),
    (["train", "layout=pp2 odd.py:none:2"], ("returns a NoneType", "list of Op")),
    (["train", "model=syntax.py:Net"], ("syntax.py, line 2: SyntaxError", "Fix it there")),
    (["train", "model=pipe.py:Net"], ("pipe.py", "no file")),
    (["train", "layout=recompute:fit"], ("recompute:fit", "memory = ")),
    # Verbs and flags.
    ([ESC], (r"unknown verb '\x1b]0;owned", "Verbs are")),
    (["draw", "1f1b", f"--{ESC}"], (r"\x1b", "phalanx draw --help")),
    (["checkpoint", "show", "missing"], ("missing", "no checkpoint")),
    (["checkpoint", "show", f"{ESC}"], (r"\x1b]0;owned", "no checkpoint")),
    (["report", "missing"], ("missing",)),
    (["plan", "--cluster", "h100x" + "9" * 5000], ("unknown cluster", "h100x64")),
    (["plan", "--batch-tokens", "9" * 400], ("--batch-tokens", "4M")),
    (["plan", "--cluster", "this", "--machine", "deep.toml"], ("deep.toml", "more than 32 deep")),
    (["data", "show", "missing"], ("missing",)),
    # Names of what there is to choose from.
    (["verify", "--backend", "zz"], ("--backend", "'zz'", "gloo")),
    (["verify", "--axes", "dp zz"], ("--axes", "'zz'", "dp pp cp tp")),
    # No value, as of a script's variable that is not set.
    (["check", "dp2", "--model", "tiny", "--device", ""], ("--device is empty", "leave --device out")),
    (["draw", "1f1b", "--model", ""], ("--model is empty", "leave --model out")),
    (["plan", "--explain="], ("--explain is empty", "leave --explain out")),
    (["report", "folder.svg", "--beside", "a", ""], ("--beside is empty",)),
    (["check", "dp2", "--model", "tiny", "--batch=--"], ("--batch is '--'", "write a value")),
    (["launch", "slurm", "good.toml", "--time=--"], ("--time is '--'", "write a value")),
    (["launch", "k8s", "good.toml", "--volume=--"], ("--volume is '--'", "write a value")),
    # Of other systems.
    (["launch", "k8s", "good.toml", "--time", "1:00:00"], ("--time is not an option of k8s", "for slurm")),
    (["launch", "slurm", "good.toml", "--image=a"], ("--image is not an option of", "for k8s, kubeflow")),
    (["launch", "kubeflow", "good.toml", "--master", "a"], ("--master is not an option of", "for torchrun")),
    (["launch", "torchrun", "good.toml", "--volume", "a"], ("--volume is not an option of", "k8s, kubeflow")),
    (["launch", "ray", "good.toml", "--accelerator", "a"], ("--accelerator is not an option of", "for sky")),
    (["verify", "--axes", ""], ("--axes names nothing", "dp pp cp tp")),
    (["verify", "--dtype", ESC], ("--dtype", r"\x1b", "float64")),
    (["verify", "--optimizer", "lion"], ("--optimizer", "adamw")),
    (["verify", "--part", "5/4"], ("--part is 5/4", "write 1/4")),
    (["verify", "--model", "zz"], ("'zz'", "gqa", "FILE.py:Class")),
    (["verify", "--model", "syntax.py:Net"], ("syntax.py, line 2: SyntaxError", "Fix it there")),
    (["verify", "--model", "pipe.py:Net"], ("pipe.py", "a named pipe")),
    (["verify", "--layouts", "dp2 tp3"], ("tp=3", "Nearest")),
    (["bench", "collectives", "--backend", "zz"], ("--backend", "'zz'", "gloo")),
    (["bench", "collectives", "--ops", "zz"], ("--ops: unknown operation 'zz'", "all_reduce")),
    (["bench", "collectives", "--groups", "2x9", "--ranks", "2"], ("--groups '2x9'", "fits into the 2")),
    (["bench", "matmul", "--device", "tpu"], ("--device", "'tpu'", "cuda")),
    (["bench", "matmul", "--dtype", "fp32,zz"], ("--dtype", "'zz'", "bf16")),
    (["bench", "matmul", "--model", "zz"], ("'zz'", "Shapes are")),
    (["bench", "mfu", "--dtype", "zz"], ("--dtype", "'zz'", "bf16")),
    (["bench", "overlap", "--backend", "zz"], ("--backend", "'zz'", "gloo")),
    (["lab", "zero-3", "--backend", "zz"], ("--backend", "'zz'", "gloo")),
    (["doctor", "--device", "tpu"], ("--device", "'tpu'", "cuda")),
    (["doctor", "--backend", "zz"], ("--backend", "'zz'", "gloo")),
    (["doctor", "--model", "zz"], ("'zz'", "Shapes are")),
    (["doctor", "topology", "text.txt"], ("nvidia-smi topo -m", "GPU0")),
    (["doctor", "topology", "pipe.txt"], ("pipe.txt", "a named pipe")),
    (["train", "--backend", "zz"], ("--backend", "'zz'", "gloo")),
    (["train", "data=pipe.txt"], ("pipe.txt holds no tokens", "phalanx data prepare")),
    (["cost", "--model", "syntax.py:Net"], ("syntax.py, line 2: SyntaxError", "Fix it there")),
    (["cost", "--model", "missing.py:Net"], ("missing.py", "Write FILE.py:Net")),
    (["plan", "--model", "syntax.py:Net"], ("syntax.py, line 2: SyntaxError", "Fix it there")),
    (["plan", "--profile", "pipe.toml"], ("pipe.toml", "a named pipe")),
    (["plan", "calibrate", "missing", "--cluster", "h100x8"], ("missing/metrics.jsonl", "no such file")),
    (
        ["checkpoint", "export", "folder.svg", "--to", "x", "--dtype", "int8"],
        ("--dtype", "int8", "BF16"),
    ),
    (
        ["checkpoint", "export", "folder.svg", "--to", "x", "--family", "bert"],
        ("--family", "bert", "llama"),
    ),
    (
        ["checkpoint", "import", "folder.svg", "--out", "x"],
        ("folder.svg/config.json", "No such file", "model.safetensors"),
    ),
    (["checkpoint", "import", "afile", "--out", "x"], ("no folder afile", "config.json")),
    (
        ["checkpoint", "show", "fifo-manifest"],
        ("fifo-manifest/manifest.json", "a named pipe", "checkpoint in it"),
    ),
    (["checkpoint", "show", "folder-manifest"], ("folder-manifest/manifest.json", "a folder")),
    (["checkpoint", "verify", "socket-manifest"], ("socket-manifest/manifest.json", "not a regular file")),
    (["data", "show", "afile"], ("afile holds no tokens", "phalanx data prepare")),
    (["data", "verify", "afile"], ("afile is not a prepared corpus", "phalanx data prepare")),
    (["data", "verify", "raw.bin"], ("raw.bin is not a prepared corpus", "index.json")),
    (["data", "verify", "folder.svg"], ("folder.svg is not a prepared corpus", "index.json")),
    (
        ["data", "prepare", "text.txt", "--out", "x", "--tokenizer", "pipe.json"],
        ("pipe.json", "not a regular file"),
    ),
    (["report", "afile"], ("no folder afile", "`out` of a run")),
    # Numbers beyond what one machine starts, holds or counts.
    (["verify", "--ranks", "99999"], ("--ranks is 99,999", "1 to 64", "--layouts")),
    (["verify", "--layouts", "dp99999"], ("--layouts: one has 99,999", "1 to 256")),
    (["verify", "--steps", "9999999"], ("--steps is 9,999,999", "1 to 10,000")),
    (
        ["bench", "collectives", "--sizes", "1:99999999999999"],
        ("--sizes", "this machine has", "Write smaller"),
    ),
    (["bench", "collectives", "--sizes", "9" * 5000], ("is not a size", "512M")),
    (["bench", "collectives", "--sizes", "1K:4K:" + "9" * 5000], ("not a range of sizes", "FIRST:LAST")),
    (["bench", "collectives", "--ranks", "99999"], ("--ranks is 99,999", "2 to 256")),
    (["bench", "matmul", "--sizes", "9999999999"], ("--sizes: 9999999999", "1 to 1,048,576")),
    (["bench", "matmul", "--sizes", "512:9999999999"], ("--sizes: 512:", "1 to 1,048,576")),
    (["bench", "matmul", "--sizes", "9" * 5000], ("--sizes: '999", "is not a size")),
    (["bench", "matmul", "--threads", "999999"], ("--threads is 999,999", "1 to 4,096")),
    (
        ["bench", "mfu", "--width", "1048576", "--layers", "1000"],
        ("1,000 layers", "this machine has", "Write a smaller"),
    ),
    (["bench", "mfu", "--batch", "16777216"], ("a batch of 16,777,216", "Write a smaller")),
    (["bench", "overlap", "--size", "999999"], ("--size 999999", "this machine has")),
    (["bench", "overlap", "--copy", "99999G"], ("--copy", "this machine has", "as 32M")),
    (["lab", "--ranks", "99999"], ("--ranks is 99,999", "1 to 256")),
    (["lab", "zero-3", "--ranks", "99999"], ("--ranks is 99,999", "1 to 256")),
    (["lab", "zero-3", "--width", "999999"], ("this machine has", "Write a smaller --width")),
    (["doctor", "--ranks", "99999"], ("--ranks is 99,999", "2 to 256")),
    (["train", "layout=dp300", "batch=300"], ("300 ranks", "one machine starts 256", "torchrun")),
    (["plan", "cost", "--tokens", "9" * 21, "--price", "1"], ("--tokens is '999", "such as 4M")),
    (["plan", "cost", "--tokens", "999999999T", "--price", "1"], ("--tokens is 999999999T", "000 or less")),
    (["plan", "--batch-tokens", "99999T"], ("--batch-tokens 99999T", "16,777,216 sequences")),
    (["draw", "mesh", "dp2", "--weight", "heads=" + "9" * 5000], ("is not a dim", "heads=4096")),
    (["draw", "mesh", "dp2", "--weight", "heads=2/" + "9" * 5000], ("is not a dim", "heads=4096")),
    # Where a command will write: tried before its work.
    (["doctor", "--out", "afile/x.toml"], ("--out: cannot write afile/x.toml", "another file")),
    (["lab", "all", "--html", "afile/x.html"], ("--html: cannot write afile/x.html", "another file")),
    (["verify", "--record", "afile/x"], ("--record: cannot write afile/x", "another file")),
    (["verify", "--record", "folder.svg"], ("--record: cannot write folder.svg", "directory")),
    (["verify", "--log", "afile/x"], ("--log: cannot write into afile", "another folder")),
    (["verify", "--log", "pipe.json"], ("--log: cannot read pipe.json", "a named pipe")),
    (["verify", "--log", "log.jsonl"], ("log.jsonl line 1", "not a verdict", "another log")),
    (["bench", "collectives", "--out", "afile/x.svg"], ("--out: cannot write afile/x.svg", "another file")),
    (["bench", "matmul", "--out", "x.png"], ("--out x.png", "use .svg")),
    (["report", "folder.svg", "--out", "afile/x"], ("--out: cannot write afile/x", "another file")),
    (["draw", "1f1b", "--out", "afile/x.svg", "--layers", "9000"], ("--out: cannot write afile/x.svg",)),
    (["draw", "mesh", "dp2", "--out", "afile/x.svg"], ("--out: cannot write afile/x.svg",)),
    (["draw", "run", "empty.json", "--out", "afile/x.svg"], ("--out: cannot write afile/x.svg",)),
    (["plan", "--out", "afile/x.toml"], ("--out: cannot write afile/x.toml", "another file")),
    (["plan", "--page", "afile/x.html"], ("--page: cannot write afile/x.html", "another file")),
    (["plan", "--page", "x.png"], ("--page x.png", "use .html")),
    (
        ["plan", "calibrate", "missing", "--cluster", "h100x8", "--out", "afile/x.toml"],
        ("--out: cannot write",),
    ),
    (
        ["data", "prepare", "text.txt", "--out", "afile/x"],
        ("--out: cannot write into afile/x", "another folder"),
    ),
    (["checkpoint", "import", "folder.svg", "--out", "afile/x"], ("--out: cannot write into afile/x",)),
    (
        ["checkpoint", "export", "folder.svg", "--to", "nul\0"],
        ("--to: cannot write into", "a name that no folder can have"),
    ),
    (["demo", "--out", "afile/x"], ("--out: cannot write into afile/x", "another folder")),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all the files that rows name."""
    root = tmp_path_factory.mktemp("mistakes")
    for name, content in FILES.items():
        raw = content.encode() if isinstance(content, str) else content
        (root / name).write_bytes(raw)
    for suffix in ("toml", "txt", "json", "py", "svg"):
        os.mkfifo(root / f"pipe.{suffix}")
    for suffix in ("toml", "txt", "json"):
        with (root / f"sparse.{suffix}").open("wb") as file:
            file.truncate(10**12)
    (root / "loop.toml").symlink_to("loop.toml")
    (root / "dangling").symlink_to("nowhere")
    (root / "full.svg").symlink_to("/dev/full")
    (root / "folder.svg").mkdir()
    for name in ("fifo-manifest", "folder-manifest", "socket-manifest"):
        (root / name).mkdir()
    os.mkfifo(root / "fifo-manifest" / "manifest.json")
    (root / "folder-manifest" / "manifest.json").mkdir()
    _socket(root / "socket-manifest" / "manifest.json")
    (root / "piped").mkdir()
    os.mkfifo(root / "piped" / "metrics.jsonl")
    (root / "linked").mkdir()
    (root / "linked" / "metrics.jsonl").symlink_to(root / "good.toml")
    before = Path.cwd()
    os.chdir(root)
    yield root
    os.chdir(before)
    assert (root / "good.toml").read_text() == FILES["good.toml"]


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as door:
        # a path of a socket is at most 107 long
        door.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def _name(row: tuple[list[str], tuple[str, ...]]) -> str:
    return ascii(
        " ".join(
            word if len(word) < 50 else word[:47] + "..." for word in row[0]
        )
    )


@pytest.fixture(autouse=True)
def _no_row_waits() -> Iterator[None]:
    """A command that waits for a pipe or counts to a billion fails here instead of standing still."""

    def late(*_: object) -> None:
        raise TimeoutError("the command was still running after 60 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _is_clean(text: str) -> None:
    """No traceback, and nothing that steers a terminal."""
    assert "Traceback" not in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_a_mistake_is_one_sentence_with_the_place_and_a_way_out(
    row: tuple[list[str], tuple[str, ...]], folder: Path, capsys: Capture
) -> None:
    argv, parts = row
    assert main(argv) == 2
    args = capsys.readouterr()
    _is_clean(args.err)
    assert args.out == ""
    for part in parts:
        assert part in args.err
    assert len(args.err) < 16_000


def test_all_arguments_that_are_wrong_are_refused_at_once(
    capsys: Capture,
) -> None:
    argv = [
        "bench",
        "matmul",
        "--threads",
        "x",
        "--dtype",
        "bf17",
        "--limt=3",
        "--limit",
        "-1",
    ]
    assert main(argv) == 2
    head, *wrong, end = capsys.readouterr().err.splitlines()
    assert head == "UsageError: 4 arguments are wrong:"
    assert wrong == [
        "- --threads is 'x'; write a whole number.",
        "- --dtype: unknown precision 'bf17'; use bf16, fp16, tf32, fp32, fp64.",
        "- --limit is -1; write a number above 0.",
        "- unknown argument '--limt=3'. Did you mean --limit?",
    ]
    assert end == "See `phalanx bench matmul --help`."
    assert main(["data", "prepare", "--held-out", "3"]) == 2
    told = capsys.readouterr().err
    assert "- --held-out is 3" in told
    assert "- the following arguments are required: SRC, --out." in told


# ---- what needs a process of its own


def _run(*argv: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, **more
    )  # type: ignore[call-overload, no-any-return]


TOLD_EARLY = [
        ["train", "missing.toml"], ["train", "layout=pp2 raises.py:mine:2"],
        ["train", "model=syntax.py:Net"], ["train", "out=good.toml/run"],
        ["train", "layout=recompute:fit"], ["train", "model=405b", "layout=dp2"],
        ["draw", "1f1b", "--stages", "999999999"], ["check", "fsdp8", "--model", "Llama-3-8B"],
        ["checkpoint", "show", "missing"], ["checkpoint", "verify", "fifo-manifest"],
        ["checkpoint", "export", "folder.svg", "--to", "x", "--dtype", "int8"],
        ["checkpoint", "import", "folder.svg", "--out", "x"],
        ["data", "show", "missing"], ["data", "show", "afile"], ["data", "verify", "afile"],
        ["data", "prepare", "text.txt", "--out", "afile/x"],
        ["verify", "--backend", "zz"], ["verify", "--axes", "zz"], ["verify", "--model", "syntax.py:Net"],
        ["verify", "--layouts", "dp2 tp3"], ["verify", "--log", "afile/x"],
        ["bench", "collectives", "--sizes", "1:99999999999999"], ["bench", "matmul", "--dtype", "zz"],
        ["bench", "mfu", "--batch", "16777216"], ["bench", "overlap", "--backend", "zz"],
        ["lab", "nothing"], ["lab", "zero-3", "--ranks", "99999"],
        ["doctor", "--out", "afile/x.toml"], ["doctor", "topology", "text.txt"],
        ["doctor", "devices", "zz"], ["doctor", "clusters", "zz"], ["doctor", "hierarchy", "zz"],
        ["cost", "--model", "syntax.py:Net"], ["plan", "--model", "syntax.py:Net"],
        ["plan", "--profile", "pipe.toml"], ["plan", "cost", "--tokens", "zz", "--price", "1"],
        ["plan", "calibrate", "missing", "--cluster", "h100x8"],
        ["report", "afile"], ["report", "folder.svg"], ["demo", "--out", "afile/x"],
        ["draw", "mesh", "zz"], ["draw", "run", "empty.json"], ["draw", "recompute", "--layers", "0"],
        ["train", "data=pipe.txt"], ["train", "--backend", "zz"], ["zz"],
]  # fmt: skip
# One process for all: where one of them loads torch, that one is reported.
TOLD = """
import contextlib, io, json, sys
from phalanx.cli import main
told = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    before = "torch" in sys.modules
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    loaded = "torch" in sys.modules and not before
    told.append([code, loaded, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, list[object]]:
    """For each command: its exit code, whether it loads torch, and its output."""
    done = subprocess.run(
        [sys.executable, "-c", TOLD, json.dumps(TOLD_EARLY)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    commands = map(" ".join, TOLD_EARLY)
    return dict(zip(commands, found, strict=True))


@pytest.mark.parametrize("command", [*map(" ".join, TOLD_EARLY)])
def test_a_mistake_is_told_before_torch_is_loaded(
    command: str, told: dict[str, list[object]]
) -> None:
    code, loaded, out, err = told[command]
    assert (code, loaded, out) == (2, False, "")
    assert isinstance(err, str)
    assert err
    _is_clean(err)


def test_torchrun_starts_the_package_as_a_module(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        "--local-addr", "127.0.0.1", "-m", "phalanx", "train",
        "model={layers=1,hidden=16,heads=2,ffn=16,vocab=256}", "batch=2", "sequence=8", "steps=2",
        "validation.batches=0", "layout=dp2", f"out={tmp_path / 'run'}", "--backend", "gloo",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (start,) = [r for r in map(json.loads, lines) if r["event"] == "start"]
    assert (start["ranks"], start["layout"]) == (2, "dp2")
    assert [
        r["step"] for r in map(json.loads, lines) if r["event"] == "step"
    ] == [1, 2]


def _manifest(tensors: int, parts: int, dims: int = 1, seed: int = 0) -> str:
    """A manifest whose tensors are `parts` rows each; with 9 dims, or other keys, none of ours."""
    ones = [1] * (dims - 1)
    rows = [
        {"file": 0, "key": ESC, "offset": 8, "box": [[4 * i, 4 * i + 4], *([0, 1] for _ in ones)],
         "local": [4, *ones], "start": 0, "stop": 4}
        for i in range(parts)
    ]  # fmt: skip
    names = [{"kind": "weight", "name": f"{ESC}{t}", "dtype": "F32", "shape": [4 * parts, *ones],
              "pieces": rows} for t in range(tensors)]  # fmt: skip
    body = {
        "format": "phalanx-checkpoint", "version": 1, "step": 1, "cursor": 0, "seed": seed,
        "data": ESC, "layout": ESC, "shape": None, "config": {}, "state": {}, "optimizer": ESC,
        "updates": None, "versions": {ESC: ESC}, "tensors": names,
        "files": [{"name": "a.safetensors", "size": 1024, "chunks": ["0" * 64]}],
    }  # fmt: skip
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(
        {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    )


def test_a_manifest_of_many_parts_is_read(
    tmp_path: Path, capsys: Capture
) -> None:
    """All pairs of parts are compared at once: one after another they outlast this test's minute."""
    (tmp_path / "manifest.json").write_text(text := _manifest(40, 1024))
    assert len(text) > 2.5e6
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    _is_clean(shown)
    assert "40" in shown


def test_what_a_manifest_names_cannot_steer_the_terminal(
    tmp_path: Path, capsys: Capture
) -> None:
    step = tmp_path / f"step-{1:08}"
    step.mkdir()
    (step / "manifest.json").write_text(_manifest(1, 2))
    (step / f"{ESC.replace('/', '')}.safetensors").touch()
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    _is_clean(shown.out + shown.err)
    assert r"\x1b]0;owned" in shown.out


def test_a_tensor_of_nine_dims_is_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "manifest.json").write_text(_manifest(1, 2, dims=9))
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert "has 9 dims; the maximum is 8" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_a_rank_file_that_is_none_is_damage(
    kind: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "manifest.json").write_text(_manifest(1, 2))
    file = tmp_path / "a.safetensors"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        _socket(file)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "a.safetensors" in capsys.readouterr().out


def test_the_report_of_a_folder_from_elsewhere_is_a_page(
    tmp_path: Path, capsys: Capture
) -> None:
    """Pipes, sparse files, ranks beyond any picture, numbers beyond any float, names with escapes."""
    run = tmp_path / ESC.replace("/", "")
    run.mkdir()
    start = {
        "event": "start",
        "step": 0,
        "layout": "dp200000",
        "model": {"name": ESC},
        "data": ESC,
    }
    step = {
        "event": "step",
        "step": 1,
        "loss": 10**400,
        "seconds": 1,
        "tokens_per_second": 1,
    }
    lines = [json.dumps(each) + "\n" for each in (start, step)]
    (run / "metrics.jsonl").write_text("".join(lines))
    with (run / "timeline.json").open("wb") as file:
        file.truncate(10**12)
    with (run / "run.toml").open("wb") as file:
        file.truncate(10**12)
    assert main(["report", str(run)]) == 0
    _is_clean(capsys.readouterr().out)
    page = (run / "report.html").read_text()
    assert len(page) < 1 << 20
    assert "too many for a picture" in page
    assert "1,000,000,000,000 bytes" in page
    (run / "timeline.json").unlink()
    os.mkfifo(run / "timeline.json")
    assert main(["report", str(run), "--cluster", "h100x8"]) == 2
    told = capsys.readouterr().err
    _is_clean(told)
    assert "a named pipe" in told


@pytest.mark.parametrize(
    "verb", ["verify", "train", "plan", "doctor", "report", "checkpoint"]
)
def test_the_prose_of_help_is_as_wide_as_the_terminal(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # An example is indented, and stands on one line so that it can be copied.
    assert not [
        line for line in lines if len(line) > 60 and not line.startswith("  ")
    ]


def test_the_package_runs_as_a_module_with_the_command_s_exit_codes(
    folder: Path,
) -> None:
    for argv, code in (
        (["--version"], 0),
        (["check", "dp2", "--model", "tiny"], 0),
        (["check", "tp3", "--model", "tiny"], 1),
        (["check", "tp3"], 2),
    ):
        done = _run(*argv, cwd=folder)
        assert done.returncode == code
        _is_clean(done.stderr)


def test_standard_output_that_is_full_or_closed_is_no_traceback(
    folder: Path,
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "draw", "1f1b"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    args = (
        "phalanx: cannot write to standard output: No space left on device.\n"
    )
    assert (done.returncode, done.stderr) == (1, args)
    script = '"$0" -m phalanx draw 1f1b >&-'
    closed = subprocess.run(
        ["sh", "-c", script, sys.executable], capture_output=True, timeout=120
    )
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


def test_a_reader_of_a_run_s_lines_may_stop_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    words = [
        "train", "model={layers=1,hidden=16,heads=2,ffn=16,vocab=256}", "batch=2", "sequence=8",
        "steps=4", "validation.batches=0", f"out={tmp_path / 'run'}", "--ranks", "1",
    ]  # fmt: skip
    command = [sys.executable, "-m", "phalanx", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(120) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [
        r["step"] for r in map(json.loads, lines) if r["event"] == "step"
    ] == [
        1,
        2,
        3,
        4,
    ]


def test_a_run_replaces_a_link_in_place_of_its_run_file(
    tmp_path: Path,
) -> None:
    from phalanx.layout.files import write_text

    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "run.toml").symlink_to(other)
    write_text(tmp_path / "run.toml", "steps = 1\n")
    assert other.read_text() == "kept"
    assert (tmp_path / "run.toml").read_text() == "steps = 1\n"
    assert not (tmp_path / "run.toml").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "run.toml"]


def test_names_of_published_models_are_known_in_any_case(
    capsys: Capture,
) -> None:
    for name in (
        "8B",
        "llama3-8b",
        "Llama-3-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
    ):
        assert main(["check", "dp2", "--model", name]) == 0
        assert "is legal for 8b" in capsys.readouterr().out


@pytest.mark.parametrize(
    "scale", [[], ["x", 1], [0, 1], [-1.0, 1], [1.0, -1], [1e300, 1], "x", 3]
)
def test_a_loss_scale_that_is_none_is_refused_with_its_manifest(
    scale: object,
) -> None:
    from phalanx.training.checkpoint_format import CheckpointError, Manifest

    text = str(Manifest(1, state={"loss_scale": scale}))
    with pytest.raises(
        CheckpointError, match=r"body: 'loss_scale' is .*expected a scale"
    ):
        Manifest.parse(text, Path("here"))
    good = str(Manifest(1, state={"loss_scale": [65536.0, 3]}))
    assert Manifest.parse(good, Path("here")).state == {
        "loss_scale": [65536.0, 3]
    }

"""Speed of `phalanx data prepare`: bytes against an earlier commit, a tokenizer against
tokenizers.

    python benchmarks/prepare.py bytes --before cd537ad
    python benchmarks/prepare.py tokenizer

The text is that of Python's standard library. Contenders alternate in one run; only
ratios within a table are meaningful. Both compare the CPU time of one process, in which
tokenizers uses one thread per core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Runs in its own process for each measurement; the first preparation warms up.
TIMED = """
import sys, time
from pathlib import Path
from phalanx.training.data.prepare import prepare
from phalanx.training.data.vocabulary import Bytes
for n in range(6):
    if n == 1:
        begun = time.process_time()
    prepare(Path(sys.argv[1]), Path(sys.argv[2] + f"-{n}"), Bytes(), share=0.05)
print((time.process_time() - begun) / 5)
"""


def written(folder: Path, size: int) -> dict[str, Path]:
    """Write the same text, in documents of 2,500 characters, in each file format."""
    import pyarrow
    from pyarrow import parquet

    modules = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    modules = [path for path in modules if "site-packages" not in path.parts]
    whole = "".join(path.read_text(errors="ignore") for path in modules)[:size]
    texts = [whole[n : n + 2500] for n in range(0, len(whole), 2500)]
    (folder / "t.txt").write_text(whole)
    (folder / "t.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    parquet.write_table(pyarrow.table({"text": texts}), folder / "t.parquet")
    return {name: folder / f"t.{name}" for name in ("txt", "jsonl", "parquet")}


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def compare_bytes(folder: Path, rounds: int, before: str) -> None:
    files = written(folder, 24_000_000)
    archive = subprocess.run(
        ["git", "archive", before, "src"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (folder / "before").mkdir()
    subprocess.run(
        ["tar", "-x", "-C", folder / "before"],
        input=archive.stdout,
        check=True,
    )
    sources = {"before": folder / "before" / "src", "now": ROOT / "src"}
    print(
        "| 24 MB of text | before, MB/s of a core | now | times as fast, median (quartiles) |"
    )
    print("|---|--:|--:|--:|")
    for kind, file in files.items():
        seconds: dict[str, list[float]] = {name: [] for name in sources}
        for n in range(rounds):
            for name, source in sources.items():
                out = folder / f"{kind}-{name}-{n}"
                environment = os.environ | {
                    "PYTHONPATH": str(source),
                    "OMP_NUM_THREADS": "1",
                }
                done = subprocess.run(
                    [sys.executable, "-c", TIMED, str(file), str(out)],
                    env=environment, capture_output=True, text=True, check=True,
                )  # fmt: skip
                seconds[name].append(float(done.stdout))
        speeds = [
            f"{24 / statistics.median(each):.0f}" for each in seconds.values()
        ]
        ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
        print(
            f"| .{kind} | {' | '.join(speeds)} | {quartiles(ratios)} |",
            flush=True,
        )


def compare_tokenizer(folder: Path, rounds: int) -> None:
    import tokenizers

    from phalanx.training.data.prepare import prepare
    from phalanx.training.data.vocabulary import open_vocabulary

    files = written(folder, 8_000_000)
    texts = [
        json.loads(line)["text"]
        for line in files["jsonl"].read_text().splitlines()
    ]
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4000, show_progress=False
    )
    words.train_from_iterator(texts[::16], trainer)
    words.save(str(folder / "tokenizer.json"))
    vocabulary = open_vocabulary(folder / "tokenizer.json")

    def alone() -> None:
        for n in range(0, len(texts), 1000):
            words.encode_batch_fast(
                texts[n : n + 1000], add_special_tokens=False
            )

    print(
        "| 8 MB of text | MB/s of a core | of tokenizers alone, median (quartiles) |"
    )
    print("|---|--:|--:|")
    spent: dict[str, list[float]] = {"tokenizers alone": []}
    for n in range(rounds):
        begun = time.process_time()
        alone()
        spent["tokenizers alone"].append(time.process_time() - begun)
        for kind, file in files.items():
            begun = time.process_time()
            prepare(file, folder / f"{kind}-{n}", vocabulary, share=0.05)
            spent.setdefault(f"prepare .{kind}", []).append(
                time.process_time() - begun
            )
    for name, seconds in spent.items():
        ratios = [
            a / b
            for a, b in zip(spent["tokenizers alone"], seconds, strict=True)
        ]
        print(
            f"| {name} | {8 / statistics.median(seconds):.1f} | {quartiles(ratios)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("bytes", "tokenizer"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--before", default="cd537ad", help="the commit to compare with"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "bytes":
            compare_bytes(Path(folder), args.rounds, args.before)
        else:
            compare_tokenizer(Path(folder), args.rounds)


if __name__ == "__main__":
    main()

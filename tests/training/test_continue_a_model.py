"""Every command of docs/continue-a-model.md, with a small model of that family."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import transformers

from hub_models import saved, theirs
from phalanx.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "continue-a-model.md"
# The sizes of the page, and those of the test: one rank of a CPU in place of 8 GPUs.
SMALL = {
    "h100x8": "h100x1", "4096": "16", "262144": "64", "dp8 zero3": "dp1", "1000": "2", "1200": "3",
    "=50": "=0", "=200": "=2", "--batch 64": "--batch 4",
}  # fmt: skip


@pytest.mark.slow
def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(theirs("llama"), tmp_path / "Llama-3.1-8B")
    words = {f"w{n}": n for n in range(59)} | {"</s>": 59, "<unk>": 60}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "Llama-3.1-8B")
    texts = [
        " ".join(f"w{(7 * n + i) % 59}" for i in range(40)) for n in range(60)
    ]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), "books.parquet"
    )
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 10
    for line in commands:
        for theirs_, ours in SMALL.items():
            line = line.replace(theirs_, ours)
        _, *argv = shlex.split(line)
        if argv[0] == "train":
            argv += [
                "layout=accum:2",
                "precision=fp32",
                "validation.batches=0",
            ]
        assert main(argv) == 0, line
    for folder in ("books-8b", "books-lora-8b"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
    assert (tmp_path / "books-adapter" / "adapter_config.json").is_file()

"""The glossary's table of operations is the table of operations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.layout import Layout, LayoutError, Run, Shape
from phalanx.layout.codec import schema
from phalanx.program.ops import KINDS
from phalanx.program.program import Op

TEXT = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()


def test_the_glossary_lists_every_operation_with_its_meaning_and_an_example_that_parses() -> (
    None
):
    rows = re.findall(r"^\| `(.)` \| (.+?) \| `(.+?)` \|$", TEXT, re.M)
    assert [(letter, does) for letter, does, _ in rows] == [
        (kind.letter, kind.does) for kind in KINDS.values()
    ]
    for letter, _, example in rows:
        assert Op.parse(example).kind == letter
        assert str(Op.parse(example)) == example


def test_the_glossary_s_layouts_parse() -> None:
    section = TEXT.split("## The words of a layout")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)`(?:, .*?)? \| (?!known)", section, re.M)
    assert len(rows) == 21
    for text in rows:
        Layout.parse(text if "pp" in text or "dp" in text else f"dp8 {text}")


# What users of FSDP, Megatron-LM, DeepSpeed and torchtitan type into a search.
TERMS = """FSDP; fully_shard; reshard_after_forward; HSDP; DDP; ZeRO-1; ZeRO-2; ZeRO-3; distributed
optimizer; ZeRO-Offload; CPU offload; no_sync; set_requires_gradient_sync; prefetch; bucket;
tensor parallel; sequence parallel; context parallel; ring attention; Ulysses; loss parallel;
pipeline parallel; virtual pipeline; zero bubble; GPipe; 1F1B; bubble; device mesh; micro-batch;
global batch size; gradient accumulation; activation checkpointing; selective activation
recomputation; activation offload; mixed precision; GradScaler; gradient clipping; MFU;
distributed checkpoint; packing; FlashAttention; torch.compile; NCCL; gloo; torchrun; Slurm; GQA;
mixture of experts; YaRN; data parallel; world size; process group; all-to-all; busbw; tied
embeddings; expert parallel; ETP; dropless; capacity factor; auxiliary loss; weight decay; warm-up; LoRA;
asynchronous checkpoint; elastic; straggler; Perfetto"""


def test_the_glossary_has_the_terms_that_users_of_other_libraries_search_for() -> (
    None
):
    text = TEXT.lower()
    assert len(TERMS.split(";")) >= 40
    assert not [
        term
        for term in TERMS.split(";")
        if " ".join(term.lower().split()) not in text
    ]


def test_what_the_glossary_says_of_other_names_are_layouts_and_keys() -> None:
    section = TEXT.split("## Names that you may search for")[1]
    keys = set(re.findall(r'"(\w+)":', json.dumps(schema(Run))))
    fields = {*Shape.__dataclass_fields__}
    for words in re.findall(
        r"`([^`]+)`", "".join(row.split("|")[2] for row in rows(section))
    ):
        if (
            words.startswith("phalanx ")
            or words in keys | fields
            or words in VERBS
        ):
            continue
        parallel = (
            words
            if re.search(r"\b(dp|pp|tp|cp)[0-9]", words)
            else f"pp2 {words}"
        )
        assert Layout.parse(parallel) != Layout(), words


VERBS = ("train", "plan", "report", "plan --explain")


def rows(section: str) -> list[str]:
    return re.findall(r"^\| (?!name)[^-].+$", section, re.M)


@pytest.mark.parametrize(
    "words, way_out",
    [
        ("hsdp2x4", "dp2x4 zero3"), ("fsdp8", "dp8 zero3"), ("ddp8", "'dp8'"), ("mbs:4", "accum:4"),
        ("gradient_accumulation_steps=4", "accum:4"), ("sequence_parallel", "tp8 seq"),
        ("activation_checkpointing", "recompute:all"), ("cpu_offload", "offload:optimizer"),
        ("fully_shard", "dp8 zero3"), ("precision=bf16", "bf16"), ("vpp2", "interleaved2"),
    ],
)  # fmt: skip
def test_other_libraries_words_are_answered_with_ours(
    words: str, way_out: str
) -> None:
    with pytest.raises(LayoutError, match=f"Write .*{way_out}"):
        Layout.parse(words)

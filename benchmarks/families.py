"""Tables of docs/families.md about models in transformers' own code.

    python benchmarks/families.py            # verifies all of them, and writes the tables
    python benchmarks/families.py granite    # a family alone, printed

They list what of each model is not sharded, the verified layouts, and the refused
families. Models are small and have random weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.layout import Layout, LayoutError, Shape
from phalanx.layout.cases import covering, every_layout
from phalanx.layout.choices import FP64
from phalanx.parallel import Model, fitting, load_model
from phalanx.verification import verify

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
# These families verify the fewest layouts of four ranks that cover every pair of
# choices; others verify a few.
COVERED = ("granite", "gpt_neox")
FEW = (
    "dp3 zero3; tp2; tp4; pp2 1f1b:3; tp2 seq; cp2; cp2:ulysses; dp2 recompute:all;"
    " pp2 zb-h1:3 recompute:selective; dp2 tp2 seq zero3 offload:activations; pp4 zero1 gpipe:3"
)
_PLAIN: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 12,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_NARROW = {"head_dim": 8}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 6},
    "exaone4": {"sliding_window": 5},
    "glm": _NARROW,
    "gpt_neox": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.4,
    },
    "nemotron": {},
    "olmo3": {"sliding_window": 6},
    "phi": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {},
    "starcoder2": {},
    "apertus": {},
    "bert": {},
    "bloom": {},
    "doge": {},
    "falcon": {},
    "gptj": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": _NARROW,
    "mamba": {},
    "mpt": {},
    "qwen2_moe": {},
}


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a small model of a family, with transformers' defaults
    for other keys."""
    import transformers

    given = _PLAIN | FAMILIES[name]
    made: Any = transformers.AutoConfig.for_model(name, **given)
    return {**given, **made.to_dict()}


def load(name: str) -> Model:
    """Return the small model. A LayoutError explains a refusal."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(name)))
        try:
            return load_model(f"hf:{folder}")
        except LayoutError as error:
            text = str(error).replace(f"{folder}/config.json: ", "")
            raise LayoutError(
                text.removesuffix(": this model cannot be trained.")
            ) from None


def layouts_of(name: str, model: Model) -> tuple[Layout, ...]:
    """Return the layouts to compare that fit the model."""
    assert model.shape is not None
    if name not in COVERED:
        few = fitting(model, Layout.parse_many(FEW))
        return tuple(replace(layout, precision=FP64) for layout in few)
    return covering(fitting(model, every_layout(_sized(model.shape), 4)), 1)


def _sized(shape: Shape) -> Shape:
    return replace(shape, batch=7, sequence=12)


def verified(name: str) -> tuple[int, int]:
    """Count the layouts that agree with one process, whose loss is checked against
    transformers' own forward, and all layouts."""
    model = load(name)
    assert model.shape is not None
    agree = count = 0
    for verdict in verify(
        _sized(model.shape),
        layouts_of(name, model),
        make=lambda: load(name),
        steps=2,
    ):
        agree, count = agree + verdict.passed, count + 1
        if not verdict.passed:
            print(
                name, verdict.layout, verdict.first_difference, file=sys.stderr
            )
    return agree, count


def described(name: str) -> tuple[bool, str]:
    """Return whether a family can be trained, and the parts that are not sharded, or
    the reason."""
    try:
        model = load(name)
    except LayoutError as error:
        return False, str(error)
    assert model.original is not None
    return True, "; ".join(model.original.notes) or "-"


def row(name: str, text: str) -> str:
    """Return the beginning of a table row, which does not depend on the
    verification."""
    return f"| `{name}` | {text.replace('|', '/')} |"


def written(page: str, trained: Mapping[str, str]) -> str:
    """Return the page with new tables; `trained` maps each trainable family to its
    verified layouts."""
    known = {name: described(name) for name in FAMILIES}
    lines = {
        "verified": [
            row(n, text) + f" {trained[n]} |"
            for n, (fits, text) in known.items()
            if fits
        ],
        "refused": [
            row(n, text) for n, (fits, text) in known.items() if not fits
        ],
    }
    for table, rows in lines.items():
        start, end = (
            f"<!-- {table}: written by benchmarks/families.py -->",
            f"<!-- end {table} -->",
        )
        before, _, rest = page.partition(start)
        old, _, after = rest.partition(end)
        head = "\n".join(old.strip("\n").splitlines()[:2])
        page = before + "\n".join((start, head, *rows, end)) + after
    return page


def main(names: list[str]) -> None:
    chosen = names or [name for name in FAMILIES if described(name)[0]]
    trained = {}
    for name in chosen:
        fits, text = described(name)
        agree, count = verified(name) if fits else (0, 0)
        trained[name] = f"{agree} of {count}"
        print(row(name, text), trained[name], flush=True)
    if not names:
        PAGE.write_text(written(PAGE.read_text(), trained))


if __name__ == "__main__":
    main(sys.argv[1:])

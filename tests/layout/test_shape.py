"""Shapes against the parameter counts that their papers publish."""

from pathlib import Path

import pytest

from phalanx.layout import LayoutError, Shape
from phalanx.layout.shape import ShapeError


@pytest.mark.parametrize(
    "name, total",
    [
        # Radford et al. 2019, as published: 124M with the output tied to the embedding.
        ("124m", 124_439_808),
        # Llama 3.2 1B and Llama 3 8B, 70B, 405B: counts of the published weights.
        ("1b", 1_235_814_400),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_parameters_are_those_of_the_published_weights(
    name: str, total: int
) -> None:
    assert Shape.load(name).total == total


def test_the_gpt_of_a_trillion_has_a_trillion() -> None:
    """Narayanan et al. 2021, eq. 2: 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh), 1008.0 billion."""
    s = Shape.load("1t-gpt")
    h, n = s.hidden, s.layers
    paper = (
        12
        * n
        * h
        * h
        * (1 + 13 / (12 * h) + (s.vocab + s.sequence) / (12 * n * h))
    )
    assert s.total == pytest.approx(paper, rel=1e-6)
    assert round(s.total / 1e9) == 1008


def test_every_shape_that_ships_loads_and_names_its_source() -> None:
    names = set(Shape.names())
    # with experts
    more = {"8x7b", "30b-a3b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"}
    assert (
        names
        == {"tiny", "25m", "124m", "1b", "8b", "70b", "405b", "1t-gpt", "mlp"}
        | more
    )
    for name in names:
        shape = Shape.load(name)
        assert shape.source
        assert shape.name == name
        assert (
            sum(shape.rows[p].numel for p in range(shape.pieces))
            == shape.total
        )
    assert Shape.load("25m").total == pytest.approx(25e6, rel=0.05)
    assert Shape.load("mlp").total == 4 * 1024 * 1024


def test_a_shape_with_mistakes_is_refused_with_all_of_them() -> None:
    text = 'layers = "four"\nhiden = 8\nheads = true\nnorm = "layer"'
    with pytest.raises(LayoutError) as caught:
        Shape.parse(text, "mine")
    for part in (
        "'mine' has 4 mistakes", "line 2: hiden = 8", "Did you mean 'hidden'", "hidden is missing",
        'line 1: layers = "four" is text', "line 3: heads = true is true or false",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(
        LayoutError, match="kv_heads = 3 does not divide heads = 4"
    ):
        Shape.parse("layers=1\nhidden=8\nheads=4\nkv_heads=3\nvocab=5", "x")
    with pytest.raises(LayoutError, match="vocab is missing"):
        Shape.parse("layers=1\nhidden=8", "x")
    with pytest.raises(LayoutError, match="is not TOML"):
        Shape.parse("layers", "x")
    with pytest.raises(LayoutError, match="Did you mean '405b'"):
        Shape.load("405bn")


def test_a_person_s_own_file_is_a_shape(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "small.toml"
    path.write_text("layers = 2\nhidden = 8\nheads = 2\nvocab = 11\n")
    shape = Shape.load(str(path))
    assert (shape.name, shape.kv_heads, shape.head_dim, shape.ffn) == (
        "small",
        2,
        4,
        32,
    )


def test_a_shape_that_a_program_makes_is_checked_like_a_file() -> None:
    with pytest.raises(LayoutError) as caught:
        Shape("x", layers=0, hidden=8, norm="batch", vocab=5, eps=0.0)
    for part in (
        "layers = 0 is out of bounds",
        'norm = "batch" is unknown',
        "eps = 0.0 is out",
    ):
        assert part in str(caught.value)
    with pytest.raises(
        LayoutError, match=r"rope_low = 4\.0 is not below rope_high = 4\.0"
    ):
        Shape("x", 1, 8, vocab=5, rope_low=4.0)
    with pytest.raises(
        LayoutError, match="heads = 16 is more than hidden = 8"
    ):
        Shape("x", 1, 8, vocab=5, heads=16)


def test_the_words_of_other_libraries_are_answered_with_ours(
    tmp_path: Path,
) -> None:
    file = tmp_path / "llama.toml"
    file.write_text("hidden_size = 64\nnum_key_value_heads = 2\n")
    with pytest.raises(ShapeError) as refused:
        Shape.load(str(file))
    ways = [mistake.way_out for mistake in refused.value.mistakes]
    assert ways[:2] == ["Write hidden", "Write kv_heads"]

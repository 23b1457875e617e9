"""The codec of all TOML files: types and bounds, the line of every mistake, printing, JSON Schema.

The oracles are `tomllib`, lines counted by hand, and the rules of JSON Schema written out below.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.layout import Run, Shape
from phalanx.layout.codec import FileError, dump, key, load, parse, schema
from phalanx.planner import Machine
from phalanx.planner.profile import SoftwareProfile


@dataclass(frozen=True)
class Wheel:
    size: int = key(description="inches", minimum=1, maximum=40)
    spokes: float | None = None


@dataclass(frozen=True)
class Engine:
    power: float = key(1.0, "kW", above=0)
    fuel: str = key("petrol", choices=("petrol", "diesel"))


@dataclass(frozen=True)
class Car:
    name: str
    engine: Engine = key(Engine(), "what drives it")
    wheels: tuple[Wheel, ...] = ()
    range: tuple[float, float] = key((0.0, 1.0), minimum=0, maximum=9)
    gears: tuple[int, ...] = key((), minimum=1)
    prices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    owner: str | None = key(None, "nobody yet")
    extra: str | dict[str, Any] = ""
    class_: str = key("", name="class")


CAR = Car(
    "a", Engine(2.5, "diesel"), (Wheel(3), Wheel(4, 1.5)), (0.5, 9.0), (1, 2),
    {"de": {"2020": 1.0, "new car": 2.0}}, "b\x7f\u202e\"'\\\n", {"deep": {"list": [1, 2]}}, "x",
)  # fmt: skip
WRONG = """\
name = 5
range = [1]
gears = [1, 0]
gaers = 1
engine.power = 0
engine.fuel = "disel"
owner = 3
[[wheels]]
size = 41
[[wheels]]
spokes = "four"
[prices.de]
2020 = true
"""
MISTAKES = {  # by the line of WRONG that they are on
    1: ("name = 5 is a whole number", "Write text"),
    2: (
        "range = [1] is a list of 1",
        "two numbers, as in range = [0.9, 0.95]",
    ),
    3: ("gears = [1, 0] is out of bounds", "1 or more"),
    4: ("gaers = 1: there is no key 'gaers'", "Did you mean 'gears'?"),
    5: ("engine.power = 0 is out of bounds", "more than 0"),
    6: ('engine.fuel = "disel" is unknown', "Did you mean 'diesel'?"),
    7: ("owner = 3 is a whole number", "Write text"),
    9: ("wheels[0].size = 41 is out of bounds", "1 to 40"),
    10: (
        "wheels[1].size is missing",
        "a whole number, as in wheels[1].size = 100",
    ),
    11: ('wheels[1].spokes = "four" is text', "a number"),
    13: ("prices.de.2020 = true is true or false", "a number"),
}


def test_every_mistake_of_a_file_is_reported_at_once_with_its_line() -> None:
    with pytest.raises(FileError) as caught:
        parse(Car, WRONG, "car.toml", FileError)
    by_line = {
        int(m.place.removeprefix("car.toml line ")): m
        for m in caught.value.mistakes
    }
    assert sorted(by_line) == sorted(MISTAKES)
    for line, (what, way_out) in MISTAKES.items():
        assert by_line[line].what == what
        assert way_out in by_line[line].way_out
    assert str(caught.value).startswith(
        "car.toml has 11 mistakes.\n- car.toml line 1: name = 5"
    )


def test_of_very_many_mistakes_the_first_are_reported_and_the_rest_counted() -> (
    None
):
    with pytest.raises(FileError) as caught:
        parse(
            Car,
            'name = ""\n' + "[[wheels]]\nsize = 0\n" * 500,
            "car.toml",
            FileError,
        )
    assert len(caught.value.mistakes) == 21
    assert "480 more mistakes" in str(caught.value)


def test_a_file_without_mistakes_and_one_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "car.toml"
    path.write_text(
        'name = "a"\nengine = {power = 3}\nwheels = [{size = 1}]\n'
    )
    assert load(Car, path, "car", FileError) == Car(
        "a", Engine(3.0), (Wheel(1),)
    )
    with pytest.raises(FileError, match="cannot read the car"):
        load(Car, tmp_path / "nothing.toml", "car", FileError)
    with pytest.raises(FileError, match="is not TOML"):
        parse(Car, "name =", "car.toml", FileError)


@pytest.mark.parametrize("short", [False, True])
def test_what_is_printed_is_toml_that_reads_back(short: bool) -> None:
    text = dump(CAR, short=short)
    written = asdict(CAR)
    written["class"] = written.pop("class_")
    written["wheels"] = [{"size": 3}, {"size": 4, "spokes": 1.5}]
    assert tomllib.loads(text) == json.loads(json.dumps(written))
    assert parse(Car, text, "", FileError) == CAR
    assert text.isprintable() or (set(text) - {"\n"} and "\u202e" not in text)
    assert ("# inches" in text) is not short


def test_a_short_file_has_no_defaults_and_six_digits() -> None:
    assert (
        dump(Car("a", Engine(1.23456789)), short=True)
        == 'name = "a"\n\n[engine]\npower = 1.23457\n'
    )
    # A value that is unset is shown as a comment, since TOML has no word for nothing.
    assert "# owner =   # nobody yet" in dump(Car("a"))


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4),
                       st.floats(0, 1e300) | st.floats(-1e9, -1e-9), max_size=3))  # fmt: skip
def test_any_key_and_any_number_read_back(numbers: dict[str, float]) -> None:
    car = replace(Car("a"), prices={"x": numbers} if numbers else {})
    assert parse(Car, dump(car), "", FileError) == car


def test_the_line_of_a_key_is_found_however_it_is_written() -> None:
    text = 'name = "a"\nprices."de".x = 1\n[ engine ]\n"fuel" = "gas"\n[prices.fr]\ny = "?"\n'
    with pytest.raises(FileError) as caught:
        parse(Car, text, "f", FileError)
    places = {
        m.what.partition(" =")[0]: m.place for m in caught.value.mistakes
    }
    assert places == {"engine.fuel": "f line 4", "prices.fr.y": "f line 6"}


def _holds(value: Any, rules: Mapping[str, Any]) -> bool:
    """Whether a value keeps the JSON Schema's rules, as its specification defines them."""
    types = {"integer": int, "number": (int, float), "boolean": bool, "string": str, "array": list,
             "object": dict, "null": type(None)}  # fmt: skip
    named = rules.get("type", [])
    allowed = [named] if isinstance(named, str) else named
    fits = [
        isinstance(value, types[t])
        and isinstance(value, bool) == (t == "boolean")
        for t in allowed
    ]
    if allowed and not any(fits):
        return False
    if isinstance(value, dict):
        known, more = (
            rules.get("properties", {}),
            rules.get("additionalProperties", True),
        )
        return set(rules.get("required", [])) <= set(value) and all(
            _holds(item, known[name]) if name in known
            else _holds(item, more) if isinstance(more, dict) else bool(more)
            for name, item in value.items()
        )  # fmt: skip
    if isinstance(value, list):
        count = (
            rules.get("minItems", 0)
            <= len(value)
            <= rules.get("maxItems", 10**9)
        )
        return count and all(
            _holds(item, rules.get("items", {})) for item in value
        )
    if "enum" in rules and value not in rules["enum"]:
        return False
    if value is None or isinstance(value, str | bool):
        return True
    low, high = rules.get("minimum", -1e400), rules.get("maximum", 1e400)
    return bool(
        low <= value <= high and value > rules.get("exclusiveMinimum", -1e400)
    )


@pytest.mark.parametrize(
    "text",
    [dump(CAR), 'name = "a"', "", "name = 5", 'name = "a"\ngears = [0]', 'name = "a"\nowner = 3',
     'name = "a"\nrange = [1]', 'name = "a"\nwheels = [{}]', 'name = "a"\nwheels = [{size = 41}]',
     'name = "a"\nengine.power = 0', 'name = "a"\nengine.fuel = "gas"', 'name = "a"\nb = 1',
     'name = "a"\nprices.x.y = "z"', 'name = "a"\nextra = 3', 'name = "a"\nextra = {a = 1}'],
)  # fmt: skip
def test_the_json_schema_accepts_what_the_codec_accepts(text: str) -> None:
    try:
        parse(Car, text, "car.toml", FileError)
        accepted = True
    except FileError:
        accepted = False
    assert _holds(tomllib.loads(text), schema(Car, "car")) is accepted


@pytest.mark.parametrize("kind", [Run, Shape, Machine, SoftwareProfile])
def test_every_kind_of_file_has_a_schema(kind: type) -> None:
    made = schema(kind, "a file")
    assert made["$schema"].startswith("https://json-schema.org/")
    assert json.loads(json.dumps(made)) == made
    assert made["additionalProperties"] is False

"""The registry: names, options from signatures, problems in words, families loaded on first use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from lamella import registry
from lamella.errors import ConfigError, UnknownNameError, UsageError
from lamella.registry import Family, build, describe, names, part, register
from samples import needs_torch


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """Return a family for one test, so that no real family changes."""
    family = Family("shape", "is drawn", ())
    monkeypatch.setitem(registry.FAMILIES, "shape", family)
    return family


@pytest.fixture
def polygon(shapes: Family) -> Callable[..., Any]:
    """A part with an option of every kind."""

    @register("shape", "polygon")
    def make(
        size: int,
        *,
        corners: Annotated[int, Field(ge=3, le=12)] = 4,
        line: Literal["solid", "dotted"] = "solid",
        angle: float,
        layers: Literal["all"] | list[int] = "all",
        width: Annotated[float, Field(gt=0)] | None = None,
        weights: Sequence[float] = (0.5, 0.5),
        filled: bool = False,
    ) -> dict[str, Any]:
        """A figure with corners.

        More details follow.
        """
        return {"size": size, "corners": corners, "line": line, "angle": angle, "layers": layers, "weights": weights}

    return make


def test_a_name_taken_by_another_part_is_an_error(shapes: Family) -> None:
    @register("shape", "circle")
    def circle() -> None: ...

    with pytest.raises(UsageError, match=r"shape 'circle' is registered twice: by .*\.circle and by .*\.disc; rename"):

        @register("shape", "circle")
        def disc() -> None: ...

    assert part("shape", "circle").make is circle


def test_a_name_taken_by_a_part_of_the_same_name_elsewhere_is_an_error(shapes: Family) -> None:
    def part_in(module: str) -> Callable[..., Any]:
        def circle() -> None: ...

        circle.__module__, circle.__qualname__ = module, "circle"
        return circle

    register("shape", "circle")(part_in("first"))
    register("shape", "circle")(part_in("first"))  # the same name again: its module was reloaded
    with pytest.raises(UsageError, match=r"registered twice: by first\.circle and by second\.circle"):
        register("shape", "circle")(part_in("second"))


def test_an_unknown_name_offers_the_nearest(polygon: Callable[..., Any]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        part("shape", "poligon")
    assert str(caught.value) == "shape 'poligon' does not exist. Did you mean 'polygon'?"
    with pytest.raises(UnknownNameError) as caught:
        part("shape", "zzz")
    assert str(caught.value) == "shape 'zzz' does not exist. Known: polygon."


def test_an_unknown_family_offers_the_nearest() -> None:
    for ask in (names, describe, lambda family: part(family, "last"), lambda family: build(family, "last")):
        with pytest.raises(UnknownNameError, match=r"^family 'mixr' does not exist\. Did you mean 'mixer'\?$"):
            ask("mixr")


def test_options_come_from_the_signature(polygon: Callable[..., Any]) -> None:
    options = {option.name: option for option in part("shape", "polygon").options}
    assert list(options) == ["corners", "line", "angle", "layers", "width", "weights", "filled"]
    assert {name: option.type for name, option in options.items()} == {
        "corners": "int (>= 3, <= 12)",
        "line": "solid | dotted",
        "angle": "float",
        "layers": "all | list of int",
        "width": "float (> 0) | none",
        "weights": "list of float",
        "filled": "bool",
    }
    assert [name for name, option in options.items() if option.required] == ["angle"]
    assert (options["corners"].default, options["width"].default) == (4, None)
    assert part("shape", "polygon").summary == "A figure with corners."


def test_options_of_a_class_come_from_its_constructor(shapes: Family) -> None:
    @register("shape", "ball")
    class Ball:
        def __init__(self, size: int, *, colour: str = "red") -> None:
            self.size, self.colour = size, colour

    @register("shape", "nothing")
    class Nothing:
        """No options, and no constructor either."""

    assert [option.name for option in part("shape", "ball").options] == ["colour"]
    assert build("shape", {"name": "ball", "colour": "blue"}, 3).colour == "blue"
    assert part("shape", "nothing").options == []
    assert isinstance(build("shape", "nothing"), Nothing)


def test_build_passes_facts_options_and_defaults(polygon: Callable[..., Any]) -> None:
    made = build("shape", {"name": "polygon", "angle": 30, "layers": [0, 2]}, 7)
    assert made == {
        "size": 7, "corners": 4, "line": "solid", "angle": 30.0, "layers": [0, 2], "weights": (0.5, 0.5)
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        build("shape", "polygon", 7)
    assert str(caught.value) == "shape 'polygon': 1 problem\n  angle: is required and was not given."


def test_all_problems_are_reported_at_once_with_path_and_value(polygon: Callable[..., Any]) -> None:
    options = {
        "corners": 2,
        "line": "dashed",
        "layers": "none",
        "width": 0,
        "weights": [1, "2"],
        "filled": 1,
        "corner": 3,
    }
    assert set(part("shape", "polygon").problems(options, "picture.shape")) == {
        "picture.shape.corner: no such option. Did you mean 'corners'?",
        "picture.shape.angle: is required and was not given.",
        "picture.shape.corners: expected at least 3, got 2.",
        "picture.shape.line: expected 'solid' or 'dotted', got 'dashed'.",
        "picture.shape.layers: expected 'all' or a list, got 'none'.",  # both members of the union on one line
        "picture.shape.width: expected more than 0.0, got 0.",
        "picture.shape.weights[1]: expected a number, got '2'.",
        "picture.shape.filled: expected true or false, got 1.",
    }
    assert part("shape", "polygon").problems({"angle": 1}, "x") == []


@pytest.mark.parametrize("value", [True, "3", 3.0, [3], None])
def test_nothing_is_converted_to_a_whole_number(polygon: Callable[..., Any], value: object) -> None:
    assert part("shape", "polygon").problems({"angle": 1, "corners": value}, "") == [
        f"corners: expected a whole number, got {value!r}."
    ]


def test_the_message_for_a_part_without_options(shapes: Family) -> None:
    register("shape", "point")(lambda: None)
    assert part("shape", "point").problems({"k": 3}, "shape") == ["shape.k: no such option; it takes none."]


def test_a_long_value_is_shortened(polygon: Callable[..., Any]) -> None:
    (problem,) = part("shape", "polygon").problems({"angle": "x" * 5000}, "shape")
    assert len(problem) < 150
    assert problem.endswith("xxx….")


def test_describe_is_plain_data(polygon: Callable[..., Any]) -> None:
    (listing,) = describe("shape")
    assert json.loads(json.dumps(listing))["parts"][0]["options"][0] == {
        "name": "corners", "type": "int (>= 3, <= 12)", "default": 4, "required": False
    }  # fmt: skip
    assert listing["summary"] == "is drawn"


@needs_torch
def test_every_registered_part_can_be_described() -> None:
    listing = json.loads(json.dumps(describe()))
    assert [family["family"] for family in listing] == list(registry.FAMILIES)
    for family in listing:
        assert family["parts"], f"{family['family']} has no parts"
        assert [entry["name"] for entry in family["parts"]] == names(family["family"])
        for entry in family["parts"]:
            assert entry["summary"].strip(), f"{family['family']} {entry['name']} has no docstring"
            for option in entry["options"]:
                assert not re.search(r"typing|class|\[|'", option["type"]), option


@needs_torch
def test_families_are_loaded_on_first_use_only() -> None:
    script = (
        "import sys, lamella.registry, lamella.config\n"
        "heavy = {'torch', 'transformers', 'numpy', 'accelerate'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert lamella.registry.FAMILIES['mixer'].parts == {}\n"
        "assert lamella.registry.names('mixer') and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_reader_is_listed_before_it_is_imported() -> None:
    script = (
        "import sys, lamella\n"
        "assert {'Reader', 'LamellaError', '__version__', '__name__'} <= set(dir(lamella)), dir(lamella)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'lamella.inference'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_part_declares_traits_that_differ_from_the_defaults_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("shape", "is drawn", (), traits={"closed": True, "corners": 0})
    monkeypatch.setitem(registry.FAMILIES, "shape", family)

    @register("shape", "square", corners=4)
    def square() -> None: ...

    @register("shape", "line", closed=False)
    def line() -> None: ...

    assert [registry.trait("shape", "square", key) for key in ("closed", "corners")] == [True, 4]
    assert [registry.trait("shape", {"name": "line"}, key) for key in ("closed", "corners")] == [False, 0]
    with pytest.raises(UsageError, match=r"shape 'dot' declares unknown traits: colour\.$"):
        register("shape", "dot", colour="red")(line)


@needs_torch
def test_an_option_that_was_added_later_is_stored_only_if_it_is_used() -> None:
    """Files and hashes of models stay as they were before the option existed."""
    stored = registry.complete("tuning", "lora")
    assert stored == {"name": "lora", "rank": 8, "alpha": 16, "dropout": 0.0, "targets": ["query", "value"], "also": []}
    assert registry.complete("tuning", {"name": "lora", "dora": False}) == stored
    assert registry.complete("tuning", {"name": "lora", "dora": True}) == {**stored, "dora": True}

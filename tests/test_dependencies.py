"""The ranges of pyproject.toml, and the two files that pin their ends: constraints.txt and constraints-lowest.txt."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
ABOVE_THE_BOUND = {"torch": Version("2.13.0")}  # docs/decisions/0062-lowest-versions.md gives the reason


def ranges() -> dict[str, Requirement]:
    """Return the requirement of each library in pyproject.toml, those of all extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    found = [Requirement(line) for line in lines if not line.startswith("lamella[")]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in found}
    assert len(by_name) == len(found), "each library has one range"
    return by_name


def pins(name: str) -> dict[str, Version]:
    """Return the version of each library that a constraints file pins, and check that it pins nothing twice."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    found = {canonicalize_name(library): Version(version) for library, version in pairs}
    assert len(found) == len(pairs), f"{name} pins a library twice"
    return found


def lowest(requirement: Requirement) -> Version:
    """Return the lower bound of a range; each range has exactly one."""
    (bound,) = [part.version for part in requirement.specifier if part.operator in (">=", "==")]
    return Version(bound)


def test_the_lowest_versions_are_the_lower_bounds() -> None:
    bounds = {name: lowest(requirement) for name, requirement in ranges().items()}
    assert pins("constraints-lowest.txt") == bounds | ABOVE_THE_BOUND
    assert all(bounds[name] < version for name, version in ABOVE_THE_BOUND.items()), "remove what is no exception"


def test_every_library_is_pinned_within_its_range() -> None:
    pinned, allowed = pins("constraints.txt"), ranges()
    assert pinned.keys() == allowed.keys()
    assert not {name: str(pinned[name]) for name, range_ in allowed.items() if pinned[name] not in range_.specifier}

"""The shape of the package: who may import whom, what is public, what the command line may not load."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lamella
from samples import needs_torch

SOURCE = Path(lamella.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(SOURCE.rglob("*.py"))

# A module imports from its own group and from the groups before it, never from a later one or from its neighbour on the
# same line. This holds for imports inside functions and for those that only type checkers see, too: a signature that
# names a later group's type knows of that group. (The registry names later modules as text; it does not know them.)
ORDER = (
    {
        "ground": (
            "atomic",
            "errors",
            "option_errors",
            "plugins",
            "registry",
            "section",
            "calibration",
            "decoding_options",
            "config",
            "validation",
            "run_file",
            "plan",
            "text_encoding",
            "unpacking",
            "user_cache",
            "child_process",
            "cores",
            "files",
            "environment",
            "runs",
            "progress",
            "garbage",
            "overlap",
            "stopwatch",
            "version",
        )
    },
    {"languages": ("languages",)},
    {"data": ("data",)},
    {"documents": ("documents",)},
    {"encoder": ("encoder",)},
    {"graph": ("graph",)},
    {"heads": ("heads",)},
    {"models": ("models",)},
    {"inference": ("inference",)},
    {"scoring": ("scoring",)},
    {"training": ("training",), "export": ("export",), "study": ("study",), "testing": ("testing",)},
    {"sweep": ("sweep",), "serve": ("serve",)},
    {"cli": ("cli",), "api": ("api",)},
    {"package": ("__init__", "__main__")},
)
GROUP = {name: group for rank in ORDER for group, names in rank.items() for name in names}
RANK = {group: place for place, rank in enumerate(ORDER) for group in rank}


def group_of(module: str) -> str:
    """`lamella.data.windows.features` belongs to `data`."""
    name = module.split(".")[1] if "." in module else "__init__"
    assert name in GROUP, f"{module}: give lamella.{name} a place in ORDER"
    return GROUP[name]


def module_name(file: Path) -> str:
    parts = ("lamella", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The modules of this package that a file imports, anywhere in it, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "lamella":  # `from lamella import registry`
            found = [f"lamella.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where a name comes from"
            found = [str(node.module)]
        else:
            continue
        yield from ((node.lineno, name) for name in found if name.split(".")[0] == "lamella")


def wrong_imports(module: str, code: str) -> list[str]:
    own = group_of(module)
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(ast.parse(code))
        if group_of(name) != own and RANK[group_of(name)] >= RANK[own]
    ]


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_imports_point_downwards(file: Path) -> None:
    assert not wrong_imports(module_name(file), file.read_text(encoding="utf-8"))


def test_an_import_that_points_upwards_is_found_wherever_it_stands() -> None:
    upwards = {
        "import lamella.training.fitting.loop",
        "from lamella.training.fitting.loop import fit",
        "from lamella import training",
        "def late():\n    from lamella.training import loop",
        "if TYPE_CHECKING:\n    from lamella.training.fitting.loop import fit",
    }
    for code in upwards:
        assert wrong_imports("lamella.inference.predict", code), code
        assert not wrong_imports("lamella.cli", code), code
    assert wrong_imports("lamella.study.report.html", "from lamella.serve import app")
    assert wrong_imports("lamella.registry", "from lamella.data import formats")
    assert not wrong_imports("lamella.registry", "from lamella.errors import ConfigError")


LONGEST_MODULE = 400  # lines


def module_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, anywhere in its code."""
    graph: dict[str, set[str]] = {}
    for module, code in sources.items():
        imported = set()
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (names & sources.keys()) or {str(node.module)}
        graph[module] = (imported & sources.keys()) - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another, directly or not."""
    reachable: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        queue = [module]
        while queue:
            queue += graph[queue.pop()] - seen
            seen |= set(queue)
        reachable[module] = seen
    in_circles = {module for module in graph if module in reachable[module]}
    groups = {
        tuple(sorted(other for other in in_circles & reachable[one] if one in reachable[other])) for one in in_circles
    }
    return sorted(map(list, groups))


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = module_graph({module_name(file): file.read_text(encoding="utf-8") for file in MODULES})
    assert len(graph) == len(MODULES)
    assert sum(map(len, graph.values())) > len(MODULES)
    assert not circles(graph)


def test_a_circle_is_found_wherever_its_imports_are() -> None:
    sources = {
        "lamella.a": "from lamella.b import name",
        "lamella.b": "def late():\n    from lamella import c",
        "lamella.c": "if TYPE_CHECKING:\n    import lamella.a",
        "lamella.d": "from lamella.a import name",
    }
    assert circles(module_graph(sources)) == [["lamella.a", "lamella.b", "lamella.c"]]
    assert not circles(module_graph({**sources, "lamella.c": ""}))


def test_no_two_modules_share_a_name() -> None:
    names = [file.stem for file in MODULES if file.stem not in {"__init__", "__main__"}]
    repeated = {name for name in names if names.count(name) > 1}
    assert not repeated


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_no_module_is_longer_than_a_reader_can_follow(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE


@needs_torch
def test_the_public_names_are_sorted_and_exist() -> None:
    assert list(lamella.__all__) == sorted(set(lamella.__all__))
    for name in lamella.__all__:
        assert getattr(lamella, name) is not None


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_every_module_says_what_it_is_for(file: Path) -> None:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, f"{module_name(file)} has no docstring"
    assert docstring.splitlines()[0].endswith((".", ":"))


@needs_torch
def test_every_module_can_be_imported() -> None:
    for file in MODULES:
        if file.name != "__main__.py":
            importlib.import_module(module_name(file).removesuffix(".__init__"))


@pytest.mark.parametrize("arguments", [["--help"], ["parts", "--help"], ["train", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lamella", *arguments], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in ended.stderr.splitlines() if "|" in line}
    assert {"lamella", "typer"} <= loaded
    assert not loaded & {"torch", "transformers", "numpy", "accelerate", "tokenizers", "huggingface_hub"}
    assert "lamella" in ended.stdout


def test_no_file_names_a_place_on_someone_s_machine() -> None:
    place = re.compile(r"(?<![\w.])/(" + "work|root" + r")/")
    files = [
        file
        for folder in ("src", "tests", "examples", "benchmarks", "configs", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".toml", ".md", ".json", ".html", ".js", ".css"}
    ]
    assert len(files) > len(MODULES)
    found = [str(file.relative_to(ROOT)) for file in files if place.search(file.read_text(encoding="utf-8"))]
    assert not found


@needs_torch
def test_a_run_file_is_checked_without_transformers() -> None:
    """It takes seconds to load, and every command that reads a run file or lists the parts would wait for it."""
    script = (
        "import sys; from lamella.plan import make_plan; from lamella import registry; registry.describe(None); "
        "make_plan({'learner': {'mixer': 'dot'}}, where='x'); print('transformers.modeling_utils' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"

"""Every command without extras: it works, or names the extra that it needs; some never look for one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamella import registry
from lamella.cli import app, with_one_command
from lamella.cli.app import COMMANDS
from lamella.data.dataset import load_examples
from lamella.data.demo import data_path
from made_runs import make_run
from samples import HAS_TORCH, needs_torch
from tiny_reader import save_tiny_bert, save_tiny_reader

HEAVY = ("torch", "transformers", "accelerate", "onnx", "onnxscript", "ray", "wandb", "tensorboard", "fastapi")
LOOKED_FOR = "looked for"
CUT = "warning: 133 questions cut to 24 tokens"  # the tiny tokenizer makes many tokens of a question
LEAST_TESTS = 1700  # that `make test-light` runs; their number grows

# As if the libraries were not installed; a command that asks for one of them is reported, even if it goes on without.
SCRIPT = f"""
import sys
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_light(name, *rest):
    if name in {HEAVY}:
        sys.stderr.write(f"{LOOKED_FOR} {{name}}\\n")
        return None
    return find_spec(name, *rest)
PathFinder.find_spec = find_light
"""
COMMAND_LINE = "from lamella.__main__ import main\nmain()"


def run_light(*arguments: str | Path, script: str = COMMAND_LINE, may_look: bool = False) -> str:
    """Run a command or script without the heavy libraries, and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    err = without(ended.stderr, LOOKED_FOR) if may_look else ended.stderr
    assert (ended.returncode, err) == (0, ""), err[-2000:]
    return ended.stdout


def without(text: str, *beginnings: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(beginnings))


def test_the_front_door() -> None:
    script = """
import lamella
from lamella import LamellaError, Reader, RunConfig, load_examples
print(len(load_examples("demo:dev").examples), RunConfig().training.epochs)
"""
    assert run_light(script=script) == "135 2.0\n"


def test_only_the_command_that_is_called_is_built() -> None:
    for name in COMMANDS:
        assert [info.callback.__name__ for info in with_one_command(name).registered_commands if info.callback] == [
            name
        ]
    assert with_one_command("aks") is with_one_command("") is app
    assert len(app.registered_commands) == len(COMMANDS)


def test_every_help_page() -> None:
    """In one process: `main` is called for each page."""
    script = """
from lamella import registry
from lamella.cli import with_one_command
for command in ([], *([name] for name in sys.argv[1:])):
    try:
        with_one_command("".join(command))(args=[*command, "--help"], prog_name="lamella")
    except SystemExit as ended:
        assert not ended.code
"""
    pages = run_light(*COMMANDS, script=script)
    assert re.findall(r"^Usage: lamella (\w+) ", pages, re.MULTILINE) == list(COMMANDS)
    assert re.search(r"--top-k N\s", pages)
    assert re.search(r"--answer eager\|balanced\|strict\s", pages)
    assert not re.search(r"<\w", pages), "types of Python, as typer shows them: <int range>, <list[str]>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with predictions, and nothing of their models."""
    folder = tmp_path_factory.mktemp("runs")
    for mixer in ("last", "dot"):
        make_run(folder / mixer, mixer=mixer)
    return folder


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predictions") / "predictions.json"
    examples = load_examples("demo:dev").examples
    path.write_text(json.dumps({e.id: e.answers[0].text if e.answers else "" for e in examples}), encoding="utf-8")
    return path


INSTALL_TRAIN = (
    "needs torch, transformers and accelerate, which are not installed; install with: pip install 'lamella[train]'"
)
ONLY_NAMES = f"names are checked; checking the values of the options of parts {INSTALL_TRAIN}"

# The arguments of every command of the application. READER, RUNS, … stand for paths; OUT is a new one for each line.
WORK = {
    "check demo:dev": "",
    "check RUN_FILE": f"warning: RUN_FILE: {ONLY_NAMES}\n",
    "convert demo:dev OUT.jsonl": "",
    "parts": "",
    "sweep RUN_FILE --out OUT --list": f"warning: RUN_FILE: {ONLY_NAMES}\n",
    "predict DATA --model READER --out OUT": "",
    "evaluate DATA PREDICTIONS": "",
    "evaluate DATA --model READER --out EVALUATED --precision int8": "",
    "calibrate DATA --model READER --out OUT": "",
    "ensemble READER OTHER --data DATA --out OUT": "",
    "ask Who? --text Bob. --model READER": "",
    "index DOCUMENTS": "",
    "ask Who? --in DOCUMENTS --model READER": "",
    "export READER --onnx OUT": "",
    "compare RUNS": "",
    "recommend RUNS": "",
    "analyse EVALUATED": "",
    "report RUNS --out OUT.html": "",
}
FAIL = {
    "extract RUN_FILE --out OUT": f"lamella: `lamella extract` {INSTALL_TRAIN}\n",
    "train RUN_FILE --out OUT": f"lamella: `lamella train` {INSTALL_TRAIN}\n",
    "sweep RUN_FILE --out OUT": f"lamella: `lamella sweep` {INSTALL_TRAIN}\n",
    "ask Who? --text Bob. --model READER --layers": "lamella: ask --layers needs torch, which is not installed; "
    "install with: pip install 'lamella[train]'\n",
    "average READER OTHER --out OUT": f"lamella: `lamella average` {INSTALL_TRAIN}\n",
    "export READER --half OUT": f"lamella: `lamella export` {INSTALL_TRAIN}\n",
    "serve READER --port 0": "lamella: `lamella serve` needs fastapi, which is not installed; "
    "install with: pip install 'lamella[serve]'\n",
    "predict DATA --model READER --out OUT --engine ray": "lamella: --engine ray needs ray, which is not installed; "
    "install with: pip install 'lamella[ray]'\n",
}
# These start fast: they do not look for the libraries of any extra.
FAST = ("check demo:dev", "convert", "evaluate", "ask", "compare", "recommend", "report")
Outcomes = dict[str, tuple[Any, str, str]]
RUN_EACH = """
import contextlib, io, json, traceback
from lamella.__main__ import main
for line in sys.argv[1:]:
    sys.argv = ["lamella", *line.split()]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        except Exception:
            code = traceback.format_exc()
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def outcomes(runs: Path, predictions: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The exit code and both outputs of every line above, run in one process; the outputs have names for the paths."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "run.toml").write_text('[data]\ntrain = "demo:train"\n[learner]\nmixer = "dot"\n', encoding="utf-8")
    encoder = save_tiny_bert(folder / "encoder")
    (folder / "documents").mkdir()
    (folder / "documents" / "a.txt").write_text("Bob.", encoding="utf-8")
    paths = {
        "DOCUMENTS": folder / "documents",
        "READER": save_tiny_reader(folder / "reader", encoder),
        "OTHER": save_tiny_reader(folder / "other", encoder, seed=1),
        "DATA": data_path("demo:dev"),
        "EVALUATED": folder / "evaluated",
        "PREDICTIONS": predictions,
        "RUNS": runs,
        "RUN_FILE": folder / "run.toml",
    }
    names = {str(path): name for name, path in paths.items()}
    lines = [*WORK, *FAIL]
    commands = [
        " ".join(str(paths.get(word, word.replace("OUT", f"{folder}/out-{number}"))) for word in line.split())
        for number, line in enumerate(lines)
    ]
    printed = map(json.loads, run_light(*commands, script=RUN_EACH).splitlines())
    assert not any((folder / f"out-{lines.index(line)}").exists() for line in FAIL)
    return {
        line: (code, out, re.sub("|".join(map(re.escape, names)), lambda path: names[path[0]], err))
        for line, (code, out, err) in zip(lines, printed, strict=True)
    }


@needs_torch
def test_parts_are_described_as_with_torch() -> None:
    script = """
import json
from lamella import registry
specs = {family: registry.names(family) for family in registry.FAMILIES}
print(json.dumps([registry.describe(), [registry.trait("tuning", name, "trains_encoder") for name in specs["tuning"]]]))
print(json.dumps([registry.complete(family, name) for family in ("mixer", "task", "tuning") for name in specs[family]]))
assert registry.uses_outline()
"""
    described, completed = map(json.loads, run_light(script=script, may_look=True).splitlines())
    specs = {family: registry.names(family) for family in registry.FAMILIES}
    traits = [registry.trait("tuning", name, "trains_encoder") for name in specs["tuning"]]
    assert described == json.loads(json.dumps([registry.describe(), traits]))
    expected = [registry.complete(family, name) for family in ("mixer", "task", "tuning") for name in specs[family]]
    assert completed == expected


def test_every_command_is_listed() -> None:
    assert {line.split()[0] for line in [*WORK, *FAIL]} == set(COMMANDS)


@pytest.mark.parametrize("line", WORK)
def test_a_command_works(line: str, outcomes: Outcomes) -> None:
    code, out, err = outcomes[line]
    assert not (line.startswith(FAST) and LOOKED_FOR in err)
    assert (code, without(err, LOOKED_FOR, CUT)) == (0, WORK[line])
    assert out


@pytest.mark.parametrize("line", FAIL)
def test_a_command_names_the_extra_that_it_needs(line: str, outcomes: Outcomes) -> None:
    code, out, err = outcomes[line]
    assert (code, out, without(err, LOOKED_FOR)) == (2, "", FAIL[line])


def test_most_of_the_suite_runs_without_torch(request: pytest.FixtureRequest) -> None:
    if HAS_TORCH or request.config.args != request.config.getini("testpaths"):
        pytest.skip("counts the tests of `make test-light`")
    assert request.session.testscollected >= LEAST_TESTS

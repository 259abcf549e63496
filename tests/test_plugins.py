"""Parts of other packages: entry points, plugins named in a run file or a saved model, and what is wrong with them."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder, tiny_batch, tiny_run_config
from lamella import evaluate, load_examples, plugins, registry
from lamella.errors import ConfigError, ModelError, PluginError
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.registry import part
from lamella.run_file import load_config
from lamella.validation import check_config

ROOT = Path(__file__).resolve().parents[1]
MIXER = '''
from lamella.heads.pooling import Last
from lamella.registry import register

@register("mixer", "{name}")
class Mine(Last):
    """A mixer of another package."""
'''

METRICS = """
from lamella.registry import register

@register("metric", "accuracy")
def accuracy(gold, predicted, language):
    return gold == predicted

@register("metric", "total")
def total(gold, predicted, language):
    return 1.0

@register("metric", "broken")
def broken(gold, predicted, language):
    return None
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that puts a package onto the path, with or without an entry point; all is undone afterwards."""
    site = tmp_path / "site"
    site.mkdir()  # before it is on the path: Python remembers that a folder does not exist
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(plugins, "_imported", set())
    monkeypatch.setattr(plugins, "_installed_imported", False)
    for family in list(registry.FAMILIES):
        registry.names(family)
        parts = dict(registry.FAMILIES[family].parts)
        monkeypatch.setitem(registry.FAMILIES, family, replace(registry.FAMILIES[family], parts=parts))
    monkeypatch.setattr(plugins, "_installed_imported", False)
    packages = []

    def write(package: str, code: str, *, entry_point: bool = True) -> None:
        packages.append(package)
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text("")
        (site / package / "parts.py").write_text(code)
        if entry_point:
            info = site / f"{package}-1.2.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.2\n")
            (info / "entry_points.txt").write_text(f"[lamella.parts]\n{package} = {package}.parts\n")
        importlib.invalidate_caches()

    yield write
    for module in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[module]


def test_an_entry_point_adds_parts_that_are_named_like_ours(install: Install) -> None:
    install("my_package", MIXER.format(name="mine"))
    assert "mine" in registry.names("mixer")
    (listing,) = registry.describe("mixer")
    assert "A mixer of another package." in [part["summary"] for part in listing["parts"]]
    assert check_config({"learner": {"mixer": "mine"}}, where="").learner.mixer == [{"name": "mine"}]
    with pytest.raises(ConfigError) as caught:
        check_config({"learner": {"mixer": {"name": "mine", "k": 1}}}, where="")
    assert caught.value.problems == ("learner.mixer[0].k: no such option; it takes none.",)
    with pytest.raises(ConfigError, match=r"mixer 'minne' does not exist\. Did you mean 'mine'\?"):
        check_config({"learner": {"mixer": "minne"}}, where="")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError: .*"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            MIXER.format(name="last"),
            r"mixer 'last' is registered twice: by lamella\.heads\.pooling\.Last and by wrecked\.parts\.Mine; rename "
            r"one of them",
        ),
        (MIXER.format(name="x").replace('"mixer"', '"mixr"'), r"family 'mixr' does not exist. Did you mean 'mixer'\?"),
    ],
)
def test_a_broken_plugin_is_one_line_with_its_package(code: str, reason: str, install: Install, lamella: Any) -> None:
    install("wrecked", code)
    for _ in range(2):  # it stays broken
        exit_code, out, err = lamella("parts", "mixer")
        assert (exit_code, out) == (2, "")
        assert len(err.splitlines()) == 1
        with pytest.raises(PluginError, match=f"^plugin 'wrecked.parts' of wrecked 1.2 cannot be imported: {reason}"):
            registry.names("mixer")
    assert err.endswith("; repair it, or uninstall its package.\n")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("least: float = object()", "Object of type object is not JSON serializable"),
        ("least: 'Missing' = 0.5", "name 'Missing' is not defined"),
        (
            "least: type('Odd', (), {}) = 0.5",
            r"Unable to generate pydantic-core schema for <class 'odd\.parts\.Odd'>.*",
        ),
    ],
)
def test_options_that_no_file_can_hold_are_one_line(option: str, reason: str, install: Install, lamella: Any) -> None:
    install("odd", METRICS.replace("predicted, language):", f"predicted, language, *, {option}):", 1))
    try:
        code, _, err = lamella("parts", "metric", "--json")
        part("metric", "accuracy").resolved({})
        error = ""
    except PluginError as refused:
        error = str(refused)
    assert re.fullmatch(rf"odd\.parts\.accuracy: its options cannot be used: {reason}; repair it\.", error)
    assert (code, err) in ((0, ""), (2, f"lamella: {error}\n"))


def test_a_plugin_that_needs_torch_names_the_extra(install: Install, lamella: Any) -> None:
    install("heavy", 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")')  # as without torch
    code, out, err = lamella("parts", "mixer")
    assert (code, out) == (2, "")
    needs = "needs torch, which is not installed; install with: pip install 'lamella[train]'"
    assert err == f"lamella: plugin 'heavy.parts' of heavy 1.2 {needs}\n"


def test_an_entry_point_without_its_module(install: Install, tmp_path: Path) -> None:
    install("lost", "")
    (tmp_path / "site" / "lost" / "parts.py").unlink()
    with pytest.raises(
        PluginError, match=r"of lost 1\.2 cannot be imported: No module named 'lost\.parts'; install the"
    ):
        registry.names("task")


def test_a_run_file_names_its_plugins(install: Install, tmp_path: Path) -> None:
    install("local_parts", MIXER.format(name="mine"), entry_point=False)
    assert "mine" not in registry.names("mixer")
    path = tmp_path / "run.toml"
    path.write_text('plugins = ["local_parts.parts"]\n[learner]\nmixer = "mine"\n')
    config = load_config(path)
    assert config.plugins == ["local_parts.parts"]
    assert "plugins" not in str(config.flat())
    stored = tmp_path / "config.json"
    stored.write_text(json.dumps(config.model_dump(mode="json")))
    assert json.loads(stored.read_text())["plugins"] == ["local_parts.parts"]
    assert load_config(stored) == config
    plan = make_plan({"plugins": "local_parts.parts", "grid": {"learner": {"mixer": ["mine", "last"]}}}, where="x")
    assert [run.plugins for run in plan.runs.values()] == [["local_parts.parts"]] * 2


def test_a_run_without_plugins_has_no_such_key() -> None:
    config = check_config({}, where="")
    assert "plugins" not in config.model_dump(mode="json")
    assert list(config.model_dump(mode="json", exclude={"learner"})) == [
        "data",
        "windows",
        "encoder",
        "training",
        "decoding",
    ]


def test_parts_of_listed_modules_are_listed(install: Install, lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install("local_parts", MIXER.format(name="mine"), entry_point=False)
    assert "  mine " not in lamella("parts", "mixer")[1]
    monkeypatch.setenv(plugins.TRUSTED, "local_parts.parts")
    assert "  mine " in lamella("parts", "mixer")[1]


@pytest.mark.parametrize("entry_point", [True, False])
def test_a_saved_model_brings_its_plugin_or_names_what_is_missing(
    entry_point: bool, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("my_package", MIXER.format(name="mine"), entry_point=entry_point)
    encoder = save_tiny_encoder(tmp_path / "encoder")
    named = {} if entry_point else {"plugins": ["my_package.parts"]}
    config = tiny_run_config(**named, learner={"mixer": "mine"})
    model = ReaderModel(load_encoder(str(encoder)), config).eval()
    model.save(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["plugins"] == ["my_package.parts"]

    forget(monkeypatch)
    if not entry_point:  # the module was chosen by a run file; a model alone cannot choose what is imported
        with pytest.raises(
            ModelError, match=r"; install .*, or, if .* trust, set LAMELLA_PLUGINS=my_package\.parts\.$"
        ):
            ReaderModel.load(tmp_path / "model")
        assert "my_package.parts" not in sys.modules
        monkeypatch.setenv(plugins.TRUSTED, "other, my_package.parts")
    loaded = ReaderModel.load(tmp_path / "model")
    assert (loaded(tiny_batch()) == model(tiny_batch())).all()
    loaded.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["plugins"] == ["my_package.parts"]

    forget(monkeypatch)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("site")])
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(tmp_path / "model")
    assert str(caught.value) == (
        f"{tmp_path / 'model' / 'config.json'}: needs the mixer 'mine', which is not installed here; install the "
        "package that holds my_package.parts."
    )


def forget(
    monkeypatch: pytest.MonkeyPatch, family: str = "mixer", part: str = "mine", module: str = "my_package"
) -> None:
    """Make the registry as it is in a new process."""
    monkeypatch.setattr(plugins, "_imported", set())
    monkeypatch.setattr(plugins, "_installed_imported", False)
    registry.FAMILIES[family].parts.pop(part)
    for name in [name for name in sys.modules if name.startswith(module)]:
        del sys.modules[name]


def page_blocks(language: str) -> list[str]:
    """Return the blocks of code in a language on the page about extending."""
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def tiny_settings(folder: Path) -> list[str]:
    """Return arguments that make a run tiny."""
    changes = [
        f"encoder.name={save_tiny_encoder(folder / 'encoder')}",
        "data.train=demo:train",
        "data.max_train_samples=4",
        "training.max_steps=1",
        "windows.max_seq_length=128",
        "windows.doc_stride=16",
    ]
    return [word for change in changes for word in ("--set", change)]


def test_the_page_about_extending_does_what_it_shows(
    install: Install, lamella: Any, tmp_path: Path, one_thread: None
) -> None:
    part, test, _ = page_blocks("python")
    run_file, entry_point, _ = page_blocks("toml")
    install("my_package", part, entry_point=False)
    (tmp_path / "site" / "my_parts.py").write_text(part)
    (tmp_path / "run.toml").write_text(run_file)
    settings = tiny_settings(tmp_path)
    code, _, err = lamella("train", tmp_path / "run.toml", "--out", tmp_path / "run", *settings)
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["plugins"] == ["my_parts"]
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["plugins"] == ["my_parts"]
    names: dict[str, Any] = {}
    exec(test, names)
    names["test_layer_max"]()
    assert tomllib.loads(entry_point)["project"]["entry-points"] == {plugins.GROUP: {"my_package": "my_package.parts"}}
    del sys.modules["my_parts"]


def test_the_page_about_extending_lists_every_family() -> None:
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|.*\| `([\w.]+)` \|$", page, re.M)
    assert sorted(name for name, _ in listed) == sorted(registry.FAMILIES)
    for name, module in listed:
        assert any(own.startswith(module) for own in registry.FAMILIES[name].modules), module


METRIC_ON_DEV = ("--set", "data.dev=demo:dev", "--set", "data.max_eval_samples=6")


def test_a_metric_of_a_plugin_selects_the_best_checkpoint(
    install: Install, lamella: Any, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "my_metrics.py").write_text(page_blocks("python")[-1])
    run_file, run = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(page_blocks("toml")[-1])
    code, _, err = lamella("train", run_file, "--out", run, *tiny_settings(tmp_path), *METRIC_ON_DEV)
    assert (code, err) == (0, "")
    results = json.loads((run / "eval_results.json").read_text())
    assert results["HasAns_exact"] <= results["HasAns_contains"] <= 100
    assert results["NoAns_contains"] == results["NoAns_exact"]
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert history[-1]["contains"] == results["contains"]
    assert json.loads((run / "config.json").read_text())["training"]["metrics"] == [{"name": "contains"}]

    # The model brings its plugin, if the user trusts it; a predictions file uses what is installed or imported.
    arguments = ("demo:dev", "--metric", "contains", "--json")
    forget(monkeypatch, "metric", "contains", module="my_metrics")
    code, _, err = lamella("evaluate", *arguments, "--model", run, "--out", tmp_path / "dev")
    assert (code, "metric 'contains' does not exist" in err) == (2, True)
    monkeypatch.setenv(plugins.TRUSTED, "my_metrics")
    code, out, _ = lamella("evaluate", *arguments, "--model", run, "--out", tmp_path / "dev")
    assert code == 0
    scores = json.loads(out)
    assert scores["contains"] == json.loads((tmp_path / "dev" / "eval_results.json").read_text())["contains"]
    code, out, _ = lamella("evaluate", *arguments, tmp_path / "dev" / "predictions.json")
    assert (code, json.loads(out)["contains"]) == (0, scores["contains"])
    files = ("--null-odds", tmp_path / "dev" / "null_odds.json", "--na-prob-thresh", "-1e9")  # withholds every answer
    code, out, _ = lamella("evaluate", *arguments, tmp_path / "dev" / "predictions.json", *files)
    withheld = json.loads(out)
    assert (code, withheld["HasAns_contains"], withheld["NoAns_contains"]) == (0, 0, 100)
    assert evaluate(run, "demo:dev", metrics=["contains"])["contains"] == scores["contains"]
    predictions = tmp_path / "dev" / "predictions.json"
    assert evaluate(predictions, "demo:dev", metrics=["contains", "f1"])["contains"] == scores["contains"]
    assert "  contains " in lamella("parts", "metric")[1]
    assert lamella("report", run, "--out", tmp_path / "report.html")[::2] == (0, "")  # reads a run with plugins
    del sys.modules["my_metrics"]


def test_mistakes_with_metrics_are_one_line(install: Install, lamella: Any, tmp_path: Path) -> None:
    install("my_package", METRICS)
    problems = [
        ("acuracy", ("accuracy",), "training.metric: metric 'acuracy' does not exist. Did you mean 'accuracy'?"),
        (
            "HasAns_accuracy",
            (),
            "training.metric: HasAns_accuracy is not computed; add 'accuracy' to training.metrics.",
        ),
        ("f2", (), "training.metric: metric 'f2' does not exist."),
        ("f1", ("acuracy",), "training.metrics[0]: metric 'acuracy' does not exist. Did you mean 'accuracy'?"),
        ("f1", ("exact", "exact"), "training.metrics: expected different metrics, got 'exact' more than once."),
        ("f1", ({"name": "accuracy", "k": 1},), "training.metrics[0].k: no such option"),
    ]
    for metric, metrics, problem in problems:
        with pytest.raises(ConfigError) as caught:
            check_config({"training": {"metric": metric, "metrics": list(metrics)}}, where="")
        assert len(caught.value.problems) == 1
        assert caught.value.problems[0].startswith(problem)
    check_config({"training": {"metric": "NoAns_accuracy", "metrics": "accuracy"}}, where="")

    (tmp_path / "empty.json").write_text(json.dumps(dict.fromkeys(demo_ids(), "")))
    for name, message in {
        "acuracy": "metric 'acuracy' does not exist. Did you mean 'accuracy'?",
        "total": "metric 'total': expected a name that no other result has; register it under another name.",
        "broken": f"expected a finite number for question {demo_ids()[0]}, got None; repair the metric.",
    }.items():
        code, out, err = lamella("evaluate", "demo:dev", tmp_path / "empty.json", "--metric", name)
        assert (code, out) == (2, "")
        assert err.strip().endswith(message)


def demo_ids() -> list[str]:
    return [example.id for example in load_examples("demo:dev").examples]

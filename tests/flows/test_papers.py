"""The run files of the papers' tables: each is valid, and each of its runs trains a step on a tiny encoder."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel

from doubles import save_tiny_encoder, tiny_config
from lamella import registry
from lamella.config import RunConfig
from lamella.data.file_formats.formats import read
from lamella.data.windows.batches import Totals, collate
from lamella.data.windows.feed import Recipe
from lamella.encoder.encoder import Encoder
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.tuning import count_parameters
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import load_plan, make_plan
from lamella.run_file import read_table
from lamella.sweep.sweep_plan import read_sweep
from lamella.training.fitting.learner import make_learner

PAPERS = Path(__file__).resolve().parents[2] / "configs" / "papers"
TABLES = sorted(PAPERS.glob("*.toml"))
ROWS = [(table, run["name"]) for table in TABLES for run in read_table(table)["run"]]
EXPECTED = json.loads(Path(__file__).with_name("papers.json").read_text(encoding="utf-8"))
TRAINED: set[str] = set()
FAMILY_OF = {"albert": "albert", "bert": "bert", "koelectra": "electra"}

pytestmark = pytest.mark.usefixtures("one_thread")
every_row = pytest.mark.parametrize(("path", "name"), ROWS, ids=lambda value: getattr(value, "stem", value))


def row_table(path: Path, name: str) -> dict[str, Any]:
    """A table of the papers with one of its rows."""
    table = read_table(path)
    return {**table, "run": [run for run in table["run"] if run["name"] == name]}


def family(table: dict[str, Any]) -> str:
    """The family of a row's encoder; a row that starts from another row starts from BERT."""
    encoder = {**table.get("encoder", {}), **table["run"][0].get("encoder", {})}
    name = encoder.get("name", "google-bert/bert-large-uncased").rpartition("/")[2]
    return FAMILY_OF[name.split("-")[0]]


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny encoders as deep as the papers' (some rows name layers); BERT's with a pooler, which some rows read."""
    folder = tmp_path_factory.mktemp("encoders")
    return {
        "albert": save_tiny_encoder(folder / "albert", "albert", num_hidden_layers=12),
        "bert": save_tiny_encoder(folder / "bert", "bert", pooler=True, num_hidden_layers=12),
        "electra": save_tiny_encoder(folder / "electra", "electra", num_hidden_layers=12),
    }


def test_every_table_lists_its_rows() -> None:
    assert len(TABLES) == 11
    assert len(ROWS) == 104
    assert len(set(ROWS)) == len(ROWS)
    assert sum(len(load_plan(table).runs) for table in TABLES) == 113  # ten of them are the curve of less data
    assert len(list(PAPERS.rglob("*.toml"))) == 15


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_expands_to_the_runs_it_has_always_had(path: Path, tmp_path: Path) -> None:
    """Same run folders, same order and passes, same options; `papers.json` lists those that are not defaults."""
    defaults = RunConfig().flat()
    sweep = read_sweep([path], tmp_path)
    expected = EXPECTED[path.stem]
    assert [list(job.configs) for job in sweep.jobs] == expected["passes"]
    assert list(sweep.runs) == list(expected["runs"])
    for name, config in sweep.runs.items():
        options = {key: value for key, value in config.flat().items() if value != defaults[key]}
        assert options == expected["runs"][name], name


@every_row
def test_a_row_that_starts_from_another_finds_it_before_itself(path: Path, name: str) -> None:
    starts = {config.encoder.from_run for config in load_plan(path, only=[name]).runs.values()} - {None}
    for start in starts:
        run, _, epoch = str(start).partition("@")
        names = [row for table, row in ROWS if table == path]
        assert run in names[: names.index(name)]
        (first,) = load_plan(path, only=[run]).runs.values()
        assert float(epoch) in first.training.save_at


def test_the_curve_of_less_data_is_one_pass_over_tenths_of_the_questions() -> None:
    (configs,) = load_plan(PAPERS / "bertvision-span.toml", only=["a386-skip-less-data-at-1"]).passes
    assert [config.learner.fraction for config in configs.values()] == [tenth / 10 for tenth in range(1, 11)]


def test_every_list_has_its_baseline_as_the_first_table_trains_it() -> None:
    baseline = load_plan(PAPERS / "korquad-base.toml").runs["koelectra-1e-5-dropout-0.1"]
    for table in ("loss", "eda", "distillation"):
        assert load_plan(PAPERS / f"korquad-{table}.toml").runs["baseline"] == baseline
    first, second, third = (load_plan(PAPERS / f"efficiency-table{number}.toml").runs for number in (1, 2, 3))
    assert first["l12"] == second["l12"] == third["l12"]
    assert second["l0-a768"] == third["l0-a768"]


def test_rows_that_are_compared_differ_in_one_part_only() -> None:
    distilled = load_plan(PAPERS / "korquad-distillation.toml").runs
    plain = distilled["baseline-batch-16"].flat()
    for name in ("sda-3", "sda-5", "sdv-3", "sdv-5"):
        assert {key for key, value in distilled[name].flat().items() if value != plain[key]} == {"learner.distil"}
    networks = load_plan(PAPERS / "efficiency-table3.toml").runs
    (simple,), (vector,), (more_maps,), (question,) = (
        networks[name].learner.mixer
        for name in ("cacnn", "cacnn-context-vector", "cacnn-context-vector-4-filters", "cacnn-question")
    )
    assert vector == {**simple, "context": "vector"}
    assert more_maps == {**vector, "filters": 4}
    assert question == {**simple, "filters_from": "question"}


@pytest.mark.parametrize("name", [row for table, row in ROWS if table.stem == "korquad-eda" and row != "baseline"])
def test_an_eda_row_is_the_baseline_with_noise_and_the_constant_legacy_rows_leak_the_label(name: str) -> None:
    baseline = load_plan(PAPERS / "korquad-base.toml").runs["koelectra-1e-5-dropout-0.1"]
    config = load_plan(PAPERS / "korquad-eda.toml").runs[name]
    assert config.data.augment is not None
    assert config.model_copy(update={"data": config.data.model_copy(update={"augment": None})}) == baseline
    examples = {example.id: example for example in read("demo:train").examples}
    augmented = registry.build("augmentation", config.data.augment)(list(examples.values()), epoch=9, epochs=10, seed=0)
    noisy = {examples[new.id].answerable for new in augmented if new.context.text != examples[new.id].context.text}
    assert noisy == ({True} if name in ("strong-legacy", "weak-legacy") else {True, False})


def narrow(run: dict[str, Any]) -> None:
    """Divide the widths that a row gives its network: a step of the paper's takes half a minute."""
    stages = run.get("learner", {}).get("mixer", [])
    for stage in stages if isinstance(stages, list) else [stages]:
        if "widths" in stage:
            stage["widths"] = [width // 16 for width in stage["widths"]]


def fresh_encoder(name: str, dropout: float | None, pooler: bool) -> LoadedEncoder:
    """Return a copy of an encoder that is read once: reading takes longer than the steps."""
    loaded = read_encoder(name, dropout, pooler)
    return replace(loaded, encoder=copy.deepcopy(loaded.encoder))


@functools.cache
def read_encoder(name: str, dropout: float | None, pooler: bool) -> LoadedEncoder:
    return load_encoder(name, dropout=dropout, pooler=pooler)


@every_row
def test_a_row_builds_and_trains_a_step(path: Path, name: str, encoders: dict[str, Path]) -> None:
    table = row_table(path, name)
    overrides = [f"encoder.name={encoders[family(table)]}"]
    overrides += ["windows.max_seq_length=100", "windows.doc_stride=16", "windows.max_query_length=24"]  # one segment
    table["run"][0].get("encoder", {}).pop("from", None)
    narrow(table["run"][0])
    for configs in make_plan(table, where=str(path), overrides=overrides).passes:
        options = json.dumps([config.flat() for config in configs.values()])
        if options in TRAINED:  # rows that differ only in the epoch of their start
            continue
        TRAINED.add(options)
        config = next(iter(configs.values()))
        pooler = any(config.learner.reads_pooled for config in configs.values())
        base = fresh_encoder(config.encoder.name, config.encoder.dropout, pooler)
        recipe = Recipe(base.tokenizer, config)
        features = recipe.features(read("demo:train").examples[:2], epoch=1)  # augmented if the row augments
        batch = collate(features, np.arange(2))
        for config in configs.values():
            model = ReaderModel(base, config)
            learner = make_learner(model, config.learner, 10)
            before = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
            model.train()
            for _ in range(2):  # the first step of a warm-up has a rate of 0
                learner.add_gradients(batch, None, Totals.of([batch]))
                learner.step(0.0)
            moved = [
                name for name, value in model.named_parameters() if name in before and not before[name].equal(value)
            ]
            assert "head.task.q" in moved
            assert len(moved) > 0.5 * len(before)


def test_the_study_of_the_demo_is_one_sweep(lamella: Any, tmp_path: Path) -> None:
    heads = PAPERS.parent / "study" / "heads.toml"
    code, out, err = lamella("sweep", heads, "--out", tmp_path / "out", "--list")
    assert (code, err) == (0, "")
    assert out.startswith("16 runs in 1 pass")
    assert "default, frozen: last-seed0" in out


def test_the_thin_tunings_are_one_sweep_at_equal_budgets() -> None:
    """Three seeds each; of the encoder, the first six train about as many parameters."""
    runs = load_plan(PAPERS.parent / "study" / "thin-tunings.toml").runs
    assert {name.rpartition("-")[2] for name in runs} == {"seed0", "seed1", "seed2"}
    small = tiny_config("bert", hidden_size=384, num_hidden_layers=1, num_attention_heads=12, intermediate_size=1536)
    counts = {}
    for name, config in runs.items():
        if name.endswith("-seed0"):
            encoder = Encoder(AutoModel.from_config(small, add_pooling_layer=False))
            registry.build("tuning", config.encoder.tuning, encoder)
            layer = encoder.layer_modules[0]
            counts[name.removesuffix("-seed0")] = 12 * count_parameters(layer)[0]
    budget = counts.pop("lora")
    assert budget == 12 * 14 * (4 * 2 * 384 + 2 * (384 + 1536))
    for name in ("adapter", "rslora", "dora", "pissa", "lora-plus"):
        assert counts.pop(name) == pytest.approx(budget, rel=0.04), name
    assert counts.pop("full") > 15 * budget
    assert counts.keys() == {"ia3", "bitfit", "layer_norm"}
    assert all(count < budget / 20 for count in counts.values())


BASES = {"mixture", "by-labels", "contrast", "many-kinds"}  # which others extend
READERS = sorted(path for path in (PAPERS.parent / "readers").glob("*.toml") if path.stem not in BASES)


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.stem)
def test_the_run_files_of_the_readers_are_valid(path: Path) -> None:
    for config in load_plan(path).runs.values():
        korean = path.stem.startswith("korean")
        assert config.data.dev == ["data/korquad-dev-mixed.json.gz" if korean else "data/cs224n-dev.json.gz"]
        from_labels_alone = path.stem in ("minilm", "e5-small", "mpnet", "deberta-v3-xsmall", "korean-full")
        assert (config.encoder.tuning["name"] == "full") == ("full" in path.stem or path.stem == "deberta-v3-xsmall")
        assert (config.learner.distil is None) == from_labels_alone

"""The run files of the papers' tables: each is sound, each of its runs trains a step on a tiny encoder."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import save_tiny_encoder
from lamella import registry
from lamella.data.batches import Totals, collate
from lamella.data.feed import Recipe
from lamella.data.formats import read
from lamella.encoder.pretrained import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import load_plan, make_plan
from lamella.run_file import load_config
from lamella.training.learner import make_learner

PAPERS = Path(__file__).resolve().parents[2] / "configs" / "papers"
ROWS = sorted(PAPERS.glob("*/*.toml"))
FAMILY_OF = {"albert": "albert", "bert": "bert", "koelectra": "electra"}

pytestmark = pytest.mark.usefixtures("one_thread")


def family(table: dict[str, Any]) -> str:
    """The family of a row's encoder; a row that starts from another row starts from BERT."""
    name = table["encoder"].get("name", "google-bert/bert-large-uncased").rpartition("/")[2]
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
    tables = sorted(PAPERS.glob("*.toml"))
    assert len(tables) == 11
    assert len(ROWS) == 96
    assert sum(len(load_plan(row).runs) for row in ROWS) == 105  # ten of them are the curve of less data
    listed = [PAPERS / run for table in tables for run in tomllib.loads(table.read_text())["runs"]]
    assert sorted(listed) == ROWS
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_row_that_starts_from_another_finds_it_before_itself(path: Path) -> None:
    starts = {config.encoder.from_run for config in load_plan(path).runs.values()} - {None}
    for start in starts:
        run, _, epoch = str(start).partition("@")
        before = tomllib.loads(PAPERS.joinpath(f"{path.parent.name}.toml").read_text())["runs"]
        place = before.index(f"{path.parent.name}/{path.name}")
        assert f"{path.parent.name}/{run}.toml" in before[:place]
        (first,) = load_plan(path.with_name(f"{run}.toml")).runs.values()
        assert float(epoch) in first.training.save_at


def test_the_curve_of_less_data_is_one_pass_over_tenths_of_the_questions() -> None:
    (one,) = load_plan(PAPERS / "bertvision-span" / "a386-skip-less-data-at-1.toml").passes
    assert [config.learner.fraction for config in one.values()] == [tenth / 10 for tenth in range(1, 11)]


@pytest.mark.parametrize("path", sorted(PAPERS.glob("korquad-eda/*.toml")), ids=lambda path: path.stem)
def test_a_row_of_eda_is_the_baseline_with_noise_and_as_it_was_run_the_constant_ones_leak(path: Path) -> None:
    baseline = load_config(PAPERS / "korquad-base" / "koelectra-1e-5-dropout-0.1.toml")
    config = load_config(path)
    assert config.data.augment is not None
    assert config.model_copy(update={"data": config.data.model_copy(update={"augment": None})}) == baseline
    examples = {example.id: example for example in read("demo:train").examples}
    augmented = registry.build("augmentation", config.data.augment)(list(examples.values()), epoch=9, epochs=10, seed=0)
    noisy = {examples[new.id].answerable for new in augmented if new.context.text != examples[new.id].context.text}
    assert noisy == ({True} if path.stem in ("strong-legacy", "weak-legacy") else {True, False})


@pytest.mark.parametrize("path", ROWS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_row_builds_and_trains_a_step(path: Path, encoders: dict[str, Path]) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    table["encoder"] = {**table["encoder"], "name": str(encoders[family(table)])}
    table["encoder"].pop("from", None)
    windows = {"max_seq_length": 100, "doc_stride": 16, "max_query_length": 24}  # one segment of the context CNN
    table["windows"] = {**table.get("windows", {}), **windows}
    for configs in make_plan(table, where=str(path)).passes:
        config = next(iter(configs.values()))
        pooler = any(one.learner.reads_pooled for one in configs.values())
        base = load_encoder(config.encoder.name, dropout=config.encoder.dropout, pooler=pooler)
        recipe = Recipe(base.tokenizer, config)
        features = recipe.features(read("demo:train").examples[:2], epoch=1)  # augmented where the row says so
        batch = collate(features, np.arange(2))
        for one in configs.values():
            model = ReaderModel(base, one)
            learner = make_learner(model, one.learner, 10)
            before = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
            model.train()
            for _ in range(2):  # the first step of a warm-up has a rate of 0
                learner.learn(batch, None, Totals.of([batch]))
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


@pytest.mark.parametrize("path", sorted((PAPERS.parent / "readers").glob("*.toml")), ids=lambda path: path.stem)
def test_the_run_files_of_the_readers_are_sound(path: Path) -> None:
    for config in load_plan(path).runs.values():
        assert config.data.dev == ["data/cs224n-dev.json.gz"]
        assert (config.encoder.tuning["name"] == "full") == ("full" in path.stem)
        assert (config.learner.distil is None) == (path.stem in ("minilm", "e5-small", "mpnet"))  # from labels alone

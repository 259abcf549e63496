"""The run files of the papers' tables: each is sound, each trains a step on a tiny encoder of its family."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import save_tiny_encoder
from lamella.config import check_config, load_config
from lamella.data.batches import Totals, collate
from lamella.data.features import featurise
from lamella.data.readers import read
from lamella.encoder.loading import load_encoder
from lamella.inference.model import ReaderModel
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
    assert len(tables) == 10
    assert len(ROWS) == 86
    listed = [PAPERS / run for table in tables for run in tomllib.loads(table.read_text())["runs"]]
    assert sorted(listed) == ROWS
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_row_that_starts_from_another_finds_it_before_itself(path: Path) -> None:
    start = load_config(path).encoder.from_run
    if start is not None:
        run, _, epoch = start.partition("@")
        before = tomllib.loads(PAPERS.joinpath(f"{path.parent.name}.toml").read_text())["runs"]
        place = before.index(f"{path.parent.name}/{path.name}")
        assert f"{path.parent.name}/{run}.toml" in before[:place]
        assert float(epoch) in load_config(path.with_name(f"{run}.toml")).training.save_at


@pytest.mark.parametrize("path", ROWS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_row_builds_and_trains_a_step(path: Path, encoders: dict[str, Path]) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    table["encoder"] = {**table["encoder"], "name": str(encoders[family(table)])}
    table["encoder"].pop("from", None)
    windows = {"max_seq_length": 100, "doc_stride": 16, "max_query_length": 24}  # one segment of the context CNN
    table["windows"] = {**table.get("windows", {}), **windows}
    config = check_config(table, where=str(path))
    base = load_encoder(config.encoder.name, dropout=config.encoder.dropout, pooler=config.learner.reads_pooled)
    model = ReaderModel(base, config)
    examples = read("demo:train").examples[:2]
    batch = collate(featurise(examples, model.tokenizer, config.windows), np.arange(2))
    learner = make_learner(model, config.learner, 10)
    before = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    model.train()
    for _ in range(2):  # the first step of a warm-up has a rate of 0
        learner.learn(batch, None, Totals.of([batch]))
        learner.step(0.0)
    moved = [name for name, value in model.named_parameters() if name in before and not before[name].equal(value)]
    assert "head.task.q" in moved
    assert len(moved) > 0.5 * len(before)

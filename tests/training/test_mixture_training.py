"""Training on a mixture of files."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from lamella.config import RunConfig
from lamella.data.windows.feed import Feed, Recipe
from lamella.models.base_encoder import load_encoder
from lamella.plan import make_plan
from lamella.training.fitting.steps import Position, Steps
from lamella.training.prepare import cut_windows
from lamella.training.run import train_plan
from lamella.training.splits import read_splits

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("mixed") / "tiny")


def table(folder: Path, **sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data": {
            "train": ["demo:dev", {"file": "demo:train", "weight": 0.5, "negatives": 0.4}],
            "dev": "demo:dev",
            "max_eval_samples": 8,
        },
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(folder), "tuning": "frozen"},
        "training": {"epochs": 2, "batch_size": 32, "precision": "fp32"},
    }
    return {**given, **{name: {**given.get(name, {}), **options} for name, options in sections.items()}}


def steps_of(encoder: Path, **sections: Any) -> tuple[Steps, Any]:
    config = RunConfig.model_validate(table(encoder, **sections))
    splits = read_splits(config, log=lambda line: None)
    feed = Feed(Recipe(load_encoder(str(encoder)).tokenizer, config), splits.train_examples)
    return Steps(feed, config.training, [config.learner.fraction], splits.mixture), splits.mixture


@pytest.mark.parametrize("data", [{}, {"augment": {"name": "eda", "originals": 1}, "workers": 0}])
def test_every_epoch_takes_what_the_mixture_says(encoder: Path, data: dict[str, Any]) -> None:
    steps, mixture = steps_of(encoder, data={**table(encoder)["data"], **data})
    taken: dict[int, list[str]] = {}
    for step in steps.after(Position()):
        features = step.features
        taken.setdefault(step.position.epoch, []).extend(
            features.examples[features.example[window]].id for windows in step.batches for window in windows
        )
    assert len(taken) == 2
    assert len(taken[0]) == steps.windows
    for epoch, ids in taken.items():
        windows, counts = Counter(ids), mixture.counts_of(mixture.examples, epoch)
        taken_ids = {example.id for example, count in zip(mixture.examples, counts, strict=True) if count}
        assert windows.keys() <= taken_ids
        if epoch == 0:  # later epochs may end a few steps early or late
            assert windows.keys() == taken_ids
    if not data:
        pool = Counter(features.examples[example].id for example in features.example)
        counts = zip(mixture.examples, mixture.counts_of(mixture.examples, 0), strict=True)
        assert Counter(taken[0]) == Counter({example.id: pool[example.id] * int(count) for example, count in counts})


def test_a_fraction_has_whole_questions(encoder: Path) -> None:
    steps, mixture = steps_of(encoder, learner={"fraction": 0.5})
    assert steps.questions == round(0.5 * len(steps.ranks)) < len(steps.ranks)
    used: set[str] = set()
    for step in steps.after(Position()):
        if step.stratum <= steps.stratum(0.5):
            features = step.features
            used |= {features.examples[features.example[window]].id for windows in step.batches for window in windows}
    questions = {mixture.questions[id] for id in used}
    assert len(questions) <= round(0.5 * len(steps.ranks))
    assert all(steps.ranks[question] < round(0.5 * len(steps.ranks)) for question in questions)


@pytest.mark.parametrize(
    ("sections", "originals"),
    [
        ({"data": {"train": "demo:train"}}, 0),
        ({"data": {"train": "demo:train"}}, 1),
        ({"data": {"train": "demo:train"}, "learner": {"fraction": 0.2}}, 0),
        ({"data": {"train": [{"file": "demo:train", "weight": 3}]}}, 0),
        ({}, 1),
    ],
    ids=["plain", "with originals", "a fraction", "repeated", "a mixture with originals"],
)
def test_a_ramp_ends_with_the_last_of_some_steps(encoder: Path, sections: dict[str, Any], originals: int) -> None:
    """An epoch may train on fewer or more windows than there are."""
    augment = {"name": "eda", "schedule": "ramp", "originals": originals}
    data = {**table(encoder, **sections)["data"], "augment": augment, "workers": 0}
    given = table(encoder, **{**sections, "data": data, "training": {"max_steps": 400, "batch_size": 32}})
    config = RunConfig.model_validate(given)
    splits = read_splits(config, log=lambda line: None)
    windows = cut_windows(splits, config, load_encoder(str(encoder)).tokenizer, lambda line: None)
    steps = Steps(windows.feed, config.training, [config.learner.fraction], splits.mixture)
    epochs = steps.total / steps.per_epoch
    assert epochs > 2
    assert windows.feed.epochs == pytest.approx(epochs, abs=1, rel=0.15)


def test_the_card_and_a_result_file_show_the_mixture(encoder: Path, tmp_path: Path, lamella: Any) -> None:
    train_plan(make_plan(table(encoder, training={"max_steps": 2}), where="test"), tmp_path / "run")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| `demo:dev` | 135 | 1 | 0 | 135 " in card
    assert re.search(r"\| `demo:train` \| 405 \| 0.5 \| 0.4 \| [12]\d\d \([56]\d.\d %\) \| [1-9]\d+ \|", card)
    code, _, err = lamella("compare", tmp_path / "run", "--keep", tmp_path / "kept.json")
    assert code == 0, err
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [file["name"] for file in kept["train"]["files"]] == ["demo:dev", "demo:train"]
    assert kept["options"]["data.train"][1] == {"file": "demo:train", "weight": 0.5, "negatives": 0.4}


def test_the_sanity_check_takes_the_questions_as_they_are(encoder: Path) -> None:
    config = RunConfig.model_validate(table(encoder))
    splits = read_splits(config, overfit=16, log=lambda line: None)
    assert splits.mixture is None
    assert len(splits.train_examples) == 16


def test_a_file_that_is_given_twice_counts_once(encoder: Path) -> None:
    for train in (["demo:dev", "demo:dev"], [{"file": "demo:dev", "weight": 2}] * 2):
        config = RunConfig.model_validate(table(encoder, data={"train": train}))
        splits = read_splits(config, log=lambda line: None)
        assert len(splits.train.examples) == 135
        assert splits.mixture is None or splits.mixture.counts[0].tolist() == [2] * 135

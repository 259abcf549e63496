"""Every head with a tuned encoder can memorise a few questions (the appendix figure of the PCE paper)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder, write_short_questions
from lamella import registry
from lamella.config import DEFAULT_ENCODER
from lamella.errors import RunError
from lamella.plan import make_plan
from lamella.training import overfit
from lamella.training.run import train_plan

MIXERS = registry.names("mixer")
SMALLER: dict[str, dict[str, Any]] = {"xception": {"widths": [4, 4, 8, 8]}}  # the network of the paper is large
WINDOWS = {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("overfit") / "tiny", num_hidden_layers=1)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_questions(tmp_path_factory.mktemp("short") / "train.jsonl")


def check(out: Path, train: object = "demo:train", *, questions: int = 16, **sections: Any) -> list[str]:
    lines: list[str] = []
    plan = make_plan({"data": {"train": str(train)}, "training": {"precision": "fp32"}, **sections}, where="test")
    train_plan(plan, out, overfit=questions, log=lines.append)
    return lines


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("questions", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_tiny_reader_memorises_a_few_questions(
    questions: int, mixer: str, encoder: Path, short: Path, tmp_path: Path
) -> None:
    lines = check(
        tmp_path / "run",
        short,
        questions=questions,
        windows=WINDOWS,
        encoder={"name": str(encoder)},
        learner={
            "mixer": {"name": mixer, **SMALLER.get(mixer, {})},
            "layers": "all",  # the embeddings too, so that there are several to mix
            "learning_rate": 2e-3,
            "head_learning_rate": 5e-3,
        },
    )
    assert "possible, at step" in lines[-2]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_real_reader_memorises_32_questions(mixer: str, tmp_path: Path) -> None:
    check(
        tmp_path / "run",
        questions=32,
        encoder={"name": DEFAULT_ENCODER},
        learner={"mixer": {"name": mixer, **SMALLER.get(mixer, {})}},
    )


def test_nothing_has_dropout() -> None:
    table = {
        "encoder": {"dropout": 0.2, "tuning": {"name": "lora", "rank": 2, "dropout": 0.3}},
        "learner": {"mixer": "conv_1xn", "beside": {"name": "conv_nxn", "dropout": 0.5}},
    }
    (config,) = overfit.overfit_plan(make_plan(table, where="test")).runs.values()
    assert config.encoder.dropout == 0
    assert config.encoder.tuning == {"name": "lora", "rank": 2, "dropout": 0.0}
    assert [stage["dropout"] for stage in (*config.learner.mixer, *config.learner.beside)] == [0, 0]


@pytest.mark.usefixtures("one_thread")
def test_a_reader_that_cannot_memorise_is_an_error(
    encoder: Path, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen random encoder: its layers do not distinguish the answers."""
    monkeypatch.setattr(overfit, "STEPS", 60)
    monkeypatch.setitem(overfit.OPTIONS, "training", {**overfit.OPTIONS["training"], "max_steps": 60})
    with pytest.raises(RunError, match=r"not memorised within 60 steps: run: exact .* possible"):
        check(tmp_path / "run", short, windows=WINDOWS, encoder={"name": str(encoder), "tuning": "frozen"})

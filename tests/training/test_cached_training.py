"""Training from a cache gives the losses of a live encoder, up to the rounding of the storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder
from lamella.encoder.storage import round_states
from lamella.errors import ConfigError, RunError, UsageError
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.extract import extract
from lamella.training.run import train_plan

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("cached") / "tiny", pooler=True, num_hidden_layers=2)


def table(folder: Path, **sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 10, "max_eval_samples": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(folder), "tuning": "frozen"},
        "learner": {"learning_rate": 1e-2},
        "training": {"epochs": 1, "batch_size": 4, "precision": "fp32"},
        "grid": {"learner": {"mixer": ["dot", "scalar_mix", "compress"]}},
    }
    return {**given, **{name: {**given.get(name, {}), **options} for name, options in sections.items()}}


def silent(line: str) -> None:
    pass


def train(given: dict[str, Any], out: Path, **options: Any) -> dict[str, list[dict[str, Any]]]:
    train_plan(make_plan(given, where="test"), out, **options)
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in out.rglob("history.jsonl")
    }


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16", "int8"])
def test_an_epoch_from_the_cache_has_the_losses_of_a_live_encoder(
    storage: Any, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If live hidden states are rounded as storage rounds them, the losses agree to 1e-4."""
    given = table(encoder)
    extract(make_plan(given, where="test"), tmp_path / "cache", storage=storage)
    encode = ReaderModel.encode
    monkeypatch.setattr(ReaderModel, "encode", lambda self, *given: round_states(encode(self, *given), storage))
    live = train(given, tmp_path / "live")

    def never(self: ReaderModel, *given: Any) -> Any:
        raise AssertionError("the encoder ran")

    monkeypatch.setattr(ReaderModel, "encode", never)
    cached = train(given, tmp_path / "cached", cache=tmp_path / "cache")
    assert live.keys() == cached.keys()
    assert len(live) == 3
    for name, records in live.items():
        assert len(records) == len(cached[name]) > 10
        for expected, found in zip(records, cached[name], strict=True):
            assert expected["event"] == found["event"]
            for key in ("loss", "start", "end") if expected["event"] == "step" else ("exact", "f1"):
                assert found[key] == pytest.approx(expected[key], rel=1e-4), (name, key)


def test_losses_differ_without_the_same_rounding(encoder: Path, tmp_path: Path) -> None:
    """Without it the losses differ, so the test above can fail."""
    given = table(encoder, grid={"learner": {"seed": [0]}})
    extract(make_plan(given, where="test"), tmp_path / "cache", storage="int8")
    live, cached = train(given, tmp_path / "live"), train(given, tmp_path / "cached", cache=tmp_path / "cache")
    pairs = zip(live["live"], cached["cached"], strict=True)
    assert any(abs(live["loss"] / cached["loss"] - 1) > 1e-4 for live, cached in pairs if "loss" in live)


def test_the_pooled_output_is_cached_too(encoder: Path, tmp_path: Path) -> None:
    learner = {"task": "answerability", "layers": "pooled+all"}
    given = table(encoder, learner=learner, grid={"learner": {"mixer": ["average", "compress"]}})
    extract(make_plan(given, where="test"), tmp_path / "cache", storage="fp32")
    live, cached = train(given, tmp_path / "live"), train(given, tmp_path / "cached", cache=tmp_path / "cache")
    for name, records in live.items():
        for expected, found in zip(records, cached[name], strict=True):
            if expected["event"] == "step":
                assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_mismatches_are_reported_in_one_line(encoder: Path, tmp_path: Path) -> None:
    given = table(encoder)
    extract(make_plan(given, where="test"), tmp_path / "cache")

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        out = tmp_path / "out"
        with pytest.raises(error, match=match):
            train(table(encoder, **changes), out, cache=tmp_path / "cache")
        assert not out.exists()

    refused(ConfigError, "augmented texts change every epoch", data={"augment": "eda"})
    refused(ConfigError, "expected frozen", encoder={"tuning": "full"})
    refused(RunError, "other data or with other window options", data={"max_train_samples": 5})
    refused(RunError, "other data or with other window options", windows={"doc_stride": 16})
    another = save_tiny_encoder(tmp_path / "other", seed=1)
    refused(RunError, "expected a cache with sha256", encoder={"name": str(another)})
    with pytest.raises(ConfigError, match="augmented texts"):
        extract(make_plan(table(encoder, data={"augment": "eda"}), where="test"), tmp_path / "new")
    several = make_plan(table(encoder, grid={"training": {"order_seed": [0, 1]}}), where="test")
    with pytest.raises(UsageError, match="one pass"):
        extract(several, tmp_path / "new")


def test_the_commands(encoder: Path, tmp_path: Path, lamella: Any) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps(table(encoder)))
    code, out, err = lamella("extract", config, "--out", tmp_path / "cache", "--storage", "int8", "--all-layers")
    assert (code, err) == (0, "")
    assert "to write" in out
    code, out, err = lamella("train", config, "--out", tmp_path / "run", "--cache", tmp_path / "cache")
    assert (code, err) == (0, "")
    code, out, err = lamella("train", config, "--out", tmp_path / "run2", "--cache", tmp_path / "nothing")
    assert code == 2
    assert err.count("\n") == 1

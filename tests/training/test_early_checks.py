"""What needs no model is checked before the encoder is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doubles import save_tiny_encoder, tiny_run_config
from lamella import runs
from lamella.errors import LamellaError
from lamella.files import read_json, write_json
from lamella.models.base_encoder import load_encoder
from lamella.models.encoder_depth import encoder_depth, encoder_positions
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training import prepare
from lamella.training.run import train_plan


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*arguments: object, **more: object) -> None:
        pytest.fail("the encoder was loaded before the mistake was reported")

    monkeypatch.setattr(prepare, "load_encoder", loaded)


def plan_of(**sections: dict[str, Any]) -> Any:
    given: dict[str, dict[str, Any]] = {"data": {"train": "demo:train", "dev": "demo:dev"}}
    return make_plan({**given, **sections}, where="test")


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        ({}, {}, "out: already holds a run"),
        ({"data": {"train": "nowhere.json"}}, {"overwrite": True}, "nowhere.json: no such file; data.train names it."),
        (
            {"data": {"train": "demo:train", "dev": ["demo:dev", "gone.json"]}},
            {"overwrite": True},
            "gone.json: no such file; data.dev names it.",
        ),
        ({"data": {"dev": "demo:dev"}}, {"overwrite": True}, "test: 1 problem\n  data.train: is required"),
        ({"learner": {"task": "answerability"}, "training": {"metric": "f1"}}, {"overwrite": True}, "gives no text"),
        (
            {"learner": {"task": "answerability", "loss": {"name": "cross_entropy", "start": 2.0}}},
            {"overwrite": True},
            "expected no start, which the task answerability does not choose, got 2.",
        ),
        (
            {"learner": {"mixer": ["average", {"name": "xception", "middle": 4}]}},
            {"overwrite": True},
            'xception.middle: 4 has no effect with variant = "abbreviated"; remove it, or set variant = "full".',
        ),
        (
            {"learner": {"mixer": "last", "beside": {"name": "context_cnn", "context": "none", "kernel": 3}}},
            {"overwrite": True},
            'no effect with context = "none"; remove it, or set context = "segments" or context = "vector".',
        ),
        (
            {"learner": {"mixer": {"name": "context_cnn", "maps": 3}}},
            {"overwrite": True},
            'context_cnn.maps: 3 has no effect with context = "segments"',
        ),
        (
            {"learner": {"mixer": {"name": "context_cnn", "context": "vector", "step": 3}}},
            {"overwrite": True},
            'context_cnn.step: 3 has no effect with context = "vector"',
        ),
        ({"encoder": {"tuning": "full"}}, {"overwrite": True, "cache": Path("cache")}, "expected frozen"),
        ({"learner": {"distil": {"name": "stored", "runs": ["out"]}}}, {"overwrite": True}, "which this run reads"),
    ],
    ids=str,
)
def test_a_mistake_is_reported_before_anything_is_loaded(
    sections: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with runs.new_run(Path("out"), "train"):
        pass
    with pytest.raises(LamellaError) as caught:
        train_plan(plan_of(**sections), Path("out"), **options)
    assert message in str(caught.value)
    assert runs.run_state(Path("out")) == "finished"


def test_a_mistake_in_a_later_pass_is_reported_before_the_first(tmp_path: Path) -> None:
    grid = {"data": {"train": ["demo:train", "nowhere.json"]}}
    with pytest.raises(LamellaError, match="nowhere"):
        train_plan(plan_of(grid=grid), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_an_encoder_with_too_few_layers_for_some_rows_is_refused_before_any_is_trained(
    command: str, lamella: Any, tmp_path: Path
) -> None:
    """One line that names the rows; `l1` on its own would fit, and `from-l1` is on the encoder of `l1`."""
    encoder = save_tiny_encoder(tmp_path / "two", num_hidden_layers=2)
    file = tmp_path / "table.toml"
    file.write_text(
        """
        data = { train = "demo:train" }
        [[run]]
        name = "l1"
        encoder.tuning = { name = "top_k", k = 1 }
        [[run]]
        name = "l12"
        encoder.tuning = { name = "top_k", k = 12 }
        [[run]]
        name = "a64"
        encoder.tuning = { name = "adapter", k = 3 }
        [[run]]
        name = "middle"
        learner.layers = [2, 7]
        """
        + ('[[run]]\nname = "from-l1"\nencoder.from = "l1"\nlearner.layers = [5]\n' if command == "sweep" else "")
    )
    code, _, err = lamella(command, file, "--out", tmp_path / "out", "--set", f"encoder.name={encoder}")
    rows = "l12 (encoder.tuning.k = 12), a64 (encoder.tuning.k = 3), middle (learner.layers = 7)"
    rows += ", from-l1 (learner.layers = 5)" if command == "sweep" else ""
    assert code == 2
    assert err.count("\n") == 1
    assert f"encoder.name: {encoder} has 2 layers, too few for {rows}. Choose" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_windows_longer_than_the_positions_are_refused_before_any_run(
    command: str, lamella: Any, tmp_path: Path
) -> None:
    encoder = save_tiny_encoder(tmp_path / "short", max_position_embeddings=256)
    file = tmp_path / "table.toml"
    file.write_text(
        "data = { train = 'demo:train' }\n[[run]]\nname = 'fits'\nwindows.max_seq_length = 256\n"
        "[[run]]\nname = 'long'\n"
    )
    code, _, err = lamella(command, file, "--out", tmp_path / "out", "--set", f"encoder.name={encoder}")
    assert code == 2
    limit = f"long: windows.max_seq_length: expected at most 256, the number of positions of {encoder}, got 384."
    assert err == f"lamella: {limit}\n"
    assert not (tmp_path / "out").exists()


def test_the_positions_of_an_encoder_are_known_without_loading_it(tmp_path: Path) -> None:
    assert encoder_positions(str(save_tiny_encoder(tmp_path / "bert", max_position_embeddings=256))) == 256
    assert encoder_positions(str(save_tiny_encoder(tmp_path / "xlm", "xlm-roberta", max_position_embeddings=66))) == 64
    assert encoder_positions("nobody/has-this") is None
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**config, "model_type": ["bert"]}))
    assert encoder_positions(str(tmp_path / "bert")) is None  # loading reports it


def test_the_depth_of_an_encoder_is_known_without_loading_it(tmp_path: Path) -> None:
    encoder = save_tiny_encoder(tmp_path / "three", num_hidden_layers=3)
    distilled = save_tiny_encoder(tmp_path / "distilled", "distilbert", n_layers=4)
    model = tmp_path / "model"
    ReaderModel(load_encoder(str(encoder)), tiny_run_config()).save(model)
    assert [encoder_depth(str(folder)) for folder in (encoder, distilled, model)] == [3, 4, 3]
    assert encoder_depth("nobody/has-this") is None
    config = read_json(model / "config.json")
    write_json(model / "config.json", {**config, "base": {**config["base"], "name": str(model)}})
    assert encoder_depth(str(model)) is None  # circular

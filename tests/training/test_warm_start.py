"""Warm starts from other models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from doubles import save_tiny_encoder
from lamella.encoder.lora import change_of, changed_layers
from lamella.encoder.low_rank import nearest_of_rank
from lamella.encoder.tuning import merge
from lamella.errors import ConfigError
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.run import train_plan

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")
ALL = ["query", "key", "value", "attention_output", "ffn_input", "ffn_output"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("start") / "tiny")


def train(encoder: Path, out: Path, *, tuning: Any = "full", steps: int = 0, **learner: Any) -> list[str]:
    """Train on the bundled questions; return the logged lines."""
    lines: list[str] = []
    given = {
        "data": {"train": "demo:train", "max_train_samples": 10},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(encoder), "tuning": tuning},
        "learner": {"learning_rate": 0.01, **learner},
        "training": {"max_steps": steps, "batch_size": 4, "precision": "fp32"},
    }
    train_plan(make_plan(given, where="test"), out, log=lines.append)
    return lines


@pytest.fixture(scope="module")
def tuned(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("start") / "full"
    train(encoder, out, steps=3)
    return out


@pytest.mark.parametrize(
    ("tuning", "mixer"),
    [
        ("full", "last"),
        ("frozen", {"name": "xception", "widths": [4, 8, 8, 8]}),  # which has running statistics besides its weights
        ({"name": "adapter", "size": 3}, "last"),
        ({"name": "lora", "rank": 2}, "last"),
        ({"name": "lora", "rank": 2, "dora": True, "init": "pissa"}, "last"),
    ],
)
def test_training_continues_from_a_model_of_the_same_tuning(
    encoder: Path, tmp_path: Path, tuning: Any, mixer: Any
) -> None:
    train(encoder, tmp_path / "first", tuning=tuning, steps=2, seed=1, mixer=mixer)
    start = str(tmp_path / "first")
    lines = train(encoder, tmp_path / "second", tuning=tuning, start=start, seed=2, mixer=mixer)
    first, second = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any("warm start from " in line for line in lines)
    sha256 = hashlib.sha256((tmp_path / "first" / "model" / "model.safetensors").read_bytes()).hexdigest()
    facts = json.loads((tmp_path / "second" / "model" / "config.json").read_text())["facts"]
    assert facts["start"] == {"model": "first", "sha256": sha256}
    assert f"| warm start | `first` (sha256 `{sha256}`) |" in (tmp_path / "second" / "model" / "README.md").read_text()


def test_options_left_out_are_taken_from_the_start(encoder: Path, tmp_path: Path) -> None:
    adapters, start = {"name": "adapter", "size": 3}, str(tmp_path / "first")
    train(encoder, tmp_path / "first", tuning=adapters, steps=2, mixer="scalar_mix")
    given: dict[str, Any] = {
        "data": {"train": "demo:train", "max_train_samples": 10},
        "learner": {"start": start},
        "training": {"max_steps": 0, "precision": "fp32"},
    }
    train_plan(make_plan(given, where="test"), tmp_path / "second")
    first, second = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (config["encoder"]["name"], config["encoder"]["tuning"]["size"]) == (str(encoder), 3)
    assert config["learner"]["mixer"][0]["name"] == "scalar_mix"
    assert config["windows"]["max_seq_length"] == 128
    train_plan(make_plan(given, where="test"), tmp_path / "second", resume=True)
    given["learner"]["mixer"] = "last"
    given["windows"] = {"max_seq_length": 96, "doc_stride": 16, "max_query_length": 12}
    train_plan(make_plan(given, where="test"), tmp_path / "third")
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert config["learner"]["mixer"] == [{"name": "last"}]
    assert (config["windows"]["max_seq_length"], config["windows"]["doc_stride"]) == (96, 16)
    given["encoder"] = {"tuning": "full"}
    with pytest.raises(ConfigError, match=r"expected a model with this run.s encoder\.tuning, full"):
        train_plan(make_plan(given, where="test"), tmp_path / "fourth")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nowhere", "nowhere"), ("all-MiniLM-L6-v2", "expected a model folder of Lamella")],
)
def test_a_start_that_is_no_model_is_refused(encoder: Path, tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^learner.start: 1 problem\n.*{expected}"):
        train(encoder, tmp_path / "out", start=name)
    assert not (tmp_path / "out").exists()


def test_training_changes_the_copied_weights(encoder: Path, tuned: Path, tmp_path: Path) -> None:
    train(encoder, tmp_path / "more", steps=2, start=str(tuned))
    first, second = (load_file(run / "model" / "model.safetensors") for run in (tuned, tmp_path / "more"))
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_lora_of_full_rank_starts_equal_to_the_trained_model(
    encoder: Path, tuned: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    also = ["layer_norm", "bias", "token_types"]
    lora = {"name": "lora", "rank": 64, "alpha": 7, "targets": ALL, "also": also, **options}
    lines = train(encoder, tmp_path / "lora", tuning=lora, start=str(tuned))
    ours, theirs = (ReaderModel.from_pretrained(run) for run in (tmp_path / "lora", tuned))
    merge(ours.encoder)
    mine, others = (dict(model.encoder.model.named_parameters()) for model in (ours, theirs))
    for name, value in others.items():
        if not name.endswith(("word_embeddings.weight", "position_embeddings.weight")):  # no projection reaches these
            torch.testing.assert_close(mine[name], value, msg=name, rtol=1e-4, atol=1e-5)
    for name, value in theirs.head.named_parameters():
        assert torch.equal(dict(ours.head.named_parameters())[name], value)
    assert any("100 % of what it added" in line for line in lines)


def test_a_start_whose_changes_are_dropped_is_warned_about(encoder: Path, tuned: Path, tmp_path: Path) -> None:
    """The warning names what is dropped, and options with which nothing is."""
    large = {"name": "lora", "rank": 4, "targets": ["query", "value", "ffn_output"], "also": ["layer_norm", "bias"]}
    train(encoder, tmp_path / "large", tuning=large, steps=3)
    start = str(tmp_path / "large")
    lines = train(encoder, tmp_path / "small", tuning="lora", start=start)
    assert f"warm start from {start}: 100 % of what it added to query, value, and its head" in lines
    assert (
        f"warning: {start} also changed layer_norm, bias, ffn_output; these changes are dropped; to keep them, set "
        'encoder.tuning.targets = ["query", "value", "ffn_output"] and encoder.tuning.also = ["layer_norm", "bias"]'
    ) in lines
    lines = train(encoder, tmp_path / "same", tuning={**large, "rank": 2}, start=start)
    assert not any("warning" in line for line in lines)
    everything = {"name": "lora", "rank": 4, "targets": ALL, "also": ["layer_norm", "bias", "token_types"]}
    lines = train(encoder, tmp_path / "full", tuning=everything, start=str(tuned))
    assert (
        f"warning: {tuned} also changed word_embeddings, position_embeddings; these changes are dropped; lora cannot "
        "keep word_embeddings, position_embeddings"
    ) in lines


def test_lora_of_low_rank_starts_nearer_than_the_base_and_dora_nearer_still(
    encoder: Path, tuned: Path, tmp_path: Path
) -> None:
    def missed(dora: bool) -> tuple[int, float]:
        """Return the printed share in per cent, and the squared distance of the weights from those of the start."""
        tuning = {"name": "lora", "rank": 2, "targets": ALL, "dora": dora}
        lines = train(encoder, tmp_path / f"dora {dora}", tuning=tuning, start=str(tuned))
        line = next(line for line in lines if "% of what it added" in line)
        ours, theirs = (ReaderModel.from_pretrained(run) for run in (tmp_path / f"dora {dora}", tuned))
        weights = [f"{path}.weight" for path in changed_layers(ours.encoder.model)]
        merge(ours.encoder)
        mine, others = (dict(model.encoder.model.named_parameters()) for model in (ours, theirs))
        distance = sum(float((mine[name] - others[name]).detach().square().sum()) for name in weights)
        return int(line.split(" %")[0].split()[-1]), distance

    (share, distance), (dora_share, dora_distance) = missed(False), missed(True)
    assert 10 < share <= dora_share < 100
    assert dora_distance < distance
    assert dora_distance / distance == pytest.approx((100 - dora_share) / (100 - share), rel=0.05)


@pytest.mark.parametrize("before", [{"name": "top_k", "k": 1}, {"name": "lora", "rank": 2, "targets": ["query"]}])
def test_projections_that_the_start_did_not_change_can_still_learn(
    encoder: Path, tmp_path: Path, before: dict[str, Any]
) -> None:
    """If A and B were both 0, they would stay 0: without a counterpart they keep their initial values."""
    train(encoder, tmp_path / "before", tuning=before, steps=2)
    lora = {"name": "lora", "rank": 4, "targets": ALL}
    train(encoder, tmp_path / "lora", tuning=lora, start=str(tmp_path / "before"))
    model = ReaderModel.from_pretrained(tmp_path / "lora")
    for path, layer in changed_layers(model.encoder.model).items():
        assert (change_of(layer).A.norm(dim=1) > 0.01).all(), path


def test_the_nearest_matrix_of_a_rank() -> None:
    """By hand: diag(3, 2, 1) has 9 + 4 of its 14 squares in its first two singular values."""
    a, b, share = nearest_of_rank(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2)
    torch.testing.assert_close(b @ a, torch.diag(torch.tensor([3.0, 2.0, 0.0])))
    torch.testing.assert_close(a.square().sum(1), b.square().sum(0))  # split evenly
    assert share == pytest.approx(13 / 14)
    for matrix, rank in ((torch.zeros(3, 4), 0), (torch.ones(4, 3), 1)):
        a, b, share = nearest_of_rank(matrix, 2)
        torch.testing.assert_close(b @ a, matrix)
        assert (len(a), share) == (rank, pytest.approx(1))


def test_a_head_that_is_built_differently_is_new(encoder: Path, tuned: Path, tmp_path: Path) -> None:
    lines = train(encoder, tmp_path / "other", start=str(tuned), mixer="scalar_mix")
    assert any("a new head" in line for line in lines)


@pytest.mark.parametrize(
    ("tuning", "expected"),
    [
        ({"name": "adapter", "size": 3}, "expected a model with this run.s encoder.tuning"),
        ("frozen", "only lora starts from other"),
    ],
)
def test_another_tuning_is_refused(encoder: Path, tuned: Path, tmp_path: Path, tuning: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        train(encoder, tmp_path / "out", tuning=tuning, start=str(tuned))
    assert not (tmp_path / "out").exists()


def test_pissa_starts_from_the_encoder_only(encoder: Path, tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init = pissa starts from the encoder's own weights: remove one"):
        train(encoder, tmp_path / "out", tuning={"name": "lora", "init": "pissa"}, start=str(tuned))


def test_lora_cannot_start_from_adapters(encoder: Path, tmp_path: Path) -> None:
    train(encoder, tmp_path / "adapters", tuning={"name": "adapter", "size": 3})
    with pytest.raises(ConfigError, match="expected a model without adapters"):
        train(encoder, tmp_path / "out", tuning="lora", start=str(tmp_path / "adapters"))


def test_a_model_on_another_encoder_is_refused(encoder: Path, tuned: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    another = save_tiny_encoder(tmp_path / "another", seed=5)
    with pytest.raises(ConfigError, match="expected a model on the base encoder"):
        train(another, tmp_path / "out", start=str(tuned))


def test_a_run_is_not_written_over_its_start(encoder: Path, tuned: Path) -> None:
    with pytest.raises(Exception, match=str(tuned)):
        train(encoder, tuned, start=str(tuned))
    assert (tuned / "model" / "model.safetensors").is_file()

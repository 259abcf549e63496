"""The cost of a run: counts checked by hand, and the file that training and scoring write."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import (
    DEPTH,
    HIDDEN,
    corpus,
    examples_about,
    save_tiny_encoder,
    tiny_model,
    tiny_run_config,
    tiny_tokenizer,
)
from lamella.data.windows.features import Features, featurise
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.scoring.cost import SAMPLE, cost_of_answers, efficiency, model_cost, sample_window
from lamella.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = [
    "data.train=demo:train",
    "data.dev=demo:dev",
    "data.max_train_samples=16",
    "data.max_eval_samples=12",
    "windows.max_seq_length=128",
    "windows.doc_stride=32",
    "windows.max_query_length=24",
    "training.precision=fp32",
    "training.epochs=1",
]


def windows() -> Features:
    return featurise(examples_about(corpus()[:5]), tiny_tokenizer("bert"), tiny_run_config().windows)


@pytest.mark.parametrize(
    ("f1", "trained", "printed"),
    [(76.3, 108_311_810, 3.27), (75.2, 42_548_738, 3.30), (72.5, 21_294_338, 3.07), (65.9, 7_124_738, 2.32),
     (53.1, 39_938, 0.67), (69.8, 2_419_202, 3.10), (75.0, 28_388_354, 3.35)],
)  # fmt: skip
def test_the_efficiency_of_the_paper_s_table(f1: float, trained: int, printed: float) -> None:
    assert efficiency(f1, trained) == pytest.approx(printed, abs=0.011)


def test_no_efficiency_without_parameters_or_f1() -> None:
    assert efficiency(80.0, 0) is efficiency(80.0, 1) is efficiency(None, 100) is efficiency(80.0, None) is None


def test_operations_match_the_formula() -> None:
    """A layer has four projections, two feed-forward products, scores and weighted sums; the head has one product."""
    models = [tiny_model(encoder={"tuning": tuning}) for tuning in ("frozen", "full")]
    frozen, full = (model_cost(model, sample_window(model, windows())) for model in models)
    tokens = frozen["flops_tokens"]
    assert abs(tokens - windows().lengths.mean()) <= abs(windows().lengths - windows().lengths.mean()).min() + 1e-9
    layer = 4 * 2 * tokens * HIDDEN**2 + 2 * 2 * tokens * HIDDEN * 48 + 2 * 2 * tokens**2 * HIDDEN
    head = 2 * tokens * HIDDEN * 2
    assert frozen["inference_flops_per_window"] == full["inference_flops_per_window"] == DEPTH * layer + head
    assert frozen["training_flops_per_window"] == DEPTH * layer + 2 * head  # no gradient for the encoder's output
    assert full["training_flops_per_window"] == 3 * (DEPTH * layer + head)


def test_parameters_are_counted() -> None:
    cost = model_cost(tiny_model(encoder={"tuning": "frozen"}), None)
    assert cost["trainable_parameters"] == 2 * HIDDEN + 2
    assert cost["total_parameters"] == cost["encoder_parameters"] + 2 * HIDDEN + 2
    assert cost["trainable_percent_of_encoder"] == 100 * cost["trainable_parameters"] / cost["encoder_parameters"]
    assert "flops_tokens" not in cost
    adapted = model_cost(tiny_model(encoder={"tuning": {"name": "adapter", "size": 4}}), None)
    assert adapted["encoder_parameters"] == cost["encoder_parameters"], "adapters are no part of what they adapt"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_for_inference_has_the_parameters_of_its_training(precision: Any, tmp_path: Path) -> None:
    """Its LoRA is merged, so it takes the operations of the plain encoder; in bf16, fused layers are counted too."""
    save_tiny_encoder(tmp_path / "base")
    config = tiny_run_config(encoder={"tuning": {"name": "lora", "rank": 2}})
    ReaderModel(load_encoder(str(tmp_path / "base")), config).save(tmp_path / "model")
    options: dict[str, Any] = {"device": "cpu", "precision": precision, "backend": "torch"}
    merged, trained = (load_model(tmp_path / "model", inference_only=only, **options) for only in (True, False))
    assert isinstance(merged, ReaderModel)
    assert isinstance(trained, ReaderModel)
    costs = [model_cost(model, sample_window(model, windows()), training=False) for model in (merged, trained)]
    operations = [cost.pop("inference_flops_per_window") for cost in costs]
    assert costs[0] == costs[1]
    assert costs[0]["trainable_parameters"] > 0
    assert costs[0]["precision"] == precision
    plain = tiny_model(encoder={"tuning": "frozen"})
    expected = model_cost(plain, sample_window(plain, windows()))["inference_flops_per_window"]
    assert operations[0] == expected < operations[1]


def test_the_mean_length_is_that_of_all_questions_not_of_the_first() -> None:
    """Files have their questions by article, so the first ones can be about short texts only."""
    short, long = (examples_about([corpus()[0][:size]]) * SAMPLE for size in (40, 160))
    tokens = [cost_of_answers(tiny_model(), examples, 1.0, 8)["flops_tokens"] for examples in (short, short + 3 * long)]
    assert tokens[1] > tokens[0]


def test_counting_changes_neither_the_model_nor_the_random_state() -> None:
    model = tiny_model(encoder={"tuning": "full"}).train()
    state = torch.get_rng_state()
    model_cost(model, sample_window(model, windows()))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stopwatch_adds_up() -> None:
    clock = Stopwatch()
    with clock:
        pass
    first = clock.seconds
    with clock:
        pass
    assert clock.seconds > first > 0


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    child = "from lamella.scoring.cost import peak_memory; print(peak_memory())"
    parent = "import subprocess, sys; filled = b'x' * 600_000_000; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", parent, child], capture_output=True, text=True, check=True)
    assert 1e7 < int(done.stdout) < 5e8


def test_training_and_scoring_write_their_cost(tmp_path: Path, lamella: Any) -> None:
    encoder = save_tiny_encoder(tmp_path / "tiny")
    config = tmp_path / "run.toml"
    config.write_text('[grid.learner]\nmixer = ["last", "scalar_mix"]\n')
    changes = [
        word for change in (*SMALL, f"encoder.name={encoder}", "encoder.tuning=frozen") for word in ("--set", change)
    ]
    assert lamella("train", config, "--out", tmp_path / "runs", *changes)[0] == 0
    for name in ("last", "scalar_mix"):
        cost = read(tmp_path / "runs" / name / "cost.json")
        assert cost["train_seconds"] == cost["encoder_seconds"] + cost["head_seconds"]
        assert min(cost["encoder_seconds"], cost["head_seconds"], cost["inference_seconds_per_1000"]) > 0
        assert cost["train_seconds"] < cost["pass_seconds"]
        assert cost["learners_in_pass"] == 2
        assert cost["model_bytes"] == (tmp_path / "runs" / name / "model" / "model.safetensors").stat().st_size
        assert cost["peak_memory_bytes"] > 1e7
        f1 = read(tmp_path / "runs" / name / "eval_results.json")["f1"]
        assert cost["efficiency"] == efficiency(f1, cost["trainable_parameters"])
    trained = read(tmp_path / "runs" / "last" / "cost.json")

    scored = ["evaluate", "demo:dev", "--model", tmp_path / "runs" / "last", "--precision", "fp32", "--batch-size", 4]
    assert lamella(*scored, "--out", tmp_path / "scored")[0] == 0
    again = read(tmp_path / "scored" / "cost.json")
    assert re.fullmatch(r"cpu, \d+ threads?", again["device"])
    for key in ("trainable_parameters", "total_parameters", "encoder_parameters", "model_bytes", "precision"):
        assert again[key] == trained[key], key
    assert again["inference_batch_size"] == 4
    assert "train_seconds" not in again
    record = read(tmp_path / "scored" / "run.json")["data"]
    assert (record["files"], record["questions"], len(record["ids_sha256"])) == (["demo:dev"], 135, 64)

    code, out, _ = lamella("compare", tmp_path / "runs", "--json")
    assert code == 0
    # Starts and ends each have a weight per layer and a scale.
    assert {run["trainable_parameters"] for run in json.loads(out)["runs"]} == {66, 66 + 2 * (DEPTH + 1)}
    fronts = {front["cost"]: front["readers"] for front in json.loads(out)["pareto"]}
    assert len(fronts["train_seconds"]) >= 1
    code, out, err = lamella("compare", tmp_path / "runs", tmp_path / "scored")
    assert (code, out) == (1, "")
    assert "123 questions answered only by scored" in err

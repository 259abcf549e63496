"""Many learners in one pass: each ends as it would alone, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles import example, save_tiny_encoder, tiny_encoder, tiny_model, tiny_run_config
from lamella import runs
from lamella.config import TrainingOptions
from lamella.data.windows.features import featurise
from lamella.errors import ConfigError, RunError
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.fitting.steps import Position, Steps, question_ranks
from lamella.training.run import train_plan
from outcomes import timeless_history

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")
SILENT: Any = lambda line: None  # noqa: E731


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("many") / "tiny", num_hidden_layers=2)


def table(folder: Path, **sections: Any) -> dict[str, Any]:
    """A small run on the bundled questions."""
    given = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 6, "max_eval_samples": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "encoder": {"name": str(folder), "tuning": "frozen"},
        "training": {"epochs": 2, "batch_size": 4, "precision": "fp32"},
    }
    return {**given, **{name: {**given.get(name, {}), **options} for name, options in sections.items()}}


def train(given: dict[str, Any], out: Path, **options: Any) -> Path:
    train_plan(make_plan(given, where="test"), out, **options)
    return out


def results(folder: Path) -> tuple[bytes, list[dict[str, Any]], Any]:
    """The weights, the history, the scores."""
    history = timeless_history(folder / "history.jsonl")
    scores = json.loads((folder / "eval_results.json").read_text())
    return (folder / "model" / "model.safetensors").read_bytes(), history, scores


MIXERS = [
    "last",
    "dot",
    "encoder_block",
    {"name": "conv_1xn"},
    ["scalar_mix", {"name": "compress", "size": 4}],
    {"name": "xception", "widths": [4, 8, 8, 8]},
]


def test_each_learner_ends_as_it_would_alone(encoder: Path, tmp_path: Path) -> None:
    """Some mixers have dropout or batch norm: each learner draws its own random numbers."""
    together = train(
        table(encoder, learner={"learning_rate": 1e-2}) | {"grid": {"learner": {"mixer": MIXERS}}},
        tmp_path / "together",
    )
    folders = sorted(path for path in together.iterdir() if path.is_dir())
    assert len(folders) == 6
    for folder in folders:
        alone = train(json.loads((folder / "config.json").read_text()), tmp_path / f"alone-{folder.name}")
        assert results(alone) == results(folder), folder.name


def test_learners_of_fractions_end_as_they_would_alone(encoder: Path, tmp_path: Path) -> None:
    grid = {"learner": {"fraction": [0.2, 0.5, 1.0], "mixer": ["dot", "conv_1xn"]}}
    together = train(table(encoder) | {"grid": grid}, tmp_path / "together")
    folders = sorted(path for path in together.iterdir() if path.is_dir())
    steps = {}
    for folder in folders:
        alone = train(json.loads((folder / "config.json").read_text()), tmp_path / f"alone-{folder.name}")
        assert results(alone) == results(folder), folder.name
        taken = [record for record in results(folder)[1] if record["event"] == "step"]
        assert [record["step"] for record in taken] == list(range(1, len(taken) + 1))
        assert taken[-1]["learning_rate"] < 0.3 * max(record["learning_rate"] for record in taken)  # its own schedule
        steps[folder.name.partition("fraction")[2]] = len(taken)
    assert steps["0.2"] < steps["0.5"] < steps["1"]


def test_the_encoder_runs_once_for_all_learners(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    encode = ReaderModel.encode
    monkeypatch.setattr(
        ReaderModel, "encode", lambda self, batch, layers: calls.append(layers) or encode(self, batch, layers)
    )
    counts = []
    for mixers in (["dot"], MIXERS):
        calls.clear()
        train(table(encoder) | {"grid": {"learner": {"mixer": mixers}}}, tmp_path / f"{len(mixers)}")
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_the_summary_lists_the_options_that_varied(encoder: Path, tmp_path: Path) -> None:
    out = train(table(encoder) | {"grid": {"learner": {"seed": [0, 1]}}}, tmp_path / "out")
    summary = json.loads((out / "runs.json").read_text())
    assert summary["varied"] == ["learner.seed"]
    assert [(row["run"], row["options"]) for row in summary["runs"]] == [
        ("seed0", {"learner.seed": 0}),
        ("seed1", {"learner.seed": 1}),
    ]
    assert all("f1" in row["scores"] for row in summary["runs"])


def test_a_learner_that_diverges_does_not_affect_the_others(encoder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    given = table(encoder) | {"grid": {"learner": {"learning_rate": [1e-3, 1e38]}}}
    train_plan(make_plan(given, where="test"), tmp_path / "out", log=lines.append)
    assert any("ended at step" in line and "the loss at step" in line for line in lines)
    assert (tmp_path / "out" / "learning_rate0.001" / "model").is_dir()
    states = [
        json.loads((tmp_path / "out" / name / "run.json").read_text())["state"]
        for name in ("learning_rate0.001", "learning_rate1e+38")
    ]
    assert states == ["finished", "failed"]


def test_a_pass_that_diverges_does_not_stop_the_next(encoder: Path, tmp_path: Path) -> None:
    given = table(encoder, encoder={"tuning": "full"}) | {"grid": {"learner": {"learning_rate": [1e30, 1e-4]}}}
    train(given, tmp_path / "out")
    assert runs.run_state(tmp_path / "out") == "finished"
    assert runs.run_state(tmp_path / "out" / "learning_rate0.0001") == "finished"
    assert runs.run_state(tmp_path / "out" / "learning_rate1e+30") == "failed"
    with pytest.raises(RunError, match="diverged"):
        train({**given, "grid": {"learner": {"learning_rate": [1e30, 1e31]}}}, tmp_path / "both")


def test_a_learner_with_infinite_weights_stops_before_it_is_scored(encoder: Path, tmp_path: Path) -> None:
    given = table(encoder, training={"evaluate_every": "1 steps", "max_steps": 3}, learner={"schedule": "constant"})
    train(given | {"grid": {"learner": {"learning_rate": [1e38, 1e-3]}}}, tmp_path / "out")
    assert runs.run_state(tmp_path / "out" / "learning_rate0.001") == "finished"
    assert runs.run_state(tmp_path / "out" / "learning_rate1e+38") == "failed"
    assert (tmp_path / "out" / "learning_rate1e+38" / "history.jsonl").read_text().count("\n") >= 1


def test_an_encoder_that_a_later_pass_reads_is_not_overwritten(encoder: Path, tmp_path: Path) -> None:
    old = train(table(encoder, training={"max_steps": 1}), tmp_path / "old")
    before = results(old)
    given = table(encoder, training={"max_steps": 1}) | {"grid": {"encoder": {"name": [str(encoder), str(old)]}}}
    with pytest.raises(RunError, match="which this run reads"):
        train(given, old, overwrite=True)
    assert results(old) == before


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training": {"metric": "f1"}, "learner": {"task": "answerability"}}, "gives no text"),
        (
            {"training": {"metric": "HasAns_f1"}, "data": {"dev": "NONE"}},
            "expected a metric of questions that the dev data has",
        ),
    ],
)
def test_a_metric_that_cannot_be_computed_is_reported_at_once(
    changes: dict[str, Any], problem: str, encoder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text('{"id": "q", "question": "Who?", "context": "Nobody.", "answers": []}\n')
    if "data" in changes:
        changes = {**changes, "data": {"dev": str(path)}}
    with pytest.raises(ConfigError, match=problem):
        train(table(encoder, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_overwriting_removes_the_runs_of_the_earlier_plan_and_nothing_else(encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(table(encoder, training={"max_steps": 1}) | {"grid": {"learner": {"seed": [0, 1]}}}, out)
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    train(table(encoder, training={"max_steps": 1}) | {"grid": {"learner": {"seed": [1, 2]}}}, out, overwrite=True)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["notes", "seed1", "seed2"]


def test_a_fraction_is_a_prefix_of_one_order_of_the_questions() -> None:
    examples = [example("A text.", id=f"q{n}") for n in range(100)]
    features = featurise(examples, tiny_encoder().tokenizer, tiny_run_config().windows)
    ranks = question_ranks((example.question_id for example in examples), seed=4)
    assert sorted(ranks.values()) == list(range(100))
    options = TrainingOptions(batch_size=8, order_seed=4, strata=[0.1, 0.3])
    steps = Steps(lambda epoch: features, options, [1.0])
    seen: dict[int, list[set[str]]] = {}
    for step in steps.after(Position()):
        ids = {features.examples[features.example[window]].id for windows in step.batches for window in windows}
        of_epoch = seen.setdefault(step.position.epoch, [set() for _ in steps.cuts])
        of_epoch[step.stratum] |= ids
    first, second = seen[0], seen[1]
    assert first == second  # the same questions in every epoch
    assert [len(ids) for ids in first] == [10, 20, 70]
    assert first[0] == {id for id, rank in ranks.items() if rank < 10}
    assert steps.count_for(0.1) == 2 * 2
    assert steps.count_for(0.3) == 2 * (2 + 3)
    assert steps.count_for(1.0) == steps.total


def test_the_contexts_of_a_question_stay_together() -> None:
    from dataclasses import replace

    examples = [replace(example("A text.", id=f"q{n}"), group=f"g{n // 5}") for n in range(50)]
    assert len(question_ranks((example.question_id for example in examples), seed=0)) == 10


@pytest.mark.parametrize("interrupted_after", [0, 1, 5, 6, 7, 11])
def test_steps_continue_in_the_middle(interrupted_after: int) -> None:
    model = tiny_model()
    examples = [example("A text.", id=f"q{n}") for n in range(22)]
    features = featurise(examples, model.tokenizer, model.windows)
    steps = Steps(lambda epoch: features, TrainingOptions(epochs=2, batch_size=4), [1.0])
    whole = list(steps.after(Position()))
    assert len(whole) == 12
    at = whole[interrupted_after - 1].position if interrupted_after else Position()
    rest = list(steps.after(at))
    for step, expected in zip(rest, whole[interrupted_after:], strict=True):
        assert (step.position, step.epoch) == (expected.position, expected.epoch)
        assert all(np.array_equal(*batches) for batches in zip(step.batches, expected.batches, strict=True))


def test_a_pass_ends_when_all_its_learners_have_stopped(encoder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    given = table(encoder, training={"epochs": 50, "patience": 2, "evaluate_every": "2 steps"})
    train_plan(
        make_plan(given | {"grid": {"learner": {"seed": [0, 1]}}}, where="test"), tmp_path / "out", log=lines.append
    )
    for seed in (0, 1):
        history = [
            json.loads(line) for line in (tmp_path / "out" / f"seed{seed}" / "history.jsonl").read_text().splitlines()
        ]
        scores = [record["f1"] for record in history if record["event"] == "evaluation"]
        best = scores.index(max(scores))
        assert len(scores) == best + 1 + 2 < 50
    assert sum("no better f1 for 2 evaluations" in line for line in lines) == 2


def test_training_stops_at_the_target(encoder: Path, tmp_path: Path) -> None:
    given = table(encoder, training={"epochs": 50, "target": 0.0, "evaluate_every": "3 steps", "metric": "exact"})
    out = train(given, tmp_path / "out")
    assert json.loads((out / "eval_results.json").read_text())["step"] == 3


def test_another_metric_can_select_the_best_model(encoder: Path, tmp_path: Path) -> None:
    given = table(encoder, training={"metric": "HasAns_f1"}, learner={"learning_rate": 1e-2})
    out = train(given, tmp_path / "out")
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    best = json.loads((out / "eval_results.json").read_text())["HasAns_f1"]
    assert best == max(record["HasAns_f1"] for record in history if record["event"] == "evaluation")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),  # seen on a GPU
    ],
    ids=["PyTorch", "cuBLAS"],
)
def test_out_of_memory_is_one_line_with_advice(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    starve(monkeypatch, largest=2, error=error)
    with pytest.raises(RunError, match=r"batch of 4 windows of up to \d+ tokens: .*--auto-batch\.$"):
        train(table(encoder), tmp_path / "out")


def test_the_log_counts_what_a_fraction_takes(encoder: Path, tmp_path: Path) -> None:
    windows = []
    for fraction, questions in ((1.0, 6), (0.5, 3)):
        lines: list[str] = []
        given = table(encoder, learner={"fraction": fraction}, training={"max_steps": 1, "batch_size": 1})
        train(given, tmp_path / str(fraction), log=lines.append)
        (line,) = (line for line in lines if line.startswith("training on "))
        assert line.startswith(f"training on {questions} questions in ")
        windows.append(int(line.split()[5]))
    assert 3 <= windows[1] < windows[0]


@pytest.mark.parametrize("tuning", ["frozen", "full"])
def test_a_batch_that_does_not_fit_is_split(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning: str
) -> None:
    """The result is the same up to rounding, as the step is only computed in pieces."""
    given = table(encoder, encoder={"tuning": tuning, "dropout": 0.0}, learner={"weight_decay": 0.0})
    plain = train(given, tmp_path / "plain")
    starve(monkeypatch, largest=1)
    halved = train(given, tmp_path / "halved", auto_batch=True)
    whole, split = (
        [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()] for folder in (plain, halved)
    )
    for before, after in zip(whole, split, strict=True):
        assert before.keys() == after.keys()
        if before["event"] == "step":
            assert after["loss"] == pytest.approx(before["loss"], rel=1e-4)


def test_a_single_window_that_does_not_fit_ends_the_run(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starve(monkeypatch, largest=0)
    with pytest.raises(RunError, match=r"out of memory on a single window"):
        train(table(encoder), tmp_path / "out", auto_batch=True)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def starve(monkeypatch: pytest.MonkeyPatch, *, largest: int, error: Exception = NO_MEMORY) -> None:
    """A machine that runs out of memory above a number of windows per batch."""
    encode = ReaderModel.encode

    def limited(self: ReaderModel, batch: Any, layers: Any) -> Any:
        if len(batch.mask) > largest and self.training:
            raise error
        return encode(self, batch, layers)

    monkeypatch.setattr(ReaderModel, "encode", limited)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_best_or_the_last_model_is_kept_with_its_scores(keep: str, encoder: Path, tmp_path: Path) -> None:
    """At so small a rate no score changes, so the first evaluation stays the best."""
    training = {"keep": keep, "save_at": [1, 2]}
    given = table(encoder, learner={"learning_rate": 1e-8}, training=training)
    lines: list[str] = []
    out = train({**given, "grid": {"learner": {"seed": [0, 1]}}}, tmp_path / "out", log=lines.append)
    kept, other = (1, 2) if keep == "best" else (2, 1)
    for run in (out / "seed0", out / "seed1"):
        weights, history, scores = results(run)
        evaluations = [record for record in history if record["event"] == "evaluation"]
        assert [record["epoch"] for record in evaluations] == [1, 2]
        assert scores.items() <= evaluations[kept - 1].items()
        assert weights == (run / "models" / str(kept) / "model.safetensors").read_bytes()
        assert weights != (run / "models" / str(other) / "model.safetensors").read_bytes()
        assert any(line.startswith(f"{run.name}: {keep} at epoch {kept}: EM") for line in lines)
        assert json.loads((run / "config.json").read_text())["training"]["keep"] == keep
        stated = "selected the best checkpoint" if keep == "best" else "at the end of training"
        assert stated in (run / "model" / "README.md").read_text()

"""The public Python functions: train, evaluate, compare, and the run that they return."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lamella
from doubles import save_tiny_encoder
from lamella import Run, RunConfig
from lamella.errors import ConfigError, DataError, RunError, UsageError

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
ROWS = [
    {
        "id": "t1",
        "question": "Who discovered Titan?",
        "context": "Huygens discovered Titan in 1655.",
        "answers": "Huygens",
    },
    {"id": "t2", "question": "When was that?", "context": "Huygens discovered Titan in 1655.", "answers": ["1655"]},
    {"id": "t3", "question": "Who landed on it?", "context": "Huygens discovered Titan in 1655.", "answers": ""},
]

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu")


class Frame:
    """A table with the interface of a pandas DataFrame that is used: columns, and rows as dictionaries."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.columns = list(rows[0])

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self.rows


class HubDataset:
    """A table with the interface of a `datasets.Dataset` that is used: it iterates over dictionaries."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "tiny"))


@pytest.fixture(scope="module")
def options(encoder: str) -> dict[str, Any]:
    """Options of a run that takes no time."""
    return {
        "encoder": {"name": encoder, "tuning": "frozen"},
        "training": {"max_steps": 2, "batch_size": 4},
        "windows": {"max_seq_length": 128, "doc_stride": 16},
    }


@pytest.fixture(scope="module")
def run(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return lamella.train(options, train=ROWS, dev=ROWS, out=tmp_path_factory.mktemp("runs") / "first")


# The front door


def test_import_loads_nothing_heavy() -> None:
    script = "import sys, lamella; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "lamella" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "pydantic", "accelerate", "tokenizers", "typer", "rich"}


def test_every_public_name_is_documented_and_every_documented_name_is_public() -> None:
    import re

    table = re.findall(r"^\| \[?`(\w+)`", PAGE.partition("## Data")[0], re.M)
    assert sorted(table) == sorted(lamella.__all__)
    used = set(re.findall(r"\blamella\.(\w+)", PAGE)) - {"LamellaError"}
    assert used <= set(lamella.__all__)
    for name in lamella.__all__:
        if name != "__version__":
            assert f"## `{name}`" in PAGE
            assert getattr(lamella, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        lamella.tarin  # noqa: B018
    assert set(lamella.__all__) <= set(dir(lamella))


def test_every_parameter_of_train_is_documented() -> None:
    import inspect

    section = PAGE.partition("## `train`")[2].partition("## `Run`")[0]
    parameters = inspect.signature(lamella.train).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    assert all(f"`{name}`" in section for name in named)
    assert all(f"{name}:" in (lamella.train.__doc__ or "") for name in named)


# train and Run


def test_a_run_has_its_reader_scores_history_and_options(run: Run) -> None:
    assert run.state == "finished"
    assert run.metrics["total"] == 3
    assert run.cost["trainable_parameters"] > 0
    assert isinstance(run.config, RunConfig)
    assert run.config.training.max_steps == 2
    assert run.config.encoder.tuning["name"] == "frozen"
    assert run.runs == {}
    assert {record["event"] for record in run.history} == {"step", "evaluation"}
    assert all(not isinstance(value, list | dict) for record in run.history for value in record.values())
    answers = run.reader(batch_size=2).ask("Who discovered Titan?", "Huygens discovered Titan in 1655.")
    assert {"answer", "start", "end", "score"} <= answers[0].keys()
    again = Run.load(run.path)
    assert (again.metrics, again.history) == (run.metrics, run.history)
    assert repr(again) == f"Run({str(run.path)!r})"


@pytest.mark.parametrize("table", [list, tuple, Frame, HubDataset, iter], ids=lambda table: table.__name__)
def test_data_in_memory_is_stored_in_the_run_folder(
    table: Callable[..., Any], run: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    made = lamella.train(options, train=table(ROWS), dev="demo:dev", out=tmp_path / "run", data={"max_eval_samples": 3})
    stored = tmp_path / "run" / "data" / "train.jsonl"
    assert made.config.data.train == [str(stored)]
    assert made.config.data.dev == ["demo:dev"]
    assert stored.read_bytes() == (run.path / "data" / "train.jsonl").read_bytes()
    assert [json.loads(line)["id"] for line in stored.read_text("utf-8").splitlines()] == ["t1", "t2", "t3"]


def test_a_run_on_data_in_memory_can_be_repeated_from_its_folder(run: Run, tmp_path: Path) -> None:
    again = lamella.train(run.path / "config.json", out=tmp_path / "again")
    assert again.metrics == run.metrics


def test_missing_cells_of_a_table_mean_no_value(options: dict[str, Any], tmp_path: Path) -> None:
    nan = float("nan")
    rows = [{**ROWS[0], "title": nan}, {**ROWS[2], "answers": nan, "is_impossible": True}]
    lamella.train(options, train=Frame(rows), out=tmp_path / "run")
    stored = (tmp_path / "run" / "data" / "train.jsonl").read_text("utf-8").splitlines()
    assert json.loads(stored[0])["title"] == ""
    assert json.loads(stored[1])["answers"] == []


def test_faulty_rows_are_reported_with_their_place(options: dict[str, Any], tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "answers": [{"text": "1655", "answer_start": 3}]}]
    with pytest.raises(DataError, match=r"<train>: 1 error.*t2"):
        lamella.train(options, train=rows, out=tmp_path / "run")
    lamella.train(options, train=rows, out=tmp_path / "run", data={"on_bad_answer": "fix"})  # the folder is still free


@pytest.mark.parametrize("data", [3, [3], [], {"question": "Who?"}], ids=str)
def test_data_of_another_kind_is_refused(data: Any, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(lamella.LamellaError, match="expected"):
        lamella.train(options, train=data, out=tmp_path / "run")


def test_options_come_from_a_file_a_dictionary_or_a_config(options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[training]\nmax_steps = 7\nepochs = 5\n[encoder]\ntuning = "adapter"\n', encoding="utf-8")
    given = {"training": {"max_steps": 7, "epochs": 5}, "encoder": {"tuning": "adapter"}}
    for number, config in enumerate((file, str(file), given, RunConfig.model_validate(given))):
        made = lamella.train(config, train=ROWS, out=tmp_path / str(number), **options)
        assert made.config.training.max_steps == 2  # the override
        assert made.config.training.epochs == 5  # the file
        assert made.config.encoder.tuning["name"] == "frozen"
    assert given == {"training": {"max_steps": 7, "epochs": 5}, "encoder": {"tuning": "adapter"}}


def test_overrides_reach_every_learner_and_every_run(options: dict[str, Any], tmp_path: Path) -> None:
    learners = {**options, "learner": [{"name": "a", "seed": 1}, {"name": "b", "seed": 2}]}
    made = lamella.train(learners, train=ROWS, out=tmp_path / "learners", learner={"learning_rate": 0.5})
    assert {name: run.config.learner.learning_rate for name, run in made.runs.items()} == {"a": 0.5, "b": 0.5}
    several = {**options, "run": [{"name": "a", "training": {"max_steps": 9}}, {"name": "b"}]}
    made = lamella.train(several, train=ROWS, out=tmp_path / "several", training={"max_steps": 1})
    assert {name: run.config.training.max_steps for name, run in made.runs.items()} == {"a": 1, "b": 1}


def test_mistakes_in_options_are_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        lamella.train(train=ROWS, out=tmp_path / "run", training={"epochz": 1}, lerner={"seed": 1}, encoder=3)
    assert "'epochs'" in str(caught.value)
    assert len(caught.value.problems) == 3
    for mistake in ({"learner": [3]}, {"run": [3]}, {"run": 3}, {"training": 3}):
        with pytest.raises(ConfigError, match="expected"):
            lamella.train(mistake, train=ROWS, out=tmp_path / "run", learner={"seed": 1})
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="resume and overwrite"):
        lamella.train(train=ROWS, out=tmp_path / "run", resume=True, overwrite=True)


def test_a_folder_with_a_run_is_kept_unless_it_is_overwritten(
    run: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    first = lamella.train(options, train=ROWS, out=tmp_path / "run")
    before = (first.path / "data" / "train.jsonl").read_bytes()
    with pytest.raises(RunError, match="already holds a run"):
        lamella.train(options, train=ROWS[:2], out=first.path)
    assert (first.path / "data" / "train.jsonl").read_bytes() == before
    second = lamella.train(options, train=ROWS[:2], out=first.path, overwrite=True)
    assert (second.path / "data" / "train.jsonl").read_bytes() != before
    (tmp_path / "project" / "data").mkdir(parents=True)
    (tmp_path / "project" / "data" / "mine.csv").touch()
    for occupied in (ROOT / "docs", tmp_path / "project"):
        with pytest.raises(RunError, match="not empty"):
            lamella.train(options, train=ROWS, out=occupied)
    with pytest.raises(RunError, match="expected a run folder"):
        Run.load(tmp_path)


def test_a_finished_run_is_left_as_it_is_when_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    first = lamella.train(options, train=ROWS, dev=ROWS, out=tmp_path / "run")
    again = lamella.train(options, train=ROWS, dev=ROWS, out=tmp_path / "run", resume=True)
    assert again.history == first.history


def test_progress_goes_to_a_function_or_to_the_logger(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    lamella.train(options, train=ROWS, out=tmp_path / "a", log=lines.append)
    with caplog.at_level(logging.INFO, logger="lamella"):
        lamella.train(options, train=ROWS, out=tmp_path / "b")
    assert any("training on 3 questions" in line for line in lines)
    assert any("training on 3 questions" in line for line in caplog.messages)
    assert capsys.readouterr() == ("", "")


def test_several_runs_are_found_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    grid = {"learner": {"mixer": ["last", "dot"]}}
    made = lamella.train(options, train=ROWS, dev=ROWS, out=tmp_path / "heads", grid=grid)
    assert list(made.runs) == ["last", "dot"]
    assert made.runs["dot"].config.learner.mixer == [{"name": "dot"}]
    for use in (lambda: made.metrics, lambda: made.history, made.reader, lambda: made.config):
        with pytest.raises(UsageError, match=r"found 2; choose one: run\.runs\['last'\]"):
            use()
    comparison = lamella.compare(made, baseline="dot")
    assert comparison.baseline.name == "dot"
    assert "last" in str(comparison)
    assert str(comparison) == "\n".join(comparison.lines())


# evaluate and compare


def test_a_run_a_reader_and_a_folder_have_the_same_scores(run: Run, tmp_path: Path) -> None:
    scores = lamella.evaluate(run, ROWS)
    assert scores["total"] == 3
    assert lamella.evaluate(run.reader(), ROWS) == scores
    assert lamella.evaluate(str(run.path), run.path / "data" / "dev.jsonl") == scores
    assert lamella.evaluate(run, ROWS, out=tmp_path / "scored") == scores
    scored = Run.load(tmp_path / "scored")
    assert scored.metrics == scores
    assert lamella.compare(run, scored).questions == 3  # both folders hold the questions they were scored on
    assert str(lamella.compare([run, scored])) == str(lamella.compare(run, scored))
    with pytest.raises(UsageError, match=r"^compare: expected runs or their folders, got 3\.$"):
        lamella.compare(run, 3)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="already holds a run"):
        lamella.evaluate(run, ROWS, out=tmp_path / "scored")
    assert lamella.evaluate(run, ROWS, out=tmp_path / "scored", overwrite=True) == scores


def test_predictions_are_scored(tmp_path: Path) -> None:
    answers = {"t1": "Huygens", "t2": "in 1655", "t3": ""}
    scores = lamella.evaluate(answers, ROWS)
    assert (scores["exact"], scores["total"]) == (pytest.approx(200 / 3), 3)
    file, data = tmp_path / "predictions.json", tmp_path / "dev.json"
    file.write_text(json.dumps(answers), encoding="utf-8")
    data.write_text(json.dumps(ROWS), encoding="utf-8")
    assert lamella.evaluate(file, data) == scores
    assert lamella.evaluate(str(file), str(data)) == scores
    assert "best_f1" in lamella.evaluate(answers, ROWS, null_odds={"t1": -3, "t2": -1, "t3": 2})


def test_questions_that_cannot_be_read_are_not_left_out_of_the_scores(run: Run, tmp_path: Path) -> None:
    answers, rows = {"t1": "Huygens"}, [ROWS[0], {**ROWS[1], "question": 3}]
    file = tmp_path / "dev.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    for data in (rows, file, [file]):
        with pytest.raises(DataError, match=r"(<records>|dev\.json): 1 question cannot be read") as error:
            lamella.evaluate(answers, data)
        assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"^<dev>: 1 question cannot be read, the first: "):
        lamella.evaluate(run, rows, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_options_that_do_not_go_together_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no out for predictions"):
        lamella.evaluate({"t1": "", "t2": "", "t3": ""}, ROWS, out=tmp_path / "run")
    with pytest.raises(UsageError, match="null_odds for predictions only"):
        lamella.evaluate(run, ROWS, null_odds={"t1": 1.0})
    with pytest.raises(UsageError, match="no precision for a loaded reader"):
        lamella.evaluate(run.reader(), ROWS, precision="int8")
    with pytest.raises(UsageError, match="batch_size: expected a whole number of at least 1, got 0"):
        lamella.evaluate(run, ROWS, batch_size=0)
    with pytest.raises(UsageError):
        lamella.compare(run)


def test_values_of_a_wrong_type_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(UsageError, match=r"^train: out: expected the run folder to write, got None\.$"):
        lamella.train(train=ROWS, out=nothing)
    with pytest.raises(UsageError, match=r"^evaluate: expected a reader, .* or predictions, got None\.$"):
        lamella.evaluate(nothing, ROWS)
    for empty in ((), ([],)):
        with pytest.raises(UsageError, match=r"^compare: expected runs or their folders, got none\.$"):
            lamella.compare(*empty)


def test_questions_with_one_id_are_refused(run: Run) -> None:
    with pytest.raises(DataError, match="t1"):
        lamella.evaluate(run, [ROWS[0], ROWS[0]])

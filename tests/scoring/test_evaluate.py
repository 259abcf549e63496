"""`evaluate`: one function for models, readers, files and examples, with and without a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from doubles import save_tiny_encoder, tiny_run_config
from lamella import runs
from lamella.data.demo import data_path
from lamella.errors import DataError, RunError
from lamella.files import read_json
from lamella.inference.questions import read_questions
from lamella.inference.reader import Reader
from lamella.inference.stored_logits import has_logits
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.scoring.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("reader")
    ReaderModel(load_encoder(str(save_tiny_encoder(home / "encoder"))), tiny_run_config()).save(home / "model")
    return home / "model"


def test_names_readers_files_and_examples_give_the_same_scores(folder: Path, tmp_path: Path) -> None:
    data = data_path("demo:dev")
    scores = evaluate(folder, data, precision="fp32", out=tmp_path / "run", keep_logits=True)
    assert scores["total"] == len(read_questions(str(data)))
    assert {"exact", "f1", "best_f1", "threshold"} <= scores.keys()
    reader = Reader.load(folder, precision="fp32", device="cpu")
    assert evaluate(reader, read_questions(str(data))) == pytest.approx(scores)
    assert evaluate(reader.model, str(data)) == pytest.approx(scores)
    assert read_json(tmp_path / "run" / runs.RESULTS) == scores
    assert runs.run_state(tmp_path / "run") == "finished"
    assert (tmp_path / "run" / runs.COST).is_file()
    assert has_logits(tmp_path / "run")


def test_examples_need_ids_of_their_own_and_a_folder_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    examples = read_questions(str(data_path("demo:dev")))[:3]
    with pytest.raises(DataError, match="predictions can hold only one answer per id"):
        evaluate(folder, [*examples, examples[0]])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(RunError):
        evaluate(folder, examples, out=tmp_path / "run")

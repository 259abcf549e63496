"""The packaged reader: small, found by name, and correct on texts that it has never seen."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from doubles import save_tiny_encoder, tiny_run_config
from lamella import Reader, runs
from lamella.data.dataset import load_examples
from lamella.encoder.sources import DEFAULT_READER, READERS, find_encoder
from lamella.encoder.tuning import count_parameters
from lamella.inference.predict import predict
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.names import saved_model
from lamella.plan import load_plan
from lamella.scoring.evaluate import score_predictions
from lamella.training.run import train_plan

ROOT = Path(__file__).resolve().parents[2]
TITAN = (
    "Titan is the largest moon of Saturn and the second-largest in the Solar System. It was discovered on 25 March "
    "1655 by the Dutch astronomer Christiaan Huygens, who had built his own telescope. The Huygens probe landed on "
    "Titan on 14 January 2005."
)


@pytest.fixture(scope="module")
def model() -> ReaderModel:
    loaded = load_model(DEFAULT_READER, device="cpu", precision="fp32", backend="torch")
    assert isinstance(loaded, ReaderModel)
    return loaded


def tiny_reader(folder: Path) -> ReaderModel:
    """Return a reader that can be loaded again: its encoder is saved in the folder."""
    return ReaderModel(load_encoder(str(save_tiny_encoder(folder / "tiny"))), tiny_run_config())


def test_it_is_a_thin_delta(model: ReaderModel) -> None:
    weights = READERS / DEFAULT_READER / "model.safetensors"
    assert weights.stat().st_size <= 3_000_000
    assert count_parameters(model)[0] <= 0.05 * model.base_parameters
    assert model.base_name == "all-MiniLM-L6-v2"


def test_it_answers_and_abstains() -> None:
    reader = Reader.load()
    questions = ["Who discovered Titan?", "When did the Huygens probe land?", "Who discovered Enceladus?"]
    best = [answers[0]["answer"] for answers in reader.ask(questions, TITAN)]
    assert best == ["Christiaan Huygens", "14 January 2005", ""]


def test_ask_uses_it_by_default(lamella, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    Path("saturn.txt").write_text(TITAN)
    code, output, _ = lamella("ask", "Who discovered Titan?", "--context", "saturn.txt", "--json")
    assert code == 0
    assert json.loads(output)["answers"][0]["answer"] == "Christiaan Huygens"


def test_only_a_folder_with_a_model_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, packaged = Path("default"), READERS / DEFAULT_READER

    def resolved() -> set[Path | None]:
        model = load_model(DEFAULT_READER, device="cpu", precision="fp32", backend="torch")
        return {find_encoder(DEFAULT_READER).folder, saved_model(DEFAULT_READER), model.folders[0]}

    folder.mkdir()
    assert resolved() == {packaged}
    with runs.new_run(folder, "train"):
        pass
    (folder / "config.json").write_text("{}")  # of a run, not of a model
    assert resolved() == {packaged}
    tiny_reader(tmp_path).save(folder / "model")
    assert resolved() == {folder / "model"}


def test_no_folder_takes_precedence_if_no_model_is_named(
    lamella,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_reader(tmp_path).save(Path("default"))
    Path("saturn.txt").write_text(TITAN)
    code, output, error = lamella("ask", "Who discovered Titan?", "--context", "saturn.txt")
    assert code == 0, error
    assert output.startswith("Christiaan Huygens")


def test_it_can_be_the_encoder_of_other_readers() -> None:
    source = find_encoder(DEFAULT_READER)
    assert (source.name, source.kind) == ("default", "package"), "a name, not a path of this machine"


def test_it_can_be_adapted(tmp_path: Path) -> None:
    """As in docs/how-to/adapt.md: the run file sets neither encoder nor tuning nor head."""
    few = ["data.max_train_samples=4", "data.max_eval_samples=2", "training.max_steps=1", "training.batch_size=2"]
    train_plan(load_plan(ROOT / "configs" / "adapt.toml", few), tmp_path / "mine")
    (mine, default) = (ReaderModel.from_pretrained(name) for name in (tmp_path / "mine", DEFAULT_READER))
    assert (mine.tuning, mine.base_sha256) == (default.tuning, default.base_sha256)
    assert mine.decoding.null_score_diff_threshold == 0
    moved = dict(mine.named_parameters())
    assert all(torch.allclose(moved[name], value, atol=2e-3) for name, value in default.named_parameters())
    assert "| warm start | `default` (sha256 " in (tmp_path / "mine" / "model" / "README.md").read_text()


def test_its_card_names_its_data(model: ReaderModel) -> None:
    card = (READERS / DEFAULT_READER / "README.md").read_text()
    assert "squad2-train-backtranslated-kept.json.gz" in card
    assert model.decoding.tuned_on is not None
    assert model.decoding.tuned_on.data.startswith("squad2-train-backtranslated-held.json.gz, ")


def test_the_documents_show_its_answers() -> None:
    """Numbers differ in the last digit between processors and precisions, and by more for another reader."""
    reader = Reader.load(device="cpu", precision="fp32")
    answers = reader.ask("Who discovered Titan?", "Christiaan Huygens discovered the moon Titan in 1655.")
    guide = (ROOT / "docs/how-to/reader.md").read_text()
    (line,) = re.findall(r"# \[?(\{'score': .*?\})", guide)
    assert ast.literal_eval(line) == pytest.approx(answers[0], abs=0.02)
    for key, tolerance in (("null_score", 0.3), ("na_prob", 0.02)):
        (shown,) = re.findall(rf"answers\.{key}  # (-?[\d.]+):", guide)
        assert float(shown) == pytest.approx(getattr(answers, key), abs=tolerance)
    shown = re.search(r"^(.+)  \[([\d.]+), characters (\d+)-(\d+)\]$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert shown is not None
    best = reader.ask("When did the probe land on Titan?", (ROOT / "examples/titan.txt").read_text())[0]
    assert (shown[1], int(shown[3]), int(shown[4])) == (best["answer"], best["start"], best["end"])
    assert float(shown[2]) == pytest.approx(best["probability"], abs=0.02)


@pytest.mark.parametrize(("every", "f1"), [(120, 77.3), pytest.param(20, 74.8, marks=pytest.mark.slow)])
def test_it_answers_questions_that_it_was_not_trained_on(
    every: int, f1: float, model: ReaderModel, real_data: Path
) -> None:
    """Some of the dev questions; on every twentieth its F1 was 74.8 when it was trained."""
    examples = load_examples([str(real_data / "cs224n-dev.json.gz")]).examples[::every]
    results = score_predictions(model, examples, predict(model, examples), language="en")
    assert results["f1"] == pytest.approx(f1, abs=1.0)

"""The dev loss and the mean layer weights of an evaluation, compared with those computed in another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles import save_tiny_encoder
from lamella import runs
from lamella.data.dataset import load_examples
from lamella.data.windows.batches import collate
from lamella.data.windows.features import featurise
from lamella.errors import UsageError
from lamella.files import read_json
from lamella.inference import one_pass
from lamella.inference.one_pass import predict_many, share_encoders
from lamella.inference.reader import Reader
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.study.analysis.layer_weights import learned_weights, mean_attention
from lamella.study.report.collect import collect
from lamella.study.report.write import write_report
from lamella.training.run import train_plan

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")
QUESTIONS = 5


def train(folder: Path, grid: dict[str, Any], **learner: Any) -> Path:
    table = {
        "data": {"train": "demo:train", "dev": "demo:dev", "max_train_samples": 4, "max_eval_samples": QUESTIONS},
        "windows": {"max_seq_length": 64, "doc_stride": 16, "max_query_length": 24},  # several windows per question
        "encoder": {"name": str(save_tiny_encoder(folder / "tiny", num_hidden_layers=2)), "tuning": "frozen"},
        "learner": {"learning_rate": 1e-2, **learner},
        "training": {"epochs": 2, "batch_size": 8, "precision": "fp32", "keep": "last", "eval_batch_size": 4},
        "decoding": {"null_score_diff_threshold": 1000.0},  # it always answers
        "grid": {"learner": grid},
    }
    train_plan(make_plan(table, where="test"), folder / "out")
    return folder / "out"


def evaluations(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / runs.HISTORY).read_text().splitlines()]
    return [record for record in records if record["event"] == "evaluation"]


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loss = {"name": "cross_entropy", "start": 2.0, "label_smoothing": 0.1}  # dev loss has neither
    grid = {"mixer": ["dot", "scalar_mix", "last"]}
    return train(tmp_path_factory.mktemp("spans"), grid, loss=loss, layers="all")


def test_decoding_in_a_thread_changes_no_prediction(spans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [ReaderModel.load(run).eval() for run in sorted(path for path in spans.iterdir() if path.is_dir())[:2]]
    share_encoders(models)
    examples = load_examples(["demo:dev"]).examples[:20]
    features = featurise(examples, models[0].tokenizer, models[0].windows)
    plain = predict_many(models, features, batch_size=4)
    monkeypatch.setattr(one_pass, "SLICE", 0)
    assert predict_many(models, features, batch_size=4) == plain
    assert plain[0] != plain[1]


def losses_one_by_one(run: Path) -> list[float]:
    """The cross-entropy of every dev window, computed alone and without the loss of the training."""
    model = ReaderModel.load(run).eval()
    features = featurise(load_examples("demo:dev").examples[:QUESTIONS], model.tokenizer, model.windows)
    assert len(features) > 2 * QUESTIONS
    losses = []
    for window in range(len(features)):
        batch = collate(features, np.array([window]), multiple_of=1)
        with torch.inference_mode():
            logits = model(batch)
        if model.gives_text:
            pairs = [(logits[0], batch.start), (logits[1], batch.end)]
        else:
            pairs = [(logits[:, :, 0].T, (~batch.has_answer).long())]
        losses.append(np.mean([float(torch.nn.functional.cross_entropy(*pair)) for pair in pairs]))
    return losses


@pytest.mark.parametrize("mixer", ["dot", "last"])
def test_the_dev_loss_of_a_reader(mixer: str, spans: Path) -> None:
    run = spans / mixer
    records = evaluations(run)
    assert len(records) == 2
    assert records[0]["dev_loss"] != records[1]["dev_loss"]
    assert records[1]["dev_loss"] == pytest.approx(np.mean(losses_one_by_one(run)), rel=1e-4)
    assert 0 < records[0]["seconds"] < records[1]["seconds"]


def test_the_dev_loss_of_a_classifier(tmp_path: Path) -> None:
    out = train(tmp_path, {"seed": [0]}, task="answerability")
    (run,) = (path.parent for path in out.rglob(runs.HISTORY))
    assert evaluations(run)[-1]["dev_loss"] == pytest.approx(np.mean(losses_one_by_one(run)), rel=1e-4)


def test_the_layer_weights_of_the_kept_model(spans: Path) -> None:
    dot, mix = (read_json(spans / name / runs.LAYERS) for name in ("dot", "scalar_mix"))
    assert dot["layers"] == mix["layers"] == [0, 1, 2]
    means = mean_attention(spans / "dot", load_examples("demo:dev").examples[:QUESTIONS])
    assert means is not None
    for output in ("start", "end"):
        by_kind = {kind: np.array(weights) for kind, weights in means["weights"][output].items()}
        whole = sum(means["tokens"][kind] * weights for kind, weights in by_kind.items())
        assert dot["weights"][output]["all"] == pytest.approx(whole / sum(means["tokens"].values()), abs=1e-5)
        assert dot["weights"][output]["answer"] == pytest.approx(by_kind["answer"], abs=1e-5)
    learned = learned_weights(spans / "scalar_mix")
    assert learned is not None
    assert {output: kinds["all"] for output, kinds in mix["weights"].items()} == {
        output: pytest.approx(weights, abs=1e-6) for output, weights in learned["weights"].items()
    }
    assert not (spans / "last" / runs.LAYERS).exists()


@pytest.mark.filterwarnings("ignore::lamella.errors.LamellaWarning")  # `ask` cuts a question, as the evaluation did
def test_sample_answers_show_the_layers_they_were_read_from(spans: Path) -> None:
    """The weights are those that `ask` gives for the same answers: at their first token and at their last."""
    content = collect([spans / "dot", spans / "last"], layers=True)
    dot, last = content["runs"]
    assert all("layers" not in answer for answer in last["answers"])
    reader = Reader.load(spans / "dot", backend="torch")
    contexts = {example.question: example.context.text for example in load_examples("demo:dev").examples}
    compared = 0
    for sample, answer in zip(content["samples"][0], dot["answers"], strict=True):
        assert ("layers" in answer) == bool(answer["text"])
        if answer["text"]:
            asked = reader.ask(sample["question"], contexts[sample["question"]], layers=True, top_k=20)
            tokens = next(found for found in asked if found["answer"] == answer["text"])["layers"]["tokens"]
            start, end = answer["layers"]["read"]
            assert answer["layers"]["numbers"] == [0, 1, 2]
            assert (start["token"], end["token"]) == (tokens[0]["token"], tokens[-1]["token"])
            assert start["weights"] == pytest.approx(tokens[0]["weights"]["start"], abs=1e-4)
            assert end["weights"] == pytest.approx(tokens[-1]["weights"]["end"], abs=1e-4)
            compared += 1
    assert compared
    without = collect([spans / "dot"])["runs"][0]
    assert all("layers" not in answer for answer in without["answers"])
    with pytest.raises(UsageError, match="--layers: expected an HTML report"):
        write_report([spans / "dot"], spans / "report.md", layers=True)

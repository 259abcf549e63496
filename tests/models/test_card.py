"""The model card: its contents, their correctness, and no path of this machine on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from doubles import DEPTH, HIDDEN, save_tiny_encoder, tiny_run_config
from lamella.data.demo import data_path
from lamella.data.file_formats.formats import read
from lamella.errors import ModelError
from lamella.export.flatten import flatten
from lamella.export.half import halve
from lamella.models.base_encoder import load_encoder
from lamella.models.facts import DomainScores, Facts, Int8Facts, RoundedBaseFacts, data_facts
from lamella.models.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread")

RESULTS = {"step": 7, "epoch": 1.0, "exact": 41.5, "f1": 50.25, "total": 1200, "by_kind": {"who": 1.0}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "tiny")


def make(base: Path, **sections: Any) -> ReaderModel:
    return ReaderModel(load_encoder(str(base)), tiny_run_config(**sections)).eval()


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the YAML header and the text of the card."""
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def section(text: str, title: str) -> str:
    match = re.search(rf"^## {title}\n\n(.*?)(?=\n\n## |\Z)", text, re.M | re.S)
    return match[1] if match else ""


def test_a_card_shows_the_recorded_facts(base: Path, tmp_path: Path) -> None:
    model = make(base, encoder={"tuning": {"name": "adapter", "size": 5}})
    examples = read("demo:dev").examples
    model.facts = Facts(
        train=data_facts([str(tmp_path / "train-v2.0.json")], examples[:5]), dev=data_facts(["demo:dev"], examples)
    )
    model.save(tmp_path / "model", results=RESULTS)
    front, text = card(tmp_path / "model")
    assert front == {
        "library_name": "lamella",
        "pipeline_tag": "question-answering",
        "tags": ["lamella", "extractive-question-answering", "adapter"],
    }
    assert text.startswith("# A reader on tiny\n")
    assert "| tuning | `adapter` (size = 5, leave_out = [], k = 0, zero = false, also = []) |" in text
    unanswerable = sum(not example.answerable for example in examples)
    assert f"| dev | `demo:dev` | {len(examples)} | {unanswerable} |" in section(text, "Data")
    assert "| train | `train-v2.0.json` | 5 |" in section(text, "Data")
    assert "| f1 | 50.25 |" in section(text, "Results")
    assert "| total | 1,200 |" in section(text, "Results")
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    whole = sum(value.numel() for name, value in model.encoder.named_parameters() if "adapter" not in name)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    cost = section(text, "Cost")
    assert cost.startswith(f"{trained:,} trained parameters, {100 * trained / whole:.4g} % of the encoder's {whole:,}.")
    assert f"takes {size / 1e6:.3f} MB, stored in fp32." in cost
    assert "128 tokens" in section(text, "Limits")
    assert section(text, "Layer weights") == ""


def test_training_on_a_fraction_of_the_questions_is_shown(base: Path, tmp_path: Path) -> None:
    model = make(base)
    for fraction, shown in ((1.0, False), (0.25, True)):
        model.facts = Facts(train=data_facts(["train.json"], ()), fraction=fraction)
        model.save(tmp_path / "model")
        assert ("Trained on 25 % of the train questions." in card(tmp_path / "model")[1]) is shown
        assert ReaderModel.load(tmp_path / "model").facts.fraction == fraction


def test_a_card_names_the_licences_of_the_training_files(base: Path, tmp_path: Path) -> None:
    model = make(base)
    licences = {"new/reviews.json": "CC BY 4.0", "other.json": "CC0"}
    model.facts = Facts(train=data_facts(["new/reviews.json", "old/reviews.json", "manuals.json"], (), licences))
    model.save(tmp_path / "model")
    shown = section(card(tmp_path / "model")[1], "Data")
    assert "| train | `reviews.json` (CC BY 4.0), `reviews.json`, `manuals.json` | 0 | 0 |" in shown


def test_a_card_shows_the_effect_of_int8(base: Path, tmp_path: Path) -> None:
    ReaderModel(load_encoder(str(base)), tiny_run_config()).eval().save(tmp_path / "model")
    assert "int8" not in card(tmp_path / "model")[1]
    measured = Int8Facts(data="dev.json", questions=1234, f1=71.24, int8_f1=71.019, equal=98.76)
    model = ReaderModel.from_pretrained(tmp_path / "model")
    model.save_facts(tmp_path / "model", int8=measured)
    line = "F1 on the 1,234 questions of `dev.json` is 71.02 instead of 71.24, and 98.8 % of the answers are the same."
    assert line in card(tmp_path / "model")[1]
    assert ReaderModel.from_pretrained(tmp_path / "model").facts.int8 == measured


def test_a_card_shows_the_scores_on_other_texts(base: Path, tmp_path: Path) -> None:
    ReaderModel(load_encoder(str(base)), tiny_run_config()).eval().save(tmp_path / "model")
    numbers = {"f1": 71.24, "f1_low": 70.0, "f1_high": 72.5, "f1_at_0": 70.1, "best_f1": 72.0, "has_answer_f1": 71.2}
    numbers |= {"refused": 15.04, "refused_eager": 4.09, "coverage_at_80": 51.6, "area_under_risk": 18.02}
    rows = [
        DomainScores(
            **numbers,
            **{"data": data, "sha256": "0" * 64, "questions": 1234, "unanswerable": 0, "threshold": -2.0},
            **{"no_answer_f1": None, "calibration_error": None, "risk": [1.0, 2.5], "computed": computed},
        )
        for data, computed in (("dev.json", "on a CPU in fp32"), ("more.json", "on one GPU in bf16"))
    ]
    model = ReaderModel.from_pretrained(tmp_path / "model")
    for measured, expected in (
        (rows[:1], " The answers were computed on a CPU in fp32.\n"),
        (rows, " The answers were computed on a CPU in fp32 (`dev.json`); on one GPU in bf16 (`more.json`).\n"),
        ([rows[0].model_copy(update={"computed": None})], " the mean risk over all coverages.\n"),
    ):
        model.save_facts(tmp_path / "model", domains=measured)
        texts = section(card(tmp_path / "model")[1], "Other texts")
        assert expected in texts
        row = "| `dev.json` | 1,234 (0) | 71.2 [70.0, 72.5] | 70.1 | 72.0 | 71.2 |  | 15.0 | 4.1 | 51.6 | 18.0 |  |\n"
        assert row in texts
        assert "| data | 50 % | 100 % |\n|---|---:|---:|\n| `dev.json` | 1.0 | 2.5 |" in texts


def test_a_card_shows_what_is_lost_on_the_original_encoder(base: Path, tmp_path: Path) -> None:
    ReaderModel(load_encoder(str(base)), tiny_run_config()).eval().save(tmp_path / "model")
    assert "original" not in card(tmp_path / "model")[1]
    numbers = {"f1": 71.24, "change": -0.1, "change_low": -0.31, "change_high": 0.05, "changed": 2.34}
    measured = [RoundedBaseFacts(data="dev.json", questions=1234, draws=3, **numbers)]
    model = ReaderModel.from_pretrained(tmp_path / "model")
    model.save_facts(tmp_path / "model", rounded_base=measured)
    assert "| `dev.json` | 1,234 | 3 | 71.24 | -0.10 (-0.31, +0.05) | 2.3 % |" in card(tmp_path / "model")[1]
    assert ReaderModel.from_pretrained(tmp_path / "model").facts.rounded_base == measured


def test_a_card_shows_how_to_load_the_reader(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, working_folder = make(base), tmp_path / "working"
    working_folder.mkdir()
    monkeypatch.chdir(working_folder)
    for folder, name in (
        (tmp_path / "default", "default"),
        (tmp_path / "first" / "model", "FOLDER"),  # equal runs have equal files
        (tmp_path / "first" / "models" / "0.3", "FOLDER"),
        (tmp_path / "models" / "mpnet", "models/mpnet"),
        (Path("near"), "near"),
    ):
        model.save(folder)
        assert f'Reader.load("{name}")' in card(folder)[1]
    model.save(tmp_path / "model", name="org/reader")
    assert 'Reader.load("org/reader")' in card(tmp_path / "model")[1]
    make(base, learner={"task": "answerability", "mixer": "scalar_mix"}).save(tmp_path / "a b")
    assert "lamella predict DATA --model 'a b' --out RUN" in card(tmp_path / "a b")[1]


def test_missing_facts_are_stated(base: Path, tmp_path: Path) -> None:
    make(base).save(tmp_path / "model")
    _, text = card(tmp_path / "model")
    assert section(text, "Data") == "Not recorded."
    assert section(text, "Results") == "Not evaluated."


def test_no_card_shows_a_path_of_this_machine(base: Path, tmp_path: Path) -> None:
    model = make(base)
    model.facts = Facts(train=data_facts([str(data_path("demo:train"))], ()))
    model.save(tmp_path / "runs" / "first" / "model")
    for name, shown in (("first", "first"), ("first/model", "first")):
        make(tmp_path / "runs" / name).save(tmp_path / "runs" / "second" / "models" / "0.3")
        assert f"# A reader on {shown}\n" in (tmp_path / "runs/second/models/0.3/README.md").read_text()
    make(tmp_path / "runs" / "second" / "models" / "0.3").save(tmp_path / "third")
    assert "# A reader on second@0.3\n" in (tmp_path / "third" / "README.md").read_text()
    for path in tmp_path.rglob("README.md"):
        text = path.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert str(base.parent) not in text
        assert str(data_path("demo:train").parent) not in text


def test_a_packaged_base_encoder_has_its_hub_name(base: Path, tmp_path: Path) -> None:
    model = make(base)
    for name, expected in (("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"), ("org/bert", "org/bert")):
        model.base_name = name
        model.save(tmp_path / "model")
        assert card(tmp_path / "model")[0]["base_model"] == expected


@pytest.mark.parametrize("options", [{}, {"shared": True, "normalise": "softmax"}], ids=["per output", "shared"])
def test_learned_layer_weights_are_shown(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    model = make(base, learner={"mixer": {"name": "scalar_mix", **options}, "layers": "all"})
    with torch.no_grad():
        model.head.stages[0].w.copy_(torch.arange(4.0).expand(model.head.stages[0].w.shape))  # type: ignore[union-attr]
        model.head.stages[0].gamma.fill_(2.0)  # type: ignore[union-attr, operator]
    model.save(tmp_path / "model")
    lines = section(card(tmp_path / "model")[1], "Layer weights").splitlines()
    assert lines[0] == "| layer | 0 | 1 | 2 | 3 |"
    shares = 2 * torch.arange(4.0).softmax(0) if options else torch.tensor([0.0, 2.0, 4.0, 6.0])
    row = " | ".join(f"{value:.3f}" for value in shares.tolist())
    assert lines[2:] == ([f"| weight | {row} |"] if options else [f"| start | {row} |", f"| end | {row} |"])


def test_the_card_of_an_answerability_reader(base: Path, tmp_path: Path) -> None:
    make(base, learner={"task": "answerability", "mixer": "scalar_mix"}).save(tmp_path / "model")
    _, text = card(tmp_path / "model")
    assert "Detects whether a text answers a question" in text
    assert "An answer is copied from the text" not in text
    rows = section(text, "Layer weights").splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| answer", "| no answer"]


def test_every_copy_of_a_model_has_the_facts(base: Path, tmp_path: Path) -> None:
    model = make(base)
    model.facts = Facts(dev=data_facts(["dev.json"], ()))
    model.save(tmp_path / "model", results=RESULTS)
    assert model.facts.results == {}  # results belong to that folder, not to later ones
    loaded = ReaderModel.load(tmp_path / "model")
    assert loaded.facts.results == RESULTS
    halve(tmp_path / "model", tmp_path / "half")
    flatten(tmp_path / "model", tmp_path / "flat")
    for name in ("half", "flat"):
        text = card(tmp_path / name)[1]
        assert section(text, "Results") == section(card(tmp_path / "model")[1], "Results")
        assert section(text, "Data") == section(card(tmp_path / "model")[1], "Data")
    assert "stored in fp16, rounded once from fp32." in section(card(tmp_path / "half")[1], "Cost")


def test_a_flat_card_lists_all_tunings(base: Path, tmp_path: Path) -> None:
    make(base, encoder={"tuning": "bitfit"}).save(tmp_path / "first")
    make(tmp_path / "first", encoder={"tuning": "layer_norm"}).save(tmp_path / "second")
    flatten(tmp_path / "second", tmp_path / "flat")
    front, text = card(tmp_path / "flat")
    assert "| tuning | `bitfit`, then `layer_norm` |" in text
    assert front["tags"][2:] == ["bitfit", "layer_norm"]
    norms = (1 + 2 * DEPTH) * 2 * HIDDEN
    biases = DEPTH * (4 * HIDDEN + 48 + HIDDEN) + (1 + 2 * DEPTH) * HIDDEN
    assert section(text, "Cost").startswith(f"{biases + norms // 2 + 2 * HIDDEN + 2:,} trained parameters, ")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"results": 3}, "facts.results: expected a table, got 3."),
        ({"later": 1}, "facts.later: no such"),
        ({"train": {"files": []}}, "facts.train.questions: is required"),
        (
            {"train": {"files": ["a", "b"], "questions": 1, "unanswerable": 0, "licences": ["CC0"]}},
            "facts.train: expected as many licences as files, got {",
        ),
        (3, "damaged: expected base"),
    ],
)
def test_damaged_facts_are_refused(facts: Any, expected: str, base: Path, tmp_path: Path) -> None:
    make(base).save(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "facts": facts}))
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(tmp_path / "model")
    assert str(caught.value).startswith(f"{file}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)

"""The mean of several models: its tensors, its answers, its card, and models that have no mean."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from doubles import record_weights, save_tiny_encoder
from lamella.calibration import Calibration, TunedOn
from lamella.decoding_options import DecodingOptions
from lamella.errors import LamellaError, OutputError, UsageError
from lamella.export.average import average
from lamella.export.flatten import flatten
from lamella.export.half import halve
from lamella.files import file_sha256
from lamella.inference.reader import Reader
from lamella.models.base_encoder import load_encoder
from lamella.models.facts import DataFacts, Facts, FileShareFacts, StartFacts, TeacherFacts
from lamella.models.model import ReaderModel
from lamella.study.result_files import read_result
from trained_readers import save_trained, windows_of

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

WEIGHTS = "model.safetensors"
LORA = {"name": "lora", "rank": 2}
PISSA = {**LORA, "init": "pissa"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "tiny", num_hidden_layers=2)


@pytest.fixture(scope="module")
def three(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_trained(folder / f"seed{seed}", base, seed=seed, encoder={"tuning": LORA}) for seed in range(3)]


def tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / WEIGHTS)


def with_facts(source: Path, folder: Path, facts: Facts, **decoding: Any) -> Path:
    model = ReaderModel.load(source)
    model.facts, model.decoding = facts, DecodingOptions(**decoding)
    model.save(folder)
    return folder


@pytest.mark.parametrize("sections", [
    {"encoder": {"tuning": LORA}, "learner": {"mixer": "dot"}},
    {"encoder": {"tuning": "full"}},
    {"encoder": {"tuning": "adapter"}},
    {"encoder": {"tuning": PISSA}},
    {"encoder": {"tuning": "frozen"}, "learner": {"mixer": ["compress", "xception"], "layers": "all"}},
], ids=lambda sections: str(sections["encoder"]["tuning"]))  # fmt: skip
def test_the_tensors_are_the_means(sections: dict[str, Any], base: Path, tmp_path: Path) -> None:
    folders = [save_trained(tmp_path / f"{seed}", base, seed=seed, **sections) for seed in range(3)]
    average(folders, tmp_path / "mean")
    mean, *parts = (tensors(folder) for folder in (tmp_path / "mean", *folders))
    assert mean.keys() == parts[0].keys()
    for name, value in mean.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, np.mean([part[name] for part in parts], axis=0), rtol=1e-6, atol=1e-7)
    assert any(not np.array_equal(mean[name], parts[0][name]) for name in mean)


def test_the_mean_of_copies_is_the_model_itself(three: list[Path], tmp_path: Path) -> None:
    copies = [shutil.copytree(three[0], tmp_path / f"copy{number}") for number in range(2)]
    average([three[0], *copies], tmp_path / "mean")
    assert (tmp_path / "mean" / WEIGHTS).read_bytes() == (three[0] / WEIGHTS).read_bytes()


def test_it_answers_on_both_backends(three: list[Path], tmp_path: Path) -> None:
    average(three, tmp_path / "mean")
    own = ReaderModel.load(tmp_path / "mean")
    padded = windows_of(own)
    found = [own.logits(padded)[:, padded.mask]]
    for backend in ("torch", "onnx"):
        reader = Reader.load(tmp_path / "mean", precision="fp32", backend=backend)
        assert reader.ask("Who found Titan?", "Huygens found Titan in 1655.", top_k=2)
        found.append(reader.model.logits(padded)[:, padded.mask])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-4)
    assert np.abs(found[0] - ReaderModel.load(three[0]).logits(padded)[:, padded.mask]).max() > 1e-3


def test_the_mean_in_half_precision(three: list[Path], tmp_path: Path) -> None:
    average(three, tmp_path / "mean")
    average(three, tmp_path / "half", half=True)
    halve(tmp_path / "mean", tmp_path / "halved")
    assert (tmp_path / "half" / WEIGHTS).read_bytes() == (tmp_path / "halved" / WEIGHTS).read_bytes()
    average([tmp_path / "half", three[0]], tmp_path / "again")  # a rounded model has a mean with others
    assert {value.dtype for value in tensors(tmp_path / "again").values()} == {np.dtype(np.float32)}


def test_run_folders_and_models_on_one_model(three: list[Path], tmp_path: Path) -> None:
    runs = [save_trained(tmp_path / f"run{seed}" / "model", three[0], seed=seed) for seed in range(2)]
    average([run.parent for run in runs], tmp_path / "mean")
    model = ReaderModel.load(tmp_path / "mean")
    assert model.base_name == str(three[0])
    assert [fact.model for fact in model.facts.mean_of] == ["run0", "run1"]
    other = save_trained(tmp_path / "other", three[1], seed=2)
    with pytest.raises(UsageError, match="flatten them first"):
        average([runs[0], other], tmp_path / "no")
    for number, chained in enumerate((runs[0], other)):
        flatten(chained, tmp_path / f"flat{number}")
    average([tmp_path / "flat0", tmp_path / "flat1"], tmp_path / "flat")
    assert ReaderModel.load(tmp_path / "flat").base_name == ReaderModel.load(three[0]).base_name


def test_facts_and_decoding_claim_nothing_that_is_not_true(three: list[Path], tmp_path: Path) -> None:
    data = DataFacts(files=["train.json"], questions=5, unanswerable=2, licences=["CC0"])
    start, teachers = StartFacts(model="first", sha256="a" * 64), [TeacherFacts(model=f"t{n}") for n in range(3)]
    own = {
        "train": data,
        "start": start,
        "results": {"f1": 50.0},
        "calibrated": {"f1_at_0": 49.0, "ece_uncalibrated": 3.0},
    }
    tuned_on = TunedOn(data="tune.json", questions=3, sha256="b" * 64)
    tuned = {"null_score_diff_threshold": 1.5, "window_penalty": 0.5, "merge": "leads", "tuned_on": tuned_on}
    first = with_facts(
        three[0], tmp_path / "first", Facts(**own, teachers=teachers[:2]), **tuned, n_best_size=7,
        calibration=Calibration(method="temperature", temperature=2.0, fitted_on=tuned_on),
    )  # fmt: skip
    second = with_facts(three[1], tmp_path / "second", Facts(**own, teachers=teachers[1:]))
    average([first, second], tmp_path / "mean")
    model = ReaderModel.load(tmp_path / "mean")
    assert model.decoding == DecodingOptions(merge="leads", n_best_size=7)
    assert (model.facts.train, model.facts.start, model.facts.teachers) == (data, start, teachers)
    assert (model.facts.results, model.facts.calibrated) == ({}, {})
    card = (tmp_path / "mean" / "README.md").read_text(encoding="utf-8")
    hashes = [file_sha256(folder / WEIGHTS) for folder in (first, second)]
    assert f"The mean of 2 models: `first` (sha256 `{hashes[0]}`), `second` (sha256 `{hashes[1]}`)." in card
    assert "| train | `train.json` (CC0) | 5 | 2 |" in card
    assert "Not evaluated." in card
    assert "## Threshold" not in card
    assert str(tmp_path) not in card.replace(str(three[0].parent), "")
    assert model.facts.mean_of[0].sha256 == hashes[0]

    share = FileShareFacts(file="train.json", questions=5, weight=2.0, negatives=0.5, taken=10, unanswerable=4)
    third = with_facts(three[2], tmp_path / "third", Facts(train=data, fraction=0.5, mixture=[share]))
    average([first, third], tmp_path / "other")
    facts = ReaderModel.load(tmp_path / "other").facts
    assert (facts.train, facts.fraction, facts.start, facts.teachers) == (None, 1.0, None, teachers[:2])
    card = (tmp_path / "other" / "README.md").read_text(encoding="utf-8")
    rows = [f"| train of `{name}` | `train.json` (CC0) | 5 | 2 |" for name in ("first", "third")]
    assert "\n".join(rows) in card
    assert "`third` was trained on 50 % of the train questions." in card
    assert "| `third` | `train.json` | 5 | 2 | 0.5 | 10 (100.0 %) | 4 |" in card

    average([tmp_path / "mean", tmp_path / "other"], tmp_path / "both")
    card = (tmp_path / "both" / "README.md").read_text(encoding="utf-8")
    assert "The mean of 2 models: `mean` (sha256" in card
    assert [f"train of `{name}`" in card for name in ("first", "second", "third")] == [True] * 3


def test_what_is_kept_of_its_scores_names_the_models(three: list[Path], tmp_path: Path, lamella: Any) -> None:
    (tmp_path / "dev.json").write_text(json.dumps([{"question": "Who?", "context": "It was Ada.", "answer": "Ada"}]))
    files = [["first.json"], ["first.json", "second.json"]]
    models = [
        with_facts(source, tmp_path / str(number), Facts(train=DataFacts(files=names, questions=5, unanswerable=2)))
        for number, (source, names) in enumerate(zip(three, files, strict=False))
    ]
    average(models, tmp_path / "mean")
    run, kept = tmp_path / "run", tmp_path / "kept.json"
    assert lamella("evaluate", tmp_path / "dev.json", "--model", tmp_path / "mean", "--out", run)[0] == 0
    assert lamella("compare", run, "--keep", kept)[0] == 0
    content = read_result(kept).content
    assert [file["name"] for file in content["train"]["files"]] == files[1]
    assert [part["model"] for part in content["mean_of"]] == ["0", "1"]
    assert [part["train"]["files"] for part in content["mean_of"]] == files


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "tuning": ({"encoder": {"tuning": {**LORA, "rank": 3}}}, r'tuning = \{"name": "lora", "rank": 2'),
    "mixer": ({"encoder": {"tuning": LORA}, "learner": {"mixer": "dot"}}, r'head.mixer = \[\{"name": "last"'),
    "task": ({"encoder": {"tuning": LORA}, "learner": {"task": "answerability"}}, "head.task = "),
    "skip": ({"encoder": {"tuning": LORA}, "learner": {"skip": True}}, "head.skip = false, as in .*, found true"),
    "windows": (
        {"encoder": {"tuning": LORA}, "windows": {"max_seq_length": 96, "doc_stride": 32, "max_query_length": 24}},
        "windows.max_seq_length = 128, as in .*, found 96",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_models_with_other_options_are_refused(kind: str, three: list[Path], base: Path, tmp_path: Path) -> None:
    sections, message = DIFFERENT[kind]
    other = save_trained(tmp_path / "other", base, **sections)
    refused([three[0], three[1], other], tmp_path, rf"^average: {other}: expected {message}.*; average models that ")


def refused(names: list[Path], folder: Path, message: str, error: type[LamellaError] = UsageError) -> None:
    before = sorted(os.listdir(folder))
    with pytest.raises(error, match=message) as caught:
        average(names, folder / "mean")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(folder)) == before


def test_models_on_another_encoder_are_refused(three: list[Path], base: Path, tmp_path: Path) -> None:
    second = save_tiny_encoder(tmp_path / "second", seed=1, num_hidden_layers=2)
    other = save_trained(tmp_path / "other", second, encoder={"tuning": LORA})
    hashes = [load_encoder(str(folder)).tensors_sha256 for folder in (base, second)]
    message = rf"expected the base encoder of {three[0]}, {base} \(sha256 {hashes[0]}"[:-52]
    refused([three[0], other], tmp_path, message)
    shutil.rmtree(second)  # the encoder need not be there
    refused([three[0], other], tmp_path, message)
    encoder = dict(load_file(base / WEIGHTS))
    (tmp_path / "copy").mkdir()
    for file in base.iterdir():
        shutil.copy(file, tmp_path / "copy")
    save_file(encoder, tmp_path / "copy" / WEIGHTS, {"format": "pt", "note": "another file, the same tensors"})
    same = save_trained(tmp_path / "same", tmp_path / "copy", encoder={"tuning": LORA})
    average([three[0], same], tmp_path / "mean")


def test_tensors_without_a_mean_must_be_equal(base: Path, tmp_path: Path) -> None:
    first = save_trained(tmp_path / "first", base, encoder={"tuning": PISSA})
    other = Path(shutil.copytree(first, tmp_path / "other"))
    changed = tensors(other)
    name = next(name for name in changed if name.endswith(".A0"))
    changed[name] = -changed[name]
    save_file(changed, other / WEIGHTS, {"format": "pt"})
    record_weights(other)
    refused([first, other], tmp_path, rf"{other}: expected {name}, which cannot be averaged, to equal that of {first}")


def test_another_tokenizer_is_refused(three: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(three[0], tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    refused([three[1], other], tmp_path, rf"{other}: expected the tokenizer of {three[1]}, found another one")


def test_calls_that_are_refused(three: list[Path], base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(three[0])
    shutil.copytree(three[0], tmp_path / "run" / "model")
    refused([], tmp_path, "at least two models, got 0")
    refused(three[:1], tmp_path, "at least two models, got 1")
    refused(
        [three[0], three[1], tmp_path / "link"], tmp_path, "expected different models, got one of them twice: .*link"
    )
    refused([tmp_path / "run", tmp_path / "run" / "model"], tmp_path, "one of them twice")
    refused([three[0], base], tmp_path, rf"{base}: expected a model folder of Lamella, .* found another kind")
    refused([three[0], tmp_path / "nowhere"], tmp_path, "nowhere")


def test_what_exists_is_replaced_only_on_request(three: list[Path], base: Path, tmp_path: Path) -> None:
    copies = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in three[:2]]
    earlier = Path(shutil.copytree(three[2], tmp_path / "earlier"))
    before = (earlier / WEIGHTS).read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for place in (*copies, copies[0] / "inside", tmp_path, base, tmp_path / "mine"):
        with pytest.raises(OutputError, match="choose another --out"):
            average(copies, place, overwrite=True)
    with pytest.raises(OutputError, match="exists already; choose another --out, or pass --overwrite"):
        average(copies, earlier)
    assert (earlier / WEIGHTS).read_bytes() == before
    average(copies, earlier, overwrite=True)
    assert (earlier / WEIGHTS).read_bytes() != before
    assert sorted(os.listdir(tmp_path)) == ["earlier", "mine", "seed0", "seed1"]


def test_a_value_beyond_half_precision_leaves_nothing_behind(base: Path, tmp_path: Path) -> None:
    folders = [save_trained(tmp_path / name, base, encoder={"tuning": "frozen"}) for name in ("first", "second")]
    for folder in folders:
        model = ReaderModel.load(folder)
        with torch.no_grad():
            model.head.task.b[0] = 70000.0
        model.save(folder)
    with pytest.raises(LamellaError, match="in the range of fp16"):
        average(folders, tmp_path / "mean", half=True)
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_the_command(three: list[Path], base: Path, lamella: Any, tmp_path: Path) -> None:
    out = tmp_path / "the mean"
    code, printed, err = lamella("average", *three, "--out", out, "--half")
    assert (code, err) == (0, "")
    assert printed.splitlines() == [
        f"{out}: mean of 3 models written",
        f"the threshold of the mean is 0; tune it on separate questions: lamella calibrate DATA --model '{out}'",
    ]
    assert {value.dtype for value in tensors(out).values()} == {np.dtype(np.float16)}
    for arguments, expected, message in [
        ((*three, "-o", out), 1, "exists already; choose another --out, or pass --overwrite"),
        ((three[0], "-o", tmp_path / "no"), 2, "expected at least two models, got 1"),
        ((three[0], three[0], "-o", tmp_path / "no"), 2, "one of them twice"),
        ((three[0], base, "-o", tmp_path / "no"), 2, "found another kind"),
        ((*three,), 2, "--out"),
    ]:
        code, printed, err = lamella("average", *arguments)
        assert (code, printed) == (expected, "")
        assert message in err
    assert lamella("average", *three, "-o", out, "--overwrite")[0] == 0
    assert os.listdir(tmp_path) == ["the mean"]

"""Exported models: the same logits and answers as with torch, without torch; and all errors of loading them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from doubles import (
    FAMILIES,
    corpus,
    examples_about,
    save_tiny_encoder,
    tiny_config,
    tiny_run_config,
    tiny_tokenizer,
)
from lamella import Reader, registry
from lamella.data.file_formats.writers import write
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.encoder.sources import Source, verified_hash
from lamella.errors import (
    EncoderError,
    LamellaError,
    MissingLibraryError,
    ModelError,
    OutputError,
    RunError,
    UsageError,
)
from lamella.export import onnx_export, onnx_trace
from lamella.export.onnx_export import export_onnx
from lamella.export.onnx_int8 import describe, describe_parity, measure_parity
from lamella.files import file_sha256
from lamella.graph.encoder_config import PREFIXES
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction
from lamella.inference.questions import read_questions
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import Int8Parity, Measured, OnnxModel, read_export
from lamella.models.onnx_sessions import Sessions
from lamella.models.transformers_model import StockModel
from lamella.scoring.evaluate import score_predictions
from tiny_reader import save_tiny_bert, save_tiny_reader

pytestmark = pytest.mark.usefixtures("one_thread")
QUESTION = "What is it?"


def windows_of(model: Any, rows: slice = slice(None)) -> Padded:
    """Windows of different lengths, from a few tokens to the maximum."""
    texts = [context[: 30 + 150 * number] for number, context in enumerate(corpus()[:5])]
    features = featurise(examples_about([*texts, ""]), model.tokenizer, model.windows)
    assert features.lengths.max() == model.windows.max_seq_length
    return pad(features, np.arange(len(features))[rows])


def assert_same_logits(model: Any, exported: Any, within: float = 1e-5) -> None:
    for rows in (slice(None), slice(0, 1), slice(-1, None), slice(2, 5)):
        padded = windows_of(model, rows)
        expected = model.logits(padded)
        real = padded.mask[:, : expected.shape[2]]
        for found in (exported.logits(padded), exported.logits_in_one_run(padded)):
            assert found.shape == expected.shape
            assert found.dtype == np.float32
            np.testing.assert_allclose(found[:, real], expected[:, real], atol=within, rtol=0)


def trained(name: str, folder: Path, *, family: str = "bert", depth: int = 1, **sections: Any) -> Path:
    """A saved reader whose trained weights are large enough to matter."""
    base = save_tiny_encoder(folder / f"{name}-encoder", family, **{LAYERS.get(family, "num_hidden_layers"): depth})
    torch.manual_seed(3)
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(**sections))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save(folder / name)
    return folder / name


BUILT = sorted(PREFIXES)
LAYERS = {"distilbert": "n_layers"}
NO_TYPES = ("deberta-v2", "distilbert", "eurobert", "modernbert", "mpnet", "roberta", "xlm-roberta")
TUNINGS = ("frozen", "adapter", "lora", "ia3")  # the others only change values of weights


def cover() -> dict[str, dict[str, Any]]:
    """Every mixer, family, tuning and task at least once; not all combinations, which the tests of the graphs have."""
    cases: dict[str, dict[str, Any]] = {}
    for number, mixer in enumerate(registry.names("mixer")):
        family, tuning = BUILT[number % len(BUILT)], TUNINGS[number % len(TUNINGS)]
        task = "answerability" if number % 5 == 3 else "span"
        cases[f"{mixer}-{task}-{family}-{tuning}"] = {
            "family": family,
            "encoder": {"tuning": tuning},
            "learner": {"mixer": mixer, "task": task, "layers": "all"},
        }
    learner = {"mixer": {"name": "context_cnn", "filters_from": "question"}, "skip": True}
    return {**cases, "filters-from-the-question": {"encoder": {"tuning": "frozen"}, "learner": learner}}


# Families without a graph of their own: torch's exporter traces them, which takes seconds. Few heads have all mixers.
TRACED: dict[str, dict[str, Any]] = {
    "traced-deberta-v2": {
        "family": "deberta-v2",
        "encoder": {"tuning": "lora"},
        "learner": {"mixer": ["scalar_mix", "compress", "conv_nxn"], "beside": ["average", "inception"], "skip": True},
    },
    "traced-modernbert": {
        "family": "modernbert",
        "encoder": {"tuning": "adapter"},
        "learner": {
            "mixer": ["first_last", "conv_1xn"],
            "beside": ["last", {"name": "context_cnn", "filters_from": "question"}],
            "layers": "all",
        },
    },
    "traced-eurobert": {
        "family": "eurobert",
        "encoder": {"tuning": "ia3"},
        "learner": {"mixer": "xception", "task": "answerability"},
    },
    "traced-dot": {"family": "modernbert", "encoder": {"tuning": "frozen"}, "learner": {"mixer": "dot"}},
    "traced-multiplicative": {
        "family": "eurobert",
        "encoder": {"tuning": "lora"},
        "learner": {"mixer": "multiplicative"},
    },
    "traced-encoder_block": {
        "family": "modernbert",
        "encoder": {"tuning": "frozen"},
        "learner": {"mixer": "encoder_block", "task": "answerability"},
    },
}
CASES = {**cover(), **TRACED}
FROM_THE_QUESTION = ("filters-from-the-question", "traced-modernbert")


@pytest.mark.parametrize("case", CASES)
def test_the_graph_gives_the_same_logits_as_torch(case: str, tmp_path: Path) -> None:
    model = trained("model", tmp_path, **CASES[case])
    message = export_onnx(model, tmp_path / "onnx")
    assert message[0] == f"{tmp_path / 'onnx'}: written, fp32"
    assert re.fullmatch(r"logits differ from torch's by at most \d\.\de-\d\d", message[1])
    in_torch, exported = (
        load_model(model, device="cpu", precision="fp32", backend="torch"),
        load_model(tmp_path / "onnx"),
    )
    assert isinstance(exported, OnnxModel)
    assert exported.gives_text == in_torch.gives_text
    assert_same_logits(in_torch, exported)
    asks_for = set(exported.inputs)
    assert ("is_context" in asks_for) == (case in FROM_THE_QUESTION)
    assert ("token_type_ids" in asks_for) == (CASES[case].get("family") not in NO_TYPES)


def stages(case: dict[str, Any]) -> set[str]:
    lists = [case["learner"][key] for key in ("mixer", "beside") if key in case["learner"]]
    return {registry.split(stage)[0] for given in lists for stage in (given if isinstance(given, list) else [given])}


def test_the_cases_cover_every_part() -> None:
    for cases in (cover(), TRACED):
        assert set().union(*map(stages, cases.values())) == set(registry.names("mixer"))
        assert {case["encoder"]["tuning"] for case in cases.values()} == set(TUNINGS)
        assert {case["learner"].get("task", "span") for case in cases.values()} == set(registry.names("task"))
    assert {case.get("family", "bert") for case in CASES.values()} == set(FAMILIES)


# --- one model, exported once, for everything below


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, its graph, and the graph in int8."""
    folder = tmp_path_factory.mktemp("exported")
    model = trained("model", folder, depth=2, encoder={"tuning": "full"}, decoding={"null_score_diff_threshold": -1.5})
    export_onnx(model, folder / "onnx")
    export_onnx(model, folder / "int8", int8=True, data="demo:dev")
    return {"model": model, "onnx": folder / "onnx", "int8": folder / "int8"}


@pytest.fixture
def exported(made: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made["onnx"], tmp_path / "onnx"))


def test_the_folder_holds_everything_needed_to_answer(made: dict[str, Path]) -> None:
    assert {path.name for path in made["onnx"].iterdir()} == {"config.json", "model.onnx", "tokenizer.json"}
    config, model = read_export(made["onnx"]), load_model(made["model"], backend="torch")
    assert (config.windows, config.decoding) == (model.windows, model.decoding)
    assert config.decoding.null_score_diff_threshold == -1.5
    assert (config.precision, config.int8, config.source.name) == ("fp32", None, str(made["model"]))
    assert config.source.sha256 == verified_hash(Source("model", made["model"], "model"))
    assert config.parity is not None
    assert 0 <= config.parity < 1e-5
    text = (made["onnx"] / "model.onnx").read_bytes()
    assert b".py" not in text  # the exporter's metadata


def test_attention_is_one_node_per_layer(made: dict[str, Path]) -> None:
    nodes = [node.op_type for node in onnx.load(made["onnx"] / "model.onnx").graph.node]
    assert nodes.count("MultiHeadAttention") == 2
    assert "Softmax" not in nodes


def test_torch_and_onnx_readers_give_the_same_answers(made: dict[str, Path]) -> None:
    contexts = corpus()[:4]
    in_torch = Reader.load(made["model"], device="cpu", precision="fp32", backend="torch")
    for backend in ("auto", "onnx"):
        reader = Reader.load(made["onnx"], backend=backend, threads=1)  # type: ignore[arg-type]
        for expected, found in zip(
            in_torch.ask([QUESTION] * 4, contexts, top_k=3), reader.ask([QUESTION] * 4, contexts, top_k=3), strict=True
        ):
            assert [answer["answer"] for answer in found] == [answer["answer"] for answer in expected]
            assert found.null_score == pytest.approx(expected.null_score, abs=1e-4)


def test_threads_may_share_a_reader(made: dict[str, Path]) -> None:
    reader, contexts = Reader.load(made["onnx"], threads=1), corpus()[:6]
    expected = [reader.ask(QUESTION, context) for context in contexts]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: reader.ask(QUESTION, contexts[at])}))
        for at in range(len(contexts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(len(contexts))] == expected


@pytest.mark.parametrize("kind", ["onnx", "int8"])
def test_asking_an_exported_model_imports_no_torch(made: dict[str, Path], kind: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(corpus()[0], encoding="utf-8")
    script = f"""
import sys
sys.argv = ["lamella", "ask", {QUESTION!r}, "--context", {str(tmp_path / "text.txt")!r}, "--model", {str(made[kind])!r}]
from lamella.__main__ import main
try:
    main()
except SystemExit as ended:
    print(ended.code, end=" ")
print(sorted({{"torch", "transformers", "accelerate", "onnx"}} & set(sys.modules)), "onnxruntime" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[-1] == "0 [] True"
    assert "characters" in ended.stdout or "not in the text" in ended.stdout


def test_inference_modules_import_no_torch() -> None:
    script = (
        "import sys; import lamella.inference.reader, lamella.inference.predict, lamella.inference.decode, "
        "lamella.models.loading, lamella.models.onnx_model, lamella.scoring.metrics, "
        "lamella.scoring.evaluate, lamella.data.windows.features, lamella.data.windows.padding; "
        "print({'torch', 'transformers', 'onnxruntime'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# --- int8


def test_int8_is_smaller_and_its_loss_is_reported(made: dict[str, Path]) -> None:
    config = read_export(made["int8"])
    assert config.precision == "int8"
    assert config.int8 is not None
    assert (config.int8.data, config.int8.questions, config.int8.metric) == ("demo:dev", 135, "f1")
    exact, rounded = load_model(made["onnx"]), load_model(made["int8"])
    examples = read_questions("demo:dev", labelled=True)
    before, after = predict(exact, examples), predict(rounded, examples)
    equal = sum(before[id].text(-1.5) == after[id].text(-1.5) for id in before) / len(before)
    assert config.int8.equal == pytest.approx(equal)
    assert config.int8.before == score_predictions(exact, examples, before)["f1"]
    assert config.int8.after == score_predictions(rounded, examples, after)["f1"]
    assert_same_logits(exact, rounded, within=1.0)
    padded = windows_of(exact)
    assert not np.allclose(exact.logits(padded), rounded.logits(padded), atol=1e-6)
    assert (made["int8"] / "model.onnx").stat().st_size < (made["onnx"] / "model.onnx").stat().st_size


def test_int8_reports_its_own_difference_from_torch(made: dict[str, Path]) -> None:
    in_torch, rounded = (
        load_model(made["model"], device="cpu", precision="fp32", backend="torch"),
        load_model(made["int8"]),
    )
    examples = read_questions("demo:dev")[:6]
    features = featurise(examples, in_torch.tokenizer, in_torch.windows)
    padded = pad(features, np.arange(len(features)))
    logits = np.abs(rounded.logits(padded) - in_torch.logits(padded))[:, padded.mask].max()
    expected, found = predict(in_torch, examples), predict(rounded, examples)
    null_odds = max(abs(found[id].null_odds - expected[id].null_odds) for id in expected)
    config = read_export(made["int8"])
    assert config.int8_parity is not None
    assert config.int8_parity.questions == 6
    assert config.int8_parity.logits == pytest.approx(logits, rel=1e-3)
    assert config.int8_parity.null_odds == pytest.approx(null_odds, rel=1e-3)
    assert config.int8_parity.logits > 100 * (config.parity or 0)  # the figure of the graph before rounding
    assert read_export(made["onnx"]).int8_parity is None


@pytest.mark.parametrize("external", [False, True])
def test_int8_rounds_the_word_embeddings(external: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small encoder they are most of the file. A large model stores its weights beside the graph."""
    if external:
        monkeypatch.setattr(onnx_export, "LARGEST_FILE", 0)
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(tiny_config("bert", num_hidden_layers=1, vocab_size=30_000))
    model.save_pretrained(tmp_path / "stock")
    tokenizer = tiny_tokenizer("bert")
    tokenizer.model_max_length = 128
    tokenizer.save_pretrained(tmp_path / "stock")
    export_onnx(tmp_path / "stock", tmp_path / "int8", int8=True)
    names = {path.name for path in (tmp_path / "int8").iterdir()}
    assert names == {"config.json", "model.onnx", "tokenizer.json", *(["model.onnx.data"] if external else [])}
    embeddings = model.bert.embeddings.word_embeddings.weight.detach().numpy()
    size = sum((tmp_path / "int8" / name).stat().st_size for name in names if name.startswith("model.onnx"))
    assert size < 0.35 * embeddings.nbytes  # a quarter, a scale per word, and the rest of the model
    tensors = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(tmp_path / "int8" / "model.onnx").graph.initializer
    }
    (table,) = (name for name, tensor in tensors.items() if tensor.shape == embeddings.shape)
    scales = tensors[table.replace(".levels", ".scales")]
    assert (tensors[table].dtype, scales.shape) == (np.int8, (30_000, 1))
    assert (np.abs(tensors[table] * scales - embeddings) <= 0.51 * scales).all()  # a row of zeros stays zero
    assert not embeddings[tokenizer.pad_token_id].any()
    stock = load_model(tmp_path / "stock", device="cpu", precision="fp32", backend="torch")
    assert_same_logits(stock, load_model(tmp_path / "int8"), within=0.05)


def test_int8_of_a_large_traced_graph_ignores_files_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnx looks there for a file with the name of the weights that it writes beside a graph."""
    model = trained("model", tmp_path, **TRACED["traced-deberta-v2"])
    monkeypatch.setattr(onnx_trace, "LARGEST_FILE", 0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.onnx.data").write_bytes(b"another export")
    monkeypatch.chdir(tmp_path / "here")
    export_onnx(model, tmp_path / "out", int8=True)
    graphs = {path.name for path in (tmp_path / "out").rglob("*.onnx*")}
    assert graphs == {"model.onnx", "model.onnx.data"}
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert Path("model.onnx.data").read_bytes() == b"another export"
    exact = load_model(model, device="cpu", precision="fp32", backend="torch")
    assert_same_logits(exact, load_model(tmp_path / "out"), within=0.1)


def test_no_answer_depends_on_its_neighbours(made: dict[str, Path]) -> None:
    """Traced graphs have one scale in int8 for everything that a run computes, so a window must not share its run."""
    model = load_model(made["int8"])
    together, rows = model.logits(windows_of(model)), windows_of(model).mask
    for row, real in enumerate(rows):
        alone = model.logits(windows_of(model, slice(row, row + 1)))
        np.testing.assert_array_equal(together[:, row, real], alone[:, 0, : real.sum()])


def test_int8_does_not_round_the_head(tmp_path: Path) -> None:
    head = {"mixer": [{"name": "compress", "size": 8}, {"name": "inception"}], "skip": True}
    export_onnx(trained("model", tmp_path, learner=head), tmp_path / "int8", int8=True)
    kinds = [node.op_type for node in onnx.load(tmp_path / "int8" / "model.onnx").graph.node]
    assert kinds.count("MatMulNBits") == 6  # the encoder's one layer: query, key, value, output, and two of the FFN
    assert "MatMul" in kinds


def test_export_from_the_command_line(made: dict[str, Path], lamella: Any, tmp_path: Path) -> None:
    code, out, err = lamella("export", made["model"], "--onnx", tmp_path / "onnx", "--int8")
    assert (code, err) == (0, "")
    first, second, third = out.splitlines()
    assert first == f"{tmp_path / 'onnx'}: written, int8"
    parity = read_export(tmp_path / "onnx").int8_parity
    assert parity is not None
    assert second == describe_parity(parity)
    assert third == "int8: the loss was not measured; pass a file with true answers as --data"
    code, out, err = lamella("predict", "demo:dev", "--model", tmp_path / "onnx", "--out", tmp_path / "run")
    assert code == 0
    assert all("questions cut to 24 tokens" in line for line in err.splitlines())
    assert len(json.loads((tmp_path / "run" / "predictions.json").read_text())) == 135


def test_a_checkpoint_of_transformers_can_be_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(tiny_config("bert", num_hidden_layers=1))
    model.save_pretrained(tmp_path / "stock")
    tokenizer = tiny_tokenizer("bert")
    tokenizer.save_pretrained(tmp_path / "stock")
    settings = tmp_path / "stock" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 128}))
    export_onnx(tmp_path / "stock", tmp_path / "onnx", int8=True)
    kinds = [node.op_type for node in onnx.load(tmp_path / "onnx" / "model.onnx").graph.node]
    assert (kinds.count("MatMulNBits"), kinds.count("MultiHeadAttention")) == (6, 1)
    stock = load_model(tmp_path / "stock", device="cpu", precision="fp32", backend="torch")
    assert isinstance(stock, StockModel)
    assert_same_logits(stock, load_model(tmp_path / "onnx"), within=0.05)


def test_a_checkpoint_whose_tokenizer_does_not_list_token_types(tmp_path: Path) -> None:
    """ALBERT reads them anyway, and so does the graph."""
    torch.manual_seed(0)
    transformers.AlbertForQuestionAnswering(tiny_config("albert")).save_pretrained(tmp_path / "stock")
    tokenizer = tiny_tokenizer("albert")
    assert "token_type_ids" not in tokenizer.model_input_names
    tokenizer.model_max_length = 128
    tokenizer.save_pretrained(tmp_path / "stock")
    export_onnx(tmp_path / "stock", tmp_path / "onnx")
    exported = load_model(tmp_path / "onnx")
    assert "token_type_ids" in exported.inputs  # type: ignore[union-attr]
    assert_same_logits(load_model(tmp_path / "stock", device="cpu", precision="fp32", backend="torch"), exported)


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """By both comparisons: with torch, and of the int8 graph with the one that it was made from."""
    reader = save_tiny_reader(tmp_path / "reader", save_tiny_bert(tmp_path / "encoder"))
    tensors = {name: np.full_like(value, 3e38) for name, value in load_file(reader / "model.safetensors").items()}
    save_file(tensors, reader / "model.safetensors")
    config = json.loads((reader / "config.json").read_bytes())
    sha256 = file_sha256(reader / "model.safetensors")
    (reader / "config.json").write_text(json.dumps({**config, "weights_sha256": sha256}))
    assert "does not match the model" in refusal(ModelError, lambda: export_onnx(str(reader), tmp_path / "out"))
    model, examples = load_model(reader, backend="onnx"), read_questions("demo:dev")[:2]
    assert isinstance(model, OnnxModel)
    assert "expected finite logits" in refusal(ModelError, lambda: measure_parity(model, model, examples))
    assert not (tmp_path / "out").exists()


def test_the_loss_of_int8_for_a_model_without_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is whether there is an answer, and here all are inverted. Data of one kind has no F1."""
    model = trained("model", tmp_path, learner={"task": "answerability"})
    write([example for example in read_questions("demo:dev") if example.answers][:20], tmp_path / "answerable.json")
    sign = itertools.cycle([1, -1])  # before and after rounding

    def turned(model: OnnxModel, examples: Any) -> dict[str, Prediction]:
        now = next(sign)
        return {
            id: Prediction(example.rows, now * example.null_odds) for id, example in predict(model, examples).items()
        }

    monkeypatch.setattr("lamella.export.onnx_int8.predict", turned)
    for data, metric in (("demo:dev", "answerability_f1"), (tmp_path / "answerable.json", "answerability_accuracy")):
        message = export_onnx(model, tmp_path / metric, int8=True, data=str(data))
        assert message[-1].startswith("int8: 0.0% of ")
        measured = read_export(tmp_path / metric).int8
        assert measured is not None
        assert (measured.equal, measured.metric) == (0.0, metric)


# --- errors


def refusal(kind: type[LamellaError], call: Callable[[], Any]) -> str:
    """The message of a refused call, on one line."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("keep", [0, 100, -50_000])
def test_a_damaged_graph(exported: Path, keep: int) -> None:
    graph = exported / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:keep])
    message = refusal(ModelError, lambda: load_model(exported))
    assert message.startswith(f"{graph}: expected sha256 ")
    assert message.endswith("the file is damaged or was replaced: copy or export the model again.")
    without_hashes(exported)
    message = refusal(ModelError, lambda: load_model(exported))
    assert message.startswith(f"{graph}: expected an ONNX graph, found a damaged file (")


def without_hashes(exported: Path) -> None:
    """Make a folder as older versions wrote it."""
    config = json.loads((exported / "config.json").read_text())
    assert set(config.pop("sha256")) == {"model.onnx", "tokenizer.json"}
    (exported / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["../model/config.json", "/etc/hostname", "."])
def test_hashes_of_files_outside_of_the_folder_are_not_computed(exported: Path, name: str) -> None:
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "sha256": {name: "0" * 64}}))
    assert refusal(ModelError, lambda: load_model(exported)).endswith(
        "no such file; the exported folder is incomplete."
    )


@pytest.mark.parametrize("place", ["../secret", "{folder}/secret", "link"])
def test_a_graph_cannot_read_tensors_from_outside_of_its_folder(exported: Path, place: str) -> None:
    without_hashes(exported)
    graph = onnx.load(exported / "model.onnx")
    onnx.save(graph, exported / "model.onnx", save_as_external_data=True, location="tensors", size_threshold=0)
    load_model(exported)
    (exported / "tensors").rename(exported.parent / "secret")
    (exported / "link").symlink_to(exported.parent / "secret")
    graph = onnx.load(exported / "model.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = place.format(folder=exported.parent)
    (exported / "model.onnx").write_bytes(graph.SerializeToString())
    assert "External data path" in refusal(ModelError, lambda: load_model(exported))


def test_a_missing_graph_or_tokenizer(exported: Path) -> None:
    without_hashes(exported)
    for name, folder in (("model.onnx", "exported folder"), ("tokenizer.json", "folder")):
        (exported / name).unlink()
        message = refusal(ModelError, lambda: load_model(exported))
        assert message == f"{exported / name}: no such file; the {folder} is incomplete."


def test_a_damaged_tokenizer(exported: Path) -> None:
    without_hashes(exported)
    (exported / "tokenizer.json").write_text("{")
    message = refusal(ModelError, lambda: load_model(exported))
    assert message.startswith(f"{exported / 'tokenizer.json'}: expected a tokenizer, found a damaged file (")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lamella_onnx": 2}, "expected export format 1, got 2; use another version of lamella."),
        ({"windows": {"max_seq_length": "long"}}, "windows.max_seq_length: input should be a valid integer."),
        ({"later": 1}, "later: extra inputs are not permitted."),
        ({"cls_token_id": None}, "cls_token_id: input should be a valid integer."),
    ],
)
def test_a_configuration_that_is_damaged_or_of_another_version(
    exported: Path, change: dict[str, Any], expected: str
) -> None:
    path = exported / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    message = refusal(ModelError, lambda: load_model(exported))
    assert message.startswith(f"{path}: ")
    assert message.endswith(expected)


def test_a_graph_with_an_unknown_input(exported: Path) -> None:
    without_hashes(exported)
    graph = onnx.load(exported / "model.onnx")
    graph.graph.input.append(onnx.helper.make_tensor_value_info("pixels", onnx.TensorProto.FLOAT, [1]))
    onnx.save(graph, exported / "model.onnx")
    assert refusal(ModelError, lambda: load_model(exported)).endswith("is_context, found pixels.")


def test_a_backend_that_does_not_fit_the_folder(made: dict[str, Path]) -> None:
    for options, problem in (
        ({"device": "cuda"}, "an ONNX graph runs on the CPU only, got device 'cuda'."),
        ({"precision": "bf16"}, "backend 'onnx' computes in fp32 or int8, got precision 'bf16'."),
    ):
        message = refusal(UsageError, lambda options=options: Reader.load(made["model"], backend="onnx", **options))
        assert message == f"{made['model']}: {problem}"
    assert "cannot run on backend 'torch'" in refusal(UsageError, lambda: Reader.load(made["onnx"], backend="torch"))
    assert "CPU only, got device 'cuda'" in refusal(UsageError, lambda: load_model(made["onnx"], device="cuda"))
    for kind, precision in (("onnx", "int8"), ("onnx", "bf16"), ("int8", "fp32")):
        message = refusal(
            UsageError, lambda kind=kind, precision=precision: load_model(made[kind], precision=precision)
        )
        own = {"onnx": "fp32"}.get(kind, kind)
        assert message == f"{made[kind]}: this ONNX export is in {own}, got precision {precision!r}."
    assert isinstance(load_model(made["int8"], precision="int8"), OnnxModel)
    assert isinstance(load_model(made["onnx"], device="cpu", precision="fp32"), OnnxModel)


def test_an_exported_model_cannot_be_exported_or_trained_on(made: dict[str, Path], tmp_path: Path) -> None:
    refusal(UsageError, lambda: export_onnx(made["onnx"], tmp_path / "again"))
    refusal(EncoderError, lambda: load_encoder(str(made["onnx"])))
    assert not list(tmp_path.iterdir())


def test_without_onnxruntime_the_error_names_it(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    message = refusal(MissingLibraryError, lambda: load_model(made["onnx"]))
    assert message.endswith("needs onnxruntime, which is not installed; install with: pip install onnxruntime")
    assert "pip install onnxruntime" in refusal(
        MissingLibraryError, lambda: export_onnx(made["model"], tmp_path / "onnx")
    )


def test_an_export_never_replaces_files(made: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder in (tmp_path, made["model"], made["onnx"]):
        message = refusal(OutputError, lambda folder=folder: export_onnx(made["model"], folder))
        assert message == f"{folder}: exists already and is not an empty folder; choose another folder."
    assert "expected --int8 with --data" in refusal(
        UsageError, lambda: export_onnx(made["model"], tmp_path / "x", data="demo:dev")
    )
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_a_graph_that_differs_from_the_model_is_not_written(
    made: dict[str, Path], exported: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    honest = OnnxModel.logits
    monkeypatch.setattr(OnnxModel, "logits_in_one_run", OnnxModel.logits)
    monkeypatch.setattr(OnnxModel, "logits", lambda self, padded: honest(self, padded) + wrong)
    message = refusal(ModelError, lambda: export_onnx(made["model"], exported.parent / "other"))
    assert "the ONNX graph does not match the model" in message
    assert os.listdir(exported.parent) == ["onnx"]


def test_windows_that_are_too_long_are_refused_as_by_torch(made: dict[str, Path], exported: Path) -> None:
    path, in_torch = exported / "config.json", load_model(made["model"], device="cpu", backend="torch")
    config = json.loads(path.read_text())
    assert config["positions"] == in_torch.positions  # type: ignore[union-attr]
    config["windows"].update(max_seq_length=2000)
    path.write_text(json.dumps(config))
    model, examples = load_model(exported), examples_about([" ".join(corpus())])
    padded = pad(featurise(examples, model.tokenizer, model.windows), np.arange(1))
    message = refusal(UsageError, lambda: predict(model, examples))
    assert message == refusal(UsageError, lambda: in_torch.logits(padded))
    limit = config["positions"]
    assert message.startswith(
        f"windows of 2000 tokens: expected at most {limit}, the number of positions of the encoder; "
    )

    del config["positions"]  # as in older folders: the graph itself fails
    path.write_text(json.dumps(config))
    message = refusal(ModelError, lambda: predict(load_model(exported), examples))
    assert message.startswith("the exported graph cannot be run on 2000 tokens: ")


def test_out_of_memory_is_distinguished_from_a_broken_graph(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def run(self, *arguments: Any) -> Any:
            raise Exception("[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size 9")

    model = load_model(made["onnx"])
    monkeypatch.setattr(Sessions, "get", lambda self, threads: Full())
    message = refusal(RunError, lambda: predict(model, examples_about(corpus()[:1])))
    assert "lower the batch size" in message


def test_the_line_about_int8_parity_names_its_sample() -> None:
    line = "int8: logits differ from torch's by at most 0.81, null odds by at most 1.2, on 6 sample questions"
    assert describe_parity(Int8Parity(questions=6, logits=0.8149, null_odds=1.193)) == line


def test_the_line_about_int8_shows_a_signed_change() -> None:
    measured = Measured(data="dev.json", questions=1, equal=1.0, metric="f1", before=42.96, after=50.06)
    assert describe(measured) == "int8: 100.0% of 1 answer unchanged; f1 42.96 -> 50.06 (+7.10)"
    assert describe(measured.model_copy(update={"after": 40.0})).endswith("f1 42.96 -> 40.00 (-2.96)")

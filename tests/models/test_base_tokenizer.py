"""Models without tokenizer files: they use the tokenizer of their base encoder, and refuse any other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from doubles import save_tiny_encoder
from lamella.encoder.pretrained import load_tokenizer
from lamella.encoder.sources import ENCODERS, Source
from lamella.errors import EncoderError, ModelError, UsageError
from lamella.export.flatten import flatten
from lamella.export.half import halve
from lamella.export.onnx_export import export_onnx
from lamella.export.peft_export import save_as_peft
from lamella.export.transformers_checkpoint import save_as_transformers
from lamella.models.base_tokenizer import hash_tokenizer, read_record, tokenizer_folder
from lamella.models.loading import load_model, load_shared
from lamella.models.model import ReaderModel
from lamella.models.shared_encoder import SharedEncoders
from lamella.models.sharing import check_sharing
from lamella.models.tokenizer_file import TokenizerFile
from lamella.models.torch_encoders import TorchEncoders
from trained_readers import save_trained, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "owner/tiny"
FILES = {"README.md", "config.json", "model.safetensors"}
ENGINES: dict[str, Callable[[Path], Any]] = {
    "torch": lambda folder: load_model(folder, backend="torch", device="cpu", precision="fp32"),
    "onnx": lambda folder: load_model(folder, backend="onnx"),
    "shared torch": lambda folder: load_shared(folder, TorchEncoders("cpu")),
    "shared onnx": lambda folder: load_shared(folder, SharedEncoders(threads=1)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `encoders`, `trained` with a reader, and `thin` with the same reader without tokenizer files."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny_encoder(folder / "encoders" / NAME, num_hidden_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENCODERS, str(folder / "encoders"))
        save_trained(folder / "trained", Path(NAME), encoder={"tuning": "lora"})
        halve(folder / "trained", folder / "half")
        halve(folder / "trained", folder / "thin", base_tokenizer=True)
    return folder


@pytest.fixture
def encoder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the encoder, found by its name, that a test may change."""
    monkeypatch.setenv(ENCODERS, str(tmp_path / "encoders"))
    return shutil.copytree(made / "encoders" / NAME, tmp_path / "encoders" / NAME)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def logits(model: Any) -> NDArray[np.float32]:
    padded = windows_of(model)
    return np.where(padded.mask, model.logits(padded), 0)


def change_tokenizer(encoder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = encoder / "tokenizer.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    change(table)
    file.write_text(json.dumps(table), encoding="utf-8")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_reader_answers_as_with_files_of_its_own(engine: str, made: Path, encoder: Path) -> None:
    assert names(made / "thin") == FILES
    assert names(made / "half") > FILES
    load = ENGINES[engine]
    np.testing.assert_array_equal(logits(load(made / "thin")), logits(load(made / "half")))


def test_the_record_is_on_the_card(made: Path) -> None:
    record = read_record(made / "thin")
    assert record is not None
    assert record.base == NAME
    assert f"| tokenizer | of the base encoder (sha256 `{record.sha256}`) |" in (made / "thin/README.md").read_text()
    assert "| tokenizer |" not in (made / "half/README.md").read_text()


def swap_two_tokens(table: dict[str, Any]) -> None:
    vocabulary = table["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def keep_capitals(table: dict[str, Any]) -> None:
    table["normalizer"]["lowercase"] = False


def give_both_texts_one_type(table: dict[str, Any]) -> None:
    table["post_processor"] = json.loads(json.dumps(table["post_processor"]).replace('"type_id": 1', '"type_id": 0'))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", [swap_two_tokens, keep_capitals])
def test_another_tokenizer_is_refused(
    engine: str, change: Callable[[dict[str, Any]], object], made: Path, encoder: Path
) -> None:
    change_tokenizer(encoder, change)
    with pytest.raises(ModelError) as caught:
        ENGINES[engine](made / "thin")
    assert re.fullmatch(
        rf"{made / 'thin'}: expected base encoder '{NAME}' with a tokenizer of sha256 \w{{12}}…, found \w{{12}}…; the "
        r"model has no tokenizer files of its own: use the encoder that it was trained on, with its tokenizer files\.",
        str(caught.value),
    )


def test_the_hash_covers_what_windows_are_made_of(encoder: Path) -> None:
    def hash_now(**special: int) -> str:
        numbers = {"cls_token_id": 2, "pad_token_id": 0, **special}
        file = encoder / "tokenizer.json"
        return hash_tokenizer(TokenizerFile(Tokenizer.from_file(str(file)), file, **numbers))

    first = hash_now()
    assert hash_now(pad_token_id=1) != first
    original = (encoder / "tokenizer.json").read_bytes()
    for change in (swap_two_tokens, keep_capitals, give_both_texts_one_type):
        change_tokenizer(encoder, change)
        assert hash_now() != first, change
        (encoder / "tokenizer.json").write_bytes(original)
    assert hash_now() == first


def serialise_otherwise(table: dict[str, Any]) -> None:
    """Add what does not count for windows, and leave out a field with a default, as older versions do."""
    table["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    table["padding"] = {
        **{"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    }
    del table["decoder"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_may_be_written_in_another_way(engine: str, made: Path, encoder: Path) -> None:
    change_tokenizer(encoder, serialise_otherwise)
    load = ENGINES[engine]
    np.testing.assert_array_equal(logits(load(made / "thin")), logits(load(made / "half")))


def test_torch_reads_the_rules_of_the_file(tmp_path: Path) -> None:
    """For some encoders, transformers takes only the vocabulary from tokenizer.json, and rules of its own."""
    base = save_tiny_encoder(tmp_path / "base", "xlm-roberta", num_hidden_layers=1)
    change_tokenizer(base, lambda table: table.update(normalizer={"type": "Lowercase"}))
    trained = save_trained(tmp_path / "trained", base, encoder={"tuning": "lora"})
    assert '"Lowercase"' not in (trained / "tokenizer.json").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="found another one in the model"):
        halve(trained, tmp_path / "out", base_tokenizer=True)
    load_tokenizer(Source("base", base, "folder"), as_stored=True).save_pretrained(trained)
    options = json.loads((trained / "tokenizer_config.json").read_text())
    (trained / "tokenizer_config.json").write_text(json.dumps({**options, "tokenizer_class": "TokenizersBackend"}))
    halve(trained, tmp_path / "thin", base_tokenizer=True)
    assert '"Lowercase"' in ReaderModel.load(tmp_path / "thin").tokenizer.backend_tokenizer.to_str()
    on_torch, on_onnx = (logits(ENGINES[engine](tmp_path / "thin")) for engine in ("torch", "onnx"))
    np.testing.assert_allclose(on_torch, on_onnx, atol=1e-4)


def test_without_the_record_missing_files_are_an_error(made: Path, encoder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "half", tmp_path / "half")
    for name in names(folder) - FILES:
        (folder / name).unlink()
    with pytest.raises(EncoderError, match=f"{folder}: .*tokenizer"):
        ReaderModel.load(folder)


def test_an_encoder_without_a_tokenizer_is_reported(made: Path, encoder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (encoder / name).unlink()
    with pytest.raises(ModelError, match=f"{made / 'thin'}: the base encoder cannot be loaded: .*tokenizer"):
        load_model(made / "thin")


def test_copies_keep_the_record_and_other_formats_have_files(made: Path, encoder: Path, tmp_path: Path) -> None:
    thin = made / "thin"
    ReaderModel.load(thin).save(tmp_path / "again")
    halve(thin, tmp_path / "half")
    for copy in (tmp_path / "again", tmp_path / "half"):
        assert (names(copy), read_record(copy)) == (FILES, read_record(thin))
    flatten(thin, tmp_path / "flat")
    save_as_peft(thin, tmp_path / "peft")
    save_as_transformers(thin, tmp_path / "transformers")
    export_onnx(thin, tmp_path / "onnx")
    above = save_trained(tmp_path / "above", thin, encoder={"tuning": "frozen"})
    for written in ("flat", "peft", "transformers", "onnx", "above"):
        assert "tokenizer.json" in names(tmp_path / written), written
    assert read_record(tmp_path / "flat") is None
    assert read_record(above) is None
    halve(above, tmp_path / "chain", base_tokenizer=True)
    assert names(tmp_path / "chain") == FILES
    assert tokenizer_folder(tmp_path / "chain").samefile(encoder)
    for engine in ("torch", "onnx"):
        load = ENGINES[engine]
        np.testing.assert_allclose(logits(load(tmp_path / "chain")), logits(load(above)), atol=2e-3)  # fp16 and fp32


def test_the_server_foresees_that_it_shares_an_encoder(made: Path, encoder: Path) -> None:
    for as_graph in (True, False):
        check_sharing(made / "thin", as_graph=as_graph)


def test_commands(made: Path, encoder: Path, lamella: Any, tmp_path: Path) -> None:
    status, _, err = lamella("export", made / "trained", "--flatten", tmp_path / "out", "--base-tokenizer")
    assert (status, err) == (2, "lamella: export: --base-tokenizer needs --half.\n")
    assert lamella("export", made / "trained", "--half", tmp_path / "out", "--base-tokenizer")[0] == 0
    assert names(tmp_path / "out") == FILES
    text = tmp_path / "text.txt"
    text.write_text("Huygens landed on Titan in 2005.")
    answers = [
        lamella("ask", "When?", "--context", text, "--model", made / name, "--json") for name in ("thin", "half")
    ]
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    counted = [lamella("check", "demo:dev", "--encoder", made / name) for name in ("thin", "half")]
    assert counted[0] == counted[1]


def test_a_model_with_another_tokenizer_is_refused(made: Path, encoder: Path, tmp_path: Path) -> None:
    change_tokenizer(encoder, swap_two_tokens)
    with pytest.raises(UsageError) as caught:
        halve(made / "trained", tmp_path / "out", base_tokenizer=True)
    assert str(caught.value) == (
        f"{made / 'trained'}: expected the tokenizer of its base encoder '{NAME}', found another one in the model; "
        "export it without --base-tokenizer."
    )
    assert not (tmp_path / "out").exists()

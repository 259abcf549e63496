"""A tokenizer with ids that the encoder has no embeddings for is refused when it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamella.encoder.sources import Source
from lamella.errors import EncoderError
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.torch_encoders import TorchEncoders
from run_files import write_run_file
from samples import plain_tokenizer
from tiny_reader import save_tiny_bert, save_tiny_checkpoint, save_tiny_reader

ROWS = plain_tokenizer().backend_tokenizer.get_vocab_size()


def change(path: Path, edit: Callable[[Any], object]) -> None:
    table = json.loads(path.read_bytes())
    edit(table)
    path.write_text(json.dumps(table))


def unknown(name: str) -> Callable[[Path], None]:
    """Return a change by which a special token is one that the vocabulary lacks."""
    return lambda folder: change(folder / "tokenizer_config.json", lambda options: options.update({name: " "}))


def add_token(folder: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": ROWS, "content": "[NEW]", "special": True, **flags}
    change(folder / "tokenizer.json", lambda table: table["added_tokens"].append(token))


def skip_ids(folder: Path) -> None:
    change(folder / "tokenizer.json", lambda table: table["model"]["vocab"].update(a=ROWS + 1000))


def end_with_another_id(folder: Path) -> None:
    change(
        folder / "tokenizer.json", lambda table: table["post_processor"]["special_tokens"]["[SEP]"].update(ids=[ROWS])
    )


UNKNOWN = {name: (unknown(name), ROWS, "(' ')") for name in ("pad_token", "sep_token", "mask_token")}
DAMAGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    **UNKNOWN,
    "an added token": (add_token, ROWS, "('[NEW]')"),
    "a gap": (skip_ids, ROWS + 1000, "('a')"),
    "the end of a window": (end_with_another_id, ROWS, ""),
}


def refusal(load: Callable[[], object]) -> str:
    with pytest.raises(EncoderError) as caught:
        load()
    return str(caught.value)


def expected(folder: Path, id: int, name: str) -> str:
    return (
        f"{folder}: expected a tokenizer with ids below {ROWS:,}, the number of embeddings of its encoder, found id "
        f"{id:,}{name and ' ' + name}; use the tokenizer files that belong to the encoder."
    )


@pytest.mark.parametrize("case", DAMAGE)
def test_readers_checkpoints_and_encoders_are_refused_on_torch(case: str, tmp_path: Path) -> None:
    damage, id, name = DAMAGE[case]
    reader = save_tiny_reader(tmp_path / "reader", save_tiny_bert(tmp_path / "encoder"))
    checkpoint = save_tiny_checkpoint(tmp_path / "checkpoint")
    encoder = save_tiny_bert(tmp_path / "damaged")
    for folder in (reader, checkpoint, encoder):
        damage(folder)
    for folder in (reader, checkpoint):
        found = refusal(lambda folder=folder: load_model(folder, backend="torch"))  # type: ignore[misc]
        assert found == expected(folder, id, name)
    assert refusal(lambda: load_encoder(str(encoder))) == expected(encoder, id, name)


@pytest.mark.parametrize("case", ["an added token", "the end of a window"])
def test_readers_are_refused_on_onnxruntime_and_in_a_server(case: str, tmp_path: Path) -> None:
    """Both read the tokenizer without transformers, which adds no token: an unknown padding does no harm there."""
    damage, id, name = DAMAGE[case]
    reader = save_tiny_reader(tmp_path / "reader", save_tiny_bert(tmp_path / "encoder"))
    source, encoders = Source(str(reader), reader, "folder"), TorchEncoders("cpu", "fp32")
    encoders.reader(source)
    damage(reader)
    assert refusal(lambda: load_model(reader, backend="onnx")) == expected(reader, id, name)
    assert refusal(lambda: encoders.reader(source)) == expected(reader, id, name)


def test_an_encoder_that_does_not_state_its_vocabulary_is_read_without_torch(tmp_path: Path) -> None:
    encoder = save_tiny_bert(tmp_path / "encoder")
    reader = save_tiny_reader(tmp_path / "reader", encoder)
    change(encoder / "config.json", lambda config: config.update(vocab_size=None))
    assert load_model(reader, backend="onnx").windows


def test_a_server_on_torch_refuses_every_id_that_is_too_high(tmp_path: Path) -> None:
    reader = save_tiny_reader(tmp_path / "reader", save_tiny_bert(tmp_path / "encoder"))
    skip_ids(reader)
    found = refusal(lambda: TorchEncoders("cpu", "fp32").reader(Source(str(reader), reader, "folder")))
    assert found == expected(reader, ROWS + 1000, "('a')")


def test_a_damaged_base_does_not_matter_to_a_reader_with_its_own_tokenizer(tmp_path: Path) -> None:
    encoder = save_tiny_bert(tmp_path / "encoder")
    reader = save_tiny_reader(tmp_path / "reader", encoder)
    unknown("pad_token")(encoder)
    assert load_model(reader, backend="torch").tokenizer.pad_token_id == plain_tokenizer().pad_token_id


@pytest.mark.parametrize("command", ["train", "extract"])
def test_training_refuses_an_encoder_before_it_writes(
    command: str, tmp_path: Path, lamella: Callable[..., tuple[int, str, str]]
) -> None:
    encoder = save_tiny_bert(tmp_path / "encoder")
    unknown("pad_token")(encoder)
    run = write_run_file(tmp_path / "run.toml", f'name = "{encoder}"\ntuning = "frozen"')
    code, _, err = lamella(command, run, "--out", tmp_path / "out")
    assert (code, err.splitlines()[-1]) == (1, f"lamella: {expected(encoder, ROWS, DAMAGE['pad_token'][2])}")
    assert _left(tmp_path / "out") in ([], ["run.json"])


def _left(folder: Path) -> Sequence[str]:
    return [path.name for path in folder.rglob("*")]

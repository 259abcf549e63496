"""Models that were trained on a rounded copy of an encoder: they also run on its original, and on nothing else."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from doubles import save_tiny_encoder
from lamella.encoder.identity import rounding_steps
from lamella.encoder.sources import ENCODERS, MODEL_WEIGHTS
from lamella.encoder.tensors import put_tensors, read_tensors
from lamella.errors import LamellaWarning, ModelError, UsageError
from lamella.export.flatten import flatten
from lamella.export.half import halve
from lamella.inference.one_pass import share_encoders
from lamella.models import base_identity
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model, load_shared
from lamella.models.model import ReaderModel
from lamella.models.saved import read_saved
from lamella.models.shared_encoder import SharedEncoders
from lamella.models.torch_encoders import TorchEncoders
from lamella.training.provenance import _has_equal_tensors
from lamella.training.warm_start import _same_base
from rounded_encoders import Change, change_file, round_weights
from shared_readers import POOLED
from trained_readers import save_trained, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "owner/tiny"
ENGINES = ["torch", "onnx"]


def vary_small_tensors(tensors: dict[str, Tensor]) -> None:
    """Give biases and LayerNorms different values, as pretraining does."""
    torch.manual_seed(5)
    for value in tensors.values():
        if value.dim() == 1:
            value.add_(0.1 * torch.randn_like(value))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `original` and `rounded`, each with an encoder of the same name."""
    folder = tmp_path_factory.mktemp("encoders")
    change_file(save_tiny_encoder(folder / "original" / NAME, num_hidden_layers=2), vary_small_tensors)
    shutil.copytree(folder / "original", folder / "rounded")
    change_file(folder / "rounded" / NAME, round_weights)
    return folder


@pytest.fixture(scope="module")
def reader(encoders: Path) -> Path:
    """A reader that was trained on the rounded copy, and records it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENCODERS, str(encoders / "rounded"))
        trained = save_trained(encoders / "trained", Path(NAME), encoder={"tuning": "lora"})
        halve(trained, encoders / "reader", rounded_base=True)
    return encoders / "reader"


@pytest.fixture
def use(encoders: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setenv(ENCODERS, str(encoders / name))


def logits(folder: Path, backend: Any = "torch") -> NDArray[np.float32]:
    model = load_model(folder, backend=backend, device="cpu", precision="fp32")
    padded = windows_of(model)
    return np.where(padded.mask, model.logits(padded), 0)


def logits_on(encoder: Path, reader: Path) -> NDArray[np.float32]:
    """Return the logits of a reader whose delta is put on an encoder by hand."""
    config = read_saved(reader).config
    model = ReaderModel(load_encoder(str(encoder)), config).eval()
    put_tensors(model, read_tensors(reader / MODEL_WEIGHTS), "reader")
    padded = windows_of(model)
    return np.where(padded.mask, model.logits(padded), 0)


# --- the steps of a rounded tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["embeddings.weight", "dense.weight"])
def test_the_steps_are_found_in_the_values(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 64) * torch.linspace(0.5, 2, 40)[:, None]
    if name == "dense.weight":
        weight[7, 9] = 200  # leaves few levels for its row
    tensors = {name: weight.clone()}
    round_weights(tensors)
    largest = weight.abs().max()[None, None] if "embeddings" in name else weight.abs().amax(1, keepdim=True)
    steps = rounding_steps(tensors[name].to(dtype).float().numpy())
    np.testing.assert_allclose(steps, largest.numpy() / 127, rtol=1e-3)


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(40, 64),
        torch.randn(64).half().float(),
        torch.ones(64),
        torch.zeros(4, 64),
        1 + torch.rand(64).half(),
    ],
    ids=["random", "random in fp16", "ones", "zeros", "near one in fp16"],
)
def test_values_that_were_not_rounded_have_no_step(values: Tensor) -> None:
    assert not rounding_steps(values.float().numpy()).any()


# --- the original, the rounded copy, and other encoders


@pytest.mark.parametrize("backend", ENGINES)
def test_the_original_is_accepted_with_a_warning(
    backend: str, encoders: Path, reader: Path, use: Callable[[str], None]
) -> None:
    use("rounded")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_copy = logits(reader, backend)
    use("original")
    with pytest.warns(LamellaWarning) as caught:
        on_original = logits(reader, backend)
    (message,) = {str(warning.message) for warning in caught}
    assert re.fullmatch(
        rf"{reader}: was trained on a rounded copy of its base encoder '{NAME}'\. The encoder found is the original: "
        r"its weights differ by 0\.[3-9] %, so a few answers may differ too\.",
        message,
    )
    spread = np.abs(on_copy).max()
    assert 1e-5 * spread < np.abs(on_original - on_copy).max() < 0.1 * spread, "other weights, nearly the same logits"
    np.testing.assert_allclose(on_original, logits_on(encoders / "original" / NAME, reader), atol=1e-5)
    use("rounded")
    np.testing.assert_array_equal(logits(reader, backend), on_copy)


def test_the_light_engine_examines_the_original_once(
    reader: Path, use: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
    use("original")
    with pytest.warns(LamellaWarning, match="rounded copy"):
        load_model(reader, backend="onnx")
    monkeypatch.setattr(base_identity, "hash_arrays", lambda arrays: pytest.fail("hashed again"))
    with pytest.warns(LamellaWarning, match="rounded copy"):
        load_model(reader, backend="onnx")


def fine_tune(tensors: dict[str, Tensor]) -> None:
    """Change what 8 bits do not round, by as much as 20 steps of training do: see decision 55."""
    for name, value in tensors.items():
        if name.endswith("LayerNorm.weight"):
            value.mul_(1 + 0.003 * torch.randn_like(value))


def change_a_layer(tensors: dict[str, Tensor]) -> None:
    value = tensors["encoder.layer.1.output.dense.weight"]
    value.add_(0.05 * value.std() * torch.randn_like(value))


def break_a_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["embeddings.LayerNorm.bias"].fill_(torch.nan)


def rename_a_tensor(tensors: dict[str, Tensor]) -> None:
    """Make the vocabulary larger: the tensors have the same names, and one has another shape."""
    words = tensors["embeddings.word_embeddings.weight"]
    tensors["embeddings.word_embeddings.weight"] = torch.cat([words, words[:8]])


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            fine_tune,
            r", which differs by \d+\.\d times the error of the rounding, most in \S+LayerNorm\.weight, by \S+ times",
        ),
        (change_a_layer, r", which differs by .*, most in encoder\.layer\.1\.output\.dense\.weight, by \S+ times"),
        (break_a_tensor, r", which differs by nan times .*, most in embeddings\.LayerNorm\.bias, by nan times"),
        (rename_a_tensor, ", with tensors of other names or shapes"),
    ],
    ids=["fine-tuned", "another layer", "not a number", "another vocabulary"],
)
def test_any_other_encoder_is_refused(
    change: Change, reason: str, backend: Any, encoders: Path, reader: Path, use: Callable[[str], None], tmp_path: Path
) -> None:
    folder = shutil.copytree(encoders / "original" / NAME, tmp_path / "other" / NAME)
    torch.manual_seed(0)
    change_file(folder, change)
    words = len(load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": words}))
    use(str(tmp_path / "other"))
    with pytest.raises(ModelError) as caught:
        load_model(reader, backend=backend, device="cpu", precision="fp32")
    assert re.fullmatch(
        rf"{reader}: expected base encoder '{NAME}' with sha256 \w{{12}}…, or the encoder that it was rounded from, "
        rf"found \w{{12}}…{reason}; use the encoder that the model was trained on\.",
        str(caught.value),
    )


def test_a_model_that_does_not_record_the_rounding_refuses_the_original(
    encoders: Path, reader: Path, use: Callable[[str], None]
) -> None:
    config = json.loads((encoders / "trained" / "config.json").read_text())
    assert set(config["base"]) == {"name", "sha256", "tensors_sha256"}
    use("original")
    with pytest.raises(ModelError, match=r"with sha256 \w{12}…, found \w{12}…; use the encoder that the model was"):
        ReaderModel.load(encoders / "trained")


# --- readers that share an encoder


@pytest.mark.parametrize("engine", [lambda: TorchEncoders("cpu"), lambda: SharedEncoders(threads=1)], ids=ENGINES)
@pytest.mark.parametrize("order", [1, -1], ids=["original first", "copy first"])
@pytest.mark.filterwarnings("ignore:.*rounded copy")
def test_readers_share_an_encoder_only_if_its_tensors_are_equal(
    engine: Callable[[], Any], order: int, encoders: Path, reader: Path, use: Callable[[str], None], tmp_path: Path
) -> None:
    """The first reader is on the original instead of the copy, the second was trained on it, the third has the copy."""
    use("original")
    native = save_trained(tmp_path / "native", encoders / "original" / NAME, encoder={"tuning": "lora"})
    exact = shutil.copytree(reader, tmp_path / "exact")
    config = json.loads((exact / "config.json").read_text())
    config["base"]["name"] = str(encoders / "rounded" / NAME)
    (exact / "config.json").write_text(json.dumps(config))
    shared = engine()
    opened = {folder: load_shared(folder, shared) for folder in (reader, native, exact)[::order]}
    assert opened[reader].encoder is opened[native].encoder
    assert opened[reader].encoder is not opened[exact].encoder
    for folder, model in opened.items():
        padded = windows_of(model)
        expected = ReaderModel.load(folder).logits(padded)
        np.testing.assert_allclose(
            np.where(padded.mask, model.logits(padded), 0), np.where(padded.mask, expected, 0), atol=1e-4
        )


@pytest.mark.filterwarnings("ignore:.*rounded copy")
def test_a_frozen_encoder_is_shared_only_if_it_is_equal(
    encoders: Path, use: Callable[[str], None], tmp_path: Path
) -> None:
    use("rounded")
    frozen = save_trained(tmp_path / "frozen", Path(NAME), encoder={"tuning": "frozen"})
    halve(frozen, tmp_path / "reader", rounded_base=True)
    on_copy = [ReaderModel.load(tmp_path / name) for name in ("frozen", "reader")]
    use("original")
    on_original = ReaderModel.load(tmp_path / "reader")
    share_encoders([*on_copy, on_original])
    assert on_copy[0].encoder is on_copy[1].encoder
    assert on_original.encoder is not on_copy[0].encoder


# --- what is recorded


def base_of(folder: Path) -> dict[str, Any]:
    base: dict[str, Any] = json.loads((folder / "config.json").read_text())["base"]
    return base


def test_the_record_is_small_and_on_the_card(reader: Path) -> None:
    rounding = base_of(reader)["rounding"]
    assert sum(map(len, rounding.values())) < 64 + 39 * 17 * 4 * 4 / 3 + 100
    card = (reader / "README.md").read_text()
    assert re.search(r"\| rounding \| it was trained on a copy .* differ by about 0\.[3-9] % \|", card)


@pytest.mark.filterwarnings("ignore:.*rounded copy")
@pytest.mark.parametrize("where", ["rounded", "original"])
def test_every_copy_keeps_the_record(where: str, reader: Path, use: Callable[[str], None], tmp_path: Path) -> None:
    """Also the hashes of the rounded copy: a model that is only written again was not trained on the original."""
    use(where)
    flatten(reader, tmp_path / "flat")
    halve(tmp_path / "flat", tmp_path / "half")
    ReaderModel.load(reader).save(tmp_path / "again")
    assert [base_of(tmp_path / name) for name in ("flat", "half", "again")] == [base_of(reader)] * 3


@pytest.mark.parametrize("backend", ENGINES)
def test_a_model_on_top_runs_on_the_original_too(
    backend: str, reader: Path, use: Callable[[str], None], tmp_path: Path
) -> None:
    use("rounded")
    above = save_trained(tmp_path / "above", reader, encoder={"tuning": "adapter"})
    assert set(base_of(above)) == {"name", "sha256"}
    on_copy = load_encoder(str(above)).loaded_sha256
    use("original")
    with pytest.warns(LamellaWarning, match=f"^{reader}: was trained on a rounded copy"):
        in_engine = logits(above, backend)
    with pytest.warns(LamellaWarning, match="rounded copy"):
        flatten(above, tmp_path / "flat")
    assert base_of(tmp_path / "flat") == base_of(reader)
    with pytest.warns(LamellaWarning, match=f"^{tmp_path / 'flat'}: was trained on a rounded copy"):
        np.testing.assert_allclose(in_engine, logits(tmp_path / "flat"), atol=1e-5)
    with pytest.warns(LamellaWarning, match="rounded copy"):
        assert load_encoder(str(above)).loaded_sha256 != on_copy, "a cache of its hidden states must not be reused"


@pytest.mark.filterwarnings("ignore:.*rounded copy")
def test_training_continues_from_a_reader_on_the_original(reader: Path, use: Callable[[str], None]) -> None:
    use("rounded")
    on_copy = ReaderModel.load(reader)
    use("original")
    on_original = ReaderModel.load(reader)
    config = on_original._saved(on_original.facts).config
    assert _same_base(ReaderModel(load_encoder(NAME), config), on_original)
    assert not _same_base(ReaderModel(load_encoder(NAME), config), on_copy)
    assert not _has_equal_tensors(reader), "a finished run was not made with the original"


# --- what cannot be recorded


def refusal(folder: Path, out: Path) -> str:
    with pytest.raises(UsageError) as caught:
        halve(folder, out, rounded_base=True)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*rounded copy")
def test_rounding_is_recorded_only_where_it_can_be_checked(
    encoders: Path, reader: Path, use: Callable[[str], None], tmp_path: Path
) -> None:
    use("original")
    native = save_trained(tmp_path / "native", Path(NAME))
    assert refusal(native, tmp_path / "out") == (
        f"{NAME}: expected an encoder whose weights were rounded to at most 256 levels, found none that are; leave "
        "out --rounded-base."
    )
    assert "its base here is the original already" in refusal(reader, tmp_path / "out")
    assert "its base is a model; flatten it first" in refusal(
        save_trained(tmp_path / "above", native), tmp_path / "out"
    )
    pooled = change_file(save_tiny_encoder(tmp_path / "pooled", pooler=True), round_weights)
    assert "it reads the pooler" in refusal(save_trained(tmp_path / "head", pooled, learner=POOLED), tmp_path / "out")


def test_the_command_writes_the_record(
    encoders: Path, use: Callable[[str], None], lamella: Any, tmp_path: Path
) -> None:
    use("rounded")
    status, _, err = lamella("export", encoders / "trained", "--flatten", tmp_path / "out", "--rounded-base")
    assert (status, err) == (2, "lamella: export: --rounded-base needs --half.\n")
    assert lamella("export", encoders / "trained", "--half", tmp_path / "out", "--rounded-base")[0] == 0
    assert "rounding" in base_of(tmp_path / "out")


@pytest.mark.parametrize("damage", [{"samples": "AAAA"}, {"samples": "?"}, {"errors": 3}, {"more": "AAAA"}], ids=str)
def test_a_damaged_record_is_reported(
    damage: dict[str, Any], reader: Path, use: Callable[[str], None], tmp_path: Path
) -> None:
    use("rounded")
    folder = shutil.copytree(reader, tmp_path / "reader")
    config = json.loads((folder / "config.json").read_text())
    config["base"]["rounding"] |= damage
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json: damaged: expected base"):
        ReaderModel.load(folder)

"""The base of a model: the same file, or the same tensors in another file, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from doubles import FAMILIES, HIDDEN, record_weights, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella.encoder.sources import find_encoder, verified_hash
from lamella.encoder.tensors import hash_parameters
from lamella.errors import ModelError
from lamella.export.flatten import flatten
from lamella.export.half import halve
from lamella.models import base_encoder, base_identity
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from run_files import write_run_file

pytestmark = pytest.mark.usefixtures("one_thread")

POOLED = {"task": "answerability", "mixer": "average", "layers": "pooled+all"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An encoder whose values are exact in fp16 too."""
    folder = save_tiny_encoder(tmp_path / "base")
    rewrite(folder, lambda tensors: {name: value.half().float() for name, value in tensors.items()})
    return folder


@pytest.fixture
def saved(base: Path, tmp_path: Path) -> Path:
    return trained(base, tmp_path / "model")


def trained(base: Path, folder: Path, tuning: str = "full", **sections: Any) -> Path:
    """Save a model whose trained parameters have all changed."""
    config = tiny_run_config(encoder={"tuning": tuning}, **sections)
    torch.manual_seed(3)
    model = ReaderModel(load_encoder(str(base), pooler=config.learner.reads_pooled), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save(folder)
    return folder


def rewrite(
    folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], metadata: dict[str, str] | None = None
) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata or {"format": "pt"})
    record_weights(folder)


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        output: Tensor = ReaderModel.load(folder)(tiny_batch())
    return output


def base_of(folder: Path) -> dict[str, str]:
    base: dict[str, str] = json.loads((folder / "config.json").read_text())["base"]
    return base


def make_old(folder: Path) -> None:
    """Rewrite a folder as older versions wrote it: without the tensor hash of the base."""
    config = json.loads((folder / "config.json").read_text())
    del config["base"]["tensors_sha256"]
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(folder)
    return str(caught.value)


# --- the same tensors in another file


def with_more_in_it(folder: Path) -> None:
    """Add what files of the hub have: a pooler, which is not read, and an integer buffer."""
    more = {
        "pooler.dense.weight": torch.randn(HIDDEN, HIDDEN),
        "pooler.dense.bias": torch.randn(HIDDEN),
        "embeddings.position_ids": torch.arange(130)[None],
    }
    rewrite(folder, lambda tensors: {**tensors, **more})


def under_a_prefix(folder: Path) -> None:
    """Rename the tensors as a model with a head saves its encoder."""
    head = {"cls.predictions.bias": torch.randn(1000)}
    rewrite(folder, lambda tensors: {**{f"bert.{name}": value for name, value in tensors.items()}, **head})


def in_shards(folder: Path) -> None:
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1


def through_a_pickle(folder: Path) -> None:
    pickle = folder.parent / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), pickle)
    rewrite(folder, lambda _: torch.load(pickle, weights_only=True), {"format": "pt", "converted": "from a pickle"})


def in_half(folder: Path) -> None:
    rewrite(folder, lambda tensors: {name: value.half() for name, value in tensors.items()})


OTHER_FILES = [with_more_in_it, under_a_prefix, in_shards, through_a_pickle, in_half]


@pytest.mark.parametrize("change", OTHER_FILES, ids=lambda change: change.__name__)
def test_the_same_weights_in_another_file_are_accepted(
    change: Callable[[Path], None], base: Path, saved: Path, tmp_path: Path
) -> None:
    adapter = trained(base, tmp_path / "adapter", "adapter")
    expected, file = [logits(folder) for folder in (saved, adapter)], verified_hash(find_encoder(str(base)))
    change(base)
    assert verified_hash(find_encoder(str(base))) != file, "the file differs"
    for folder, before in zip((saved, adapter), expected, strict=True):
        assert torch.equal(logits(folder), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensor_hash_excludes_the_pooler(family: str, tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path / "encoder", family, pooler=True)
    whole = load_encoder(str(tmp_path / "encoder"))
    assert whole.tensors_sha256 == hash_parameters(tiny_encoder(family, pooler=True).encoder.model)
    rewrite(tmp_path / "encoder", lambda file: {name: file[name] for name in sorted(file) if "pooler" not in name})
    bare = load_encoder(str(tmp_path / "encoder"))
    assert bare.tensors_sha256 == whole.tensors_sha256
    other = load_encoder(str(save_tiny_encoder(tmp_path / "other", family, seed=1)))
    assert other.tensors_sha256 != bare.tensors_sha256


# --- other weights


def test_weights_that_differ_in_a_single_value_are_refused(base: Path, saved: Path) -> None:
    def nudge(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        bias = tensors["encoder.layer.1.output.dense.bias"]
        bias[3] = torch.nextafter(bias[3], torch.tensor(1.0))
        return tensors

    before = base_of(saved)["sha256"]
    rewrite(base, nudge)
    assert refusal(saved) == (
        f"{saved}: expected base encoder {str(base)!r} with sha256 {before[:12]}…, found "
        f"{verified_hash(find_encoder(str(base)))[:12]}…; use the encoder that the model was trained on."
    )


ENCODER = tiny_encoder().encoder.model
PARAMETERS = dict(ENCODER.named_parameters())


@given(st.data())
def test_every_bit_of_every_parameter_counts(data: st.DataObject) -> None:
    before = hash_parameters(ENCODER)
    bits = PARAMETERS[data.draw(st.sampled_from(sorted(PARAMETERS)))].detach().view(-1).view(torch.int32)
    place, bit = data.draw(st.integers(0, bits.numel() - 1)), 1 << data.draw(st.integers(0, 30))
    bits[place] ^= bit
    assert hash_parameters(ENCODER) != before
    bits[place] ^= bit
    assert hash_parameters(ENCODER) == before


def module_of(tensors: dict[str, Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    return module


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
        ({"a": torch.ones(1), "b": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.ones(1)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
    ],
    ids=["shape", "name", "order of values", "type"],
)
def test_names_shapes_and_types_count_too(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert hash_parameters(module_of(first)) != hash_parameters(module_of(second))
    reordered = dict(reversed(first.items()))
    assert hash_parameters(module_of(first)) == hash_parameters(module_of(reordered)), "the order does not count"


# --- the pooler, which the tensor hash does not cover


def test_a_model_that_reads_the_pooled_output_needs_the_same_file(tmp_path: Path) -> None:
    """The tensor hash does not cover the pooler."""
    base = save_tiny_encoder(tmp_path / "pooled", pooler=True)
    below = trained(base, tmp_path / "below", "adapter")
    alone = trained(base, tmp_path / "alone", "frozen", learner=POOLED)
    above = trained(below, tmp_path / "above", "frozen", learner=POOLED)
    rewrite(base, lambda tensors: {**tensors, "pooler.dense.bias": tensors["pooler.dense.bias"] + 1})
    ReaderModel.load(below)
    assert refusal(alone).startswith(f"{alone}: expected base encoder {str(base)!r} with sha256")
    assert refusal(above).startswith(f"{below}: expected base encoder {str(base)!r} with sha256")


# --- folders of older versions


def test_an_old_folder_loads_only_on_the_same_file(base: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(saved)
    make_old(saved)
    assert torch.equal(logits(saved), expected)
    with_more_in_it(base)
    monkeypatch.setattr(base_identity, "hash_arrays", lambda arrays: pytest.fail("there is nothing to compare it with"))
    assert "use the encoder that the model was trained on." in refusal(saved)


@pytest.mark.parametrize("form", [halve, flatten])
def test_an_export_of_an_old_folder_adds_the_hash(
    form: Callable[[Path, Path], ReaderModel], base: Path, saved: Path, tmp_path: Path
) -> None:
    recorded = base_of(saved)
    make_old(saved)
    form(saved, tmp_path / "new")
    assert base_of(tmp_path / "new") == recorded
    expected = logits(tmp_path / "new")
    in_shards(base)
    assert torch.equal(logits(tmp_path / "new"), expected)


def test_halving_an_old_half_model_changes_none_of_its_tensors(saved: Path, tmp_path: Path) -> None:
    halve(saved, tmp_path / "old")
    files = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    make_old(tmp_path / "old")
    halve(tmp_path / "old", tmp_path / "new" / "old")
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "old").iterdir()} == files


# --- what is recorded, and when


def test_the_recorded_hash_is_of_the_base_before_training(base: Path, saved: Path) -> None:
    assert base_of(saved)["tensors_sha256"] == load_encoder(str(base)).tensors_sha256
    assert hash_parameters(ReaderModel.load(saved).encoder.model) != base_of(saved)["tensors_sha256"]
    assert f"| sha256 of its tensors | `{base_of(saved)['tensors_sha256']}` |" in (saved / "README.md").read_text()


@pytest.mark.usefixtures("on_cpu")
def test_a_training_run_records_it(base: Path, lamella: Any, tmp_path: Path) -> None:
    file = write_run_file(tmp_path / "run.toml", f'name = "{base}"\ntuning = "full"', steps=1)
    assert lamella("train", file, "--out", tmp_path / "run")[0] == 0
    assert base_of(tmp_path / "run" / "model") == {
        "name": str(base),
        "sha256": verified_hash(find_encoder(str(base))),
        "tensors_sha256": load_encoder(str(base)).tensors_sha256,
    }


@pytest.mark.parametrize("moved", [False, True], ids=["on its file", "on another file"])
def test_every_copy_keeps_both_hashes(moved: bool, base: Path, saved: Path, tmp_path: Path) -> None:
    """Also the file hash: models built on this one identify it by the hash."""
    known, identity = base_of(saved), verified_hash(find_encoder(str(saved)))
    if moved:
        under_a_prefix(base)
    flatten(saved, tmp_path / "flat")
    halve(tmp_path / "flat", tmp_path / "half")
    ReaderModel.load(saved).save(saved)  # as storing a threshold does
    assert [base_of(folder) for folder in (tmp_path / "flat", tmp_path / "half", saved)] == [known] * 3
    assert verified_hash(find_encoder(str(saved))) == identity


def test_a_chain_depends_on_the_tensors_of_the_pretrained_encoder(base: Path, saved: Path, tmp_path: Path) -> None:
    above = trained(saved, tmp_path / "above", "adapter")
    assert set(base_of(above)) == {"name", "sha256"}
    assert "sha256 of its tensors" not in (above / "README.md").read_text()
    halve(above, tmp_path / "half")
    assert base_of(tmp_path / "half") == base_of(above)
    expected, known = logits(above), base_of(saved)
    with_more_in_it(base)
    assert torch.equal(logits(above), expected)
    flatten(above, tmp_path / "flat")
    assert base_of(tmp_path / "flat") == known
    assert torch.equal(logits(tmp_path / "flat"), expected)
    again = trained(saved, tmp_path / "again", "adapter")
    assert base_of(again) == base_of(above), "the file of the encoder does not matter"


def test_no_tensor_is_hashed_if_the_file_is_the_same(
    saved: Path, lamella: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing would take a large part of the time of a short answer."""
    above = trained(saved, tmp_path / "above", "adapter")
    monkeypatch.setattr(base_encoder, "hash_parameters", lambda model: pytest.fail("hashed"))
    monkeypatch.setattr(base_identity, "hash_arrays", lambda arrays: pytest.fail("hashed"))
    for folder in (saved, above):
        load_model(folder, device="cpu")
    (tmp_path / "titan.txt").write_text("Huygens discovered Titan.")
    assert lamella("ask", "Who?", "-c", tmp_path / "titan.txt", "-m", saved)[0] == 0
    shutil.copytree(above, tmp_path / "copy")
    ReaderModel.load(tmp_path / "copy").save(tmp_path / "copy")

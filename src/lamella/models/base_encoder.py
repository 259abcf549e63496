"""Load the encoder that a model is built on: a pretrained encoder, or the tuned encoder of a saved model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lamella.data.windows.tokenizer_check import check_ids
from lamella.encoder.lora import tensors_follow
from lamella.encoder.pretrained import LoadedEncoder, load_pretrained, load_tokenizer
from lamella.encoder.sources import (
    MODEL_CONFIG,
    Source,
    find_encoder,
    is_model,
    is_peft,
    portable_name,
    verified_hash,
    weights_file,
)
from lamella.encoder.tensors import hash_parameters, parameters_of, put_tensors
from lamella.encoder.tuning import merge, tune_in_turn
from lamella.errors import ConfigError, EncoderError, MissingLibraryError, ModelError, UsageError
from lamella.models.base_identity import FoundTensors, check_base
from lamella.models.base_tokenizer import Record, check_tokenizer, hash_tokenizer
from lamella.models.peft_tensors import read_model_tensors
from lamella.models.saved import SavedModel, check_weights, read_saved
from lamella.models.tokenizer_file import TOKENIZER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_encoder(name: str, *, dropout: float | None = None, pooler: bool = False) -> LoadedEncoder:
    """Find an encoder by name and load it in fp32; a saved model gives its encoder as it was tuned.

    The pooler is built only on request: most heads do not read it, and many encoders have none. The tensors of a
    pretrained encoder are hashed here, because training may change them and the saved model must identify them.
    """
    loaded = _load(name, dropout, pooler, loading=())
    check_ids(loaded.tokenizer, loaded.encoder.vocabulary_size, loaded.folders[0])
    pretrained = len(loaded.folders) == 1
    return replace(loaded, tensors_sha256=hash_parameters(loaded.encoder.model)) if pretrained else loaded


def load_base(
    folder: Path, saved: SavedModel, *, dropout: float | None = None, pooler: bool = False, loading: Sequence[Path] = ()
) -> LoadedEncoder:
    """Load the base encoder of a saved model, and check that it is the encoder the model was trained on.

    The file hash is cheap. If it differs, compare the tensor hashes: the same encoder may be stored in another file.
    They exclude the pooler, so they do not help a head that reads it. The recorded hashes are kept, also when the model
    is saved again, because models built on this one know it by them. The original of a rounded copy is accepted with a
    warning. The tokenizer comes from the model folder, or is that of the base encoder if its hash is recorded.
    """
    try:
        base = _load(saved.base_name, dropout, pooler, loading=(*loading, folder.resolve()))
    except EncoderError as error:
        raise ModelError(f"{folder}: the base encoder cannot be loaded: {error}") from None

    def examine() -> FoundTensors:
        return FoundTensors.examine(parameters_of(base.encoder.model), saved)

    original = check_base(folder, saved, base.sha256, None if pooler else examine)
    tokenizer = _tokenizer(folder, saved, base)
    check_ids(tokenizer, base.encoder.vocabulary_size, folder)
    return replace(
        base,
        tokenizer=tokenizer,
        sha256=saved.base_sha256,
        tensors_sha256=saved.base_tensors_sha256,
        rounding=saved.rounding,
        tokenizer_sha256=saved.base_tokenizer_sha256,
        original_sha256=original or base.original_sha256,
    )


def stored_tokenizer(base: LoadedEncoder) -> PreTrainedTokenizerFast:
    """Return the tokenizer of an encoder as its tokenizer.json describes it, which is what answers without torch."""
    folder = base.folders[0]
    if is_model(folder) or not (folder / TOKENIZER).is_file():
        return base.tokenizer
    return load_tokenizer(Source(base.name, folder, "folder"), as_stored=True)


def _tokenizer(folder: Path, saved: SavedModel, base: LoadedEncoder) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder; peft saves none."""
    if saved.base_tokenizer_sha256 is not None:
        tokenizer = stored_tokenizer(base)
        check_tokenizer(folder, Record(saved.base_name, saved.base_tokenizer_sha256), hash_tokenizer(tokenizer))
        return tokenizer
    if is_peft(folder) and not (folder / "tokenizer_config.json").is_file():
        return base.tokenizer
    return load_tokenizer(Source(saved.base_name, folder, "folder"))


@contextlib.contextmanager
def reported_as_damage(folder: Path) -> Iterator[None]:
    """Raise a configuration error of a saved model as a ModelError: the folder is at fault, not the caller."""
    try:
        yield
    except MissingLibraryError:
        raise
    except UsageError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        raise ModelError(f"{folder / MODEL_CONFIG}: does not fit its base encoder: {'; '.join(problems)}") from None


def _load(name: str, dropout: float | None, pooler: bool, loading: Sequence[Path]) -> LoadedEncoder:
    """Load an encoder; `loading` are the folders of the saved models that are built on it, to detect a circle."""
    source = find_encoder(name)
    if source.folder.resolve() in loading:
        raise EncoderError(f"{name!r}: circular base-model reference; no encoder is at the bottom of this chain.")
    sha256 = verified_hash(source)
    if is_model(source.folder):
        return _load_tuned(source, sha256, dropout, pooler, loading)
    encoder = load_pretrained(source, dropout=dropout, pooler=pooler)
    return LoadedEncoder(encoder, load_tokenizer(source), portable_name(source), sha256, (source.folder,))


def _load_tuned(
    source: Source, sha256: str, dropout: float | None, pooler: bool, loading: Sequence[Path]
) -> LoadedEncoder:
    """Load the encoder of a saved model: its base, tuned as recorded, with the trained tensors.

    Adapters become part of the encoder; LoRA and IA³ are merged into the weights. The saved head may have read the
    pooled output while the new one does not, or the reverse.
    """
    saved = read_saved(source.folder)
    had_pooler = saved.config.learner.reads_pooled
    loaded = load_base(source.folder, saved, dropout=dropout, pooler=pooler or had_pooler, loading=loading)
    with reported_as_damage(source.folder), tensors_follow():
        tune_in_turn(loaded.encoder, saved.tunings)
    if pooler and not had_pooler:
        loaded.encoder.model.pooler.requires_grad_(False)  # the saved model had no pooler to tune
    check_weights(source.folder, saved)
    tensors = read_model_tensors(source.folder, loaded.encoder)
    prefix = "encoder."
    put_tensors(
        loaded.encoder,
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)},
        str(weights_file(source.folder)),
    )
    merge(loaded.encoder)
    if had_pooler and not pooler:
        loaded.encoder.model.add_module("pooler", None)
    folders = (source.folder, *loaded.folders)
    name = portable_name(source)
    return replace(
        loaded, name=name, sha256=sha256, folders=folders, tensors_sha256=None, rounding=None, tokenizer_sha256=None
    )

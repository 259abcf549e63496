"""Encoders made ready to run: pretrained ones, and those that a saved model tuned.

`trust_remote_code` is never on, and weights are always loaded in fp32.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lamella import registry
from lamella.config import RunConfig
from lamella.encoder.encoder import Encoder, family_of
from lamella.encoder.sources import (
    MODEL_CONFIG,
    MODEL_FORMAT,
    MODEL_WEIGHTS,
    Source,
    find_encoder,
    is_saved_model,
    verified_hash,
)
from lamella.encoder.tensors import hash_parameters, put_tensors, read_tensors
from lamella.encoder.tuning import merge, tune_in_turn
from lamella.errors import (
    ConfigError,
    EncoderError,
    MissingExtraError,
    ModelError,
    PluginError,
    UsageError,
    one_line,
)
from lamella.files import read_json
from lamella.plugins import import_plugins
from lamella.validation import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 1


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder ready to run, with its tokenizer and what identifies it."""

    encoder: Encoder
    tokenizer: PreTrainedTokenizerFast
    name: str
    sha256: str
    folders: tuple[Path, ...] = ()  # where it was loaded from, and what it was tuned from
    tensors_sha256: str | None = None  # of a pretrained one, before any training: see hash_parameters


@dataclass(frozen=True)
class SavedModel:
    """What the config.json of a saved model says."""

    base_name: str
    base_sha256: str
    base_tensors_sha256: str | None  # none where the base is a saved model, and in folders of earlier days
    config: RunConfig  # encoder, head, windows and decoding; the rest are defaults
    tuned_before: tuple[dict[str, Any], ...]  # of a flattened chain: the tunings of the models below
    facts: dict[str, Any]  # what is known of its training, for the model card

    @property
    def tunings(self) -> list[dict[str, Any]]:
        """All that was done to the base, in order."""
        return [*self.tuned_before, self.config.encoder.tuning]


def load_encoder(name: str, *, dropout: float | None = None, pooler: bool = False) -> LoadedEncoder:
    """Find an encoder by name and load it in fp32; for a saved model, with the weights it was tuned to.

    The pooler is built only when asked for: most heads do not read it, and many encoders come without one. The tensors
    of a pretrained encoder are hashed here, since what is trained on it may change them and must name them when saved.
    """
    loaded = _load(name, dropout, pooler, above=())
    pretrained = len(loaded.folders) == 1
    return replace(loaded, tensors_sha256=hash_parameters(loaded.encoder.model)) if pretrained else loaded


def _load(name: str, dropout: float | None, pooler: bool, above: Sequence[Path]) -> LoadedEncoder:
    """`above` are the saved models that stand on this encoder: it cannot be one of them."""
    source = find_encoder(name)
    if source.folder.resolve() in above:
        raise EncoderError(f"{name!r} is a model that stands on itself; a circle of models has no encoder.")
    sha256 = verified_hash(source)
    if is_saved_model(source.folder):
        return _load_tuned(source, sha256, dropout, pooler, above)
    encoder = _load_pretrained(source, dropout, pooler)
    return LoadedEncoder(encoder, load_tokenizer(source), _lasting_name(source), sha256, (source.folder,))


def _lasting_name(source: Source) -> str:
    """A name that means the same from another folder: that of a folder is its full path."""
    return os.path.abspath(os.path.expanduser(source.name)) if source.kind == "folder" else source.name


def load_base(
    folder: Path, saved: SavedModel, *, dropout: float | None = None, pooler: bool = False, above: Sequence[Path] = ()
) -> LoadedEncoder:
    """The encoder that a saved model was trained on, and no other: a hash must be the one that was written down.

    That of the file is had for little. Where it is another, the same encoder may lie in another file: its tensors tell,
    but for the pooler, which they say nothing of. The hashes stay those that were written down, also where the model is
    saved again: models that stand on it know it by them. The tokenizer is the one in the model folder, which no hash
    guards.
    """
    try:
        base = _load(saved.base_name, dropout, pooler, above=(*above, folder.resolve()))
    except EncoderError as error:
        raise ModelError(f"{folder}: its base encoder cannot be loaded: {error}") from None
    if base.sha256 != saved.base_sha256 and (pooler or not _has_tensors(base, saved.base_tensors_sha256)):
        raise ModelError(
            f"{folder}: was trained on {saved.base_name!r} with sha256 {saved.base_sha256[:12]}…; the one found here "
            f"has {base.sha256[:12]}…. Use the encoder it was trained on."
        )
    return replace(
        base,
        tokenizer=load_tokenizer(Source(saved.base_name, folder, "folder")),
        sha256=saved.base_sha256,
        tensors_sha256=saved.base_tensors_sha256,
    )


def _has_tensors(base: LoadedEncoder, sha256: str | None) -> bool:
    return sha256 is not None and hash_parameters(base.encoder.model) == sha256


def read_chain(folder: Path) -> list[SavedModel]:
    """A saved model that could be loaded, the one that it stands on, and so on down to one on a pretrained encoder."""
    chain = [read_saved(folder)]
    while is_saved_model(below := find_encoder(chain[-1].base_name).folder):
        chain.append(read_saved(below))
    return chain


def read_saved(folder: Path) -> SavedModel:
    """The configuration of a saved model; one that is damaged or of another version is refused."""
    path = folder / MODEL_CONFIG
    saved = read_json(path)
    version = saved.get(MODEL_FORMAT)
    if version != FORMAT_VERSION:
        raise ModelError(f"{path}: expected model format {FORMAT_VERSION}. Got {version!r}, of another lamella.")
    try:
        name, sha256 = str(saved["base"]["name"]), str(saved["base"]["sha256"])
        tensors_sha256 = saved["base"].get("tensors_sha256")
        before, facts = list(saved.get("tuned_before", [])), dict(saved.get("facts", {}))
        named = {"tuning": [*before, saved["tuning"]], "task": saved["head"]["task"], "mixer": saved["head"]["mixer"]}
        plugins = _import_plugins_of(path, list(saved.get("plugins", [])), named)
        table = {
            "plugins": plugins,
            "encoder": {"name": name, "tuning": saved["tuning"]},
            "learner": saved["head"],
            "windows": saved["windows"],
            "decoding": saved["decoding"],
        }
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"{path}: expected base (with name and sha256), tuning, head, windows and decoding; it is damaged."
        ) from None
    try:
        earlier = [check_config({"encoder": {"tuning": tuning}}, where=str(path)) for tuning in before]
        config = check_config(table, where=str(path))
    except ConfigError as error:
        raise ModelError(f"{path}: is damaged, or of another lamella: {'; '.join(error.problems)}") from None
    return SavedModel(name, sha256, tensors_sha256, config, tuple(one.encoder.tuning for one in earlier), facts)


def _import_plugins_of(path: Path, plugins: list[str], named: Mapping[str, Any]) -> list[str]:
    """Import the plugins that a saved model needs and return those found; fail if a part that it names is missing."""
    imported = []
    for plugin in plugins:
        with contextlib.suppress(PluginError):  # its parts may come from elsewhere by now
            import_plugins([plugin])
            imported.append(plugin)
    if len(imported) < len(plugins):
        specs = [(family, spec) for family, value in named.items() for spec in _as_list(value)]
        for family, name in [(family, registry.split(spec)[0]) for family, spec in specs]:
            if name not in registry.names(family):
                raise ModelError(
                    f"{path}: needs the {family} {name!r}, which is not installed here; install the package that "
                    f"holds {' or '.join(plugins)}."
                )
    return imported


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@contextlib.contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """What does not go with its encoder is the fault of a saved model here, and not of the one who loads it."""
    try:
        yield
    except MissingExtraError:
        raise
    except UsageError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        raise ModelError(f"{folder / MODEL_CONFIG}: does not go with its base: {'; '.join(problems)}") from None


def load_tokenizer(source: Source) -> PreTrainedTokenizerFast:
    """The tokenizer that lies beside the weights."""
    from transformers import AutoTokenizer

    folder = source.folder
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a damaged file fails wherever it is first felt
            raise EncoderError(f"{folder}: no tokenizer could be loaded: {one_line(error)}.") from None
    # Without its files, transformers makes a tokenizer that knows the special tokens and nothing else.
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if not any((folder / file).is_file() for file in files):
        raise EncoderError(f"{folder}: expected a tokenizer ({' or '.join(files)}). Found none.")
    if not getattr(tokenizer, "is_fast", False):
        raise EncoderError(f"{folder}: its tokenizer gives no character offsets; a fast one is needed.")
    return cast("PreTrainedTokenizerFast", tokenizer)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers reports on loading with bars and tables; what matters of it, we say ourselves."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _load_pretrained(source: Source, dropout: float | None, pooler: bool) -> Encoder:
    from transformers import AutoConfig, AutoModel

    family = family_of(_model_type(source.folder), str(source.folder))
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source.folder, **options)
    except Exception as error:  # transformers has an error of its own for every kind of wrong value
        raise EncoderError(f"{source.folder}: its config.json cannot be used: {one_line(error)}.") from None
    if family.optional_pooler:
        options["add_pooling_layer"] = pooler
    elif pooler:
        raise EncoderError(f"{source.folder}: a {config.model_type} encoder has no pooled output.")
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"):
        if dropout is not None and hasattr(config, key):
            setattr(config, key, dropout)
    with quiet():
        try:
            model, report = AutoModel.from_pretrained(
                source.folder,
                config=config,
                dtype=torch.float32,  # transformers 5 would take the type the file was saved in
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
        except Exception as error:
            raise EncoderError(f"{source.folder}: its weights cannot be loaded: {one_line(error)}.") from None
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        raise EncoderError(
            f"{source.folder}: expected the weights of a {config.model_type} encoder; {len(wrong)} are missing or of "
            f"another shape ({', '.join(wrong[:3])}{', …' if len(wrong) > 3 else ''})."
        )
    return Encoder(model)


def _model_type(folder: Path) -> str:
    config = read_json(folder / MODEL_CONFIG)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise EncoderError(f"{folder / MODEL_CONFIG}: expected the configuration of an encoder, with its model_type.")
    return str(config["model_type"])


def _load_tuned(
    source: Source, sha256: str, dropout: float | None, pooler: bool, above: Sequence[Path]
) -> LoadedEncoder:
    """A saved model's encoder: its base, edited as its tuning says, with the tuned tensors put in.

    Its adapters are parts of it from now on; its LoRA or IA³ is merged into the weights. Its head may have read the
    pooled output where the new one does not, or the reverse.
    """
    saved = read_saved(source.folder)
    had_pooler = saved.config.learner.reads_pooled
    loaded = load_base(source.folder, saved, dropout=dropout, pooler=pooler or had_pooler, above=above)
    with fitting(source.folder):
        tune_in_turn(loaded.encoder, saved.tunings)
    if pooler and not had_pooler:
        loaded.encoder.model.pooler.requires_grad_(False)  # it was not there to be tuned
    tensors = read_tensors(source.folder / MODEL_WEIGHTS)
    prefix = "encoder."
    put_tensors(
        loaded.encoder,
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)},
        str(source.folder / MODEL_WEIGHTS),
    )
    merge(loaded.encoder)
    if had_pooler and not pooler:
        loaded.encoder.model.add_module("pooler", None)
    folders = (source.folder, *loaded.folders)
    return replace(loaded, name=_lasting_name(source), sha256=sha256, folders=folders, tensors_sha256=None)

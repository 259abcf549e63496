"""The folder of a saved model: read and written here.

The folder holds only what training changed. The rest is the base encoder, recorded by name and hash.

    config.json         format, base encoder, hash of the tensors, tuning, head, windows, decoding, facts about training
    model.safetensors   the trained tensors; names start with `encoder.` or `head.`
    README.md           the model card
    tokenizer files, unless config.json records that the tokenizer is that of the base encoder
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella import registry
from lamella.config import HEAD_OPTIONS, RunConfig
from lamella.encoder.identity import Rounding
from lamella.encoder.sources import (
    MODEL_CONFIG,
    MODEL_FORMAT,
    MODEL_WEIGHTS,
    find_encoder,
    is_model,
    is_peft,
    is_saved_model,
    portable_name,
    verified_hash,
    weights_file,
)
from lamella.errors import ConfigError, ModelError, OutputError, PluginError, UntrustedPluginError
from lamella.files import file_sha256, is_empty, new_folder, read_json, write_bytes, write_json, write_text
from lamella.models.base_tokenizer import RECORD
from lamella.models.facts import Facts, read_facts
from lamella.models.peft_folder import read_peft
from lamella.plugins import TRUSTED, import_trusted_plugin
from lamella.validation import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 1
CARD = "README.md"


@dataclass(frozen=True)
class SavedModel:
    """The contents of a saved model's config.json."""

    base_name: str
    base_sha256: str
    base_tensors_sha256: str | None  # None if the base is a saved model, and in folders of older versions
    config: RunConfig  # encoder, head, windows and decoding; everything else has its default
    tuned_before: tuple[dict[str, Any], ...]  # in a flattened chain: the tunings of the models below
    facts: Facts
    weights_sha256: str | None = None  # None until it is written, and in folders of older versions
    rounding: Rounding | None = None  # of the base encoder, if it is a rounded copy and its original will do too
    base_tokenizer_sha256: str | None = None  # of the base encoder, if the folder has no tokenizer files

    @property
    def tunings(self) -> list[dict[str, Any]]:
        """Every tuning of the base encoder, in order."""
        return [*self.tuned_before, self.config.encoder.tuning]

    @property
    def head(self) -> dict[str, Any]:
        """The options of the head, with every default filled in."""
        return complete_head({name: getattr(self.config.learner, name) for name in HEAD_OPTIONS})

    def to_json(self) -> dict[str, Any]:
        """Return the table that config.json holds."""
        tensors = {"tensors_sha256": self.base_tensors_sha256} if self.base_tensors_sha256 else {}
        rounding = {"rounding": asdict(self.rounding)} if self.rounding else {}
        tokenizer = {RECORD: self.base_tokenizer_sha256} if self.base_tokenizer_sha256 else {}
        *before, tuning = (registry.complete("tuning", spec) for spec in self.tunings)
        return {
            MODEL_FORMAT: FORMAT_VERSION,
            **({"plugins": self.config.plugins} if self.config.plugins else {}),
            "base": {"name": self.base_name, "sha256": self.base_sha256, **tensors, **tokenizer, **rounding},
            **({"weights_sha256": self.weights_sha256} if self.weights_sha256 else {}),
            **({"tuned_before": before} if before else {}),
            "tuning": tuning,
            "head": self.head,
            "windows": self.config.windows.model_dump(),
            **self.measured_json(),
        }

    def measured_json(self) -> dict[str, Any]:
        """Return the part of that table that may change after training."""
        facts = self.facts.model_dump(mode="json", exclude_defaults=True)
        return {"decoding": self.config.decoding.model_dump(), **({"facts": facts} if facts else {})}


def read_saved(folder: Path, *, check_parts: bool = True) -> SavedModel:
    """Read and check the configuration of a model folder: of a saved model, or of a LoRA folder of peft.

    Without `check_parts`, torch is not imported for a saved model: its plugins are not imported, and the options of its
    tunings, mixers and task are taken as they are.
    """
    if is_peft(folder):
        return _read_peft(folder)
    path = folder / MODEL_CONFIG
    saved = read_json(path)
    version = saved.get(MODEL_FORMAT)
    if version != FORMAT_VERSION:
        raise ModelError(
            f"{path}: expected model format {FORMAT_VERSION}, got {version!r}; use another version of lamella."
        )
    try:
        name, sha256 = str(saved["base"]["name"]), str(saved["base"]["sha256"])
        tensors_sha256 = saved["base"].get("tensors_sha256")
        rounding = Rounding(**saved["base"]["rounding"]) if "rounding" in saved["base"] else None
        tokenizer = str(saved["base"][RECORD]) if RECORD in saved["base"] else None
        weights = str(saved["weights_sha256"]) if "weights_sha256" in saved else None
        before, measured = list(saved.get("tuned_before", [])), dict(saved.get("facts", {}))
        head, plugins = saved["head"], list(saved.get("plugins", []))
        named = {"tuning": [*before, saved["tuning"]], "task": head["task"], "mixer": head["mixer"]}
        table = {
            "plugins": _import_plugins_of(path, plugins, named) if check_parts else plugins,
            "encoder": {"name": name, "tuning": saved["tuning"]},
            "learner": head,
            "windows": saved["windows"],
            "decoding": saved["decoding"],
        }
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"{path}: damaged: expected base (with name and sha256), tuning, head, windows and decoding."
        ) from None
    try:
        earlier = [
            check_config({"encoder": {"tuning": tuning}}, where=str(path), check_parts=check_parts) for tuning in before
        ]
        config = check_config(table, where=str(path), check_parts=check_parts)
    except ConfigError as error:
        problems = "; ".join(error.problems)
        raise ModelError(f"{path}: damaged, or written by another version of lamella: {problems}") from None
    tuned_before = tuple(config.encoder.tuning for config in earlier)
    facts = read_facts(measured, str(path))
    return SavedModel(name, sha256, tensors_sha256, config, tuned_before, facts, weights, rounding, tokenizer)


def _read_peft(folder: Path) -> SavedModel:
    """Read a LoRA folder of peft as if it had been saved by Lamella; it records no hash of its base."""
    peft = read_peft(folder)
    name = portable_name(peft.base)
    table = {"encoder": {"name": name, "tuning": peft.tuning}, "windows": peft.windows}
    try:
        config = check_config(table, where=str(folder))
    except ConfigError as error:
        raise ModelError(f"{folder}: cannot be read as the tuning lora: {'; '.join(error.problems)}") from None
    return SavedModel(name, verified_hash(peft.base), None, config, (), Facts())


def import_plugins_of(folders: Iterable[Path]) -> None:
    """Import the plugins that saved models name, as far as the user has chosen them.

    A model that answers on onnxruntime is read without them, since its parts need no code of theirs.
    """
    for folder in filter(is_saved_model, folders):
        for plugin in read_saved(folder, check_parts=False).config.plugins:
            with contextlib.suppress(UntrustedPluginError):
                import_trusted_plugin(plugin)


def _import_plugins_of(path: Path, plugins: list[str], named: Mapping[str, Any]) -> list[str]:
    """Import the plugins that a saved model needs and return those found; fail if a part that it names is missing."""
    imported, untrusted = [], []
    for plugin in plugins:
        with contextlib.suppress(PluginError):  # its parts may come from elsewhere by now
            try:
                import_trusted_plugin(plugin)
                imported.append(plugin)
            except UntrustedPluginError:
                if importlib.util.find_spec(plugin.partition(".")[0]):  # not of the module: that imports its package
                    untrusted.append(plugin)
    if len(imported) < len(plugins):
        specs = [(family, spec) for family, value in named.items() for spec in _as_list(value)]
        for family, name in [(family, registry.split(spec)[0]) for family, spec in specs]:
            if name not in registry.names(family):
                trust = f", or, if it is a module that you trust, set {TRUSTED}={','.join(untrusted)}"
                raise ModelError(
                    f"{path}: needs the {family} {name!r}, which is not installed here; install the package that "
                    f"holds {' or '.join(plugins)}{trust if untrusted else ''}."
                )
    return imported


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def write_saved(
    folder: Path,
    saved: SavedModel,
    weights: bytes,
    tokenizer: PreTrainedTokenizerFast,
    *,
    card: str,
    replace_model: bool = True,
) -> None:
    """Write a model folder; other processes see the old folder or the new one, never a mixture."""
    from lamella.encoder.pretrained import quiet  # imports torch, which reading does not need

    with new_folder(folder, replace=replace_model) as fresh:
        write_bytes(fresh / MODEL_WEIGHTS, weights)
        if saved.base_tokenizer_sha256 is None:
            with quiet():
                tokenizer.save_pretrained(fresh)
        sha256 = hashlib.sha256(weights).hexdigest()
        write_json(fresh / MODEL_CONFIG, replace(saved, weights_sha256=sha256).to_json())
        write_text(fresh / CARD, card)


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a model folder that holds other folders, such as `.git`, which would be removed with it."""
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if inside:
        raise OutputError(
            f"{folder}: holds the folder {inside[0]}, which would be removed with the model; choose another folder."
        )


def check_new_model(out: Path, sources: Iterable[Path], *, overwrite: bool = False) -> None:
    """Refuse to write a model over one of the models that it is made of, their bases, or, without `overwrite`, another.

    Call it before the work starts.
    """
    place = out.resolve()
    for source in sources:
        taken = source.resolve()
        if place == taken or place in taken.parents or taken in place.parents:
            raise OutputError(
                f"{out}: holds the model {source}, which is read, or lies inside it; choose another --out."
            )
        if any(
            place == find_encoder(link.base_name).folder.resolve() for link in read_chain(source, check_parts=False)
        ):
            raise OutputError(f"{out}: holds the base of the model {source}; choose another --out.")
    if not out.exists() or is_empty(out):
        return
    if not overwrite:
        raise OutputError(f"{out}: exists already; choose another --out, or pass --overwrite.")
    if not (out.is_dir() and is_saved_model(out)):
        raise OutputError(f"{out}: expected a model folder to overwrite, found other files; choose another --out.")
    check_replaceable(out)


def write_measured(folder: Path, saved: SavedModel, *, card: str) -> None:
    """Update the decoding options, the facts and the card of a model folder; everything else stays as it is.

    The weights, by which other models identify this one, are not touched. The options, which count, are written last:
    after a kill before that, the model is as it was, and the same command writes both again.
    """
    write_text(folder / CARD, card)
    write_json(folder / MODEL_CONFIG, {**read_json(folder / MODEL_CONFIG), **saved.measured_json()})


def read_chain(folder: Path, *, check_parts: bool = True) -> list[SavedModel]:
    """Read a saved model, its base model, and so on down to the model on a pretrained encoder."""
    chain = [read_saved(folder, check_parts=check_parts)]
    while is_model(below := find_encoder(chain[-1].base_name).folder):
        chain.append(read_saved(below, check_parts=check_parts))
    return chain


def check_weights(folder: Path, saved: SavedModel, *, hash_file: Callable[[Path], str] = file_sha256) -> None:
    """Check that the trained tensors are those that were saved; folders of older versions have no hash to compare."""
    path = folder / MODEL_WEIGHTS
    if saved.weights_sha256 is None or not path.is_file():  # a missing file is reported where it is read
        return
    sha256 = hash_file(path)
    if sha256 != saved.weights_sha256:
        raise ModelError(
            f"{path}: expected sha256 {saved.weights_sha256[:12]}…, as recorded in {MODEL_CONFIG}, found "
            f"{sha256[:12]}…; the file is damaged or was replaced: copy or download the model again."
        )


def weights_sha256(folder: Path) -> str:
    """Hash the trained tensors of a model folder; warm starts and teachers are recorded by this hash."""
    return file_sha256(weights_file(folder))


def complete_head(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the default options of the task and of every mixer stage."""
    stages = {key: [registry.complete("mixer", stage) for stage in spec[key]] for key in ("mixer", "beside")}
    return {**spec, "task": registry.complete("task", spec["task"]), **stages}

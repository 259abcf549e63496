"""Find encoders by name: a folder, a folder of encoders, a Python package, the hub's cache, the hub; in this order.

A folder may hold a saved model. One saved model comes with this package, under the name `default`; a folder of that
name takes precedence only if it holds a model. The folder of encoders (`LAMELLA_ENCODERS`) holds encoders under their
hub names, so that a model records its base by a name that is valid on other machines too.

Nothing here imports torch; `pretrained` loads the weights. Only safetensors files count: a pickle can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lamella.encoder.packages import PACKAGED
from lamella.errors import EncoderError, MissingLibraryError, did_you_mean
from lamella.files import file_sha256, read_json
from lamella.runs import MODEL, describe_run_without_model, run_state

MODEL_CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
MODEL_FORMAT = "lamella"  # the key of config.json that marks a folder as a saved model of Lamella


DEFAULT_READER = "default"  # the reader that comes with the package
READERS = Path(__file__).parents[1] / "readers"
ENCODERS = "LAMELLA_ENCODERS"  # the environment variable with the path of the folder of encoders
HUB_OWNER = "sentence-transformers/"  # owner of the packaged encoders on the hub


@dataclass(frozen=True)
class Source:
    """The folder of an encoder or model, with the name that it was requested by."""

    name: str
    folder: Path
    kind: str  # "folder", "named", "package", "cache" or "hub"
    sha256: str | None = None  # the expected hash of the weights, if known

    @property
    def weights(self) -> list[Path]:
        """The weight files that transformers would read: a single file, or its shards."""
        single = weights_file(self.folder)
        return [single] if single.is_file() else sorted(self.folder.glob("model-*-of-*.safetensors"))


def find_encoder(name: str) -> Source:
    """Resolve a name to a folder on this machine, downloading from the hub only if no other place has it."""
    source = find_local_encoder(name)
    if source is not None:
        return source
    short = name.removeprefix(HUB_OWNER)
    try:
        return _from_hub(hub_id(name))
    except EncoderError:
        if short in PACKAGED:  # its package is not installed, or it would have been found
            raise MissingLibraryError(f"the encoder {name!r}", [PACKAGED[short][-1].distribution]) from None
        raise


def find_local_encoder(name: str) -> Source | None:
    """Resolve a name to a folder without asking the hub; None if this machine does not have it."""
    folder = named_folder(name)
    if name == DEFAULT_READER and folder.parent == READERS:
        return Source(name, folder, "package")
    if os.path.isdir(folder):  # False for a name that is too long, where pathlib raises
        return _in_folder(name, folder)
    on_hub = hub_id(name)
    return (
        _in_encoders(name)
        or _in_encoders(on_hub)
        or packaged_encoder(name.removeprefix(HUB_OWNER))
        or _in_cache(on_hub)
    )


def named_folder(name: str) -> Path:
    """Return the folder that a name may mean; `default` is the packaged reader unless such a folder holds a model."""
    folder = Path(os.path.expanduser(name))  # unlike pathlib's method, it keeps an unknown ~user
    if name == DEFAULT_READER and not _holds_model(folder):
        return READERS / name
    return folder


def packaged_encoder(name: str) -> Source | None:
    """Return the packaged encoder of that name, if its package is installed."""
    for packaged in PACKAGED.get(name, ()):
        if (folder := packaged.folder()) is not None:
            return Source(name, folder, "package", packaged.sha256)
    return None


def hub_id(name: str) -> str:
    """Return the name of an encoder on the hub."""
    return f"{HUB_OWNER}{name}" if name in PACKAGED else name


def is_saved_model(folder: Path) -> bool:
    """Return whether a folder is a model saved by Lamella, as opposed to an encoder saved by transformers."""
    path = folder / MODEL_CONFIG
    if not path.is_file():
        return False
    config = read_json(path)
    return isinstance(config, dict) and MODEL_FORMAT in config


def is_peft(folder: Path) -> bool:
    """Return whether a folder was saved by peft: a model that is stored as a change of its base encoder, like ours."""
    return (folder / PEFT_CONFIG).is_file() and not is_saved_model(folder)


def is_model(folder: Path) -> bool:
    """Return whether a folder holds a change of a base encoder, as opposed to an encoder."""
    return is_saved_model(folder) or is_peft(folder)


def weights_file(folder: Path) -> Path:
    """Return where a folder has its weights, if they are not in shards."""
    return folder / (PEFT_WEIGHTS if is_peft(folder) else MODEL_WEIGHTS)


def model_folder(path: Path) -> Path:
    """Return the model folder that a path means: the path itself, or the `model` of a run folder."""
    return path / MODEL if is_saved_model(path / MODEL) else path


def portable_name(source: Source) -> str:
    """Return a name that is valid from any working directory: the absolute path if the encoder is a folder."""
    return os.path.abspath(os.path.expanduser(source.name)) if source.kind == "folder" else source.name


def verified_hash(source: Source, *, hash_file: Callable[[Path], str] = file_sha256) -> str:
    """Return the hash that identifies the weights of an encoder; check it if the expected hash is known.

    The hash of a saved model covers its tensors, its tunings and the hash of its base. It does not cover thresholds and
    windows, which may change without it.
    """
    sha256 = hash_weights(_check_weights(source).weights, hash_file=hash_file)
    if is_saved_model(source.folder):
        config = read_json(source.folder / MODEL_CONFIG)
        base = config.get("base")
        base_sha256 = base.get("sha256") if isinstance(base, dict) else None  # not the name: a folder may move
        identity = [sha256, base_sha256, config.get("tuning"), config.get("tuned_before")]
        sha256 = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    elif is_peft(source.folder):
        identity = [sha256, file_sha256(source.folder / PEFT_CONFIG)]
        sha256 = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    if source.sha256 is not None and sha256 != source.sha256:
        raise EncoderError(
            f"{source.folder}: expected the weights of {source.name} with sha256 {source.sha256}, found {sha256}; "
            "delete that folder and reinstall its package."
        )
    return sha256


def hash_weights(files: Sequence[Path], *, hash_file: Callable[[Path], str] = file_sha256) -> str:
    """Return the sha256 of a weight file; for several shards, the sha256 of their hashes."""
    digests = [hash_file(path) for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _holds_model(path: Path) -> bool:
    """Return whether a folder is a model folder or a run with a model; the config.json of a run does not count."""
    folder = model_folder(path)
    return (folder / MODEL_CONFIG).is_file() and run_state(folder) is None


def _in_folder(name: str, folder: Path) -> Source:
    folder = model_folder(folder)
    if found := describe_run_without_model(folder):
        raise EncoderError(f"{folder}: expected an encoder or a saved model, found {found}.")
    if not (folder / MODEL_CONFIG).is_file() and not is_peft(folder):
        files = ", ".join(sorted(file.name for file in folder.iterdir())[:6]) or "an empty folder"
        raise EncoderError(
            f"{folder}: expected an encoder or a saved model (a folder with config.json), found {files}."
        )
    return _check_weights(Source(name, folder, "folder"))


def _in_encoders(name: str) -> Source | None:
    """Return the encoder of that name in the folder of encoders, if there is one."""
    encoders = os.environ.get(ENCODERS)
    inside = encoders and not os.path.isabs(name) and ".." not in Path(name).parts
    if not encoders or not inside or not os.path.isdir(folder := os.path.join(os.path.expanduser(encoders), name)):
        return None
    inner = model_folder(Path(folder))
    if not (inner / MODEL_CONFIG).is_file() and not is_peft(inner):  # another place may have the name
        return None
    return replace(_in_folder(name, Path(folder)), kind="named")


def _in_cache(name: str) -> Source | None:
    """Return the newest snapshot of a hub repository in the local cache, if it has weights."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, MODEL_CONFIG)
        if not isinstance(config, str):
            config = try_to_load_from_cache(name, PEFT_CONFIG)
    except HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    source = Source(name, Path(config).parent, "cache")
    return source if source.weights else None


def _from_hub(name: str) -> Source:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    places = f"not a folder, not in {ENCODERS} (with a config.json), not a packaged encoder ({', '.join(PACKAGED)})"
    nowhere = f"encoder {name!r}: {places} and not in the local cache"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") == "1":
        raise EncoderError(f"{nowhere}, and the hub is switched off (HF_HUB_OFFLINE).{_nearest(name)}")
    try:
        # A short request first: without a network it fails at once, instead of after a retry for every file.
        files = HfApi().model_info(name, timeout=5).siblings or []
        if not any(file.rfilename.endswith(".safetensors") for file in files):
            raise EncoderError(
                f"encoder {name!r}: expected safetensors weights on the hub, found none; pickles are never loaded."
            )
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        return Source(name, Path(snapshot_download(name, allow_patterns=patterns)), "hub")
    except HFValidationError:
        raise EncoderError(f"{nowhere}, and it is not a valid hub id.{_nearest(name)}") from None
    except RepositoryNotFoundError:
        raise EncoderError(f"{nowhere}, and the hub has no such model that you can access.{_nearest(name)}") from None
    except EncoderError:
        raise
    except Exception as error:  # the client of the hub changed its HTTP library, and so its errors, between versions
        reason = type(error).__name__
        raise EncoderError(
            f"{nowhere}, and the hub cannot be reached ({reason}); check the network connection.{_nearest(name)}"
        ) from None


def _nearest(name: str) -> str:
    hint = did_you_mean(name, [*PACKAGED, DEFAULT_READER])
    return hint if "mean" in hint else ""


def _check_weights(source: Source) -> Source:
    if not source.weights:
        pickles = [*source.folder.glob("*.bin"), *source.folder.glob("*.pt"), *source.folder.glob("*.pth")]
        found = f"only a pickle ({pickles[0].name}), which is never loaded" if pickles else "none"
        raise EncoderError(f"{source.folder}: expected weights in safetensors format ({MODEL_WEIGHTS}), found {found}.")
    return source

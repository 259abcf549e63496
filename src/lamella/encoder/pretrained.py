"""Load pretrained encoders and their tokenizers.

`trust_remote_code` is never on, and weights are always loaded in fp32.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file

from lamella.data.windows.tokenizer_check import find_problem
from lamella.encoder.config_check import read_configuration
from lamella.encoder.encoder import Encoder
from lamella.encoder.families import family_of
from lamella.encoder.identity import Rounding
from lamella.encoder.sources import Source
from lamella.errors import EncoderError, counted, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DROPOUT_OPTIONS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
)


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder that is ready to run, its tokenizer, and the hashes that identify it."""

    encoder: Encoder
    tokenizer: PreTrainedTokenizerFast
    name: str
    sha256: str
    folders: tuple[Path, ...] = ()  # the folder it was loaded from, then the folders of its base models
    tensors_sha256: str | None = None  # of a pretrained encoder, before any training: see hash_parameters
    rounding: Rounding | None = None  # of a pretrained encoder, if a model records that it is a rounded copy
    tokenizer_sha256: str | None = None  # of the base encoder, if a model has no tokenizer files of its own
    original_sha256: str | None = None  # hash of the tensors, if the original was loaded instead of the rounded copy

    @property
    def loaded_sha256(self) -> str:
        """The hash that identifies the tensors in memory; `sha256` identifies what the model was trained on."""
        if self.original_sha256 is None:
            return self.sha256
        return hashlib.sha256(f"{self.sha256} {self.original_sha256}".encode()).hexdigest()


def load_pretrained(source: Source, *, dropout: float | None = None, pooler: bool = False) -> Encoder:
    """Load the weights of a pretrained encoder in fp32; `dropout` overrides the encoder's own rates."""
    from transformers import MODEL_MAPPING

    folder = source.folder
    config = load_configuration(source)
    family = family_of(config.model_type, str(folder))
    options: dict[str, Any] = {}
    if family.optional_pooler:
        options["add_pooling_layer"] = pooler
    elif pooler:
        raise EncoderError(f"{folder}: {config.model_type} encoders have no pooled output; choose other layers.")
    for key in DROPOUT_OPTIONS:
        if dropout is not None and hasattr(config, key):
            setattr(config, key, dropout)
    try:
        # Tensors of another shape are rejected below, with their names.
        model, report = build_model(MODEL_MAPPING, source, config, ignore_mismatched_sizes=True, **options)
    except Exception as error:
        raise EncoderError(f"{folder}: the weights cannot be loaded: {one_line(error)}.") from None
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        raise EncoderError(
            f"{folder}: expected the weights of a {config.model_type} encoder; {counted(len(wrong), 'tensor')} missing "
            f"or of another shape ({', '.join(wrong[:3])}{', …' if len(wrong) > 3 else ''})."
        )
    return Encoder(model)


def build_model(kinds: Mapping[Any, Any], source: Source, config: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Build a model of transformers in fp32 from the weight files of a folder; return it, and what did not fit.

    Given the folder, transformers would choose the files itself: by config.json, an index or the name of a folder
    inside, they may be others than those that were hashed, also outside of the folder.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in source.weights:
        shard = load_file(path)
        if twice := sorted(tensors.keys() & shard.keys()):
            raise EncoderError(f"{path.name} has tensors that another shard has as well ({', '.join(twice[:3])})")
        tensors |= shard
    config._attn_implementation = None  # config.json may name one that is downloaded, and run
    with quiet():
        model, report = kinds[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,  # transformers 5 would use the type of the file
            output_loading_info=True,
            **options,
        )
    return model, report


def load_configuration(source: Source) -> Any:
    """Load the configuration of a pretrained encoder, and check that its kind is supported."""
    from transformers import AutoConfig

    folder = source.folder
    family_of(read_configuration(source)["model_type"], str(folder))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises a different class for each kind of invalid value
        raise EncoderError(f"{folder}: config.json cannot be used: {one_line(error)}.") from None


def load_tokenizer(source: Source, *, as_stored: bool = False) -> PreTrainedTokenizerFast:
    """Load the tokenizer that is stored beside the weights.

    `as_stored` takes the rules of its tokenizer.json. Otherwise transformers decides: for some encoders it takes only
    the vocabulary from the file, and rules of its own, such as how white space is split.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if as_stored else AutoTokenizer

    folder = source.folder
    with quiet():
        try:
            tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            problem = find_problem(tokenizer.backend_tokenizer) if getattr(tokenizer, "is_fast", False) else None
        except Exception as error:  # a damaged file can fail anywhere in the library
            raise EncoderError(f"{folder}: the tokenizer cannot be loaded: {one_line(error)}.") from None
    if problem is not None:
        raise EncoderError(f"{folder}: expected a tokenizer, found a damaged one ({problem}).")
    # Without its files, transformers builds a tokenizer that knows the special tokens and nothing else.
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if not any((folder / file).is_file() for file in files):
        raise EncoderError(f"{folder}: expected a tokenizer ({' or '.join(files)}), found none.")
    if not getattr(tokenizer, "is_fast", False):
        raise EncoderError(f"{folder}: expected a fast tokenizer, which gives character offsets; found a slow one.")
    if tokenizer.cls_token is None:  # as in EuroBERT: a text begins with another token, which serves the same purpose
        tokenizer.cls_token = tokenizer.bos_token
    return cast("PreTrainedTokenizerFast", tokenizer)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and tables of transformers; Lamella reports what matters itself."""
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

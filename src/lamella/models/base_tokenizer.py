"""Models without tokenizer files: they record a hash of the tokenizer of their base encoder, and use that.

The hash covers what windows are made of: the vocabulary, the special tokens, and the tokens of sample texts. It does
not cover the file, which each version of its library writes in another way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

import tokenizers

from lamella.data.examples import Context
from lamella.data.windows.features import pair_template
from lamella.data.windows.tokens import Tokenizing, tokenise_contexts, without_truncation
from lamella.encoder.sources import MODEL_CONFIG, Source, find_encoder, is_saved_model
from lamella.errors import ModelError
from lamella.files import read_json
from lamella.models.tokenizer_file import TOKENIZER, TokenizerFile, open_tokenizer
from lamella.user_cache import remembered, remembered_sha256

RECORD = "tokenizer_sha256"  # the key of `base` in config.json
SAMPLES = (
    "The probe Huygens landed on Titan on 14 January 2005, at 12:43 UTC; it sent 350 pictures (of 700).",
    "Don't re-enter: e-mail me@example.org, pay $1,000.50 or 3½ %, see https://example.org/a_b?c=1#d.",
    "  two  spaces,\ttabs,\nlines\r\n\n and a\u00a0no-break space ",
    "Crème brûlée, Straße, ÀÉÎÕÜ, e\u0301 and ﬁ, ＡＢＣ１２３, İstanbul, ŁÓDŹ, naïveté",
    "이순신은 1598년 노량 해전에서 전사하였다. 그는 ‘난중일기’를 남겼다.",
    "東京は日本の首都です。人口は約1400万人。 北京是中国的首都。",
    "Москва — столица России. Η Αθήνα είναι πρωτεύουσα. القاهرة عاصمة مصر. दिल्ली भारत की राजधानी है।",
    "antidisestablishmentarianism xqzjvkw 🙂👍🏽 ∑≈ → <s> [CLS] </s> [SEP]",
)


def hash_tokenizer(tokenizer: Tokenizing) -> str:
    """Hash a tokenizer as windows use it; equal tokenizers in different files have equal hashes."""
    plain = without_truncation(tokenizer)
    vocabulary = sorted(plain.get_vocab(with_added_tokens=True).items(), key=lambda entry: (entry[1], entry[0]))
    tokens = tokenise_contexts(plain, [Context(text) for text in SAMPLES])
    samples = [[ids.tolist(), offsets.tolist()] for ids, offsets in tokens.values()]
    return hashlib.sha256(json.dumps([vocabulary, astuple(pair_template(tokenizer)), samples]).encode()).hexdigest()


class Record(NamedTuple):
    """What the config.json of a model without tokenizer files holds."""

    base: str  # the name of the base encoder
    sha256: str  # of its tokenizer


def read_record(folder: Path) -> Record | None:
    """Return the record of a model folder; None if it has tokenizer files of its own, or holds no model."""
    base = read_json(folder / MODEL_CONFIG).get("base") if is_saved_model(folder) else None
    return Record(str(base.get("name")), str(base[RECORD])) if isinstance(base, dict) and RECORD in base else None


def tokenizer_folder(folder: Path, *, find: Callable[[str], Source | None] = find_encoder) -> Path:
    """Return the folder with the tokenizer files of a model or an encoder: its own, or that of its base.

    If `find` returns None for a base, return the folder of the model on it.
    """
    passed: set[Path] = set()
    while (record := read_record(folder)) and folder.resolve() not in passed:  # loading reports a circle
        passed.add(folder.resolve())
        base = find(record.base)
        if base is None:
            break
        folder = base.folder
    return folder


def open_tokenizer_of(
    folder: Path, model_type: str, open_tokenizer: Callable[[Path, str], TokenizerFile | None] = open_tokenizer
) -> TokenizerFile | None:
    """Open the tokenizer of a model, its own or that of its base; None if that needs transformers."""
    where = tokenizer_folder(folder)
    tokenizer = open_tokenizer(where, model_type) if (where / TOKENIZER).is_file() else None
    if tokenizer is not None and (record := read_record(folder)) is not None:
        check_tokenizer(folder, record, _hash_file(tokenizer))
    return tokenizer


def check_tokenizer(folder: Path, record: Record, found: str) -> None:
    """Check that a model gets the tokenizer that it records, by the hash of the one found."""
    if found != record.sha256:
        raise ModelError(
            f"{folder}: expected base encoder {record.base!r} with a tokenizer of sha256 {record.sha256[:12]}…, found "
            f"{found[:12]}…; the model has no tokenizer files of its own: use the encoder that it was trained on, "
            "with its tokenizer files."
        )


def _hash_file(tokenizer: TokenizerFile) -> str:
    """Hash a tokenizer as `hash_tokenizer` does; only once, because a large one takes a second."""
    special = [tokenizer.cls_token_id, tokenizer.pad_token_id]
    key = ["tokenizer", tokenizers.__version__, SAMPLES, special, remembered_sha256(Path(tokenizer.name_or_path))]
    return str(remembered(key, lambda: hash_tokenizer(tokenizer)))

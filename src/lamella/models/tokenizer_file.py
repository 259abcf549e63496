"""Tokenizers that need only their tokenizer.json, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import Tokenizer

from lamella.data.windows.tokenizer_check import find_problem
from lamella.data.windows.tokens import switch_truncation_off
from lamella.errors import ModelError, one_line
from lamella.files import file_sha256, read_json

TOKENIZER = "tokenizer.json"
OPTIONS = ("tokenizer_config.json", "special_tokens_map.json")  # the files that name special tokens, the newest first

# The tokens that the tokenizers of transformers have if no file names them: first token, padding.
FIRST_AND_PADDING = {
    "albert": ("[CLS]", "<pad>"),
    "mpnet": ("<s>", "<pad>"),
    "roberta": ("<s>", "<pad>"),
    "xlm-roberta": ("<s>", "<pad>"),
}
BERT_FIRST_AND_PADDING = ("[CLS]", "[PAD]")


class TokenizerFile:
    """A tokenizer as Lamella uses it: the backend without truncation, and the numbers of two special tokens."""

    def __init__(self, backend: Tokenizer, path: Path, *, cls_token_id: int, pad_token_id: int) -> None:
        self.backend_tokenizer = backend
        self.cls_token_id, self.pad_token_id, self.name_or_path = cls_token_id, pad_token_id, str(path)
        switch_truncation_off(self)  # a copy without it would take as long as half a question


def open_tokenizer(folder: Path, model_type: str) -> TokenizerFile | None:
    """Open the tokenizer of a model or an encoder; None if its special tokens are not known.

    As with transformers, a padding that is not known is 0.
    """
    backend = read_tokenizer(folder)
    names = {key: value for file in reversed(OPTIONS) for key, value in read_options(folder, file).items()}
    first, padding = FIRST_AND_PADDING.get(model_type, BERT_FIRST_AND_PADDING)
    cls = backend.token_to_id(_text(names.get("cls_token", first)) or _text(names.get("bos_token")))
    pad = backend.token_to_id(_text(names.get("pad_token", padding)))
    path = folder / TOKENIZER
    return None if cls is None else TokenizerFile(backend, path, cls_token_id=cls, pad_token_id=pad or 0)


class Tokenizers:
    """Opens tokenizers so that models with equal files share one while any of them is in use."""

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[tuple[str, ...], TokenizerFile] = WeakValueDictionary()

    def open(self, folder: Path, model_type: str) -> TokenizerFile | None:
        """Open the tokenizer of a model or an encoder, as `open_tokenizer`."""
        files = [folder / name for name in (TOKENIZER, *OPTIONS)]
        key = (model_type, *(file_sha256(path) if path.is_file() else "" for path in files))
        tokenizer = self._shared.get(key)
        if tokenizer is None and (tokenizer := open_tokenizer(folder, model_type)) is not None:
            self._shared[key] = tokenizer
        return tokenizer


def read_options(folder: Path, file: str = OPTIONS[0]) -> dict[str, Any]:
    """Return the options that a folder stores beside its tokenizer; empty without the file."""
    options = read_json(folder / file) if (folder / file).is_file() else {}
    return options if isinstance(options, dict) else {}


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer.json of a folder."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelError(f"{path}: no such file; the folder is incomplete.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        problem = find_problem(tokenizer)
    except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
        problem = one_line(error)
    if problem is not None:
        raise ModelError(f"{path}: expected a tokenizer, found a damaged file ({problem}).")
    return tokenizer


def _text(token: Any) -> str:
    """Return the text of a special token: a string, or a table with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content.isprintable() else ""  # no half of a surrogate pair

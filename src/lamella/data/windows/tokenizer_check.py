"""Check a tokenizer that was read from a file: some damage shows only when a text is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from lamella.data.windows.features import pair_template
from lamella.data.windows.tokens import Tokenizing
from lamella.errors import EncoderError, one_line, shorten

UNKNOWN = "\U0002a6a5 \ua66e"  # letters that hardly any vocabulary holds


def find_problem(tokenizer: Tokenizer) -> str | None:
    """Describe why a tokenizer cannot tokenise every text; None if it can."""
    for table in _templates(tokenizer):
        known = table.get("special_tokens", {})
        for piece in (*table.get("single", ()), *table.get("pair", ())):
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in known:  # the library would end in a panic
                return f"its post-processor has no special token {shorten(name)}"
    model = tokenizer.model
    unknown = getattr(model, "unk_token", None)
    id = None if unknown is None else model.token_to_id(unknown)
    if id is not None and model.id_to_token(id) != unknown:  # a copy of the tokenizer would lose it
        return f"its unknown token {shorten(unknown)} has the same id as another token"
    try:
        tokenizer.encode(UNKNOWN, add_special_tokens=False)
    except Exception as error:  # the library raises a bare Exception
        return one_line(error)
    return None


def check_ids(tokenizer: Tokenizing, rows: int, where: object, *, every: bool = True) -> None:
    """Check that an encoder with this many embeddings has one for each token; raise EncoderError for the highest id.

    transformers adds a special token that the vocabulary lacks, such as an unknown `pad_token`, with the next free id.
    Without `every`, look at each id only if there are too many tokens: a vocabulary of 250,000 tokens takes 0.1 s.
    """
    template, backend = pair_template(tokenizer), tokenizer.backend_tokenizer
    highest = max(*template.prefix, *template.middle, *template.suffix, template.pad_id)
    if every or backend.get_vocab_size() > rows:
        highest = max(highest, _highest_id(tokenizer))
    if highest >= rows:
        token = backend.id_to_token(highest)
        name = "" if token is None else f" ({shorten(token)})"
        raise EncoderError(
            f"{where}: expected a tokenizer with ids below {rows:,}, the number of embeddings of its encoder, found id "
            f"{highest:,}{name}; use the tokenizer files that belong to the encoder."
        )


def _highest_id(tokenizer: Tokenizing) -> int:
    if tokenizer not in _HIGHEST:  # readers of a server may share a tokenizer
        _HIGHEST[tokenizer] = max(tokenizer.backend_tokenizer.get_vocab().values(), default=0)
    return _HIGHEST[tokenizer]


_HIGHEST: WeakKeyDictionary[Tokenizing, int] = WeakKeyDictionary()


def _templates(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the templates by which a tokenizer adds special tokens."""
    if tokenizer.post_processor is None:
        return
    table = json.loads(tokenizer.post_processor.__getstate__())
    for processor in table.get("processors", [table]):
        if processor.get("type") == "TemplateProcessing":
            yield processor

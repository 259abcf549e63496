"""Check a tokenizer that was read from a file: some damage shows only when a text is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from lamella.errors import one_line, shorten

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


def _templates(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the templates by which a tokenizer adds special tokens."""
    if tokenizer.post_processor is None:
        return
    table = json.loads(tokenizer.post_processor.__getstate__())
    for processor in table.get("processors", [table]):
        if processor.get("type") == "TemplateProcessing":
            yield processor

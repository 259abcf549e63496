"""What tests without torch share: short examples and a small tokenizer. `doubles` adds tiny encoders and readers."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import read
from lamella.data.windows.tokens import Tokenizing

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


def example(context: str, answer: str | None = None, question: str = "What is it?", id: str = "q1") -> Example:
    """Return an example whose answer is at its first occurrence in the context."""
    answers = () if answer is None else (Answer(answer, context.index(answer)),)
    return Example(id=id, question=question, context=Context(context), answers=answers)


def examples_about(contexts: Sequence[str]) -> list[Example]:
    """Return one unanswerable example for each context."""
    return [example(text, id=f"q{number}") for number, text in enumerate(contexts)]


@dataclass(frozen=True, eq=False)
class PlainTokenizer:
    """A tokenizer that needs only the library of that name."""

    backend_tokenizer: Tokenizer
    cls_token_id: int = 2
    pad_token_id: int = 0
    name_or_path: str = "plain"


@functools.cache
def plain_tokenizer() -> PlainTokenizer:
    """Return BERT's tokenizer with a small vocabulary: every character and the longer words of the bundled text."""
    text = " ".join(sorted({example.context.text for example in read("demo:train").examples}))
    characters = sorted({*text.lower(), *"abcdefghijklmnopqrstuvwxyz0123456789"} - {" "})
    words = sorted(set(re.findall(r"[a-z]{5,}", text.lower())))[::4]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *characters, *(f"##{piece}" for piece in characters), *words]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PlainTokenizer(tokenizer)


if HAS_TORCH:
    from lamella.testing.tiny import FAMILIES, tiny_tokenizer

    TOKENIZERS = ("plain", *FAMILIES)
else:
    TOKENIZERS = ("plain",)


def tokenizer_of(kind: str) -> Tokenizing:
    """Return one of the `TOKENIZERS`: the plain one, or that of an encoder family, which needs torch."""
    return plain_tokenizer() if kind == "plain" else tiny_tokenizer(kind)

"""Tokenise texts, with exact character offsets.

Each distinct text is tokenised once, without special tokens and without truncation. Hangul is composed first, since
tokenizers do not know syllables that are written as jamo; offsets are those of the original text.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Regex, Tokenizer, models, normalizers

from lamella.data.examples import Context
from lamella.data.windows.context_cache import ContextCache
from lamella.languages.hangul import compose_hangul, compose_with_places

Integers = NDArray[np.int32]
IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # U+3000 is the last white space
JOINERS = "\u200c\u200d"
PIECE = 50_000  # characters of a context to tokenise at once
GROUP = 64  # texts whose offsets are computed at once


class Tokenizing(Protocol):
    """The interface of a tokenizer: a fast tokenizer of transformers, or a tokenizer.json file on its own."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    @property
    def cls_token_id(self) -> Any: ...

    @property
    def pad_token_id(self) -> Any: ...

    @property
    def name_or_path(self) -> str: ...


def without_truncation(tokenizer: Tokenizing) -> Tokenizer:
    """Return a copy of the backend tokenizer without truncation and padding, which some encoders switch on.

    SentencePiece reads every white space as a space. The DeBERTa tokenizer of transformers 5 lacks this rule, so that a
    no-break space would join two unknown words into one token; the copy has it.

    Copying takes longer than answering a question, so the copy is reused until tokens are added to the original.
    """
    original = tokenizer.backend_tokenizer
    plain = _PLAIN.get(tokenizer)
    if plain is None or plain.get_vocab_size() != original.get_vocab_size():
        plain = Tokenizer.from_str(original.to_str())
        plain.no_truncation()
        plain.no_padding()
        if isinstance(plain.model, models.Unigram):
            own = [] if plain.normalizer is None else [plain.normalizer]
            plain.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"[^\S ]"), " "), *own])
        _PLAIN[tokenizer] = plain
    return plain


def switch_truncation_off(tokenizer: Tokenizing) -> None:
    """Switch truncation and padding off for good, so that `without_truncation` needs no copy.

    Only for a tokenizer that nothing else uses: transformers switches them on for the length of a call.
    """
    original = tokenizer.backend_tokenizer
    original.no_truncation()
    original.no_padding()
    if not isinstance(original.model, models.Unigram):  # which still needs the rule for white space
        _PLAIN[tokenizer] = original


_PLAIN: WeakKeyDictionary[Tokenizing, Tokenizer] = WeakKeyDictionary()


def remember_contexts(tokenizer: Tokenizing, cache: ContextCache, name: str) -> None:
    """Keep the tokens of contexts in a cache, under the name of the tokenizer: equal tokenizers may share a name."""
    _CACHES[tokenizer] = (cache, name)


def remembers_contexts(tokenizer: Tokenizing) -> bool:
    """Return whether the tokens of contexts are kept in a cache."""
    return tokenizer in _CACHES


_CACHES: WeakKeyDictionary[Tokenizing, tuple[ContextCache, str]] = WeakKeyDictionary()


def context_tokens(
    tokenizer: Tokenizing, plain: Tokenizer, contexts: Sequence[Context]
) -> dict[str, tuple[Integers, Integers]]:
    """Return the token ids and character offsets of each distinct text, from the tokenizer's cache if it has one.

    `plain` is the tokenizer without truncation.
    """
    if tokenizer not in _CACHES:
        return tokenise_contexts(plain, contexts)
    cache, name = _CACHES[tokenizer]
    texts = dict.fromkeys(context.text for context in contexts)
    known = {text: tokens for text in texts if (tokens := cache.get(name, text)) is not None}
    new = tokenise_contexts(plain, [context for context in contexts if context.text not in known])
    for text, tokens in new.items():
        cache.put(name, text, tokens)
    return {**known, **new}


def tokenise_questions(plain: Tokenizer, questions: Sequence[str]) -> dict[str, Integers]:
    """Return the token ids of each distinct question."""
    distinct = list(dict.fromkeys(questions))
    readable = [compose_hangul(encodable(text)) for text in distinct]
    encodings = plain.encode_batch_fast(readable, add_special_tokens=False)
    return {text: np.array(encoding.ids, np.int32) for text, encoding in zip(distinct, encodings, strict=True)}


def tokenise_contexts(plain: Tokenizer, contexts: Sequence[Context]) -> dict[str, tuple[Integers, Integers]]:
    """Return the token ids and character offsets of each distinct text."""
    distinct = list(dict.fromkeys(context.text for context in contexts))
    short = [text for text in distinct if len(text) <= PIECE]
    composed = [compose_with_places(encodable(text)) for text in short]
    encodings = plain.encode_batch([text for text, _ in composed], add_special_tokens=False)
    tokenised: dict[str, tuple[Integers, Integers]] = {}
    for at in range(0, len(short), GROUP):
        group = slice(at, at + GROUP)
        tokenised.update(zip(short[group], _ids_and_offsets(encodings[group], composed[group]), strict=True))
    for text in distinct:
        if len(text) > PIECE:
            ids, offsets = zip(*tokenise_in_pieces(plain, text), strict=True)
            tokenised[text] = np.concatenate(ids), np.concatenate(offsets)
    return tokenised


def _ids_and_offsets(
    encodings: Sequence[Encoding], composed: Sequence[tuple[str, Sequence[int] | None]]
) -> list[tuple[Integers, Integers]]:
    """Return the ids and offsets of each text; `composed` are the texts, with the places of `compose_with_places`."""
    all_offsets = _exact_offsets([encoding.offsets for encoding in encodings], [text for text, _ in composed])
    return [
        (
            np.array(encoding.ids, np.int32),
            offsets if places is None else np.array(places, np.int32)[offsets],
        )
        for encoding, offsets, (_, places) in zip(encodings, all_offsets, composed, strict=True)
    ]


def tokenise_in_pieces(plain: Tokenizer, text: str) -> Iterator[tuple[Integers, Integers]]:
    """Tokenise a long text in pieces: the output of a tokenizer takes a hundred times the memory of ids and offsets."""
    begin = 0
    while begin < len(text):
        end = _end_of_piece(text, begin)
        piece, places = compose_with_places(encodable(text[begin:end]))
        encoding = plain.encode(piece, add_special_tokens=False)
        ((ids, offsets),) = _ids_and_offsets([encoding], [(piece, places)])
        yield ids, offsets + np.int32(begin)
        begin = end


class SlidingTokens:
    """The tokens of a long text, read from its beginning to its end, of which only a part is in memory."""

    def __init__(self, plain: Tokenizer, text: str) -> None:
        self._pieces = tokenise_in_pieces(plain, text)
        self.ids, self.offsets = np.empty(0, np.int32), np.empty((0, 2), np.int32)
        self.first = 0  # index in the whole text of the first token in memory
        self.complete = False  # whether the last token of the text was read

    @property
    def end(self) -> int:
        """One past the index of the last token that was read."""
        return self.first + len(self.ids)

    def move(self, first: int, end: int) -> None:
        """Forget the tokens before `first`, and read until `end` or the end of the text, perhaps some tokens more."""
        kept = slice(first - self.first, None)
        ids, offsets, read = [self.ids[kept]], [self.offsets[kept]], self.end
        while read < end and not self.complete:
            piece = next(self._pieces, None)
            if piece is None:
                self.complete = True
                break
            ids.append(piece[0])
            offsets.append(piece[1])
            read += len(piece[0])
        self.first, self.ids, self.offsets = first, np.concatenate(ids), np.concatenate(offsets)


def _end_of_piece(text: str, begin: int) -> int:
    """Return an end before a space that follows a word, where every tokenizer starts a token; else any position."""
    at = begin + PIECE
    while (at := text.find(" ", at, begin + 2 * PIECE)) >= 0 and text[at - 1].isspace():
        at += 1
    return at if at >= 0 else min(begin + 2 * PIECE, len(text))


def encodable(text: str) -> str:
    """Replace each lone surrogate, which the tokenizer rejects, by one question mark, so that offsets stay the same."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _exact_offsets(raw: Sequence[Sequence[tuple[int, int]]], texts: Sequence[str]) -> list[Integers]:
    """Return the offsets of the tokens of each text, such that they cover exactly the visible characters of a token.

    SentencePiece and byte-level tokenizers count the space before a word as part of it; the space is removed. A token
    of spaces only gets a begin after its end, so that it adds nothing to a span on either side:

        "a   b"   a (0, 1)   Ġ (1, 3)   Ġb (3, 5)     become     (0, 1)   (4, 1)   (4, 5)

    BERT drops combining marks and joiners before it splits, so that "é" written as two characters would lose its
    accent; ALBERT loses one of the two characters that it reads as a quotation mark. A character that belongs to no
    token is added to the token before it, or else to the token after it, if they are adjacent.
    """
    counts = [len(offsets) for offsets in raw]
    # The texts are processed as one, which is faster; the space between two of them belongs to no token.
    joined = " ".join(texts)
    lengths = np.array([len(text) for text in texts], np.int64)
    text_begins = np.cumsum(lengths + 1) - lengths - 1
    lowest, highest = np.repeat(text_begins, counts), np.repeat(text_begins + lengths, counts)  # per token
    pairs = itertools.chain.from_iterable(itertools.chain.from_iterable(raw))
    offsets = np.fromiter(pairs, np.int64, 2 * len(lowest)).reshape(-1, 2) + lowest[:, None]

    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    spaces = IS_SPACE[np.minimum(codes, len(IS_SPACE) - 1)]
    solid = np.flatnonzero(~spaces)
    before = np.append(0, np.cumsum(~spaces))  # how many characters before each are no spaces
    begin = np.append(solid, len(joined))[before[offsets[:, 0]]]  # the first character that is no space
    end = np.append(0, solid + 1)[before[offsets[:, 1]]]  # one past the last character that is no space
    begin, end = np.minimum(begin, highest), np.maximum(end, lowest)
    spaces = np.append(spaces, True)  # so that the index past the end is valid

    following = np.append(begin[1:], len(joined))
    for token in np.flatnonzero((end < following) & ~spaces[end]):
        while end[token] < following[token] and _belongs_to_word(joined[end[token]]):
            end[token] += 1
    previous = np.append(0, end[:-1])
    for token in np.flatnonzero((previous < begin) & ~spaces[begin - 1]):
        while previous[token] < begin[token] and _belongs_to_word(joined[begin[token] - 1]):
            begin[token] -= 1
    exact = (np.stack([begin, end], axis=1) - lowest[:, None]).astype(np.int32)
    ends = itertools.accumulate(counts)
    return [exact[end - count : end].copy() for end, count in zip(ends, counts, strict=True)]  # not the memory of all


def _belongs_to_word(character: str) -> bool:
    """Check whether a character without a token is part of the adjacent word.

    Marks, joiners and visible characters are; direction marks and zero-width spaces at the edge of a word are not,
    since annotators do not select them. The tag characters, which spell the flags of Scotland and Wales, are.
    """
    if character.isspace():
        return False
    invisible = unicodedata.category(character) in ("Cc", "Cf")
    return not invisible or character in JOINERS or "\U000e0020" <= character <= "\U000e007f"

"""From texts to tokens, with exact places in the text.

A text is tokenised once, however many questions ask about it, without special tokens and without truncation.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from lamella.data.examples import Context

Integers = NDArray[np.int32]
IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # no white space comes after U+3000
JOINERS = "\u200c\u200d"
PIECE = 50_000  # characters of a context that are tokenised at once


class Tokenizing(Protocol):
    """What is asked of a tokenizer: transformers' fast ones have it, and so has the file tokenizer.json alone."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    @property
    def cls_token_id(self) -> Any: ...

    @property
    def pad_token_id(self) -> Any: ...

    @property
    def name_or_path(self) -> str: ...


def without_truncation(tokenizer: Tokenizing) -> Tokenizer:
    """A copy of the tokenizer proper; some encoders ship with truncation and padding switched on.

    A copy takes longer than answering a question does, so it is kept until tokens are added to the original.
    """
    original = tokenizer.backend_tokenizer
    plain = _PLAIN.get(tokenizer)
    if plain is None or plain.get_vocab_size() != original.get_vocab_size():
        plain = Tokenizer.from_str(original.to_str())
        plain.no_truncation()
        plain.no_padding()
        _PLAIN[tokenizer] = plain
    return plain


_PLAIN: WeakKeyDictionary[Tokenizing, Tokenizer] = WeakKeyDictionary()


def tokenise_questions(plain: Tokenizer, questions: Sequence[str]) -> dict[str, Integers]:
    distinct = list(dict.fromkeys(questions))
    encodings = plain.encode_batch_fast([_encodable(text) for text in distinct], add_special_tokens=False)
    return {text: np.array(encoding.ids, np.int32) for text, encoding in zip(distinct, encodings, strict=True)}


def tokenise_contexts(plain: Tokenizer, contexts: Sequence[Context]) -> dict[str, tuple[Integers, Integers]]:
    """Token ids and character offsets of each distinct text."""
    distinct = list(dict.fromkeys(context.text for context in contexts))
    short = [text for text in distinct if len(text) <= PIECE]
    encodings = plain.encode_batch([_encodable(text) for text in short], add_special_tokens=False)
    tokenised = {text: _ids_and_offsets(encoding, text) for text, encoding in zip(short, encodings, strict=True)}
    for text in distinct:
        if len(text) > PIECE:
            tokenised[text] = _tokenise_in_pieces(plain, text)
    return tokenised


def _ids_and_offsets(encoding: Encoding, text: str) -> tuple[Integers, Integers]:
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    return np.array(encoding.ids, np.int32), _exact_offsets(offsets, text)


def _tokenise_in_pieces(plain: Tokenizer, text: str) -> tuple[Integers, Integers]:
    """A long text bit by bit: what a tokenizer gives takes a hundred times the memory of what is kept of it."""
    ids, offsets = [], []
    begin = 0
    while begin < len(text):
        end = _end_of_piece(text, begin)
        piece = text[begin:end]
        of_piece = _ids_and_offsets(plain.encode(_encodable(piece), add_special_tokens=False), piece)
        ids.append(of_piece[0])
        offsets.append(of_piece[1] + begin)
        begin = end
    return np.concatenate(ids), np.concatenate(offsets)


def _end_of_piece(text: str, begin: int) -> int:
    """Before a blank behind a word, where every tokenizer begins anew; anywhere, in a text with few of them."""
    at = begin + PIECE
    while (at := text.find(" ", at, begin + 2 * PIECE)) >= 0 and text[at - 1].isspace():
        at += 1
    return at if at >= 0 else min(begin + 2 * PIECE, len(text))


def _encodable(text: str) -> str:
    """Lone surrogates have no UTF-8 form and the tokenizer refuses them: one question mark each keeps the places."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _exact_offsets(offsets: Integers, text: str) -> Integers:
    """Offsets that cut out exactly what a person would call the token.

    Sentence-piece and byte-level tokenizers count the space before a word into it: it is taken off. A token that is
    nothing but spaces ends up with its begin after its end, so that it adds nothing to a span on either side of it:

        "a   b"   a (0, 1)   Ġ (1, 3)   Ġb (3, 5)     become     (0, 1)   (4, 1)   (4, 5)

    BERT drops combining marks and joiners before it splits, so that "é" written as two characters would lose its
    accent; ALBERT loses one of the two characters that it reads as a quotation mark. What no token claims is given to
    the token before it, or else to the one after it, if it touches that.
    """
    if not len(offsets):
        return offsets
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    spaces = IS_SPACE[np.minimum(codes, len(IS_SPACE) - 1)]
    solid = np.flatnonzero(~spaces)
    begin = np.append(solid, len(text))[np.searchsorted(solid, offsets[:, 0])]  # the first that is no space
    end = np.append(0, solid + 1)[np.searchsorted(solid, offsets[:, 1])]  # one past the last that is no space
    spaces = np.append(spaces, True)  # so that what lies past the end may be asked for: nothing to claim there

    following = np.append(begin[1:], len(text))
    for token in np.flatnonzero((end < following) & ~spaces[end]):
        while end[token] < following[token] and _clings(text[end[token]]):
            end[token] += 1
    previous = np.append(0, end[:-1])
    for token in np.flatnonzero((previous < begin) & ~spaces[begin - 1]):
        while previous[token] < begin[token] and _clings(text[begin[token] - 1]):
            begin[token] -= 1
    return np.stack([begin, end], axis=1).astype(np.int32)


def _clings(character: str) -> bool:
    """Whether an unclaimed character is part of the word that it touches.

    Marks and joiners are, and what else one would see, but not a direction mark or a zero-width space at a word's edge:
    annotators do not mark these. The tag characters, which spell the flag of Scotland or Wales, are not seen but meant.
    """
    if character.isspace():
        return False
    unseen = unicodedata.category(character) in ("Cc", "Cf")
    return not unseen or character in JOINERS or "\U000e0020" <= character <= "\U000e007f"

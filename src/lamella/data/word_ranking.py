"""Rank texts by the words they share with a question (BM25)."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75  # of BM25 (Robertson and Zaragoza 2009): saturation of a word's count, and weight of the length
# Letters of a word that count: a stem in most languages, so that "discovers" finds "discovered". Chosen on SQuAD, where
# the best 50 of 3,090 passages contain 98.1 % of the answers; with whole words 97.0 %, with five letters 97.9 %.
STEM = 6
LAST_MARK = 0xFFFF  # a pattern with the marks of the rare scripts beyond is many times slower

Number = TypeVar("Number", bound=np.generic, covariant=True)


class Sliced(Protocol[Number]):
    """An array, or a part of a file that is read slice by slice."""

    def __getitem__(self, part: slice, /) -> NDArray[Number]: ...


_ASCII_WORDS = re.compile(r"[^\W_]+")
# Scripts without spaces between words; Korean, whose particles are written at the word, is best cut in pairs too.
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0e7f\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]"
)


@dataclass(frozen=True)
class ScoreMatrix:
    """The score of each text for each term, by columns: the texts and scores of a term lie between two `begins`."""

    scores: Sliced[np.float32]
    texts: Sliced[np.int32]
    begins: NDArray[np.int64]


class WordRanking:
    """Scores texts for questions."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.vocabulary: dict[str, int] = {}
        self._rank([number_terms(text, self.vocabulary) for text in texts])

    @classmethod
    def of_terms(cls, numbers: Sequence[Sequence[int]], vocabulary: dict[str, int]) -> WordRanking:
        """Rank texts whose terms are numbered by a vocabulary already."""
        ranking = cls.__new__(cls)
        ranking.vocabulary = vocabulary
        ranking._rank(numbers)
        return ranking

    @classmethod
    def of_matrix(cls, matrix: ScoreMatrix, count: int, vocabulary: dict[str, int]) -> WordRanking:
        """Rank `count` texts by scores that were computed before."""
        ranking = cls.__new__(cls)
        ranking.vocabulary, ranking.count, ranking.matrix = vocabulary, count, matrix
        return ranking

    def scores(self, question: str) -> NDArray[np.float32]:
        """Return the score of every text for a question; 0 for texts that share no word with it."""
        scores = np.zeros(self.count, np.float32)
        matrix, begins = self.matrix, self.matrix.begins
        for term in dict.fromkeys(terms(question)):
            if (number := self.vocabulary.get(term)) is not None:
                column = slice(int(begins[number]), int(begins[number + 1]))
                scores[matrix.texts[column]] += matrix.scores[column]  # a text is in a column once
        return scores

    def _rank(self, numbers: Sequence[Sequence[int]]) -> None:
        self.count = len(numbers)
        if not any(numbers):  # an index of no words cannot be built
            empty = np.zeros(len(self.vocabulary) + 1, np.int64)
            self.matrix = ScoreMatrix(np.zeros(0, np.float32), np.zeros(0, np.int32), empty)
            return
        built = (
            _import_bm25s()
            .BM25(k1=K1, b=B)
            .build_index_from_ids(list(self.vocabulary.values()), numbers, show_progress=False)
        )
        self.matrix = ScoreMatrix(built["data"], built["indices"], built["indptr"])


def _import_bm25s() -> Any:
    """Import bm25s, when scores are computed: it takes half a second.

    If JAX is installed, importing bm25s starts it, and on a GPU JAX reserves most of the memory at once. JAX would only
    select the highest scores, which is done here with numpy, so it is hidden from this import.
    """
    hidden = "jax.lax"
    if hidden in sys.modules:
        import bm25s

        return bm25s
    sys.modules[hidden] = None  # type: ignore[assignment]
    try:
        import bm25s
    finally:
        del sys.modules[hidden]
    return bm25s


def number_terms(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Return the numbers of the terms of a text; the vocabulary grows by those that it does not have."""
    return [vocabulary.setdefault(term, len(vocabulary)) for term in terms(text)]


def terms(text: str) -> Iterator[str]:
    """Yield the terms of a text: the stems of its words, or pairs of letters where words are not separated.

    They do not depend on the normal form of the text: file systems and editors may write "é" as two characters.
    """
    if text.isascii():
        words = _ASCII_WORDS.findall(text.lower())
    else:
        words = _words().findall(unicodedata.normalize("NFC", text).lower())
    for word in words:
        if word.isascii() or not _WITHOUT_SPACES.search(word):
            yield word[:STEM] if not word.isdigit() else word
        else:
            yield from (word[place : place + 2] for place in range(max(1, len(word) - 1)))


@cache
def _words() -> re.Pattern[str]:
    r"""Return the pattern of a word, with the marks that \w lacks, such as the vowel signs of Hindi."""
    marks = "".join(chr(code) for code in range(LAST_MARK + 1) if unicodedata.category(chr(code))[0] == "M")
    return re.compile(rf"[^\W_]+(?:[{marks}]+[^\W_]*)*")

"""Ranking texts by the words of a question."""

from __future__ import annotations

import math
import random
import unicodedata
from collections import Counter

import numpy as np
import pytest

from lamella.data.word_ranking import WordRanking, terms

WORDS = ("the", "old", "mill", "by", "river", "tower", "stood", "above", "quiet", "town", "mills")


def test_terms_are_stems_numbers_and_pairs_of_letters() -> None:
    assert list(terms("Discovering, DISCOVERED: 1655123 – Zoë's")) == ["discov", "discov", "1655123", "zoë", "s"]
    assert list(terms("타이탄 土星")) == ["타이", "이탄", "土星"]
    assert list(terms("토 ...")) == ["토"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Café Zürich–Łódź", ["café", "zürich", "łódź"]),
        ("हिन्दी भाषा, snake_case", ["हिन्दी", "भाषा", "snake", "case"]),
        ("서울 東京", ["서울", "東京"]),
        ("\u0301 x\u0307y", ["ẋy"]),  # a mark at no letter is no word
    ],
)
def test_terms_do_not_depend_on_the_normal_form_and_keep_marks(text: str, expected: list[str]) -> None:
    for form in ("NFC", "NFD"):
        assert list(terms(unicodedata.normalize(form, text))) == expected


def test_scores_are_those_of_bm25() -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=length)) for length in (3, 30, 9, 70)]
    ranking = WordRanking(texts)
    question = "Which mill, old mill or tower?"
    counts = [Counter(terms(text)) for text in texts]
    mean = sum(count.total() for count in counts) / len(counts)
    expected = []
    for count in counts:
        score = 0.0
        for term in set(terms(question)):
            found = sum(term in other for other in counts)
            idf = math.log(1 + (len(counts) - found + 0.5) / (found + 0.5))
            score += idf * count[term] / (count[term] + 1.2 * (0.25 + 0.75 * count.total() / mean))
        expected.append(score)
    assert ranking.scores(question) == pytest.approx(expected, rel=1e-5)
    assert not np.any(ranking.scores("Zanzibar?"))
    assert not np.any(ranking.scores("?"))


@pytest.mark.parametrize("texts", [[], ["", "..."]])
def test_texts_without_words_score_nothing(texts: list[str]) -> None:
    assert WordRanking(texts).scores("Which mill?").tolist() == [0.0] * len(texts)

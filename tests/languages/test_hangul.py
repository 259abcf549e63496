"""Korean text: syllables in any normal form, the metric of KorQuAD 1.0, words and characters."""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamella.data.augment import EDA
from lamella.data.examples import Answer, Context, Example
from lamella.data.word_ranking import terms
from lamella.languages import get_language
from lamella.languages.hangul import compose_hangul, compose_with_places
from lamella.scoring.answer_metrics import character_f1, exact, f1, word_f1
from lamella.scoring.evaluate import evaluate_file

KOREAN = get_language("ko")
SYLLABLES = st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), max_size=8)
LETTERS = st.characters(min_codepoint=0x20, max_codepoint=0xD7FF)
JAMO = st.characters(min_codepoint=0x1100, max_codepoint=0x11FF)
MIXED = st.text(st.one_of(st.sampled_from("한글 은《》'\"(),.a각1"), JAMO, LETTERS), max_size=20)


@given(SYLLABLES)
def test_every_syllable_is_composed(text: str) -> None:
    decomposed = unicodedata.normalize("NFD", text)
    assert compose_hangul(decomposed) == text
    assert f1(text, decomposed, KOREAN) == 1.0


@given(MIXED)
@example("각\u11a8 가\u11a8 \u1100\u1161\u11a8\u11a8")
def test_nothing_but_hangul_changes_and_places_are_exact(text: str) -> None:
    composed, places = compose_with_places(text)
    assert composed == compose_hangul(text)
    assert compose_hangul(composed) == composed
    assert unicodedata.normalize("NFC", composed) == unicodedata.normalize("NFC", text)
    if places is None:
        assert composed == text
        return
    assert (places[0], places[-1]) == (0, len(text))
    for character, (begin, end) in zip(composed, pairwise(places), strict=True):
        original = text[begin:end]
        assert character == original or unicodedata.normalize("NFC", original) == character


def official_normal_form(text: str) -> str:
    """The normal form of KorQuAD 1.0, from its definition: quotes and brackets become spaces, punctuation vanishes."""
    text = re.sub("['\"《》<>〈〉()‘’]", " ", text).lower()
    return " ".join("".join(character for character in text if character not in string.punctuation).split())


def official_f1(gold: str, predicted: str) -> float:
    """The F1 of KorQuAD 1.0, from its definition: characters of all words, counted with repetition."""
    golds, found = (list("".join(official_normal_form(text).split())) for text in (gold, predicted))
    same = sum((Counter(golds) & Counter(found)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(golds)
    return 2 * precision * recall / (precision + recall)


@given(MIXED, MIXED)
def test_the_metric_is_that_of_korquad(gold: str, predicted: str) -> None:
    gold, predicted = compose_hangul(gold), compose_hangul(predicted)
    assert KOREAN.normalise(gold) == official_normal_form(gold)
    assert exact(gold, predicted, KOREAN) == (official_normal_form(gold) == official_normal_form(predicted))
    if KOREAN.normalise(gold) or KOREAN.normalise(predicted):  # KorQuAD has no unanswerable questions
        assert f1(gold, predicted, KOREAN) == pytest.approx(official_f1(gold, predicted))
    assert character_f1(gold, predicted, KOREAN) == f1(gold, predicted, KOREAN)


@pytest.mark.parametrize(
    ("gold", "predicted", "characters", "words"),
    [
        ("이순신", "이순신이", 6 / 7, 0.0),  # with a particle
        ("1989년 2월 15일", "1989년 2월 15일에", 2 * 10 / 21, 2 / 3),
        ("《햄릿》", "햄릿", 1.0, 1.0),
        ("‘자유’를", "“자유”를", 2 * 3 / 8, 0.0),  # KorQuAD removes ‘ ’ but not “ ”
        ("서울 (Seoul)", "seoul 서울", 1.0, 1.0),
        ("가가나", "가나나", 4 / 6, 0.0),  # with repetition: 가 and 나 once each
        ("부산", "서울", 0.0, 0.0),
    ],
)
def test_scores_counted_by_hand(gold: str, predicted: str, characters: float, words: float) -> None:
    assert f1(gold, predicted, KOREAN) == pytest.approx(characters)
    assert word_f1(gold, predicted, KOREAN) == pytest.approx(words)


def test_word_f1_is_printed_beside_f1_for_korean_only(tmp_path: Path) -> None:
    row = {"id": "q", "question": "누가?", "context": "이순신이 이겼다.", "answers": ["이순신"]}
    (tmp_path / "ko.jsonl").write_text(json.dumps(row, ensure_ascii=False))
    results = evaluate_file(str(tmp_path / "ko.jsonl"), {"q": "이순신이"})
    assert (results["f1"], results["word_f1"], results["exact"]) == (pytest.approx(600 / 7), 0.0, 0.0)
    assert results["HasAns_word_f1"] == 0.0
    assert "word_f1" not in evaluate_file("demo:dev", {}, missing="empty")


def test_a_search_finds_words_in_any_normal_form() -> None:
    assert list(terms(unicodedata.normalize("NFD", "대한민국의 수도"))) == list(terms("대한민국의 수도"))


def test_eda_changes_korean_words_and_spares_those_with_the_answer() -> None:
    text = "임진왜란 때 이순신이 명량에서 왜군을 크게 물리쳤다고 난중일기에 적혀 있다."
    original = Example("q", "누가?", Context(text), (Answer("이순신", text.index("이순신")),))
    seen = set()
    for epoch in range(20):
        (changed,) = EDA(rate=0.3)([original], epoch=epoch, epochs=20, seed=0)
        seen.add(changed.context.text)
        (answer,) = changed.answers
        assert changed.context.text[answer.begin_char : answer.end_char] == "이순신"
        assert "이순신이" in changed.context.text.split()  # the particle stays at its word
    assert len(seen) > 15


@pytest.mark.parametrize("family", ["albert", "bert", "xlm-roberta", "modernbert"])
@given(
    words=st.lists(
        st.sampled_from(["서울은", "한국의", "수도", "국의", "(도)", "the", "moon", "東京", "3.5°C", "각ᆨ"]),
        min_size=1,
        max_size=8,
    )
)
def test_offsets_are_those_of_the_text_in_every_normal_form(family: str, words: list[str]) -> None:
    pytest.importorskip("torch")
    from lamella.data.windows.tokens import tokenise_contexts, without_truncation
    from lamella.testing.tiny import tiny_tokenizer

    plain: Any = without_truncation(tiny_tokenizer(family))
    text = unicodedata.normalize("NFC", " ".join(words))
    ids, offsets = tokenise_contexts(plain, [Context(text)])[text]
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        other = unicodedata.normalize(form, text)
        other_ids, other_offsets = tokenise_contexts(plain, [Context(other)])[other]
        if form in ("NFC", "NFD"):
            assert np.array_equal(ids, other_ids)
            pieces = [text[begin:end] for begin, end in offsets.tolist()]
            assert [unicodedata.normalize("NFC", other[b:e]) for b, e in other_offsets.tolist()] == pieces
        covered = np.zeros(len(other), bool)
        for begin, end in other_offsets.tolist():
            covered[begin:end] = True
        assert [
            character for character, at in zip(other, covered, strict=True) if not at and not character.isspace()
        ] == []

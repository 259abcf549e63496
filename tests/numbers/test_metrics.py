"""The metric against the official SQuAD 2.0 and KorQuAD 1.0 definitions, written below as plain loops."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import string
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lamella.data.examples import Answer, Context, Example
from lamella.errors import DataError, UnknownNameError, UsageError
from lamella.languages import get_language
from lamella.languages.english import English
from lamella.languages.korean import Korean
from lamella.scoring.answer_metrics import exact, f1, score_metrics
from lamella.scoring.metrics import best_thresholds, score, score_questions, score_readers

SHARED_DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"


# ---------------------------------------------------------------- the definitions, step by step


def plain_normalise(text, language):
    if language == "ko":
        for mark in "'\"《》<>〈〉()‘’":
            text = text.replace(mark, " ")
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    if language == "en":
        text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def plain_units(text, language):
    words = plain_normalise(text, language).split()
    return words if language == "en" else [character for word in words for character in word]


def plain_f1(gold, predicted, language):
    gold_units, given_ = plain_units(gold, language), plain_units(predicted, language)
    if not gold_units or not given_:
        return 1.0 if gold_units == given_ else 0.0
    same = sum((Counter(gold_units) & Counter(given_)).values())
    if same == 0:
        return 0.0
    precision = same / len(given_)
    recall = same / len(gold_units)
    return (2 * precision * recall) / (precision + recall)


def plain_raw(examples, predictions, language="en"):
    exact, overlap = {}, {}
    for example in examples:
        golds = [answer.text for answer in example.answers if plain_normalise(answer.text, language)]
        if not golds:
            golds = [""]
        predicted = predictions[example.id]
        exact[example.id] = max(
            int(plain_normalise(gold, language) == plain_normalise(predicted, language)) for gold in golds
        )
        overlap[example.id] = max(plain_f1(gold, predicted, language) for gold in golds)
    return exact, overlap


def plain_best(predictions, raw, na, has_answer):
    current = sum(1 for answerable in has_answer.values() if not answerable)
    best, threshold = current, 0.0
    for id_ in sorted(na, key=lambda id_: na[id_]):
        if has_answer[id_]:
            current += raw[id_]
        elif predictions[id_]:
            current -= 1
        if current > best:
            best, threshold = current, na[id_]
    return 100.0 * best / len(raw), threshold


def plain_average_precision(gain, na, total):
    """Recall only grows at the end of a run of equal na scores."""
    ordered = sorted(na, key=lambda id_: na[id_])
    gained, last_recall, area = 0.0, 0.0, 0.0
    for position, id_ in enumerate(ordered):
        gained += gain[id_]
        if position == len(ordered) - 1 or na[ordered[position + 1]] != na[id_]:
            area += gained / (position + 1) * (gained / total - last_recall)
            last_recall = gained / total
    return 100.0 * area


def plain_score(examples, predictions, na=None, language="en", threshold=None):
    has_answer = {example.id: bool(example.answers) for example in examples}
    raw_exact, raw_f1 = plain_raw(examples, predictions, language)
    exact, overlap = dict(raw_exact), dict(raw_f1)
    if threshold is not None:
        for id_ in has_answer:
            if na[id_] > threshold:
                exact[id_] = overlap[id_] = float(not has_answer[id_])
    result = {}
    groups = {
        "": list(has_answer),
        "HasAns_": [id_ for id_ in has_answer if has_answer[id_]],
        "NoAns_": [id_ for id_ in has_answer if not has_answer[id_]],
    }
    for prefix, ids in groups.items():
        if ids:
            result[prefix + "exact"] = 100.0 * sum(exact[id_] for id_ in ids) / len(ids)
            result[prefix + "f1"] = 100.0 * sum(overlap[id_] for id_ in ids) / len(ids)
            result[prefix + "total"] = len(ids)
    if na is None:
        return result
    na = {id_: value for id_, value in na.items() if id_ in has_answer}
    result["best_exact"], result["best_exact_thresh"] = plain_best(predictions, raw_exact, na, has_answer)
    result["best_f1"], result["best_f1_thresh"] = plain_best(predictions, raw_f1, na, has_answer)
    answerable = sum(has_answer.values())
    if answerable:
        for name, raw in (("exact", raw_exact), ("f1", raw_f1), ("oracle", has_answer)):
            gain = {id_: raw[id_] if has_answer[id_] else 0 for id_ in has_answer}
            result[f"pr_{name}_ap"] = plain_average_precision(gain, na, answerable)
    return result


def plain_answerability(examples, na, cut):
    """Positive class: no answer."""
    hit = false_alarm = missed = right = 0
    for example in examples:
        none, predicted_none = not example.answers, na[example.id] > cut
        right += none == predicted_none
        hit += none and predicted_none
        false_alarm += predicted_none and not none
        missed += none and not predicted_none
    result = {"answerability_accuracy": 100.0 * right / len(examples)}
    unanswerable = hit + missed
    if unanswerable:
        result["answerability_f1"] = 100.0 * 2 * hit / (2 * hit + false_alarm + missed)
        result["answerability_ap"] = plain_average_precision(
            {example.id: float(not example.answers) for example in examples},
            {example.id: -na[example.id] for example in examples},
            unanswerable,
        )
    return result


# ---------------------------------------------------------------- small data sets

# Words that exercise the rules: articles, punctuation alone, accents, letters whose lower case is two characters,
# a non-breaking and an ideographic space, Korean brackets.
PIECES = [
    *("a", "An", "THE", "there", "theory", "river", "River's", "Straße", "İstanbul", "über", "1,234", "3.5%", "U.S."),
    *("the-end", "an.", "'a'", "!", "--", "\u00a0", "\u3000", "—", "“no”", "é", "e\u0301", "ǅ", "_", "the\u0301"),
    *("《햄릿》", "(서울)", "‘독도’", "〈봄〉", "대한민국", "한국의", "임진왜란", "日本"),
]
WORDS = ["river", "bank", "north", "east", "1889", "tower"]


def texts(pieces=tuple(PIECES)):
    words = st.lists(st.sampled_from(pieces), min_size=1, max_size=4)
    return st.tuples(words, st.sampled_from([" ", "  ", ""])).map(lambda drawn: drawn[1].join(drawn[0]))


ANY_TEXT = st.one_of(texts(), texts(), st.text(max_size=6))


@st.composite
def data_sets(draw, text=ANY_TEXT):
    """(examples, predictions, na scores); na scores are often equal, in their own order, and include an unknown id."""
    kinds = draw(st.sampled_from([(True,), (False,), (True, False), (True, False)]))
    examples, predictions = [], {}
    for number in range(draw(st.integers(1, 9))):
        golds = draw(st.lists(text, min_size=1, max_size=3)) if draw(st.sampled_from(kinds)) else []
        examples.append(example(f"q{number}", *golds))
        near = [st.sampled_from(golds), st.sampled_from(golds).map(lambda gold: f"the {gold}!")] if golds else []
        predictions[f"q{number}"] = draw(st.one_of(st.just(""), text, *near))
    values = draw(st.sampled_from([st.integers(-2, 2).map(float), st.floats(allow_nan=False, allow_infinity=False)]))
    ids = draw(st.permutations([*predictions, "stranger"]))
    return examples, predictions, {id_: draw(values) for id_ in ids}


def example(id_, *golds):
    return Example(id_, "?", Context(" ".join(golds)), tuple(Answer(gold, 0) for gold in golds))


def assert_same(scores, expected):
    assert list(scores) == list(expected)  # in the official order of keys
    for key, value in expected.items():
        assert scores[key] == pytest.approx(value, rel=1e-12, abs=1e-9), key
        assert type(scores[key]) is (int if key.endswith("total") else float), key


# ---------------------------------------------------------------- agreement


@settings(max_examples=150, deadline=None)
@given(data_sets(), st.sampled_from(["en", "ko"]))
def test_answers_alone_score_as_defined(data, language):
    examples, predictions, _ = data
    assert_same(score(examples, predictions, language=language), plain_score(examples, predictions, language=language))


@settings(max_examples=150, deadline=None)
@given(
    data_sets(), st.sampled_from(["en", "ko"]), st.one_of(st.none(), st.sampled_from([-1.5, -1.0, 0.0, 1.0, math.inf]))
)
def test_na_scores_search_and_precision_recall_score_as_defined(data, language, threshold):
    examples, predictions, na = data
    expected = plain_score(examples, predictions, na, language, threshold)
    for name, neutral in (("null_odds", 0.0), ("na_prob", 0.5)):
        cut = neutral if threshold is None else threshold
        scores = score(examples, predictions, language=language, threshold=threshold, **{name: na})
        assert_same(scores, expected | plain_answerability(examples, na, cut))
        # Exactly: a best threshold is the na score of a question, and another last digit selects another question.
        assert (scores["best_exact_thresh"], scores["best_f1_thresh"]) == (
            expected["best_exact_thresh"],
            expected["best_f1_thresh"],
        )


@settings(max_examples=100, deadline=None)
@given(data_sets(), st.randoms(use_true_random=False), st.sampled_from([None, -1.0, 0.0, 0.5]))
def test_null_odds_drive_the_search_and_probabilities_the_answerability(data, chance, threshold):
    examples, predictions, odds = data
    probability = {id_: chance.choice([0.1, 0.5, 0.9]) for id_ in predictions}
    scores = score(examples, predictions, null_odds=odds, na_prob=probability, threshold=threshold)
    expected = plain_score(examples, predictions, odds, threshold=threshold)
    assert_same(scores, expected | plain_answerability(examples, probability, 0.5))


@settings(max_examples=150, deadline=None)
@given(st.one_of(texts(), st.text()), st.one_of(texts(), st.text()))
def test_a_single_pair_scores_as_defined(gold, predicted):
    assert English().normalise(gold) == plain_normalise(gold, "en")
    assert Korean().normalise(gold) == plain_normalise(gold, "ko")
    for language in ("en", "ko"):
        same = plain_normalise(gold, language) == plain_normalise(predicted, language)
        assert exact(gold, predicted, get_language(language)) == int(same)
        assert f1(gold, predicted, get_language(language)) == plain_f1(gold, predicted, language)


@settings(max_examples=50, deadline=None)
@given(data_sets())
def test_the_registered_metrics_define_the_scores(data):
    examples, predictions, _ = data
    for language in ("en", "ko"):
        scores = score(examples, predictions, language=language)
        means = score_metrics({"exact": exact, "f1": f1}, examples, predictions, language=language)
        assert means == pytest.approx({key: scores[key] for key in scores if not key.endswith("total")}, abs=1e-9)


def test_the_official_half_dev_set_scores_as_defined():
    path = SHARED_DATA / "cs224n-dev.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not next to the repository")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    examples = [
        Example(
            question["id"],
            question["question"],
            Context(paragraph["context"]),
            tuple(Answer(answer["text"], answer["answer_start"]) for answer in question["answers"]),
        )
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    chance = random.Random(7)
    predictions = {example.id: guess(example, chance) for example in examples}
    odds = {  # rounded, so that many are equal
        example.id: round(chance.gauss(-2 if example.answers else 2, 2), 2) for example in examples
    }
    scores = score(examples, predictions, null_odds=odds, threshold=1.5)
    assert_same(
        scores, plain_score(examples, predictions, odds, threshold=1.5) | plain_answerability(examples, odds, 1.5)
    )
    assert (scores["total"], scores["HasAns_total"], scores["NoAns_total"]) == (6078, 2910, 3168)
    # The guesses are neither all right nor all wrong, and the search did not end where it began.
    assert 15 < scores["HasAns_exact"] < scores["HasAns_f1"] < 80
    assert scores["best_exact_thresh"] != 0.0 != scores["best_f1_thresh"]


def guess(example, chance):
    """Return nothing, an answer, an answer and its surroundings, or any words of the context."""
    kind = chance.choice(["nothing", "gold", "wider", "words", "words"])
    if kind == "nothing":
        return ""
    if kind == "words" or not example.answers:
        words = example.context.text.split(" ")
        begin = chance.randrange(len(words))
        return " ".join(words[begin : begin + chance.randint(1, 6)])
    answer = chance.choice(example.answers)
    wider = chance.randint(1, 12) if kind == "wider" else 0
    return example.context.text[max(answer.begin_char - wider, 0) : answer.end_char + wider]


# ---------------------------------------------------------------- worked out by hand

TOWER = [
    example("q1", "the Eiffel Tower", "Eiffel Tower"),  # "Eiffel tower!"     exact 1, F1 1
    example("q2", "in 1889"),  # "1889": precision 1, recall 1/2              exact 0, F1 2/3
    example("q3", "Gustave Eiffel"),  # "Maurice Koechlin"                    exact 0, F1 0
    example("q4", "iron"),  # ""                                              exact 0, F1 0
    example("q5"),  # ""                                                      exact 1, F1 1
    example("q6"),  # "1901"                                                  exact 0, F1 0
]
PREDICTED = {"q1": "Eiffel tower!", "q2": "1889", "q3": "Maurice Koechlin", "q4": "", "q5": "", "q6": "1901"}
ODDS = {"q1": -4.0, "q2": -2.0, "q3": 1.0, "q4": 3.0, "q5": 2.0, "q6": -1.0}  # ascending: q1 q2 q6 q3 q5 q4


def test_hand_worked_scores():
    assert score(TOWER, PREDICTED, null_odds=ODDS) == pytest.approx(
        {
            "exact": 100 * 2 / 6,
            "f1": 100 * (1 + 2 / 3 + 1) / 6,
            "total": 6,
            "HasAns_exact": 100 * 1 / 4,
            "HasAns_f1": 100 * (1 + 2 / 3) / 4,
            "HasAns_total": 4,
            "NoAns_exact": 50,
            "NoAns_f1": 50,
            "NoAns_total": 2,
            # From 2 right: q1 +1 = 3, q2 +0, q6 -1 = 2, and nothing more.
            "best_exact": 100 * 3 / 6,
            "best_exact_thresh": -4,
            # From 2 right: q1 +1, q2 +2/3 = 3.67, q6 -1.
            "best_f1": 100 * (3 + 2 / 3) / 6,
            "best_f1_thresh": -2,
            # q1: precision 1, recall 0 to 1/4; no later answer is exact.
            "pr_exact_ap": 25,
            # q1 as above; q2: precision (1 + 2/3) / 2, recall grows by (2/3) / 4.
            "pr_f1_ap": 100 * (1 / 4 + (5 / 3 / 2) * (2 / 3 / 4)),
            # Answerable are the 1st, 2nd, 4th and 6th of the order, each a quarter of the recall.
            "pr_oracle_ap": 100 * (1 / 1 + 2 / 2 + 3 / 4 + 4 / 6) / 4,
            # Odds above 0: q3, q4, q5; without an answer: q5, q6. Right are q1, q2, q5.
            "answerability_accuracy": 50,
            "answerability_f1": 100 * 2 * 1 / (3 + 2),
            # Descending q4 q5 q3 q6 ...: q5 is the first at rank 2, q6 the second at rank 4.
            "answerability_ap": 100 * (1 / 2 + 2 / 4) / 2,
        }
    )


def test_hand_worked_threshold():
    # Above -1.5 are all but q1 and q2: q3 and q4 are now wrong, q5 and q6 right.
    scores = score(TOWER, PREDICTED, null_odds=ODDS, threshold=-1.5)
    assert scores["exact"] == pytest.approx(100 * (1 + 0 + 0 + 0 + 1 + 1) / 6)
    assert scores["f1"] == pytest.approx(100 * (1 + 2 / 3 + 0 + 0 + 1 + 1) / 6)
    assert (scores["HasAns_exact"], scores["NoAns_exact"]) == (25, 100)
    # A question exactly at the threshold keeps its answer: q6 does at -1, not just below.
    assert score(TOWER, PREDICTED, null_odds=ODDS, threshold=-1.0)["NoAns_exact"] == 50
    # The answerability numbers are decided at the same threshold: of q3 to q6 above -1.5, q5 and q6 have no answer.
    assert scores["answerability_accuracy"] == pytest.approx(100 * 4 / 6)
    raw = score(TOWER, PREDICTED, null_odds=ODDS)
    for key in raw:
        if key.startswith(("best_", "pr_")):
            assert scores[key] == raw[key]


def test_equal_na_scores_are_searched_in_the_order_of_the_file_as_the_official_script_does():
    examples, predicted = [example("right", "river"), example("none")], {"right": "river", "none": "bank"}
    assert score(examples, predicted, null_odds={"right": 1.0, "none": 1.0})["best_exact"] == 100
    assert score(examples, predicted, null_odds={"none": 1.0, "right": 1.0})["best_exact"] == 50


def test_normalisation_by_example():
    assert English().normalise("The  U.S.'s \t theory, an \u00a0 age") == "uss theory age"
    assert English().normalise("AN") == English().normalise("the a!") == English().normalise("...") == ""
    assert English().normalise("a-b the-end") == "ab theend"  # punctuation goes first, and glues
    assert English().normalise("“quoted” — text") == "“quoted” — text"  # only ASCII punctuation goes
    assert English().normalise("Los Ángeles") == "los ángeles"


def test_korean_by_example():
    assert Korean().normalise("《햄릿》(Hamlet), 3.5막 the ‘a’") == "햄릿 hamlet 35막 the a"  # articles stay
    assert Korean().normalise("“독도”") == "“독도”"  # double curly quotes are not on KorQuAD's list
    # 대한민국 and 한국의: the characters 한, 국 are shared; 2/3 of the prediction, 2/4 of the gold.
    assert f1("대한민국", "한국의", Korean()) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert f1("대한민국", "한국의", English()) == 0
    # Spaces are no characters: F1 1, but not an exact match.
    assert f1("임진 왜란", "임진왜란", Korean()) == 1
    assert exact("임진 왜란", "임진왜란", Korean()) == 0
    # A character counts as often as it occurs: 가가나 has 가 twice.
    assert f1("가가나", "가가가", Korean()) == pytest.approx(2 / 3)
    korean = score([example("q", "《햄릿》")], {"q": "햄릿"}, language="ko")
    assert korean == {"exact": 100, "f1": 100, "total": 1, "HasAns_exact": 100, "HasAns_f1": 100, "HasAns_total": 1}


def test_words_count_as_often_as_they_occur():
    assert f1("new york new york", "new york", English()) == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert f1("york new", "new york", English()) == 1
    assert exact("york new", "new york", English()) == 0


def test_answers_that_normalise_to_nothing():
    # Next to a real answer, "the" is no gold: "" is wrong. Alone, it leaves "" as the only right answer.
    assert score([example("q", "the", "river")], {"q": ""})["exact"] == 0
    only = score([example("q", "the")], {"q": "!"}, null_odds={"q": 0.0})
    assert (only["exact"], only["HasAns_total"]) == (100, 1)  # still a question with answers
    assert "NoAns_total" not in only
    # An unanswerable question answered "the" is right by its text, yet costs 1 in the search.
    none = score([example("q")], {"q": "the"}, null_odds={"q": 0.0})
    assert (none["exact"], none["best_exact"], none["best_exact_thresh"]) == (100, 100, 0.0)


# ---------------------------------------------------------------- sanity


@settings(max_examples=100, deadline=None)
@given(data_sets(), st.data())
def test_a_right_answer_never_lowers_a_score(data, draw):
    examples, predictions, _ = data
    answerable = [
        example for example in examples if any(English().normalise(answer.text) for answer in example.answers)
    ]
    assume(answerable)
    chosen = draw.draw(st.sampled_from(answerable))
    gold = next(answer.text for answer in chosen.answers if English().normalise(answer.text))
    before, after = score(examples, predictions), score(examples, predictions | {chosen.id: gold})
    assert after["exact"] >= before["exact"]
    assert after["f1"] >= before["f1"] - 1e-9
    assert after["exact"] <= after["f1"] + 1e-9


@settings(max_examples=100, deadline=None)
@given(data_sets(text=texts(WORDS)))
def test_no_threshold_beats_the_best(data):
    examples, predictions, na = data
    best = score(examples, predictions, null_odds=na)
    for threshold in [*na.values(), -math.inf, math.inf]:
        at = score(examples, predictions, null_odds=na, threshold=threshold)
        assert at["exact"] <= best["best_exact"] + 1e-9
        assert at["f1"] <= best["best_f1"] + 1e-9


def test_perfect_and_silent_readers():
    perfect = {example.id: example.answers[0].text if example.answers else "" for example in TOWER}
    assert score(TOWER, perfect)["exact"] == score(TOWER, perfect)["f1"] == 100
    silent = score(TOWER, dict.fromkeys(PREDICTED, ""))
    assert (silent["HasAns_f1"], silent["NoAns_f1"]) == (0, 100)


def test_the_scores_of_each_question():
    questions = score_questions(TOWER, PREDICTED)
    assert questions.ids == ("q1", "q2", "q3", "q4", "q5", "q6")
    assert questions.exact.tolist() == [1, 0, 0, 0, 1, 0]
    assert questions.f1.tolist() == pytest.approx([1, 2 / 3, 0, 0, 1, 0])
    assert questions.answerable.tolist() == [True, True, True, True, False, False]
    assert questions.answered.tolist() == [True, True, True, False, False, True]
    withheld = questions.withheld(np.array([True, False, False, False, False, True]))
    assert withheld.exact.tolist() == [0, 0, 0, 0, 1, 1]
    assert withheld.answered.tolist() == [False, True, True, False, False, False]
    assert questions.exact.tolist() == [1, 0, 0, 0, 1, 0]  # as it was
    assert best_thresholds(questions, ODDS)["best_f1_thresh"] == -2


# ---------------------------------------------------------------- mistakes


def test_many_readers_score_as_each_of_them_alone():
    texts = [
        "",
        "the",
        "Titan",
        "the Titan",
        "moon Titan",
        "Titan moon",
        "a big moon",
        "Saturn!",
        "titan",
        "Rhea, Titan",
    ]
    draw = random.Random(0)
    for language in ("en", "ko"):
        asked = [
            Example(str(n), "?", Context("c"), tuple(Answer(draw.choice(texts[1:]), 0) for _ in range(n % 4)))
            for n in range(40)
        ]
        readers = [{example.id: draw.choice(texts) for example in asked} for _ in range(12)]
        for scores, answers in zip(score_readers(asked, readers, language=language), readers, strict=True):
            assert scores.answered.tolist() == [answers[id] != "" for id in scores.ids]
            assert scores.answerable.tolist() == [bool(example.answers) for example in asked]
            for example, same, overlap in zip(asked, scores.exact, scores.f1, strict=True):
                golds = [answer.text for answer in example.answers if plain_normalise(answer.text, language)] or [""]
                given_ = answers[example.id]
                assert same == max(
                    plain_normalise(gold, language) == plain_normalise(given_, language) for gold in golds
                )
                assert overlap == max(plain_f1(gold, given_, language) for gold in golds)


def test_missing_predictions_are_counted_and_named():
    examples = [example(f"q{number:02}", "river") for number in range(13)]
    with pytest.raises(
        DataError, match=r"expected one for every question, 2 of 13 missing: q11, q12; .*--missing empty"
    ):
        score(examples, {f"q{number:02}": "river" for number in range(11)})
    many = [example(f"q{number:03}", "river") for number in range(120)]
    with pytest.raises(
        DataError, match=r"expected one for every question, 119 of 120 missing: q001, .*, q010 and 109 more; "
    ):
        score(many, {"q000": "river"})
    assert score(examples, {"q00": "river"}, missing="empty")["exact"] == pytest.approx(100 / 13)


def test_predictions_for_other_questions_are_ignored():
    assert score(TOWER, PREDICTED | {"stranger": None}, null_odds=ODDS | {"stranger": math.nan}) == score(
        TOWER, PREDICTED, null_odds=ODDS
    )


@pytest.mark.parametrize("wrong", [None, 3, ["iron"]])
def test_a_prediction_must_be_a_text(wrong):
    with pytest.raises(DataError, match="prediction of question q4: expected a text"):
        score(TOWER, PREDICTED | {"q4": wrong})


@pytest.mark.parametrize("name", ["null_odds", "na_prob"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, "0.5", None, True, 10**400])
def test_na_scores_must_be_finite_numbers(name, wrong):
    with pytest.raises(DataError, match="of question q4: expected a finite number"):
        score(TOWER, PREDICTED, **{name: ODDS | {"q4": wrong}})


def test_na_scores_may_be_numpy_numbers_or_integers():
    odds = {id_: np.float32(value) for id_, value in ODDS.items()}
    whole = {id_: int(value) for id_, value in ODDS.items()}
    assert (
        score(TOWER, PREDICTED, null_odds=odds)
        == score(TOWER, PREDICTED, null_odds=whole)
        == score(TOWER, PREDICTED, null_odds=ODDS)
    )


@pytest.mark.parametrize("given_", [{"null_odds": {"q1": 1.0}}, {"na_prob": {}}, {"null_odds": ODDS, "na_prob": {}}])
@pytest.mark.parametrize("missing", ["error", "empty"])
def test_missing_na_scores_are_counted_and_named(given_, missing):
    with pytest.raises(DataError, match=r"for every question, [56] of 6 missing: q"):
        score(TOWER, PREDICTED, missing=missing, **given_)


def test_an_id_used_twice_is_an_error():
    with pytest.raises(DataError, match="got 1 used more than once: q1"):
        score([*TOWER, example("q1", "steel")], PREDICTED)


def test_no_questions_is_an_error():
    with pytest.raises(DataError, match="expected questions to score, found none"):
        score([], {})


def test_options_are_checked():
    with pytest.raises(UsageError, match="expected null_odds or na_prob to apply it to"):
        score(TOWER, PREDICTED, threshold=0.0)
    with pytest.raises(UsageError, match="got nan"):
        score(TOWER, PREDICTED, null_odds=ODDS, threshold=math.nan)
    with pytest.raises(UsageError, match="expected one of en, ko, got 'kr'"):
        score(TOWER, PREDICTED, language="kr")
    with pytest.raises(UnknownNameError, match=r"missing 'emtpy' does not exist\. Did you mean 'empty'"):
        score(TOWER, PREDICTED, missing="emtpy")


def test_every_message_is_one_line():
    for mistake in ({"predictions": {}}, {"null_odds": {}}, {"threshold": 1.0}, {"language": "kr"}, {"missing": "no"}):
        with pytest.raises((DataError, UsageError)) as caught:
            score(TOWER, **{"predictions": PREDICTED} | mistake)
        assert "\n" not in str(caught.value)


def test_the_metric_imports_no_torch():
    code = "import sys, lamella.scoring.metrics; print({'torch', 'transformers', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

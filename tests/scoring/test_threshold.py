"""Thresholds and calibration equal exhaustive searches, are unbiased on planted data, and finite on any data."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.calibration import Calibration, TunedOn
from lamella.data.examples import Answer, Context, Example
from lamella.decoding_options import DecodingOptions
from lamella.errors import DataError
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import NO_SPAN, Candidate, Prediction
from lamella.scoring.calibrate import check_tunable, fingerprint, threshold_report, tune_decoding
from lamella.scoring.metrics import QuestionScores, best_thresholds, summarise
from lamella.scoring.threshold import (
    LEAST_SLOPE,
    assign_folds,
    break_even,
    cross_fit,
    expected_calibration_error,
    fit_isotonic,
    fit_temperature,
    tune,
)

# Ties and adjacent floats on purpose: thresholds must not separate the former and must separate the latter.
ODDS = st.sampled_from([-2.0, -1.0, np.nextafter(-1.0, 0), -0.5, 0.0, 5e-324, 1 + 2**-52, 1 + 2**-51, 1e4, 1e300])
QUESTION = st.tuples(ODDS, st.booleans(), st.sampled_from([0.0, 0.25, 0.5, 2 / 3, 1.0]))


def scored(answerable: np.ndarray, f1: np.ndarray) -> QuestionScores:
    ids = tuple(f"q{number}" for number in range(len(f1)))
    f1 = np.where(answerable, f1, 0.0)
    return QuestionScores(ids, answerable, np.ones(len(ids), np.bool_), (f1 == 1).astype(np.float64), f1)


def unpack(questions: list[tuple[float, bool, float]]) -> tuple[QuestionScores, np.ndarray]:
    odds, answerable, f1 = (np.array(column) for column in zip(*questions, strict=True))
    return scored(answerable, f1), odds.astype(np.float64)


def planted(rng: np.random.Generator, count: int, temperature: float = 1.0, bias: float = 0.0) -> tuple:
    """Questions whose probability of no answer is sigmoid(odds / temperature + bias)."""
    odds = rng.normal(0, 3, count)
    unanswerable = rng.random(count) < 1 / (1 + np.exp(-(odds / temperature + bias)))
    return odds, unanswerable


def f1_at(scores: QuestionScores, odds: np.ndarray, threshold: float) -> float:
    return float(scores.withheld(odds > threshold).f1.mean())


@pytest.mark.parametrize(("weights", "near"), [(None, 0.1), ((1.0, 3.0), 0.15)])
def test_the_break_even_threshold_is_where_planted_odds_have_it(
    weights: tuple[float, float] | None, near: float
) -> None:
    odds, unanswerable = planted(np.random.default_rng(5), 20_000, temperature=2.0, bias=0.5)
    scores = scored(~unanswerable, np.full(len(odds), 0.7))
    best = 2.0 * (np.log(0.7) - 0.5)  # answering earns 0.7 (1 - p), abstaining p
    found = break_even(scores, odds, None if weights is None else np.where(odds > 0, *weights))
    assert found == pytest.approx(best, abs=near)
    assert f1_at(scores, odds, found) > f1_at(scores, odds, best) - 0.001


def test_the_break_even_threshold_knows_that_doubtful_answers_are_worth_less() -> None:
    odds, unanswerable = planted(np.random.default_rng(6), 20_000, temperature=4.0)
    worth = np.clip(0.6 - 0.1 * odds, 0.0, 1.0)
    scores = scored(~unanswerable, worth)
    found = f1_at(scores, odds, break_even(scores, odds))
    assert found > f1_at(scores, odds, tune(scores, odds)) - 0.002
    constant = 4.0 * np.log(scores.f1[~unanswerable].mean())  # if all answers were worth the same
    assert found > f1_at(scores, odds, constant) + 0.001


def test_with_few_questions_the_break_even_threshold_is_better_on_others_than_the_tuned_one() -> None:
    rng = np.random.default_rng(6)
    everything, unanswerable = planted(rng, 20_000, temperature=3.0, bias=0.5)
    scores = scored(~unanswerable, np.full(len(everything), 0.75))
    found: dict[str, list[float]] = {"tuned": [], "break even": []}
    for _ in range(60):
        some = np.isin(np.arange(len(everything)), rng.integers(0, len(everything), 120))
        for name, choose in (("tuned", tune), ("break even", break_even)):
            found[name].append(f1_at(scores, everything, choose(scores.only(some), everything[some])))
    assert np.mean(found["break even"]) > np.mean(found["tuned"]) + 0.005


@pytest.mark.parametrize("f1", [0.0, 1.0])
@pytest.mark.parametrize("kinds", [[True, True], [False, False], [True, False]])
def test_the_break_even_threshold_of_any_data_is_near_its_odds(kinds: list[bool], f1: float) -> None:
    odds = np.array([2.0, -3.0])
    assert -4 <= break_even(scored(np.array(kinds), np.full(2, f1)), odds) <= 3


@given(st.lists(QUESTION, min_size=1, max_size=12))
def test_no_threshold_is_better_than_the_tuned_one(questions: list[tuple[float, bool, float]]) -> None:
    scores, odds = unpack(questions)
    threshold = tune(scores, odds)
    assert np.isfinite(threshold)
    all_of_them = [-1e9, *odds, *np.nextafter(odds, -np.inf)]
    best = max(f1_at(scores, odds, threshold) for threshold in all_of_them)
    assert f1_at(scores, odds, threshold) == pytest.approx(best, abs=1e-9)
    # The official search finds more only by separating equal odds.
    official = best_thresholds(scores, dict(zip(scores.ids, odds.tolist(), strict=True)))["best_f1"]
    assert 100 * best <= official + 1e-9
    if len(set(odds)) == len(odds):
        assert 100 * best == pytest.approx(official)


@given(st.lists(QUESTION, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_the_questions_does_not_matter(questions: list[tuple[float, bool, float]], random) -> None:
    shuffled = random.sample(questions, len(questions))
    assert tune(*unpack(questions)) == tune(*unpack(shuffled))


def test_a_threshold_lies_midway_and_nearest_to_0_on_a_tie() -> None:
    scores, odds = unpack([(-3.0, True, 1.0), (1.0, True, 1.0), (5.0, False, 0.0)])
    assert tune(scores, odds) == 3.0
    scores, odds = unpack([(-3.0, True, 0.0), (1.0, True, 0.0), (5.0, True, 0.0)])  # no answer is right: stay near 0
    assert tune(scores, odds) == -1.0
    scores, odds = unpack([(-3.0, False, 0.0), (-2.0, False, 0.0)])
    assert tune(scores, odds) == -4.0
    scores, odds = unpack([(2.0, True, 1.0), (3.0, True, 1.0)])
    assert tune(scores, odds) == 4.0
    scores, odds = unpack([(1 + 2**-52, True, 1.0), (1 + 2**-51, False, 0.0)])  # the middle would round up
    assert tune(scores, odds) == 1 + 2**-52


@given(st.lists(QUESTION, min_size=4, max_size=16), st.integers(2, 4))
def test_a_question_does_not_affect_its_own_threshold(questions: list[tuple[float, bool, float]], folds: int) -> None:
    scores, odds = unpack(questions)
    fold_of = np.arange(len(odds)) % folds
    found = cross_fit(scores, odds, fold_of)
    for fold in range(folds):
        others = tune(scores.only(fold_of != fold), odds[fold_of != fold])
        assert np.array_equal(found.f1[fold_of == fold], scores.withheld(odds > others).f1[fold_of == fold])
        # With the opposite answers, the threshold that a fold is scored at stays the same.
        opposite = np.where(fold_of == fold, ~scores.answerable, scores.answerable)
        before, after = (
            cross_fit(scored(answerable, np.ones(len(odds))), odds, fold_of)
            for answerable in (scores.answerable, opposite)
        )
        assert np.array_equal(before.answered[fold_of == fold], after.answered[fold_of == fold])


def test_cross_fitting_predicts_the_score_on_new_questions() -> None:
    """Over many draws it is below the best F1 on the same questions, and equal to the F1 on 2000 new ones."""
    rng = np.random.default_rng(0)
    best, crossed, fresh = [], [], []
    for _ in range(150):
        odds, unanswerable = planted(rng, 60, temperature=2.0, bias=0.5)
        scores = scored(~unanswerable, (rng.random(60) < 0.7).astype(np.float64))
        new_odds, new_unanswerable = planted(rng, 2000, temperature=2.0, bias=0.5)
        new = scored(~new_unanswerable, (rng.random(2000) < 0.7).astype(np.float64))
        threshold = tune(scores, odds)
        best.append(f1_at(scores, odds, threshold))
        crossed.append(float(cross_fit(scores, odds, np.arange(60) % 5).f1.mean()))
        fresh.append(f1_at(new, new_odds, threshold))
    assert np.mean(best) > np.mean(fresh) + 0.02
    assert np.mean(crossed) < np.mean(best) - 0.02
    assert np.mean(crossed) == pytest.approx(np.mean(fresh), abs=0.015)


@pytest.mark.parametrize(("temperature", "bias"), [(1.0, 0.0), (2.5, 0.7), (0.4, -1.5)])
def test_a_planted_temperature_and_bias_are_found(temperature: float, bias: float) -> None:
    odds, unanswerable = planted(np.random.default_rng(1), 40_000, temperature, bias)
    found = fit_temperature(odds, unanswerable)
    assert found.temperature == pytest.approx(temperature, rel=0.05)
    assert found.bias == pytest.approx(bias, abs=0.08)


@given(st.lists(st.tuples(ODDS, st.booleans()), min_size=1, max_size=12), st.sampled_from([1e-6, 1.0, 100.0]))
def test_a_temperature_maximises_the_likelihood_without_certainty(
    pairs: list[tuple[float, bool]], scale: float
) -> None:
    """No small change of either number fits better; perfectly separated questions leave some doubt."""
    odds = np.clip(np.array([odds for odds, _ in pairs]), -5, 5) * scale
    unanswerable = np.array([flag for _, flag in pairs])
    found = fit_temperature(odds, unanswerable)
    p = na_probability(odds, found)
    assert ((p > 0) & (p < 1)).all()
    many, few = unanswerable.sum(), (~unanswerable).sum()
    targets = np.where(unanswerable, (many + 1) / (many + 2), 1 / (few + 2))
    spread = odds.std()
    if spread <= 1e-9 * np.abs(odds).max():  # equal except for rounding: all have the same probability
        assert p == pytest.approx(targets.mean(), abs=1e-6)
        return
    z = (odds - odds.mean()) / spread
    slope, level = spread / found.temperature, found.bias + odds.mean() / found.temperature

    def loss(slope: float, level: float) -> float:
        return float((np.logaddexp(0, slope * z + level) - targets * (slope * z + level)).sum())

    least = loss(slope, level) - 1e-9
    assert loss(slope * 1.05, level) >= least
    assert min(loss(slope, level + 0.05), loss(slope, level - 0.05)) >= least
    if slope > 1.01 * LEAST_SLOPE:
        assert loss(slope * 0.95, level) >= least


def test_a_context_without_tokens_does_not_distort_the_fit() -> None:
    odds, unanswerable = planted(np.random.default_rng(6), 300)
    plain = fit_temperature(odds, unanswerable)
    for flag in (True, False):
        assert fit_temperature(np.append(odds, 3.0 - NO_SPAN), np.append(unanswerable, flag)) == plain
    alone = fit_temperature(np.full(4, -NO_SPAN), np.array([True, True, True, False]))
    assert na_probability(np.array([-NO_SPAN]), alone)[0] == pytest.approx((3 * 4 / 5 + 1 / 3) / 4)  # Platt's targets


def test_misleading_odds_give_all_questions_the_same_probability() -> None:
    odds = np.linspace(-3, 3, 300)
    unanswerable = odds < -1
    found = na_probability(odds, fit_temperature(odds, unanswerable))
    assert found == pytest.approx(unanswerable.mean(), abs=0.01)
    assert (np.diff(found) >= 0).all()


@given(st.lists(st.tuples(ODDS, st.booleans()), min_size=1, max_size=10))
def test_isotonic_steps_match_the_formula(pairs: list[tuple[float, bool]]) -> None:
    """The min-max formula: at each of the odds, the maximum over range begins of the minimum mean over range ends.

    The outcomes are Platt's targets, so no number of questions gives certainty.
    """
    odds, unanswerable = np.array([odds for odds, _ in pairs]), np.array([flag for _, flag in pairs])
    distinct = np.unique(odds)
    targets = np.where(unanswerable, 1 - 1 / (unanswerable.sum() + 2), 1 / ((~unanswerable).sum() + 2))
    expected = [
        max(
            min(targets[(odds >= low) & (odds <= high)].mean() for high in distinct if high >= here)
            for low in distinct
            if low <= here
        )
        for here in distinct
    ]
    found = fit_isotonic(odds, unanswerable)
    assert na_probability(distinct, found) == pytest.approx(expected)
    assert 0 < found.probability[0] <= found.probability[-1] < 1
    assert Calibration.model_validate(found.model_dump()) == found
    beyond = na_probability(np.array([-1e308, 1e308]), found)
    assert beyond.tolist() == [found.probability[0], found.probability[-1]]


def test_isotonic_steps_are_few() -> None:
    odds, unanswerable = planted(np.random.default_rng(2), 6000)
    assert len(fit_isotonic(odds, unanswerable).odds) < 200


def test_the_calibration_error_is_small_only_for_right_probabilities() -> None:
    rng = np.random.default_rng(3)
    odds, unanswerable = planted(rng, 20_000)
    right = na_probability(odds, None)
    assert expected_calibration_error(right, unanswerable) < 0.012
    assert expected_calibration_error(na_probability(odds + 2, None), unanswerable) > 0.15
    assert expected_calibration_error(na_probability(odds * 4, None), unanswerable) > 0.08
    # By hand: two groups, each 0.25 off.
    p, outcome = np.array([0.25, 0.25, 0.75, 0.75]), np.array([False, True, True, True])
    assert expected_calibration_error(p, outcome, bins=2) == pytest.approx(0.25)


def test_the_order_of_equal_probabilities_does_not_matter() -> None:
    p, outcome = np.full(100, 0.5), np.arange(100) < 50
    assert expected_calibration_error(p, outcome) == pytest.approx(0)


@pytest.mark.parametrize("fit", [fit_temperature, fit_isotonic])
def test_calibration_improves_probabilities_on_other_questions(fit) -> None:
    odds, unanswerable = planted(np.random.default_rng(4), 3000, temperature=3.0, bias=1.0)
    new_odds, new_unanswerable = planted(np.random.default_rng(5), 3000, temperature=3.0, bias=1.0)
    before = expected_calibration_error(na_probability(new_odds, None), new_unanswerable)
    after = expected_calibration_error(na_probability(new_odds, fit(odds, unanswerable)), new_unanswerable)
    assert before > 0.1
    assert after < 0.035


@pytest.mark.parametrize("fit", [fit_temperature, fit_isotonic])
def test_a_weight_counts_as_so_many_questions(fit) -> None:
    """A weight of 3 fits as three copies do, except for Platt's targets, which depend on the number of questions."""
    rng = np.random.default_rng(6)
    odds, unanswerable = planted(rng, 4000, temperature=2.0)
    weights = rng.integers(1, 4, 4000)
    weighted = fit(odds, unanswerable, weights.astype(np.float64))
    copied = fit(np.repeat(odds, weights), np.repeat(unanswerable, weights))
    at = np.linspace(-6, 6, 50)
    assert na_probability(at, weighted) == pytest.approx(na_probability(at, copied), abs=1e-3)
    scores = scored(~unanswerable, rng.random(4000))
    thrice = scored(np.repeat(~unanswerable, weights), np.repeat(scores.f1, weights))
    assert tune(scores, odds, weights.astype(np.float64)) == tune(thrice, np.repeat(odds, weights))


def asked(title: str, context: str, id: str, *, answer: bool = True, group: str | None = None) -> Example:
    answers = (Answer(context[:1], 0),) if answer else ()
    return Example(id, "What?", Context(context, title), answers, group=group)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=40), st.integers(2, 5))
def test_an_article_is_in_one_fold_and_folds_are_about_equal(titles: list[int], folds: int) -> None:
    examples = [asked(f"article {title}", "one text", f"q{row}") for row, title in enumerate(titles)]
    found = assign_folds(examples, folds)
    if len(set(titles)) == 1:
        assert found is None  # one article with one context
        return
    assert found is not None
    assert all(len(set(found[np.array(titles) == title])) == 1 for title in set(titles))
    sizes = np.bincount(found)
    assert len(sizes) == min(folds, len(set(titles)))
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= max(titles.count(title) for title in titles)


def test_without_titles_folds_split_by_context_and_keep_a_question_together() -> None:
    bare = assign_folds([asked("", text, f"q{row}") for row, text in enumerate("aabbcc")], 2)
    assert bare is not None
    assert bare[0] == bare[1]
    assert bare[2] == bare[3]
    assert set(bare) == {0, 1}
    mixed = [asked("t", "x", f"t{row}") for row in range(4)] + [asked("", text, text) for text in "abcd"]
    found = assign_folds(mixed, 2)
    assert found is not None
    assert set(found[:4]) == {0}
    assert set(found[4:]) == {1}
    found = assign_folds([asked("t", "x", "t"), *mixed[4:]], 2)  # contexts without a title are not one article
    assert found is not None
    assert sorted(np.bincount(found)) == [2, 3]
    many = assign_folds([asked(f"t{row}", "x", f"q{row}", group=f"g{row // 2}") for row in range(8)], 2)
    assert many is not None
    assert (many[0::2] == many[1::2]).all()


def predicted(odds: float, text: str = "x") -> Prediction:
    return Prediction((Candidate(text, 0, 1, 0.0), Candidate("", 0, 0, odds)), null_odds=odds)


def a_set_of(count: int = 40) -> tuple[list[Example], dict[str, Prediction]]:
    """Questions on eight articles, every other unanswerable; their odds are 5 too high."""
    rng = np.random.default_rng(5)
    examples = [
        asked(f"article {number % 8}", f"x{number}", f"q{number}", answer=number % 2 == 0) for number in range(count)
    ]
    odds = {example.id: float(5 + rng.normal(-2 if example.answerable else 2, 1)) for example in examples}
    return examples, {id: predicted(value) for id, value in odds.items()}


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_tuned_options_record_what_they_were_tuned_on(method) -> None:
    examples, predictions = a_set_of(240)
    tuned = tune_decoding(DecodingOptions(), examples, predictions, data=["folder/dev.json"], method=method)
    decoding = DecodingOptions.model_validate(tuned.decoding.model_dump())
    assert decoding == tuned.decoding
    assert decoding.null_score_diff_threshold == pytest.approx(5, abs=1)
    assert decoding.tuned_on is not None
    assert (decoding.tuned_on.data, decoding.tuned_on.questions) == ("dev.json", 240)
    assert decoding.calibration is not None
    assert decoding.calibration.fitted_on == decoding.tuned_on
    assert decoding.tuned_on.sha256 == fingerprint(examples[::-1])
    report = tuned.report
    assert report["f1_at_0"] == 50
    assert min(report["f1_in_sample"], report["crossfit_f1"]) > 80
    assert report["crossfit_ece"] < report["ece_uncalibrated"]
    assert (report["threshold_choice"], report["calibration_choice"]) == ("tuned", "tuned")
    assert len(tuned.lines()) == 5


def test_scores_report_the_threshold_and_whether_it_was_tuned_on_these_questions() -> None:
    examples, predictions = a_set_of()
    odds = np.array([prediction.null_odds for prediction in predictions.values()])
    scores = scored(np.array([example.answerable for example in examples]), np.ones(len(examples)))
    plain = threshold_report(DecodingOptions(), examples, scores, odds, gives_text=True)
    assert set(plain) == {"threshold", "exact_at_0", "f1_at_0", "crossfit_exact", "crossfit_f1", "ece"}
    decoding = tune_decoding(DecodingOptions(), examples, predictions, data=["dev"]).decoding
    here = threshold_report(decoding, examples, scores, odds, gives_text=True)
    assert here["threshold_tuned_on_these"] is True
    assert here["ece"] < plain["ece"]
    assert here["crossfit_f1"] == plain["crossfit_f1"]
    elsewhere = threshold_report(decoding, examples[1:], scores.only(np.arange(40) > 0), odds[1:], gives_text=True)
    assert elsewhere["threshold_tuned_on_these"] is False
    known = summarise(scores, null_odds=dict(zip(scores.ids, odds.tolist(), strict=True)), threshold=0.0)
    assert (plain["exact_at_0"], plain["f1_at_0"]) == (known["exact"], known["f1"])


def test_without_texts_the_accuracy_is_tuned() -> None:
    examples, predictions = a_set_of()
    without = {
        id: Prediction((Candidate("", 0, 0, prediction.null_odds),), prediction.null_odds)
        for id, prediction in predictions.items()
    }
    with_texts = tune_decoding(DecodingOptions(), examples, predictions, data=["dev"])
    tuned = tune_decoding(DecodingOptions(), examples, without, data=["dev"], gives_text=False)
    assert tuned.decoding == with_texts.decoding  # here every answer is right
    assert tuned.report["crossfit_answerability_accuracy"] == with_texts.report["crossfit_f1"]
    assert len(tuned.lines()) == 6
    assert "few questions (20 answerable, 20 unanswerable)" in tuned.lines()[1]


def test_data_with_one_kind_of_question_cannot_be_tuned_on_and_lacks_some_scores() -> None:
    examples, predictions = a_set_of()
    answerable = [example for example in examples if example.answerable]
    with pytest.raises(DataError, match="only answerable ones"):
        tune_decoding(DecodingOptions(), answerable, predictions, data=["dev.json"])
    with pytest.raises(DataError, match="found none"):
        check_tunable([], ["dev.json"])
    scores = scored(np.ones(20, np.bool_), np.ones(20))
    report = threshold_report(DecodingOptions(), answerable, scores, np.zeros(20), gives_text=True)
    assert set(report) == {"threshold", "exact_at_0", "f1_at_0"}


def test_one_context_has_no_other_articles() -> None:
    examples, predictions = a_set_of()
    alone = [asked("t", "x", example.id, answer=example.answerable) for example in examples]
    tuned = tune_decoding(DecodingOptions(), alone, predictions, data=["dev"])
    assert "crossfit_f1" not in tuned.report
    assert tuned.kept
    assert tuned.decoding == DecodingOptions()
    assert "one context" in tuned.lines()[0]
    assert "one context" in tuned.lines()[-1]
    forced = tune_decoding(DecodingOptions(), alone, predictions, data=["dev"], force=True)
    assert not forced.kept
    assert forced.decoding.null_score_diff_threshold == pytest.approx(5, abs=1)
    assert forced.report["threshold_choice"] == forced.report["calibration_choice"] == "forced"


def with_random_odds(count: int, unanswerable: float) -> tuple[list[Example], dict[str, Prediction]]:
    """Questions whose odds say nothing, all below 0: on other articles, no threshold beats answering all of them."""
    rng = np.random.default_rng(7)
    examples = [
        asked(f"article {number % 8}", f"x{number}", f"q{number}", answer=rng.random() > unanswerable)
        for number in range(count)
    ]
    return examples, {example.id: predicted(float(-abs(rng.normal())) - 0.1) for example in examples}


@pytest.mark.parametrize("force", [False, True])
def test_a_threshold_is_kept_if_the_tuned_one_is_not_better_on_other_articles(force: bool) -> None:
    examples, predictions = with_random_odds(200, 0.45)
    tuned = tune_decoding(DecodingOptions(), examples, predictions, data=["dev"], force=force)
    report, decoding = tuned.report, tuned.decoding
    assert report["f1_at_0"] >= report["crossfit_f1"]
    assert report["threshold_tuned"] > 0
    assert report["threshold_choice"] == ("forced" if force else "kept")
    assert f"{report['crossfit_f1']:.2f}, is not better than {report['f1_at_0']:.2f}" in report["threshold_reason"]
    assert decoding.null_score_diff_threshold == report["threshold"] == (report["threshold_tuned"] if force else 0)
    assert (decoding.tuned_on is not None) is force
    # The probabilities are better than before, so they are stored all the same, with what they were fitted on.
    assert report["calibration_choice"] == "tuned"
    assert decoding.calibration is not None
    assert decoding.calibration.fitted_on is not None
    scores = scored(np.array([example.answerable for example in examples]), np.ones(200))
    again = threshold_report(decoding, examples, scores, np.zeros(200), gives_text=True)
    assert again["threshold_tuned_on_these"] is True


def test_a_calibration_is_kept_if_the_fitted_one_is_not_better_on_other_articles() -> None:
    odds, unanswerable = planted(np.random.default_rng(8), 60)
    examples = [asked(f"t{number}", "x", f"q{number}", answer=not flag) for number, flag in enumerate(unanswerable)]
    predictions = {f"q{number}": predicted(float(value)) for number, value in enumerate(odds)}
    tuned = tune_decoding(DecodingOptions(), examples, predictions, data=["dev"])
    assert tuned.report["crossfit_ece"] >= tuned.report["ece_uncalibrated"]
    assert (tuned.report["calibration_choice"], tuned.decoding.calibration) == ("kept", None)
    assert "calibration kept as it was: the cross-fitted error" in tuned.lines()[-1]
    poor = DecodingOptions(calibration=Calibration(method="temperature", temperature=1e6, bias=9.0))
    tuned = tune_decoding(poor, examples, predictions, data=["dev"])
    assert (tuned.report["calibration_choice"], tuned.decoding.calibration) == ("kept", None)
    assert "calibration removed, uncalibrated is better: the cross-fitted error" in tuned.lines()[-1]


def test_a_model_keeps_its_own_threshold_where_it_is_the_best() -> None:
    """It competes with the tuned one and with 0, but not where it was tuned on the same questions."""
    examples, predictions = with_random_odds(200, 0.7)  # most have no answer: abstain from all
    elsewhere = TunedOn(data="other", questions=9, sha256="0" * 64)
    own = DecodingOptions(
        null_score_diff_threshold=-9.0,
        tuned_on=elsewhere,
        calibration=fit_temperature(*planted(np.random.default_rng(9), 50)),
    )
    tuned = tune_decoding(own, examples, predictions, data=["dev"])
    assert tuned.report["f1_before"] == pytest.approx(100 * np.mean([not example.answerable for example in examples]))
    assert (tuned.decoding.null_score_diff_threshold, tuned.decoding.tuned_on) == (-9.0, elsewhere)
    assert any(line.startswith("before:") and "at -9.0000" in line for line in tuned.lines())
    # At 0, where all questions are answered, the score is better for the opposite questions.
    opposite = [
        asked(example.context.title, example.context.text, example.id, answer=not example.answerable)
        for example in examples
    ]
    tuned = tune_decoding(own, opposite, predictions, data=["dev"])
    assert tuned.report["f1_before"] < tuned.report["f1_at_0"]
    assert (tuned.report["threshold"], tuned.decoding.tuned_on) == (0.0, None)
    # Tuned by force on these questions, it is no evidence for itself.
    good_examples, good_predictions = with_random_odds(200, 0.45)
    forced = tune_decoding(DecodingOptions(), good_examples, good_predictions, data=["dev"], force=True).decoding
    again = tune_decoding(forced, good_examples, good_predictions, data=["dev"])
    assert "f1_before" not in again.report
    assert "ece_before" not in again.report
    assert again.decoding.null_score_diff_threshold == 0
    assert again.decoding.calibration == forced.calibration


def test_a_few_questions_change_nothing() -> None:
    examples, predictions = a_set_of(18)  # nine of each kind
    tuned = tune_decoding(DecodingOptions(), examples, predictions, data=["dev"])
    assert tuned.report["crossfit_f1"] > tuned.report["f1_at_0"]
    assert tuned.decoding == DecodingOptions()
    assert "at least 10 questions of each kind" in tuned.lines()[0]
    # Not even a threshold and a calibration that are worse here than 0 and none; nor some that were tuned here.
    poor = Calibration(method="temperature", temperature=1e6, bias=9.0)
    for sha256 in ("0" * 64, fingerprint(examples)):
        tuned_on = TunedOn(data="other", questions=900, sha256=sha256)
        own = DecodingOptions(null_score_diff_threshold=-99.0, tuned_on=tuned_on, calibration=poor, window_penalty=0.5)
        tuned = tune_decoding(own, examples, predictions, data=["dev"])
        assert tuned.decoding == own
        assert tuned.report["threshold"] == -99
        assert "calibration kept as it was: at least 10 questions" in tuned.lines()[-1]
    with pytest.raises(DataError, match=r"at least 100 .* found 99 and 99; use the method temperature"):
        check_tunable(a_set_of(198)[0], ["dev"], "isotonic")
    check_tunable(a_set_of(200)[0], ["dev"], "isotonic")


def test_nothing_here_needs_torch() -> None:
    script = "import sys, lamella.scoring.calibrate, lamella.inference.predict; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"

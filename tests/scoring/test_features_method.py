"""The calibration by features: it finds planted weights, and is used only where it is better on files left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lamella.calibration import Calibration, TunedOn
from lamella.data.examples import Answer, Context, Example
from lamella.decoding_options import DecodingOptions
from lamella.errors import UsageError
from lamella.inference.abstention import FEATURES, calibrated, log_odds
from lamella.inference.no_answer import logistic, na_probability
from lamella.inference.prediction import Prediction, rank
from lamella.scoring.calibrate import Tuned, calibrate_model, tune_decoding
from lamella.scoring.feature_fit import PENALTY, fit_features
from lamella.scoring.tuning_sample import Sample

NAMES = ("null_odds", "margin", "entropy")
Questions = tuple[list[Example], dict[str, Prediction]]


def planted_table(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features whose log-odds are 1.5 z1 - z2 + 0.5, with z standardised; the third says nothing."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(count, 3))
    unanswerable = rng.random(count) < logistic(1.5 * z[:, 0] - z[:, 1] + 0.5)
    return z * [2.0, 5.0, 0.1] + [1.0, -3.0, 2.0], unanswerable


def test_planted_weights_are_found() -> None:
    table, unanswerable = planted_table(40_000)
    found = fit_features(table, unanswerable, np.ones(len(table)), NAMES)
    assert [feature.name for feature in found.features] == list(NAMES)
    assert [feature.weight for feature in found.features] == pytest.approx([1.5, -1.0, 0.0], abs=0.06)
    assert found.bias == pytest.approx(0.5, abs=0.06)
    assert [feature.mean for feature in found.features] == pytest.approx([1.0, -3.0, 2.0], abs=0.1)
    assert Calibration.model_validate(found.model_dump()) == found


@pytest.mark.parametrize("case", ["plain", "weighted", "separable", "constant", "one kind"])
def test_the_fit_is_the_minimum_of_the_penalised_loss(case: str) -> None:
    table, unanswerable = planted_table(60, seed=1)
    weights = np.random.default_rng(2).random(60) * 7 if case == "weighted" else np.ones(60)
    if case == "separable":
        unanswerable = table[:, 0] > 1
    if case == "constant":
        table[:, 2] = 7.0
    if case == "one kind":
        unanswerable = np.ones(60, np.bool_)
    found = fit_features(table, unanswerable, weights, NAMES)
    start = np.array([*(feature.weight for feature in found.features), found.bias])
    assert np.isfinite(start).all()

    def loss(values: np.ndarray) -> float:
        features = [replace_weight(feature, value) for feature, value in zip(found.features, values, strict=False)]
        logits = log_odds(table, found.model_copy(update={"features": features, "bias": values[-1]}))
        losses = np.logaddexp(0, logits) - unanswerable * logits
        return float((weights / weights.mean() * losses).sum() + PENALTY / 2 * (values[:-1] ** 2).sum())

    for place in range(4):
        for step in (-0.01, 0.01):
            assert loss(start) <= loss(start + step * np.eye(4)[place]) + 1e-6
    if case == "constant":
        assert found.features[2].weight == 0


def replace_weight(feature: Any, weight: float) -> Any:
    return feature.model_copy(update={"weight": float(weight)})


def questions(name: str, count: int, *, by_margin: float, by_odds: float, seed: int, right: float = 1.0) -> Questions:
    """Questions whose null odds and margin differ between the two kinds by some standard deviations."""
    rng = np.random.default_rng(seed)
    examples, predictions = [], {}
    for number in range(count):
        answerable, id = bool(number % 2), f"{name}-{number}"
        context = Context(f"x and y in text {number} of {name}", f"{name} {number % 9}")
        sign = -1 if answerable else 1
        margin = max(0.0, 4 - sign * by_margin / 2 + rng.normal())
        odds = sign * by_odds / 2 + rng.normal() - 1
        text = "x" if rng.random() < right else "y"
        begin = context.text.index(text)
        examples.append(Example(id, "What?", context, (Answer("x", 0),) if answerable else ()))
        other = context.text.index("in")
        predictions[id] = rank(
            [(text, begin, begin + 1, 3.0, 0), ("in", other, other + 2, 3.0 - margin, 0)], 3.0 + odds
        )
    return examples, predictions


def tuned_on_files(files: list[Questions], decoding: DecodingOptions | None = None, **options: Any) -> Tuned:
    return tune_decoding(
        decoding or DecodingOptions(),
        [example for examples, _ in files for example in examples],
        {id: prediction for _, predictions in files for id, prediction in predictions.items()},
        data=[f"folder/{number}.json" for number in range(len(files))],
        files=[number for number, (examples, _) in enumerate(files) for _ in examples],
        **{"method": "features", **options},
    )


HELPFUL = [
    questions(name, count, by_margin=3.0, by_odds=1.0, seed=seed)
    for name, count, seed in (("a", 200, 1), ("b", 120, 2), ("c", 60, 3))
]
USELESS = [questions(name, 150, by_margin=0.0, by_odds=2.0, seed=seed) for name, seed in (("a", 4), ("b", 5), ("c", 6))]


def test_features_are_used_where_they_are_better_on_files_left_out() -> None:
    tuned = tuned_on_files(HELPFUL)
    report, decoding = tuned.report, tuned.decoding
    assert report["features_choice"] == report["threshold_choice"] == report["calibration_choice"] == "tuned"
    assert set(report["compared"]) == {"mean", "0.json", "1.json", "2.json"}
    for kinds in report["compared"].values():
        assert kinds["features"]["aurc"] < kinds["threshold"]["aurc"]
        assert kinds["features"]["coverage_at_80"] > kinds["threshold"]["coverage_at_80"]
        assert kinds["features"]["f1"] > kinds["threshold"]["f1"] + 5
    mean, parts = report["compared"]["mean"], [report["compared"][f"{number}.json"] for number in range(3)]
    for kind in ("threshold", "features"):
        for key in mean[kind]:
            assert mean[kind][key] == pytest.approx(np.mean([part[kind][key] for part in parts]))
    assert decoding.null_score_diff_threshold == 0
    assert decoding.calibration is not None
    assert (decoding.calibration.method, decoding.calibration.answerable) == ("features", 0.5)
    assert decoding.tuned_on == decoding.calibration.fitted_on is not None
    assert DecodingOptions.model_validate(decoding.model_dump()) == decoding
    assert tuned.lines()[0] == "no answer above a probability of 0.5, by features fitted on 380 questions"
    assert "each file tuned on the others" in "\n".join(tuned.lines())
    assert sum(line.startswith("  ") and "AURC" in line for line in tuned.lines()) == 4
    # What is stored decides as the report says.
    for (examples, predictions), part in zip(HELPFUL, parts, strict=True):
        answers = [calibrated(predictions[example.id], decoding).text(0.0) for example in examples]
        right = np.mean(
            [text == ("x" if example.answerable else "") for text, example in zip(answers, examples, strict=True)]
        )
        assert 100 * right == pytest.approx(part["features"]["f1"], abs=6)


def test_the_threshold_alone_is_used_where_features_do_not_help() -> None:
    tuned, plain = tuned_on_files(USELESS), tuned_on_files(USELESS, method="temperature")
    assert tuned.report["features_choice"] == "kept"
    assert "with a threshold alone" in tuned.report["features_reason"]
    assert tuned.decoding == plain.decoding
    assert {key: tuned.report[key] for key in plain.report} == plain.report
    assert any(line.startswith("features not used: their ") for line in tuned.lines())
    forced = tuned_on_files(USELESS, force=True)
    assert forced.report["features_choice"] == "forced"
    assert forced.decoding.calibration is not None
    assert forced.decoding.calibration.method == "features"


def test_a_file_counts_the_same_whatever_its_size() -> None:
    small, large = (
        questions("a", 40, by_margin=0, by_odds=3.0, seed=7),
        questions("b", 1000, by_margin=0, by_odds=3.0, seed=8),
    )
    repeated = [
        (replace(example, id=f"{example.id}/{copy}"), f"{example.id}/{copy}")
        for example in small[0]
        for copy in range(25)
    ]
    copies = ([example for example, _ in repeated], {id: small[1][id.split("/")[0]] for _, id in repeated})
    weighed, copied = (tuned_on_files(files, method="temperature") for files in ([small, large], [copies, large]))
    # Platt's targets depend on the number of questions, and so do thresholds, a little.
    for key, difference in (("f1_at_0", 1e-6), ("f1_in_sample", 0.2), ("crossfit_f1", 0.2), ("threshold", 0.1)):
        assert weighed.report[key] == pytest.approx(copied.report[key], abs=difference), key
    assert weighed.decoding.calibration is not None
    assert weighed.decoding.calibration.answerable == 0.5


def test_a_question_does_not_affect_what_is_fitted_for_its_own_file() -> None:
    examples = [example for part, _ in HELPFUL for example in part]
    predictions = {id: prediction for _, part in HELPFUL for id, prediction in part.items()}
    files = [number for number, (part, _) in enumerate(HELPFUL) for _ in part]
    tuned_on = TunedOn(data="x", questions=len(examples), sha256="0" * 64)
    sample = Sample.build(examples, predictions, tuned_on, files=files)
    first = sample.files == 0
    opposite = replace(sample.scores, answerable=np.where(first, ~sample.scores.answerable, sample.scores.answerable))
    for method in ("temperature", "isotonic", "features"):
        before, after = sample.cross_fit(method), replace(sample, scores=opposite).cross_fit(method)
        assert np.array_equal(before.probability[first], after.probability[first])
        assert np.array_equal(before.withheld[first], after.withheld[first])
        assert not np.array_equal(before.probability[~first], after.probability[~first])


def test_one_file_is_split_by_article_and_one_context_cannot_be_split() -> None:
    tuned = tuned_on_files(HELPFUL[:1])
    assert tuned.report["features_choice"] == "tuned"
    assert set(tuned.report["compared"]) == {"mean"}
    assert "each article tuned on the others" in "\n".join(tuned.lines())
    examples, predictions = HELPFUL[0]
    alone = [replace(example, context=examples[0].context) for example in examples]
    tuned = tuned_on_files([(alone, predictions)])
    assert "one context" in tuned.report["features_reason"]
    assert tuned.decoding == DecodingOptions()
    forced = tuned_on_files([(alone, predictions)], force=True)
    assert forced.decoding.calibration is not None
    assert forced.decoding.calibration.method == "features"
    assert forced.lines()


def test_a_model_with_features_keeps_threshold_and_calibration_together() -> None:
    """Its threshold is one of log-odds: neither is replaced alone."""
    decoding = tuned_on_files(HELPFUL).decoding
    elsewhere = [questions(name, 150, by_margin=3.0, by_odds=1.0, seed=seed) for name, seed in (("d", 9), ("e", 10))]
    again = tuned_on_files(elsewhere, decoding, method="temperature")
    assert again.report["f1_before"] > again.report["crossfit_f1"]
    assert again.report["ece_before"] > 0
    assert again.kept
    assert again.decoding == decoding
    assert again.report["threshold"] == 0
    lines = "\n".join(again.lines())
    assert "kept" in lines
    # Where features mislead, both are replaced.
    misleading = [questions(name, 300, by_margin=-6.0, by_odds=3.0, seed=seed) for name, seed in (("f", 11), ("g", 12))]
    other = tuned_on_files(misleading, decoding, method="temperature")
    assert not other.kept
    assert other.decoding.calibration is not None
    assert other.decoding.calibration.method == "temperature"
    # On the same questions, what was tuned on them is no evidence.
    same = tuned_on_files(HELPFUL, decoding, method="temperature")
    assert "f1_before" not in same.report
    assert same.decoding.calibration is not None
    assert same.decoding.calibration.method == "temperature"


def test_predictions_of_a_calibrated_model_are_tuned_on_as_before() -> None:
    """The null odds of its predictions are log-odds; tuning starts from the scores."""
    decoding = tuned_on_files(HELPFUL).decoding
    mapped = [
        (examples, {id: calibrated(prediction, decoding) for id, prediction in predictions.items()})
        for examples, predictions in HELPFUL
    ]
    assert tuned_on_files(mapped) == tuned_on_files(HELPFUL)


def test_a_model_without_texts_has_no_features() -> None:
    class Silent:
        gives_text = False
        decoding = DecodingOptions()

    with pytest.raises(UsageError, match="expected a model that finds answers"):
        calibrate_model(Silent(), {"a.json": HELPFUL[0][0]}, method="features")  # type: ignore[arg-type]


def test_every_feature_has_a_weight() -> None:
    calibration = tuned_on_files(HELPFUL).decoding.calibration
    assert calibration is not None
    assert [feature.name for feature in calibration.features] == list(FEATURES)
    assert calibration.features[list(FEATURES).index("windows")].weight == 0  # one window each: nothing to learn
    odds = [
        calibrated(prediction, DecodingOptions(calibration=calibration)).null_odds
        for prediction in HELPFUL[0][1].values()
    ]
    assert ((na_probability(np.array(odds), calibration) > 0.5) == (np.array(odds) > 0)).all()

"""The penalty for long texts: fitted where more windows bring more false answers, and used where it is better."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lamella.data.examples import Answer, Context, Example
from lamella.decoding_options import DecodingOptions
from lamella.inference.abstention import calibrated
from lamella.inference.prediction import Prediction, rank
from lamella.scoring.calibrate import tune_decoding

Questions = tuple[list[Example], dict[str, Prediction]]
FILES = ["a.json", "b.json", "c.json", "d.json"]


def questions(name: str, windows: tuple[int, ...], *, drift: float, seed: int, count: int = 400) -> Questions:
    """Return questions, half of them answerable, whose null odds fall by `drift` per doubling of the windows."""
    rng = np.random.default_rng(seed)
    examples, predictions = [], {}
    for number in range(count):
        id, answerable, read = f"{name}-{number}", number % 2 == 0, windows[number // 2 % len(windows)]
        answers = (Answer("Rome", 0),) if answerable else ()
        examples.append(Example(id, "Where?", Context(f"Rome, {id}."), answers))
        odds = rng.normal(-2.0 if answerable else 2.0, 1.5) - drift * np.log2(read)
        predictions[id] = rank([("Rome", 0, 4, 0.0, 0)], float(odds), windows=read)
    return examples, predictions


def tune(parts: list[Questions], decoding: DecodingOptions | None = None, force: bool = False):  # type: ignore[no-untyped-def]
    examples = [example for part, _ in parts for example in part]
    predictions = {id: prediction for _, part in parts for id, prediction in part.items()}
    files = [number for number, (part, _) in enumerate(parts) for _ in part]
    return tune_decoding(
        decoding or DecodingOptions(), examples, predictions, data=FILES[: len(parts)], files=files, force=force
    )


def long_and_short(drift: float) -> list[Questions]:
    lengths = [(1,), (1, 2), (4, 8), (16, 32)]
    return [questions(str(number), windows, drift=drift, seed=number) for number, windows in enumerate(lengths)]


def test_a_planted_drift_is_undone() -> None:
    tuned = tune(long_and_short(drift=0.8))
    assert tuned.decoding.window_penalty == pytest.approx(0.8, abs=0.1)
    assert tuned.decoding.null_score_diff_threshold == pytest.approx(0.0, abs=0.6)
    report = tuned.report
    assert report["window_penalty_choice"] == "tuned"
    assert report["window_penalty_f1_with"] > report["window_penalty_f1_without"] + 5
    assert report["crossfit_ece"] < 6
    assert any(line.startswith("long texts: null odds rise by 0.") for line in tuned.lines())
    json.dumps(report)


def test_decisions_use_it() -> None:
    parts = long_and_short(drift=0.8)
    decoding = tune(parts).decoding
    for examples, predictions in parts:
        right = [
            bool(calibrated(predictions[example.id], decoding).text(decoding.null_score_diff_threshold))
            == example.answerable
            for example in examples
        ]
        assert np.mean(right) > 0.85


def test_a_file_of_long_texts_beside_one_of_short_texts_is_enough() -> None:
    tuned = tune([questions("short", (1,), drift=0.8, seed=0), questions("long", (16, 32), drift=0.8, seed=1)])
    assert tuned.decoding.window_penalty == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("drift", [0.0, -0.5])
def test_texts_without_a_drift_get_none(drift: float) -> None:
    tuned = tune(long_and_short(drift))
    assert tuned.decoding.window_penalty == pytest.approx(0.0, abs=0.03)


def test_texts_of_one_window_show_nothing() -> None:
    report = tune([questions(name, (1,), drift=0.0, seed=seed) for seed, name in enumerate("xy")]).report
    assert "window_penalty_tuned" not in report
    assert report["window_penalty"] == 0


def test_a_few_long_texts_show_nothing() -> None:
    parts = [questions("short", (1,), drift=0.8, seed=0), questions("long", (2, 16), drift=0.8, seed=1, count=90)]
    assert "window_penalty_tuned" not in tune(parts).report


def test_fifty_long_texts_are_enough() -> None:
    """Also for cross-fitting, where each fold is judged by the long texts of the others, which are fewer."""
    parts = [questions("short", (1,), drift=1.0, seed=0), questions("long", (32, 64), drift=1.0, seed=1, count=50)]
    report = tune(parts).report
    assert report["window_penalty_f1_with"] > report["window_penalty_f1_without"]
    assert report["window_penalty_choice"] == "tuned"


def test_it_is_kept_with_the_threshold_it_belongs_to() -> None:
    """A threshold from elsewhere that is better than the tuned one keeps its penalty."""
    before = DecodingOptions(null_score_diff_threshold=0.0, window_penalty=0.8)
    few = [questions("few", (1, 2, 16), drift=0.8, seed=5, count=16)]
    tuned = tune(few, before)
    assert tuned.report["threshold_choice"] == "kept"
    assert tuned.decoding.window_penalty == 0.8


def test_the_report_names_how_its_scores_were_cross_fitted() -> None:
    """A penalty is tuned across articles; a penalty that is merely kept leaves the scores to be tuned across files."""
    assert "each article tuned on the others" in "\n".join(tune(long_and_short(drift=0.8)).lines())
    before = DecodingOptions(null_score_diff_threshold=0.0, window_penalty=0.8)
    tuned = tune(
        [questions(name, (1, 2, 16), drift=0.8, seed=seed, count=16) for seed, name in enumerate("xy")], before
    )
    assert (tuned.report["threshold_choice"], tuned.decoding.window_penalty) == ("kept", 0.8)
    assert "each file tuned on the others" in "\n".join(tuned.lines())

"""The threshold of an adapted reader: tuned on the corrections left out if they are enough, else its parent's.

The same corrections show whether the reader is better. Each is therefore answered at a threshold that was chosen
without its text; the threshold that is stored is chosen with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamella.data.examples import Example
from lamella.decoding_options import DecodingOptions
from lamella.inference.abstention import calibrated
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import QAModel
from lamella.scoring.calibrate import Tuned, tune_decoding
from lamella.scoring.metrics import language_of
from lamella.scoring.threshold import assign_folds
from lamella.scoring.tuning_sample import doubt_about
from lamella.serve.adaptation import LEFT_OUT

ENOUGH = 40  # of each kind: a third is left out, of which four fifths must be enough to tune on (`LEAST`)
OF_PARENT = ("null_score_diff_threshold", "window_penalty", "calibration", "tuned_on")


@dataclass(frozen=True)
class Choice:
    """The decoding options to store, and the answer to each correction with options chosen without its text."""

    tuned: Tuned  # its report is empty if the parent's options are kept
    answers: Mapping[str, str]
    enough: bool  # corrections to tune on

    def sentence(self, parent: str) -> str:
        """Describe the choice for people."""
        if self.tuned.report:
            return "How readily it answers was tuned on these corrections, and checked on texts not used for it."
        why = "a threshold tuned on these corrections is not better on other texts"
        if not self.enough:
            kinds = f"{ENOUGH} corrections with and {ENOUGH} without an answer"
            why = f"tuning its threshold takes about {kinds}, on several texts"
        return f"It answers as readily as {parent}: {why}."


def choose_threshold(model: QAModel, parent: DecodingOptions, examples: Sequence[Example]) -> Choice:
    """Choose the threshold and the calibration of an adapted model: tuned on some examples, or its parent's."""
    merged = model.decoding.model_copy(update={"merge": parent.merge})  # what the parent's threshold was tuned for
    predictions = predict(model, examples, decoding=merged)
    start = merged.model_copy(update={key: getattr(parent, key) for key in OF_PARENT})
    folds = assign_folds(examples)
    numbers = [] if folds is None else folds.tolist()
    others = {
        fold: [example for example, number in zip(examples, numbers, strict=True) if number != fold]
        for fold in set(numbers)
    }
    if not others or any(doubt_about(part) for part in others.values()):
        return Choice(Tuned(start, {}), answers_at(start, predictions), enough=False)

    def tune(part: Sequence[Example]) -> Tuned:
        of_part = {example.id: predictions[example.id] for example in part}
        language = language_of(examples)
        tuned = tune_decoding(start, part, of_part, data=[LEFT_OUT], gives_text=model.gives_text, language=language)
        return tuned if tuned.report["threshold_choice"] == "tuned" else Tuned(start, {})  # not 0, which it may prefer

    answers: dict[str, str] = {}
    for part in others.values():
        used = {example.id for example in part}
        held_out = {id_: prediction for id_, prediction in predictions.items() if id_ not in used}
        answers |= answers_at(tune(part).decoding, held_out)
    return Choice(tune(examples), answers, enough=True)


def answers_at(decoding: DecodingOptions, predictions: Mapping[str, Prediction]) -> dict[str, str]:
    """Return the answers with some decoding options; an empty one is no answer."""
    threshold = decoding.null_score_diff_threshold
    return {id_: calibrated(prediction, decoding).text(threshold) for id_, prediction in predictions.items()}

"""Predictions for examples: windows through a model, batch by batch, down to an n-best list a question.

The model may be torch's or onnxruntime's: nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.config import DecodingOptions, WindowOptions
from lamella.data.examples import Example
from lamella.data.features import Features, featurise_in_slices
from lamella.data.padding import Padded, longest_first, pad
from lamella.data.tokens import Tokenizing
from lamella.errors import DataError, RunError
from lamella.files import write_entries
from lamella.inference.decode import Merger, Prediction, WindowSpans, decode, decode_answerability
from lamella.inference.several_contexts import asked_once, by_question, several_contexts
from lamella.progress import progress
from lamella.scoring.calibrate import odds_of, scores_of_best, threshold_report
from lamella.scoring.cost import Stopwatch
from lamella.scoring.metrics import Language, summarise
from lamella.scoring.threshold import na_probability

if TYPE_CHECKING:
    from lamella.inference.logits import LogitsKeeper


class Deciding(Protocol):
    """Whatever answers are decided by: a model, or several of them together."""

    @property
    def decoding(self) -> DecodingOptions: ...

    @property
    def gives_text(self) -> bool:
        """Whether it finds answers, or only tells whether there is one."""


class Answering(Deciding, Protocol):
    """A model that answers: what of it decoding needs to know, and its logits."""

    @property
    def tokenizer(self) -> Tokenizing: ...

    @property
    def windows(self) -> WindowOptions: ...

    @property
    def folders(self) -> tuple[Path, ...]:
        """What it was loaded from."""

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Those of its task, [2, B, T]: of starts and ends; or [2, B, 1]: of "here" and "not here"."""


def predict(
    model: Answering,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    keeper: LogitsKeeper | None = None,
    clock: Stopwatch | None = None,
) -> dict[str, Prediction]:
    """Answer every example. Memory holds some windows and the n-best spans of a question; all logits, in half
    precision, only where a `keeper` is to have them. A `clock` is given the seconds from windows to logits.
    """
    refuse_repeated_ids(examples)
    merger = Merger(model.decoding, gives_text=model.gives_text)
    with progress("answering", len(examples)) as advance:
        for features in featurise_in_slices(examples, model.tokenizer, model.windows):
            for padded, logits in each_batch(model, features, batch_size, clock):
                merger.add(features, spans_of(model, padded, logits))
                if keeper is not None:
                    keeper.add(features, padded, logits)
            advance(len(features.examples))
    return merger.predictions(examples)


def refuse_repeated_ids(examples: Sequence[Example]) -> None:
    """Answers go by the id of their question."""
    twice = [id for id, times in Counter(one.id for one in examples).items() if times > 1]
    if twice:
        raise DataError(
            f"question {twice[0]}: its id is given to several questions, so that answers would be lost; lamella check "
            "DATA --fix OUT gives each its own."
        )


def each_batch(
    model: Answering, features: Features, batch_size: int, clock: Stopwatch | None = None
) -> Iterator[tuple[Padded, NDArray[np.float32]]]:
    """Every window with its logits, in batches of like length."""
    for indices in longest_first(features.lengths, batch_size):
        padded = pad(features, indices)
        with explaining_memory(padded), clock or Stopwatch():
            logits = model.logits(padded)
        yield padded, logits


def spans_of(model: Deciding, padded: Padded, logits: NDArray[Any], **options: Any) -> WindowSpans:
    """What a model's logits say of some windows."""
    if model.gives_text:
        return decode(logits, padded, model.decoding, **options)
    return decode_answerability(logits, padded)


@contextmanager
def explaining_memory(padded: Padded) -> Iterator[None]:
    """Out of memory is answered with what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError):  # which is numpy's and onnxruntime's
            from lamella.encoder.memory import is_out_of_memory

            if not is_out_of_memory(error):
                raise
        windows, tokens = padded.mask.shape
        raise RunError(
            f"out of memory while answering {windows} windows of {tokens} tokens at once: lower the batch size "
            "(--batch-size; in training, training.eval_batch_size)."
        ) from None


def score_predictions(
    model: Deciding,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    *,
    language: Language = "en",
) -> dict[str, Any]:
    """The metric of a model's predictions at its threshold; of one that gives no text, only how well it abstains.

    `best_f1` and its like search all thresholds, so they are given the best *answer* of every question, also where the
    prediction was "no answer"; from the text of `predictions.json` alone, an answer given up could not come back.
    """
    decoding, gives_text = model.decoding, model.gives_text
    scores = scores_of_best(examples, predictions, gives_text=gives_text, language=language)
    odds = {id: one.null_odds for id, one in predictions.items()}
    results = summarise(scores, null_odds=odds, threshold=decoding.null_score_diff_threshold)
    if not gives_text:
        results = {key: value for key, value in results.items() if key == "total" or key.startswith("answerability")}
    results |= threshold_report(decoding, examples, scores, odds_of(examples, predictions), gives_text=gives_text)
    return results | (_score_by_question(model, examples, predictions, language) if several_contexts(examples) else {})


def _score_by_question(
    model: Deciding, examples: Sequence[Example], predictions: Mapping[str, Prediction], language: Language
) -> dict[str, Any]:
    """The scores of the one answer that a question gets from all its contexts."""
    asked, answers = asked_once(examples), answers_by_question(model, examples, predictions)
    best = scores_of_best(asked, answers, gives_text=model.gives_text, language=language)
    withheld = odds_of(asked, answers) > model.decoding.null_score_diff_threshold
    results = summarise(best.withheld(withheld))
    if not model.gives_text:
        results = {"answerability_accuracy": results["exact"], "total": results["total"]}
    return {f"question_{key}": value for key, value in results.items()}


def answers_by_question(
    model: Deciding, examples: Sequence[Example], predictions: Mapping[str, Prediction]
) -> dict[str, Prediction]:
    """One prediction a question, where some are asked of several contexts."""
    return by_question(examples, predictions, n_best=model.decoding.n_best_size, gives_text=model.gives_text)


def write_predictions(
    folder: Path, model: Deciding, predictions: Mapping[str, Prediction], examples: Sequence[Example] = ()
) -> None:
    """The files that every other stage reads, under their official names; without texts, where the model gives none.

    Where `examples` ask a question of several contexts, these have an id each; the answers by question lie beside.
    """
    threshold = model.decoding.null_score_diff_threshold
    odds = {id: one.null_odds for id, one in predictions.items()}
    na_prob = na_probability(np.array(list(odds.values()), np.float64), model.decoding.calibration).tolist()
    write_entries(folder / runs.NULL_ODDS, odds)
    write_entries(folder / runs.NA_PROB, dict(zip(odds, na_prob, strict=True)))
    if model.gives_text:
        write_entries(folder / runs.PREDICTIONS, {id: one.text(threshold) for id, one in predictions.items()})
        write_entries(
            folder / runs.NBEST,
            {id: [candidate.to_json() for candidate in one.candidates] for id, one in predictions.items()},
        )
    if several_contexts(examples):
        answers = answers_by_question(model, examples, predictions)
        write_entries(folder / runs.QUESTION_NULL_ODDS, {id: one.null_odds for id, one in answers.items()})
        if model.gives_text:
            texts = {id: one.text(threshold) for id, one in answers.items()}
            write_entries(folder / runs.QUESTION_PREDICTIONS, texts)

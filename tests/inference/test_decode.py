"""Decoding finds the same best spans as an exhaustive search, within a window and across windows."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.config import WindowOptions
from lamella.data.demo import data_path
from lamella.data.examples import Answer, Context, Example
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.decoding_options import DecodingOptions
from lamella.errors import ModelError
from lamella.inference.decode import decode, decode_answerability
from lamella.inference.prediction import NO_SPAN, Candidate, Prediction, rank_together
from lamella.inference.window_merger import WindowMerger
from lamella.scoring.metrics import score
from samples import TOKENIZERS, example, needs_torch, plain_tokenizer, tokenizer_of

# One token per letter; with the question "q r", windows of 16 tokens hold 11 letters and begin at 0, 7 and 14.
SMALL = WindowOptions(max_seq_length=16, doc_stride=4)
DISTINCT = " ".join("abcdefghijklmnopqrstuvwxy")
REPEATED = " ".join("abc" * 8)


def hand_made(is_context: np.ndarray, cls: int = 0) -> Padded:
    """Windows in which only the context matters."""
    rows, width = is_context.shape
    zeros, mask = np.zeros((rows, width), np.int64), np.ones((rows, width), np.bool_)
    return Padded(zeros, mask, zeros, is_context, is_context, zeros[:, 0], zeros[:, 0], np.arange(rows), cls)


def legal_spans(is_context: np.ndarray, longest: int) -> list[tuple[int, int]]:
    places = np.flatnonzero(is_context)
    return [(i, j) for i in places for j in places if i <= j < i + longest]


def merged(
    features: Features, logits: Callable[[Padded], np.ndarray], options: DecodingOptions, batch_size: int = 2
) -> dict[str, Prediction]:
    merger = WindowMerger(options)
    for windows in longest_first(features.lengths, batch_size):
        padded = pad(features, windows)
        merger.add(features, decode(logits(padded), padded, options))
    return merger.predictions(features.examples)


def random_logits(features: Features, seed: int) -> Callable[[Padded], np.ndarray]:
    """Fixed logits per window, independent of the batches."""
    table = np.random.default_rng(seed).normal(0, 3, (2, len(features), 512)).astype(np.float32)
    return lambda padded: table[:, padded.windows, : padded.input_ids.shape[1]]


def small_features(*contexts: str) -> Features:
    examples = [example(text, question="q r", id=f"q{number}") for number, text in enumerate(contexts)]
    return featurise(examples, plain_tokenizer(), SMALL)


class TestJoint:
    def test_max_context_only_starts_where_the_window_shows_most(self) -> None:
        features = small_features(DISTINCT)
        padded = pad(features, np.arange(len(features)))
        logits = random_logits(features, 3)(padded)
        everything = DecodingOptions(n_best_size=1000, max_answer_length=4)
        free = decode(logits, padded, everything)
        bound = decode(logits, padded, everything.model_copy(update={"max_context_only": True}))
        for row in range(len(features)):
            legal = [
                (start, end, score)
                for start, end, score in zip(free.start[row], free.end[row], free.score[row], strict=True)
                if np.isfinite(score) and padded.max_context[row, start]
            ]
            spans = zip(bound.start[row], bound.end[row], bound.score[row], strict=True)
            assert [span for span in spans if np.isfinite(span[2])] == legal
            assert 0 < len(legal) < np.isfinite(free.score[row]).sum()

    @settings(max_examples=150, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        shape=st.tuples(st.integers(1, 4), st.integers(1, 24)),
        density=st.floats(0, 1),
        n_best=st.integers(1, 400),
        longest=st.integers(1, 40),
    )
    def test_equal_an_exhaustive_search(
        self, seed: int, shape: tuple[int, int], density: float, n_best: int, longest: int
    ) -> None:
        rng = np.random.default_rng(seed)
        is_context = rng.random(shape) < density
        logits = rng.normal(0, 4, (2, *shape)).astype(np.float32)
        options = DecodingOptions(n_best_size=n_best, max_answer_length=longest)
        cls = int(rng.integers(shape[1]))
        result = decode(logits, hand_made(is_context, cls), options)

        assert result.windows.tolist() == list(range(shape[0]))
        assert result.null == pytest.approx(logits[:, :, cls].astype(np.float64).sum(0), abs=1e-6)
        for row in range(shape[0]):
            start, end = logits[:, row].astype(np.float64)
            legal = {(i, j): start[i] + end[j] for i, j in legal_spans(is_context[row], longest)}
            real = result.score[row] > -math.inf
            spans = list(zip(result.start[row][real].tolist(), result.end[row][real].tolist(), strict=True))
            assert len(set(spans)) == len(spans) == min(n_best, len(legal))
            assert result.score[row][real].tolist() == sorted(legal.values(), reverse=True)[:n_best]
            assert result.score[row][real].tolist() == [legal[span] for span in spans]
            assert not real[len(spans) :].any()  # filler entries come last

    @settings(max_examples=150, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        shape=st.tuples(st.integers(1, 4), st.integers(1, 24)),
        density=st.floats(0, 1),
        steps=st.integers(1, 5),
        n_best=st.integers(1, 60),
        longest=st.integers(1, 40),
    )
    def test_ties_keep_the_earlier_then_the_shorter_span(
        self, seed: int, shape: tuple[int, int], density: float, steps: int, n_best: int, longest: int
    ) -> None:
        """Logits with few distinct values, as rounding gives: many spans tie."""
        rng = np.random.default_rng(seed)
        is_context = rng.random(shape) < density
        logits = rng.integers(0, steps, (2, *shape)).astype(np.float32)
        options = DecodingOptions(n_best_size=n_best, max_answer_length=longest)
        result = decode(logits, hand_made(is_context), options)
        for row in range(shape[0]):
            start, end = logits[:, row].tolist()
            legal = [(-start[i] - end[j], i, j) for i, j in legal_spans(is_context[row], longest)]
            real = result.score[row] > -math.inf
            spans = zip(-result.score[row][real], result.start[row][real], result.end[row][real], strict=True)
            assert list(spans) == sorted(legal)[:n_best]

    def test_on_a_collated_batch(self) -> None:
        features = small_features(DISTINCT, "a b", "")
        padded = pad(features, np.arange(len(features)))
        logits = random_logits(features, 0)(padded)
        options = DecodingOptions(n_best_size=50, max_answer_length=4)
        result = decode(logits, padded, options)
        for row in range(len(features)):
            first, end = int(features.context_begin[row]), int(features.context_end[row])
            legal = [(i, j) for i in range(first, end) for j in range(i, min(i + 4, end))]
            scores = sorted((float(logits[0, row, i]) + float(logits[1, row, j]) for i, j in legal), reverse=True)
            assert result.score[row][: len(legal)].tolist() == scores[:50]

    @pytest.mark.parametrize(
        ("place", "value"), [(0, math.nan), (0, math.inf), (0, -math.inf), (3, math.nan), (3, math.inf)]
    )
    def test_a_diverged_model_is_named(self, place: int, value: float) -> None:
        logits = np.zeros((2, 1, 8))
        logits[0, 0, place] = value
        with pytest.raises(ModelError, match="expected finite numbers"):
            decode(logits, hand_made(np.arange(8)[None] > 1), DecodingOptions())

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_diverged_answerability_model_is_named(self, value: float) -> None:
        with pytest.raises(ModelError, match="expected finite numbers"):
            decode_answerability(np.array([[[value]], [[0.0]]]), hand_made(np.arange(8)[None] > 1))


class TestIndependent:
    OPTIONS = DecodingOptions(method="independent", n_best_size=3, max_answer_length=2)

    def decoded(self, start: dict[int, float], end: dict[int, float]) -> Any:
        """Decode a window of nine tokens, whose context begins at the third."""
        logits = np.zeros((2, 1, 9))
        for row, values in zip(logits, (start, end), strict=True):
            for place, value in values.items():
                row[0, place] = value
        return decode(logits, hand_made(np.arange(9)[None] > 2), self.OPTIONS), logits[:, 0]

    def test_start_and_end_are_chosen_independently_at_any_length(self) -> None:
        result, logits = self.decoded({4: 5, 6: 4, 1: 99}, {8: 7, 5: 6, 2: 99})  # the question cannot be chosen
        assert (result.start[0, 0], result.end[0, 0]) == (4, 8)
        weights = np.exp(logits[:, [0, 3, 4, 5, 6, 7, 8]])
        probability = (weights.max(1) / weights.sum(1)).prod()
        assert result.score[0, 0] == pytest.approx(math.log(probability))
        assert result.null[0] == pytest.approx(result.score[0, 0] - 5 - 7)  # [CLS] has 0 and 0
        assert result.score[0, 1:].tolist() == [-math.inf] * 2  # 6 to 5 is not a span, nor is a pair with [CLS]

    @pytest.mark.parametrize(("start", "end"), [({7: 5.0}, {4: 5.0}), ({0: 5.0}, {4: 5.0}), ({0: 5.0}, {0: 5.0})])
    def test_a_pair_that_is_not_a_span_means_no_answer(self, start: dict[int, float], end: dict[int, float]) -> None:
        result, _ = self.decoded(start, end)
        spans = zip(result.start[0], result.end[0], result.score[0], strict=True)
        assert all(3 <= first <= last for first, last, score in spans if score > -math.inf)
        assert result.null[0] > result.score[0, 0]

    def test_the_surest_window_decides(self) -> None:
        features = small_features(DISTINCT)
        options = DecodingOptions(method="independent")
        logits = np.zeros((2, 3, 16))
        logits[:, 0, 0], logits[:, 1, 6], logits[:, 2, 0] = 4.0, 6.0, 3.0
        prediction = merged(features, lambda padded: logits[:, padded.windows], options)["q0"]
        assert prediction.text(0.0) == "j"  # the seventh token of the second window, which begins at h
        logits[:, 0, 0] = 9.0
        assert merged(features, lambda padded: logits[:, padded.windows], options)["q0"].text(0.0) == ""


class TestRankTogether:
    def test_one_list_of_all_contexts(self) -> None:
        features = small_features(DISTINCT, REPEATED)
        alone = list(merged(features, random_logits(features, 2), DecodingOptions(n_best_size=5)).values())
        merged_prediction = rank_together(alone, 5)
        spans = sorted(
            ((candidate.score, at) for at in range(2) for candidate in alone[at].candidates if candidate.text),
            reverse=True,
        )[:5]
        assert [
            (candidate.score, candidate.context) for candidate in merged_prediction.candidates if candidate.text
        ] == spans
        assert merged_prediction.null.score == min(prediction.null.score for prediction in alone)
        assert merged_prediction.null_odds == pytest.approx(merged_prediction.null.score - spans[0][0])
        assert sum(candidate.probability for candidate in merged_prediction.candidates) == pytest.approx(1)
        assert rank_together(alone[:1], 5) == alone[0]


class TestMerger:
    def test_reducing_many_windows_loses_no_better_span(self, monkeypatch: pytest.MonkeyPatch) -> None:
        features = small_features(" ".join("abcdefghijklmnopqrstuvwxy" * 8))
        logits = random_logits(features, 5)
        options = DecodingOptions(n_best_size=7, max_answer_length=3)
        expected = merged(features, logits, options)
        assert len(features) > 20
        for size in (2, 3, 5):
            monkeypatch.setattr("lamella.inference.window_merger.WINDOWS_KEPT", size)
            assert merged(features, logits, options) == expected

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1), n_best=st.integers(1, 60), longest=st.integers(1, 12), size=st.integers(1, 5)
    )
    def test_best_score_of_every_span(self, seed: int, n_best: int, longest: int, size: int) -> None:
        features = small_features(DISTINCT, "a b c")
        options = DecodingOptions(n_best_size=n_best, max_answer_length=longest)
        logits = random_logits(features, seed)
        predictions = merged(features, logits, options, size)
        assert list(predictions) == ["q0", "q1"]

        start, end = logits(pad(features, np.arange(len(features)))).astype(np.float64)
        for number, asked in enumerate(features.examples):
            best: dict[str, float] = {}
            nulls = []
            for window in np.flatnonzero(features.example == number):
                nulls.append(start[window, 0] + end[window, 0])
                first, past = int(features.context_begin[window]), int(features.context_end[window])
                for i in range(first, past):
                    for j in range(i, min(i + longest, past)):
                        begin_char, end_char = features.characters(int(window), i, j)
                        text = asked.context.text[begin_char:end_char]
                        best[text] = max(best.get(text, -math.inf), start[window, i] + end[window, j])
            expected = dict(sorted(best.items(), key=lambda item: -item[1])[:n_best])
            prediction = predictions[asked.id]
            answers = {each.text: each.score for each in prediction.candidates if each.text}
            assert answers == pytest.approx(expected, abs=1e-5)
            assert prediction.null_odds == pytest.approx(min(nulls) - max(best.values()), abs=1e-5)

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 4), n_best=st.integers(1, 30), size=st.integers(1, 5))
    def test_tied_answers_of_all_windows_are_cut_by_position(
        self, seed: int, steps: int, n_best: int, size: int
    ) -> None:
        features = small_features(DISTINCT)
        options = DecodingOptions(n_best_size=n_best, max_answer_length=3)
        table = np.random.default_rng(seed).integers(0, steps, (2, len(features), 16)).astype(np.float32)
        best: dict[tuple[int, int], float] = {}
        for window in range(len(features)):
            first, past = int(features.context_begin[window]), int(features.context_end[window])
            for i in range(first, past):
                for j in range(i, min(i + 3, past)):
                    place = features.characters(window, i, j)
                    best[place] = max(best.get(place, 0.0), float(table[0, window, i] + table[1, window, j]))
        expected = sorted((-score, *place) for place, score in best.items())[:n_best]
        with pytest.MonkeyPatch.context() as patch:
            for limit in (2, 64):
                patch.setattr("lamella.inference.window_merger.WINDOWS_KEPT", limit)
                prediction = merged(
                    features, lambda padded: table[:, padded.windows, : padded.mask.shape[1]], options, size
                )["q0"]
                answers = [
                    (-candidate.score, candidate.begin_char, candidate.end_char)
                    for candidate in prediction.candidates
                    if candidate.text
                ]
                assert answers == expected

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1), n_best=st.integers(1, 60), text=st.sampled_from([DISTINCT, REPEATED, "a", ""])
    )
    def test_every_prediction_has_these_properties(self, seed: int, n_best: int, text: str) -> None:
        features = small_features(text)
        options = DecodingOptions(n_best_size=n_best)
        prediction = merged(features, random_logits(features, seed), options)["q0"]
        candidates = prediction.candidates
        answers = [candidate for candidate in candidates if candidate.text]
        assert len(answers) <= n_best
        assert len(candidates) == len(answers) + 1  # "no answer" is a candidate exactly once
        assert len({candidate.text for candidate in candidates}) == len(candidates)
        assert all(text[candidate.begin_char : candidate.end_char] == candidate.text for candidate in candidates)
        assert [candidate.score for candidate in candidates] == sorted(
            (candidate.score for candidate in candidates), reverse=True
        )
        assert sum(candidate.probability for candidate in candidates) == pytest.approx(1)
        for better, worse in itertools.pairwise(candidates):
            assert worse.probability == pytest.approx(better.probability * math.exp(worse.score - better.score))
        null = next(candidate for candidate in candidates if not candidate.text)
        assert prediction.null_odds == pytest.approx(null.score - (answers[0].score if answers else NO_SPAN))
        assert prediction.best_span.text == (answers[0].text if answers else "")

    def test_a_text_is_listed_once_at_its_best_place(self) -> None:
        features = small_features("a b a")
        logits = np.zeros((2, 1, 8))
        begin = int(features.context_begin[0])
        logits[:, 0, begin], logits[:, 0, begin + 2] = 1.0, 4.0
        prediction = merged(features, lambda padded: logits, DecodingOptions(max_answer_length=1))["q0"]
        assert [
            (candidate.text, candidate.begin_char, candidate.score)
            for candidate in prediction.candidates
            if candidate.text
        ] == [
            ("a", 4, 8.0),
            ("b", 2, 0.0),
        ]

    def test_overlapping_windows_agree_on_one_place(self) -> None:
        features = small_features(DISTINCT)  # letters 7 to 10 are seen by the first two windows
        logits = np.zeros((2, 3, 16))
        logits[:, 0, 4 + 8], logits[:, 1, 4 + 1] = 2.0, 5.0  # the same letter, i, in both
        prediction = merged(features, lambda padded: logits[:, padded.windows], DecodingOptions(max_answer_length=1))[
            "q0"
        ]
        best = prediction.best_span
        assert (best.text, best.begin_char, best.end_char, best.score) == ("i", 16, 17, 10.0)
        assert [candidate.text for candidate in prediction.candidates].count("i") == 1

    def test_no_answer_takes_the_smallest_window(self) -> None:
        features = small_features(DISTINCT)
        logits = np.zeros((2, 3, 16))
        logits[:, :, 0] = [3.0, -1.0, 2.0]
        prediction = merged(features, lambda padded: logits[:, padded.windows], DecodingOptions())["q0"]
        assert prediction.null_odds == -2.0
        assert next(candidate.score for candidate in prediction.candidates if not candidate.text) == -2.0

    def test_the_order_of_windows_does_not_matter(self) -> None:
        features = small_features(DISTINCT, REPEATED, "a b c")
        logits = random_logits(features, 3)
        expected = merged(features, logits, DecodingOptions(), 1)
        for size in (2, 3, 7):
            assert merged(features, logits, DecodingOptions(), size) == expected

    def test_examples_without_windows_are_left_out(self) -> None:
        lost = Example("lost", "q r", Context(DISTINCT), (Answer(DISTINCT, 0),))
        examples = [lost, example("a b", "a", question="q r", id="kept")]
        features = featurise(examples, plain_tokenizer(), SMALL, negative_windows="drop")
        assert list(merged(features, random_logits(features, 0), DecodingOptions())) == ["kept"]

    @pytest.mark.parametrize("kind", TOKENIZERS)
    def test_contexts_without_a_token(self, kind: str) -> None:
        contexts = ("", " \n\t ", "\x00\x01")
        examples = [example(text, id=f"q{number}") for number, text in enumerate(contexts)]
        features = featurise(examples, tokenizer_of(kind), WindowOptions())
        predictions = merged(features, random_logits(features, 1), DecodingOptions())
        for number in range(2):
            prediction = predictions[f"q{number}"]
            assert [candidate.text for candidate in prediction.candidates] == [""]
            assert prediction.candidates[0].probability == 1
            assert prediction.text(0.0) == ""
            assert math.isfinite(prediction.null_odds)
            assert prediction.null_odds > 1000
        for prediction in predictions.values():
            json.dumps(prediction.rows, allow_nan=False)

    @needs_torch
    def test_an_answer_never_begins_with_a_blank(self) -> None:
        """RoBERTa has tokens for white space; a span from such a token to a word is the word."""
        features = featurise([example("a   b  \n c ")], tokenizer_of("roberta"), WindowOptions())
        for seed in range(5):
            prediction = merged(features, random_logits(features, seed), DecodingOptions(n_best_size=100))["q1"]
            texts = {candidate.text for candidate in prediction.candidates}
            assert texts == {"", "a", "b", "c", "a   b", "b  \n c", "a   b  \n c"}


class TestPrediction:
    PREDICTION = Prediction((Candidate("tower", 4, 9, 3.0, 0.7), Candidate("", 0, 0, 2.0, 0.3)), null_odds=-1.0)

    @pytest.mark.parametrize(
        ("threshold", "text"), [(0.0, "tower"), (-1.0, "tower"), (-1.01, ""), (-5.0, ""), (9, "tower")]
    )
    def test_no_answer_wins_above_the_threshold(self, threshold: float, text: str) -> None:
        assert self.PREDICTION.text(threshold) == text

    def test_words_of_the_n_best_file(self) -> None:
        assert self.PREDICTION.n_best()[0] == {
            "text": "tower", "probability": 0.7, "score": 3.0, "start": 4, "end": 9
        }  # fmt: skip


class TestOracle:
    def demo(self) -> list[Example]:
        examples = []
        document = json.loads(data_path("demo:dev").read_text(encoding="utf-8"))
        for article in document["data"]:
            for paragraph in article["paragraphs"]:
                shared = Context(paragraph["context"])
                for qa in paragraph["qas"]:
                    answers = tuple(Answer(answer["text"], answer["answer_start"]) for answer in qa["answers"])
                    examples.append(Example(qa["id"], qa["question"], shared, answers))
        return examples

    @pytest.mark.parametrize("kind", TOKENIZERS)
    @pytest.mark.parametrize("windows", [{}, {"max_seq_length": 256, "doc_stride": 96}])
    def test_logits_at_the_gold_score_a_hundred(self, kind: str, windows: dict[str, Any]) -> None:
        """From labels to logits to characters to metric nothing is lost, in whole contexts and in windows."""

        def oracle(padded: Padded) -> np.ndarray:
            logits = np.random.default_rng(0).normal(0, 1, (2, *padded.input_ids.shape))
            rows = np.arange(len(padded.windows))
            logits[0, rows, padded.start] += 20
            logits[1, rows, padded.end] += 20
            return logits

        examples = self.demo()
        features = featurise(examples, tokenizer_of(kind), WindowOptions(**windows))
        assert features.lost_answers == 0
        predictions = merged(features, oracle, DecodingOptions(max_answer_length=100), 32)
        texts = {id: prediction.text(0.0) for id, prediction in predictions.items()}
        results = score(examples, texts)
        assert results["exact"] == results["HasAns_exact"] == results["NoAns_exact"] == 100
        assert results["total"] == len(examples)
        for asked in examples:
            best = predictions[asked.id].best_span
            if asked.answers:
                first = asked.answers[0]
                assert (best.text, best.begin_char) == (first.text, first.begin_char)

"""Answering with threads gives the same predictions as without, and the files of a run hold them unchanged."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lamella import runs
from lamella.config import WindowOptions
from lamella.data.examples import Context, Example
from lamella.data.question_words import content_words
from lamella.data.windows import features, tokens
from lamella.data.windows.features import featurise, featurise_in_slices
from lamella.data.windows.padding import Padded
from lamella.decoding_options import DecodingOptions
from lamella.documents.passages import PartRanking, PassageIndex
from lamella.errors import ModelError
from lamella.inference import predict as module
from lamella.inference.decode import WindowSpans
from lamella.inference.doubts import Doubts
from lamella.inference.predict import predict
from lamella.inference.prediction import RANK_WEIGHT, Prediction, rank
from lamella.inference.prediction_files import read_answers, write_predictions
from lamella.inference.window_merger import WindowMerger
from samples import plain_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxy"


def reader(**decoding: Any) -> Any:
    """Return a model whose logits depend on the tokens of a window alone."""

    def logits(padded: Padded) -> np.ndarray:
        table = np.random.default_rng(0).normal(0, 3, (2, 512, 64)).astype(np.float32)
        places = np.arange(padded.input_ids.shape[1]) % 64
        logits = table[:, padded.input_ids % 512, places]
        logits[:, :, padded.cls] += padded.input_ids[:, 4] % 7  # the first token of the context
        return logits

    return SimpleNamespace(
        tokenizer=plain_tokenizer(),
        windows=WindowOptions(max_seq_length=16, doc_stride=4),
        decoding=DecodingOptions(**decoding),
        gives_text=True,
        folders=(),
        logits=logits,
    )


def questions(count: int) -> list[Example]:
    generator = np.random.default_rng(1)
    texts = [" ".join(generator.choice(list(LETTERS), size)) for size in generator.integers(0, 40, count)]
    return [Example(f"q{number}", "q r", Context(text)) for number, text in enumerate(texts)]


class Sink:
    def __init__(self) -> None:
        self.windows: list[list[int]] = []

    def add(self, features: Any, padded: Padded, logits: np.ndarray) -> None:
        self.windows.append(padded.windows.tolist())


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    examples, model = questions(60), reader()
    sinks = [Sink(), Sink()]
    plain = predict(model, examples, batch_size=4, sink=sinks[0], doubts=Doubts(model.tokenizer, model.windows))
    monkeypatch.setattr(module, "SLICE", 10)
    doubts = Doubts(model.tokenizer, model.windows)
    assert predict(model, examples, batch_size=4, sink=sinks[1], doubts=doubts) == plain
    assert list(plain) == [example.id for example in examples]
    assert sinks[0].windows == sinks[1].windows != []


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat short texts as very long ones."""
    monkeypatch.setattr(tokens, "PIECE", 12)
    monkeypatch.setattr(features, "LONG", 1)


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize("stride_is", ["overlap", "step"])
@pytest.mark.parametrize("size", [1, 2, 5, 1024])
def test_windows_cut_while_a_text_is_tokenised_are_the_same(size: int, stride_is: Any) -> None:
    generator = np.random.default_rng(2)
    for room, stride in ((16, 4), (16, 11), (17, 1), (20, 15)):
        windows = WindowOptions(max_seq_length=room, doc_stride=stride, max_query_length=4, stride_is=stride_is)
        for words in (0, 1, 5, 6, 7, 20, 21, *generator.integers(20, 200, 6)):
            text = " " + " ".join(generator.choice(list(LETTERS), words)) + "\n "
            given = [Example("q", "q r", Context(text))], plain_tokenizer(), windows
            whole = list(featurise_in_slices(*given, size=size, whole_offsets=True))
            parts = list(featurise_in_slices(*given, size=size))
            assert len(parts) == len(whole)
            for part, slice_ in zip(parts, whole, strict=True):
                for name in ("input_ids", "rows", "example", "context_begin", "context_end", "max_context", "start"):
                    assert np.array_equal(getattr(part, name), getattr(slice_, name)), name
                for window, (begin, end) in enumerate(zip(part.context_begin, part.context_end, strict=True)):
                    for place in range(begin, end):
                        assert part.characters(window, place, place) == slice_.characters(window, place, place)


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize("merge", ["scores", "leads"])
def test_an_answer_in_a_long_text_is_the_same_whether_its_tokens_are_kept_or_not(merge: str) -> None:
    text = " ".join(np.random.default_rng(3).choice(list(LETTERS), 10_000))
    example, model = Example("q", "q r", Context(text)), reader(merge=merge)
    assert predict(model, [example]) == predict(model, [example], sink=Sink())


def test_leads_change_only_the_answers_of_texts_with_several_windows() -> None:
    examples = questions(60)
    scores, leads = (predict(reader(merge=merge), examples) for merge in ("scores", "leads"))
    alone = {id for id, prediction in scores.items() if prediction.windows == 1}
    assert 0 < len(alone) < len(examples)
    assert {id for id in scores if scores[id] == leads[id]} >= alone
    assert scores != leads
    for id, prediction in leads.items():
        assert prediction.null.score == scores[id].null.score
        assert prediction.best_span.score <= scores[id].best_span.score + 1e-9


def test_the_score_of_a_span_by_its_lead() -> None:
    text = "a b c d e f g h. " * 60 + "\n\n" + "The red fox sleeps here. " * 50 + "\n\n" + "h g f e d c b a. " * 60
    example = Example("q", "Where does the red fox sleep?", Context(text))
    windows = featurise([example], plain_tokenizer(), WindowOptions(max_seq_length=128, doc_stride=16))
    ranking = PartRanking(PassageIndex([text]), content_words(example.question))
    merger = WindowMerger(DecodingOptions(merge="leads"))
    generator = np.random.default_rng(4)
    null = generator.normal(0, 3, len(windows))
    score = generator.normal(0, 3, len(windows))
    start = windows.context_begin[:, None].astype(np.int64)
    numbers = np.arange(len(windows))
    merger.add(windows, WindowSpans(numbers, start, start + numbers[:, None] % 3, score[:, None], null))
    found = np.array(
        [
            ranking.score(*windows.characters(window, windows.context_begin[window], windows.context_end[window] - 1))
            for window in numbers
        ]
    )
    assert 0 == found.min() < found.max()
    expected = score - (null - null.min()) - RANK_WEIGHT * (found.max() - found)
    prediction = merger.predictions([example])["q"]
    assert prediction.best_span.score == pytest.approx(expected.max())
    best = int(expected.argmax())
    assert prediction.best_span.begin_char == windows.characters(best, start[best, 0], start[best, 0])[0]
    assert prediction.null_odds == pytest.approx(null.min() - expected.max())


@pytest.mark.usefixtures("short_is_long")
def test_memory_does_not_grow_with_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "PIECE", 400)
    windows = WindowOptions(max_seq_length=64, doc_stride=16)

    def peak(words: int) -> int:
        example = Example("q", "q r", Context("ab " * words))
        tracemalloc.start()
        for _ in featurise_in_slices([example], plain_tokenizer(), windows, size=16):
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(10)  # what is made once
    assert peak(20_000) < 1.5 * peak(2_000)


def test_an_error_of_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reader()
    model.logits = lambda padded: np.full((2, *padded.mask.shape), np.nan)
    monkeypatch.setattr(module, "SLICE", 10)
    with pytest.raises(ModelError, match="expected finite numbers"):
        predict(model, questions(60), batch_size=4)


def test_the_n_best_file_holds_the_numbers_unchanged(tmp_path: Path) -> None:
    odd = Prediction(
        (('half \ud800 of a "pair"\n', 1, 9, 1e-7, 1e-300, 0), ("", 0, 0, -1e22, 5e-324, 0), ("é", 3, 4, -0.1, 0.0, 0)),
        null_odds=-1e22,
    )
    predictions = {**predict(reader(), questions(20)), "odd": odd}
    write_predictions(tmp_path, reader(), predictions)
    lines = (tmp_path / runs.NBEST).read_text().splitlines()
    assert len(lines) == len(predictions) + 2
    written = json.loads("\n".join(lines))
    assert written == {
        id: [
            {"text": row.text, "probability": row.probability, "score": row.score}
            | {"start": row.begin_char, "end": row.end_char}
            for row in prediction.candidates
        ]
        for id, prediction in predictions.items()
    }


def test_null_odds_are_read_as_they_were_decided_by(tmp_path: Path) -> None:
    """With a penalty for long texts, or features, the n-best list alone does not give them."""
    penalised = replace(rank([("Rome", 0, 4, 2.0, 0)], 1.0, windows=8), null_odds=2.0)
    write_predictions(tmp_path, reader(), {"q": penalised})
    assert read_answers(tmp_path).predictions["q"].null_odds == 2.0
    (tmp_path / runs.NULL_ODDS).unlink()  # runs of other programs may have none
    assert read_answers(tmp_path).predictions["q"].null_odds == -1.0


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_a_score_that_json_cannot_hold_is_refused(score: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_predictions(tmp_path, reader(), {"q": Prediction((("a", 0, 1, score, 1.0, 0),), null_odds=0.0)})
    assert not (tmp_path / runs.NBEST).exists()

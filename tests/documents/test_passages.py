"""Passages of long texts: how they are cut, ranked and read, with exact places in the whole text."""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella import LamellaWarning, Reader
from lamella.data.file_formats.formats import read
from lamella.documents import passages
from lamella.documents.passages import LONGEST_PASSAGE, MOST_OVERLAP, PASSAGE, PassageCache, PassageIndex, cut
from lamella.errors import UsageError
from lamella.inference import reader as reader_module
from samples import needs_torch

pytestmark = pytest.mark.usefixtures("one_thread")

TITAN = "Christiaan Huygens discovered the moon Titan in 1655 with a telescope of his own."


def sentences(count: int, seed: int = 0) -> list[str]:
    words = ["stone", "river", "north", "mill", "winter", "grain", "bridge", "old", "market", "road", "tower", "field"]
    chosen = random.Random(seed)
    return [f"{' '.join(chosen.choices(words, k=12)).capitalize()}." for _ in range(count)]


class TestCut:
    def test_short_paragraphs_are_joined_and_long_ones_stay_whole(self) -> None:
        paragraphs = [" ".join(sentences(5, seed)) for seed in range(10)] + [" ".join(sentences(20))]
        assert PASSAGE < len(paragraphs[-1]) < LONGEST_PASSAGE
        text = "\n\n".join(paragraphs)
        spans = list(cut(text))
        assert spans[0][0] == 0
        assert spans[-1] == (text.index(paragraphs[-1]), len(text))
        assert all(first[1] == second[0] for first, second in pairwise(spans))
        assert 2 < len(spans) < len(paragraphs)
        assert all(text[end - 2 : end] == "\n\n" for _, end in spans[:-1])
        assert len(list(cut(text.replace("\n", "\r\n")))) == len(spans)  # the same cuts with other line ends

    def test_a_long_paragraph_is_cut_between_sentences_that_overlap(self) -> None:
        text = " ".join(sentences(100))
        spans = list(cut(text))
        assert (spans[0][0], spans[-1][1]) == (0, len(text))
        for (_, end), (begin, _) in pairwise(spans):
            assert 0 < end - begin <= MOST_OVERLAP
            assert text[begin - 2 : begin] == text[end - 2 : end] == ". "
            assert text[begin:end].count(".") == 1

    @pytest.mark.parametrize("text", ["x" * 5500, "word " * 1200, "line\n" * 1200, "a sentence? " * 500, "字。" * 3000])
    def test_a_text_without_paragraphs(self, text: str) -> None:
        spans = list(cut(text))
        assert len(spans) > 3
        assert all(0 < end - begin <= LONGEST_PASSAGE for begin, end in spans)

    @given(st.text(st.sampled_from("ab. \n!\t字。"), max_size=300).map(lambda text: text * 40))
    def test_every_character_is_in_a_passage(self, text: str) -> None:
        covered = 0
        for begin, end in cut(text):
            assert begin <= covered < end
            assert end - begin <= LONGEST_PASSAGE
            covered = end
        assert covered == len(text)


def test_passages_that_touch_are_joined() -> None:
    text = f"{' '.join(sentences(40))} {TITAN} {' '.join(sentences(40, 1))}"
    (found,), related = PassageIndex(["nothing here", text]).best("Who discovered Titan?", 1)
    assert related
    assert found.text == 1
    assert TITAN in text[found.begin : found.end]
    index = PassageIndex([text])
    everything, _ = index.best("Who discovered Titan?", len(index))
    assert [(passage.begin, passage.end) for passage in everything] == [(0, len(text))]


def test_the_best_passages_contain_the_answers_of_the_demo_data() -> None:
    examples = read("demo:train").examples
    contexts = list(dict.fromkeys(example.context.text for example in examples))
    index = PassageIndex(["\n\n".join(contexts)])
    assert len(index) > 40
    text, found = index.texts[0], 0
    answerable = [example for example in examples if example.answerable]
    for example in answerable:
        place = text.index(example.context.text) + example.answers[0].begin_char
        found += any(passage.begin <= place < passage.end for passage in index.best(example.question, 10)[0])
    assert found / len(answerable) > 0.95


@pytest.fixture(scope="module")
def default() -> Reader:
    return Reader.load(device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def book() -> str:
    paragraphs = [" ".join(sentences(8, seed)) for seed in range(260)]
    paragraphs[201] = f"{paragraphs[201]} {TITAN}"
    return "\n\n".join(paragraphs)


class TestReader:
    def test_places_are_those_in_the_whole_text(self, default: Reader, book: str) -> None:
        answers = default.ask("Who discovered Titan?", book, passages=3, top_k=5)
        assert answers[0]["answer"] == "Christiaan Huygens"
        assert answers[0]["start"] == book.index("Christiaan")
        assert all(book[answer["start"] : answer["end"]] == answer["answer"] for answer in answers)
        assert len({answer["answer"] for answer in answers}) == 5
        read, total = answers.passages
        assert read == 3 < total
        assert answers.to_json()["passages"] == {"read": 3, "of": total}
        assert answers[0].sentence() == ("", "Christiaan Huygens", TITAN.removeprefix("Christiaan Huygens"))
        several = default.ask("Who discovered Titan?", ["Nobody knows.", book, ""], passages=3)
        assert (several[0]["context"], several[0]["start"]) == (1, answers[0]["start"])

    def test_long_contexts_are_ranked_and_this_is_logged(
        self, default: Reader, book: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "PASSAGES_READ", 3)
        lines: list[str] = []
        assert default.ask("Who discovered Titan?", TITAN, log=lines.append).passages is None
        assert not lines
        monkeypatch.setattr(reader_module, "LONG_CONTEXT", len(book) - 1)
        answers = default.ask(["Who discovered Titan?", "When was Titan discovered?"], book, log=lines.append)
        assert [result[0]["answer"] for result in answers] == ["Christiaan Huygens", "1655"]
        total = answers[0].passages[1]
        line = f"{len(book):,} characters: reading the best 3 of {total} passages, ranked by the words of the question"
        assert lines == [line]
        with caplog.at_level(logging.INFO, logger="lamella"):
            default.ask("Who discovered Titan?", book)
        assert [record.getMessage() for record in caplog.records if record.name == "lamella"] == [line]

    @needs_torch
    def test_nothing_is_ranked_if_everything_is_read(self) -> None:
        from doubles import corpus, tiny_model

        reader, text = Reader(tiny_model(seed=1)), "\n\n".join(corpus())
        whole = reader.ask("Who kept bees?", text, passages=None, top_k=5)
        assert whole.passages is None
        assert "passages" not in whole.to_json()
        assert reader.ask("Who kept bees?", text, passages=999, top_k=5) == whole

    def test_a_question_without_a_word_of_the_text(self, default: Reader, book: str) -> None:
        with pytest.warns(
            LamellaWarning, match=r"no passage shares a word with the question 'Zanzibar\?', so the first 2 "
        ):
            answers = default.ask("Zanzibar?", book, passages=2)
        assert answers.passages[0] == 2

    @pytest.mark.parametrize("passages", [0, -1, 2.5, "many", "all"])
    def test_a_wrong_number_is_refused(self, passages: Any, default: Reader) -> None:
        with pytest.raises(UsageError, match="passages: expected a whole number"):
            default.ask("Who?", TITAN, passages=passages)


class TestCache:
    def test_the_last_texts_are_kept_up_to_a_number_of_characters(self) -> None:
        cache = PassageCache(most_characters=100)
        first, second, long = ("a " * 20,), ("b " * 20, "c"), ("d " * 80,)
        index = cache.get(first)
        assert cache.get(second) is cache.get(second)
        assert cache.get(("a " * 20,)) is index
        assert cache.get(long) is cache.get(long), "the newest is always kept"
        assert cache.get(first) is not index

    def test_threads_build_an_index_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built: list[object] = []
        together = threading.Barrier(4)
        monkeypatch.setattr(passages, "PassageIndex", lambda texts: [built.append(texts), PassageIndex(texts)][1])
        cache = PassageCache()

        def get(_: int) -> PassageIndex:
            together.wait(10)
            return cache.get(("a b c " * 1000,))

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(get, range(4)))) == 1
        assert len(built) == 1

"""Windows: equal to those of the tokenizer, with exact characters, for any input."""

from __future__ import annotations

import copy
import itertools
import json
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from doubles import AWKWARD, FAMILIES, corpus, example, tiny_tokenizer
from lamella.config import WindowOptions
from lamella.data.demo import data_path
from lamella.data.examples import Answer, Context, Example
from lamella.data.windows import features as module
from lamella.data.windows.batches import collate
from lamella.data.windows.features import Features, featurise, pair_template
from lamella.data.windows.spans import window_spans
from lamella.data.windows.tokens import GROUP, tokenise_contexts, without_truncation
from lamella.encoder.pretrained import load_tokenizer
from lamella.encoder.sources import find_encoder, packaged_encoder
from lamella.errors import EncoderError

LETTERS = list("abcdefghijklmnopqrstuvwxy")  # each is one token of the BERT family
ALPHABET = " ".join(LETTERS)
# A question of 2 tokens and 3 special tokens leave room for 11: the windows of the alphabet begin at 0, 7 and 14.
SMALL = WindowOptions(max_seq_length=16, doc_stride=4)
FRAGMENTS = (
    *("Cafe\u0301", "e\u0301\u0327te\u0301", "Zoë", "naïve", "A\u0300\u0316\u0301", "\u0345a", "o\u20dd", "İstanbul"),
    *("👩\u200d🚀", "👨\u200d👩\u200d👧\u200d👦", "👍\U0001f3fd", "\U0001f1eb\U0001f1f7", "❤\ufe0f", "1\ufe0f\u20e3"),
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    *("東京は日本", "か\u3099", "ｶﾞ", "서울은", "\u1112\u1161\u11ab", "ไทย", "नमस्ते", "हिन्दी", "क्\u200dष", "र्\u200d"),
    *("القاهرة", "مُحَمَّد", "می\u200cخواهم", "שָׁלוֹם"),
    *(
        "“moon”",
        "—",
        "…",
        "3.5°C",
        "½",
        "x²",
        "①",
        "ß",
        "ﬁne",
        "𝔘𝔫𝔦",
        "``q''",
        "''",
        "¨u",
        "co\u00adop",
        "a\u200bb",
        "▁",
    ),
)
SPACES = (" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", " \u2009", "\u202f", "\n\n  ")


def tokenizer_like_gemma() -> Any:
    """Return a small tokenizer built like that of mmBERT, which is Gemma's: unknown characters become bytes."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained: Any = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=60, special_tokens=special, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trained.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> $B:1 <eos>:1",
        special_tokens=[(token, trained.token_to_id(token)) for token in ("<bos>", "<eos>")],
    )
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=trained, cls_token="<bos>", sep_token="<eos>", pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="module", params=[*FAMILIES, "mmBERT", "MiniLM"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Return the small tokenizer of each family, and a real one."""
    if request.param == "mmBERT":
        return tokenizer_like_gemma()
    if request.param != "MiniLM":
        return tiny_tokenizer(request.param)
    if packaged_encoder("all-MiniLM-L6-v2") is None:
        pytest.skip("the packaged encoder is not installed")
    return load_tokenizer(find_encoder("all-MiniLM-L6-v2"))


def test_texts_have_the_same_tokens_together_as_alone(tokenizer: Any) -> None:
    """The offsets of several texts are computed at once; no character of a text reaches a token of another."""
    generator = np.random.default_rng(0)
    pieces = [*AWKWARD.split(" "), *SPACES, "", "e\u0301", "\u0301", "\u200d", "\u200b", "``", "a", "."]
    texts = ["".join(generator.choice(pieces, size)) for size in generator.integers(0, 8, 3 * GROUP)]
    plain = without_truncation(tokenizer)
    together = tokenise_contexts(plain, [Context(text) for text in texts])
    assert together.keys() == set(texts)
    for text, (ids, offsets) in together.items():
        alone = tokenise_contexts(plain, [Context(text)])[text]
        assert (ids.tolist(), offsets.tolist()) == (alone[0].tolist(), alone[1].tolist()), repr(text)
        assert offsets.shape == (len(ids), 2)


def demo_paragraphs(count: int) -> list[dict[str, Any]]:
    document = json.loads(data_path("demo:dev").read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
    return paragraphs[:: max(1, len(paragraphs) // count)][:count]


def about(context: str, *answers: str | tuple[int, int], question: str = "q r", id: str = "q1") -> Example:
    """Make an example with answers given as texts, or as the indices of their first and last word in the context."""
    placed = []
    for answer in answers:
        if isinstance(answer, tuple):
            words = context.split()
            answer, begin = " ".join(words[answer[0] : answer[1] + 1]), len(" ".join(["", *words[: answer[0]]]))
            placed.append(Answer(answer, begin if answer[0] else 0))
        else:
            placed.append(Answer(answer, context.index(answer)))
    return Example(id=id, question=question, context=Context(context), answers=tuple(placed))


def words_of(text: str) -> list[Answer]:
    """Return every run of characters without white space, with its position."""
    words, begin = [], None
    for position, character in enumerate(text + " "):
        if character.isspace() and begin is not None:
            words.append(Answer(text[begin:position], begin))
            begin = None
        elif not character.isspace() and begin is None:
            begin = position
    return words


def labelled_text(features: Features, window: int) -> str | None:
    """Return the text of the context that a window is labelled with; None for "no answer"."""
    start, end = int(features.start[window]), int(features.end[window])
    if start == end == features.template.cls:
        return None
    assert features.context_begin[window] <= start <= end < features.context_end[window]
    begin_char, end_char = features.characters(window, start, end)
    return features.examples[features.example[window]].context.text[begin_char:end_char]


def ids_of(features: Features, window: int) -> list[int]:
    return features.input_ids[features.rows[window] : features.rows[window + 1]].tolist()


class TestParity:
    @pytest.mark.skipif(
        Version(tokenizers.__version__) < Version("0.23.3"),
        reason="tokenizers 0.23.2 loses the end of a truncated context",
    )
    @pytest.mark.parametrize(("length", "stride"), [(384, 128), (96, 32), (80, 0), (88, 16)])
    def test_windows_equal_those_of_the_tokenizer(self, tokenizer: Any, length: int, stride: int) -> None:
        pairs = [(paragraph["qas"][0]["question"], paragraph["context"]) for paragraph in demo_paragraphs(4)]
        # No empty context: transformers treats it as absent and does not make a pair.
        pairs += [("Où est 東京?", " ".join([AWKWARD] * 3)), ("", AWKWARD), ("Who?", "short"), ("Who?", " ")]
        examples = [Example(str(n), question, Context(text)) for n, (question, text) in enumerate(pairs)]
        features = featurise(examples, tokenizer, WindowOptions(max_seq_length=length, doc_stride=stride))
        batch = collate(features, np.arange(len(features)))

        window = 0
        for question, text in pairs:
            expected = tokenizer(
                question,
                text,
                truncation="only_second",
                max_length=length,
                stride=stride,
                return_overflowing_tokens=True,
                return_token_type_ids=True,
            )
            for ids, types in zip(expected["input_ids"], expected["token_type_ids"], strict=True):
                assert ids_of(features, window) == ids
                if "token_type_ids" in tokenizer.model_input_names:
                    assert batch.token_types[window, : len(ids)].tolist() == types
                window += 1
        assert window == len(features)

    def test_families_with_token_types_have_two_of_them(self) -> None:
        kinds = {family: pair_template(tiny_tokenizer(family)).context_type for family in FAMILIES}
        assert {family for family, kind in kinds.items() if kind == 1} >= {"albert", "bert", "electra"}
        assert {family for family, kind in kinds.items() if kind == 0} >= {"roberta", "xlm-roberta"}

    def test_the_tokenizers_own_truncation_is_neither_used_nor_changed(self) -> None:
        tokenizer = copy.deepcopy(tiny_tokenizer("bert"))
        tokenizer.backend_tokenizer.enable_truncation(8)
        tokenizer.backend_tokenizer.enable_padding(length=8)
        features = featurise([about(ALPHABET)], tokenizer, WindowOptions())
        assert features.lengths.tolist() == [2 + 3 + len(LETTERS)]
        assert tokenizer.backend_tokenizer.truncation["max_length"] == 8
        assert tokenizer.backend_tokenizer.padding["length"] == 8

    def test_tokens_added_later_are_used(self) -> None:
        tokenizer = copy.deepcopy(tiny_tokenizer("bert"))
        before = featurise([about("the lamella")], tokenizer, WindowOptions())
        tokenizer.add_tokens(["lamella"])
        after = featurise([about("the lamella")], tokenizer, WindowOptions())
        assert tokenizer.convert_tokens_to_ids("lamella") in after.input_ids
        assert after.lengths[0] < before.lengths[0]

    def test_a_tokenizer_that_joins_no_pairs_is_refused(self) -> None:
        bare = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare)
        with pytest.raises(EncoderError, match=r"joins two texts.*got \['a', 'b'\]"):
            pair_template(tokenizer)


class TestCharacters:
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_the_label_of_every_word_is_exact(self, tokenizer: Any, data: st.DataObject) -> None:
        word = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=3).map("".join)
        words = data.draw(st.lists(word, min_size=1, max_size=8))
        context = data.draw(st.sampled_from(["", *SPACES]))
        for text in words:
            context += text + data.draw(st.sampled_from(SPACES))
        context = context if data.draw(st.booleans()) else context.rstrip()
        answers = words_of(context)
        assert [answer.text for answer in answers] == words
        shared = Context(context)
        examples = [Example(str(n), "Which?", shared, (answer,)) for n, answer in enumerate(answers)]
        features = featurise(examples, tokenizer, WindowOptions(max_seq_length=4096))
        assert [labelled_text(features, n) for n in range(len(features))] == words

    def test_every_fragment_by_itself(self, tokenizer: Any) -> None:
        for fragment in FRAGMENTS:
            features = featurise([about(fragment, fragment)], tokenizer, WindowOptions())
            assert labelled_text(features, 0) == fragment

    def test_every_word_of_the_demo_set(self, tokenizer: Any) -> None:
        examples = []
        for paragraph in demo_paragraphs(3):
            shared = Context(paragraph["context"])
            examples += [Example("", "?", shared, (answer,)) for answer in words_of(shared.text)]
        features = featurise(examples, tokenizer, WindowOptions(max_seq_length=4096))
        expected = [example_.answers[0].text for example_ in examples]
        assert [labelled_text(features, n) for n in range(len(features))] == expected

    @settings(max_examples=60, deadline=None)
    @given(
        text=st.lists(st.sampled_from([*FRAGMENTS, *SPACES, "a", "b", ".", "\u200b", "\u0301"]), max_size=14).map(
            "".join
        )
    )
    def test_no_span_begins_or_ends_with_white_space(self, tokenizer: Any, text: str) -> None:
        features = featurise([about(text)], tokenizer, WindowOptions(max_seq_length=4096))
        first, last = int(features.context_begin[0]), int(features.context_end[0])
        for start in range(first, last):
            for end in range(start, min(start + 5, last)):
                begin_char, end_char = features.characters(0, start, end)
                assert 0 <= begin_char <= len(text)
                assert 0 <= end_char <= len(text)
                assert text[begin_char:end_char] == text[begin_char:end_char].strip()

    @settings(max_examples=40, deadline=None)
    @given(text=st.text(max_size=40))
    def test_offsets_rise_for_any_text(self, tokenizer: Any, text: str) -> None:
        offsets = featurise([about(text)], tokenizer, WindowOptions(max_seq_length=4096)).offsets[0]
        assert (np.diff(offsets, axis=0) >= 0).all()

    def test_white_space_between_words_belongs_to_neither(self) -> None:
        offsets = featurise([about("a   b")], tiny_tokenizer("roberta"), WindowOptions()).offsets[0]
        assert offsets[0].tolist() == [0, 1]
        assert offsets[-1].tolist() == [4, 5]
        assert all(begin == 4 and end == 1 for begin, end in offsets[1:-1])

    def test_direction_marks_and_zero_width_spaces_are_excluded(self, tokenizer: Any) -> None:
        for context in ("\u200fשלום\u200e", "\ufeffשלום", "a \u200bשלום\u200b b", "(\u2067שלום\u2069)"):
            features = featurise([about(context, "שלום")], tokenizer, WindowOptions())
            assert labelled_text(features, 0) == "שלום"

    def test_a_lone_mark_does_not_shift_offsets(self, tokenizer: Any) -> None:
        context = "one \u0301 two"
        features = featurise([about(context, "one"), about(context, "two")], tokenizer, WindowOptions())
        assert [labelled_text(features, n) for n in (0, 1)] == ["one", "two"]

    def test_surrogates_do_not_shift_offsets(self, tokenizer: Any) -> None:
        # A surrogate pair as two characters becomes one character when it is converted through UTF-16.
        for broken in ("ab\ud800cd", "\udfff", "\ud83d\ude00", "\ud800\ud800", "\ude00\ud83d"):
            context = f"{broken} Zoë {broken} word {broken}"
            features = featurise([about(context, "word"), about(context, "Zoë")], tokenizer, WindowOptions())
            assert [labelled_text(features, n) for n in (0, 1)] == ["word", "Zoë"]

    def test_an_answer_inside_a_token_is_labelled_with_the_whole_token(self) -> None:
        features = featurise(
            [Example("1", "?", Context("the the the"), (Answer("h", 5),))], tiny_tokenizer("bert"), SMALL
        )
        assert labelled_text(features, 0) == "the"

    def test_the_samples_contain_the_intended_characters(self) -> None:
        """Guard the tests above against an editor that normalises the special characters."""
        text = "".join(FRAGMENTS)
        assert {"Mn", "Mc", "Me", "Cf", "So", "Sk", "Lo", "Pi", "No"} <= {
            unicodedata.category(character) for character in text
        }
        assert all(character in text for character in ("\u200d", "\u200c", "\U0001f3fd", "\u0301", "\u3099", "\ufe0f"))
        assert unicodedata.normalize("NFC", text) != text != unicodedata.normalize("NFD", text)


class TestLabels:
    def labels(self, *answers: tuple[int, int]) -> list[str | None]:
        features = featurise([about(ALPHABET, *answers)], tiny_tokenizer("bert"), SMALL)
        assert features.first_token.tolist() == [0, 7, 14]
        assert features.lengths.tolist() == [16, 16, 16]
        return [labelled_text(features, window) for window in range(3)]

    def test_inside_one_window(self) -> None:
        assert self.labels((5, 6)) == ["f g", None, None]

    def test_an_answer_in_the_overlap_labels_both_windows(self) -> None:
        assert self.labels((7, 10)) == ["h i j k", "h i j k", None]

    @pytest.mark.parametrize(("place", "letter"), [(0, "a"), (24, "y")])
    def test_at_the_ends_of_the_context(self, place: int, letter: str) -> None:
        assert [label for label in self.labels((place, place)) if label] == [letter]

    @pytest.mark.parametrize(
        ("place", "windows"), [(6, [0]), (7, [0, 1]), (10, [0, 1]), (11, [1]), (13, [1]), (18, [2])]
    )
    def test_at_the_border_of_a_window(self, place: int, windows: list[int]) -> None:
        labels = self.labels((place, place))
        assert [window for window, label in enumerate(labels) if label] == windows
        assert {label for label in labels if label} == {LETTERS[place]}

    def test_an_answer_across_the_end_of_a_window(self) -> None:
        assert self.labels((9, 12)) == [None, "j k l m", None]

    def test_an_answer_longer_than_any_window(self) -> None:
        assert self.labels((3, 18)) == [None, None, None]

    def test_unanswerable(self) -> None:
        assert self.labels() == [None, None, None]

    def test_the_first_of_several_answers_is_the_label(self) -> None:
        assert self.labels((5, 6), (5, 5), (20, 20)) == ["f g", None, None]

    def test_a_repeated_word_is_labelled_at_the_offset_of_the_answer(self, tokenizer: Any) -> None:
        context = "tower and tower and tower"
        features = featurise([Example("1", "?", Context(context), (Answer("tower", 10),))], tokenizer, WindowOptions())
        assert features.characters(0, int(features.start[0]), int(features.end[0])) == (10, 15)

    def test_lost_answers_are_counted(self) -> None:
        context = "a \x01\x02 b"
        examples = [
            about(context, "\x01\x02", id="lost"),
            about(context, "b", id="kept"),
            about(context, id="unanswerable"),
            Example("beyond", "?", Context("a b"), (Answer("c", 77),)),
        ]
        features = featurise(examples, tiny_tokenizer("bert"), WindowOptions())
        assert features.lost_answers == 2
        assert [labelled_text(features, window) for window in range(4)] == [None, "b", None, None]


class TestSpans:
    @settings(max_examples=300, deadline=None)
    @given(
        tokens=st.integers(0, 300),
        room=st.integers(1, 60),
        stride=st.integers(0, 80),
        kind=st.sampled_from(["overlap", "step"]),
    )
    def test_spans_cover_all_tokens_within_the_room(self, tokens: int, room: int, stride: int, kind: Any) -> None:
        spans = window_spans(tokens, room, stride, kind)
        assert set().union(*(range(first, last) for first, last in spans)) == set(range(tokens))
        assert all(0 <= last - first <= room for first, last in spans)
        assert spans[0][0] == 0
        assert [last for _, last in spans].index(tokens) == len(
            spans
        ) - 1  # the first span that reaches the end is the last
        for (first, last), (begin, _) in itertools.pairwise(spans):
            assert last - first == room  # only the last may be shorter
            assert first < begin <= last
            if kind == "overlap" and stride < room:
                assert last - begin == stride
            if kind == "overlap" and stride >= room:
                assert last - begin == room // 2 or room == 1
            if kind == "step" and stride:
                assert begin - first == min(stride, room)

    @settings(max_examples=200, deadline=None)
    @given(tokens=st.integers(1, 600), room=st.integers(1, 384), stride=st.integers(1, 200))
    def test_step_gives_as_many_windows_as_the_original_bert_code(self, tokens: int, room: int, stride: int) -> None:
        windows, start = 1, 0
        while start + (length := min(room, tokens - start)) < tokens:
            start += min(length, stride)
            windows += 1
        assert len(window_spans(tokens, room, stride, "step")) == windows

    def test_examples(self) -> None:
        assert window_spans(10, 6, 2) == [(0, 6), (4, 10)]
        assert window_spans(11, 6, 2) == [(0, 6), (4, 10), (8, 11)]
        assert window_spans(10, 6, 2, "step") == [(0, 6), (2, 8), (4, 10)]
        assert window_spans(0, 6, 2) == [(0, 0)]
        assert window_spans(3, 1, 128) == [(0, 1), (1, 2), (2, 3)]
        assert window_spans(3, 1, 0, "step") == [(0, 1), (1, 2), (2, 3)]

    def test_featurise_uses_stride_is(self) -> None:
        step = WindowOptions(max_seq_length=16, doc_stride=4, stride_is="step")
        features = featurise([about(ALPHABET)], tiny_tokenizer("bert"), step)
        assert features.first_token.tolist() == [0, 4, 8, 12, 16]


class TestExtremes:
    CONTEXTS = (
        "",
        " \n\t\r\n\u00a0 ",
        "\x00\x01\x02\x7f",
        "\u200b\ufeff",
        "\u0301" * 300,
        "\ud800\udfff x",
        "x" * 800,
        AWKWARD,
    )
    QUESTIONS = ("", " ", "Who?", "\x00", "\ud83d", "word " * 10_000)

    @pytest.mark.parametrize(
        "options",
        [
            WindowOptions(max_seq_length=16, max_query_length=1000),
            WindowOptions(max_seq_length=16, doc_stride=1000, max_query_length=1),
            WindowOptions(max_seq_length=24, doc_stride=0, stride_is="step"),
            WindowOptions(),
        ],
    )
    def test_extreme_inputs_do_not_fail(self, tokenizer: Any, options: WindowOptions) -> None:
        pairs = [(question, text) for question in self.QUESTIONS for text in self.CONTEXTS]
        examples = [
            Example(str(n), question, Context(text), (Answer(text, 0),) if text else ())
            for n, (question, text) in enumerate(pairs)
        ]
        features = featurise(examples, tokenizer, options)
        assert set(features.example.tolist()) == set(range(len(examples)))  # every question has a window
        assert features.lengths.max() <= options.max_seq_length
        room = features.context_end - features.context_begin
        tokens = np.array([len(offsets) for offsets in features.offsets])[features.example]
        assert ((room > 0) | (tokens == 0)).all()
        batch = collate(features, np.arange(len(features)))
        assert batch.is_context.sum(dim=1).tolist() == room.tolist()

    def test_no_examples(self) -> None:
        features = featurise([], tiny_tokenizer("bert"), WindowOptions())
        assert len(features) == 0
        assert features.lengths.tolist() == []

    def test_a_context_of_200_000_characters(self, tokenizer: Any) -> None:
        text = ("The tower of Zoë — 東京 — was built. " * 6000)[:200_000]
        features = featurise([about(text, "The tower"), about(text)], tokenizer, WindowOptions())
        assert len(features) > 200
        assert Counter(labelled_text(features, window) for window in range(len(features)))["The tower"] == 1
        assert features.max_context.sum() == sum(len(offsets) for offsets in features.offsets)

    @pytest.mark.parametrize("limit", [1, 5, 64])
    def test_a_long_question_is_truncated(self, limit: int) -> None:
        question = " ".join(LETTERS * 4)
        options = WindowOptions(max_query_length=limit)
        features = featurise([about(ALPHABET, question=question)], tiny_tokenizer("bert"), options)
        assert features.context_begin.tolist() == [limit + 2]
        ids = tiny_tokenizer("bert")(question, add_special_tokens=False)["input_ids"]
        assert ids_of(features, 0)[1 : limit + 1] == ids[:limit]

    def test_a_question_that_fills_the_window_leaves_one_token_of_context(self) -> None:
        options = WindowOptions(max_seq_length=16, max_query_length=500)
        features = featurise([about("a b c", (1, 1), question=ALPHABET)], tiny_tokenizer("bert"), options)
        assert features.lengths.tolist() == [16, 16, 16]
        assert [labelled_text(features, window) for window in range(3)] == [None, "b", None]


class TestNegativeWindows:
    EXAMPLES = (
        about(ALPHABET, (1, 1), id="one window of three"),
        about(ALPHABET, (8, 9), id="two windows of three"),
        about(ALPHABET, (3, 18), id="no window"),
        about(ALPHABET, id="unanswerable"),
        about("a b c", (0, 2), id="short"),
    )

    def windows(self, setting: Any, seed: int = 0, examples: tuple[Example, ...] = EXAMPLES) -> dict[str, list[int]]:
        features = featurise(examples, tiny_tokenizer("bert"), SMALL, negative_windows=setting, seed=seed)
        windows: dict[str, list[int]] = {example_.id: [] for example_ in examples}
        for index, first in zip(features.example, features.first_token, strict=True):
            windows[examples[index].id].append(int(first))
        return windows

    def test_keep(self) -> None:
        everything = [0, 7, 14]
        assert list(self.windows("keep").values()) == [everything, everything, everything, everything, [0]]

    def test_drop(self) -> None:
        assert list(self.windows("drop").values()) == [[0], [0, 7], [], [0, 7, 14], [0]]

    def test_subsample_keeps_one_negative_window_per_question(self) -> None:
        windows = self.windows("subsample")
        assert windows["one window of three"] in ([0, 7], [0, 14])
        assert windows["two windows of three"] == [0, 7, 14]
        assert len(windows["no window"]) == 1
        assert windows["unanswerable"] == [0, 7, 14]
        assert windows["short"] == [0]

    def test_subsample_is_reproducible_and_independent_of_other_examples(self) -> None:
        together = self.windows("subsample", seed=3)
        assert together == self.windows("subsample", seed=3)
        alone = {single.id: self.windows("subsample", 3, (single,))[single.id] for single in self.EXAMPLES}
        assert alone == together
        assert self.windows("subsample", 3, self.EXAMPLES[::-1]) == together

    def test_subsample_varies_with_seed_and_id(self) -> None:
        by_seed = {tuple(self.windows("subsample", seed)["one window of three"]) for seed in range(20)}
        assert by_seed == {(0, 7), (0, 14)}
        many = tuple(about(ALPHABET, (1, 1), id=f"\ud800{n}") for n in range(20))
        assert {tuple(starts) for starts in self.windows("subsample", 0, many).values()} == {(0, 7), (0, 14)}


class TestMaxContext:
    @settings(max_examples=60, deadline=None)
    @given(
        words=st.lists(st.integers(0, 90) | st.integers(300, 500), min_size=1, max_size=2),
        length=st.integers(16, 40) | st.integers(280, 320),  # a last window that is 100 tokens shorter scores 1 less
        stride=st.integers(0, 40) | st.integers(120, 160),
        kind=st.sampled_from(["overlap", "step"]),
    )
    def test_equals_the_rule_of_bert(self, words: list[int], length: int, stride: int, kind: Any) -> None:
        examples = [about(" ".join(["a"] * count), id=str(n)) for n, count in enumerate(words)]
        options = WindowOptions(max_seq_length=length, doc_stride=stride, stride_is=kind)
        features = featurise(examples, tiny_tokenizer("bert"), options)
        for index, count in enumerate(words):
            windows = np.flatnonzero(features.example == index)
            spans = [
                (int(features.first_token[w]), int(features.context_end[w] - features.context_begin[w]))
                for w in windows
            ]
            owned = Counter()
            for token in range(count):
                scores = [
                    min(token - first, first + size - 1 - token) + 0.01 * size if first <= token < first + size else -1
                    for first, size in spans
                ]
                owned[scores.index(max(scores)), token] += 1
            flagged = Counter()
            for number, window in enumerate(windows):
                flags = features.max_context[features.rows[window] : features.rows[window + 1]]
                shift = int(features.first_token[window]) - int(features.context_begin[window])
                flagged.update((number, int(position) + shift) for position in np.flatnonzero(flags))
            assert flagged == owned
            assert sorted(token for _, token in flagged) == list(range(count))


class TestSharing:
    def test_a_text_is_tokenised_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = tiny_tokenizer("bert").backend_tokenizer
        seen: list[str] = []

        class Spy:
            def encode(self, *texts: str) -> Any:
                return plain.encode(*texts)

            def encode_batch(self, texts: list[str], **options: Any) -> Any:
                seen.extend(texts)
                return plain.encode_batch(texts, **options)

            encode_batch_fast = encode_batch

        monkeypatch.setattr(module, "without_truncation", lambda _: Spy())
        shared = Context("the tower of stone")
        examples = [Example(str(n), f"question {n % 3}", shared) for n in range(9)]
        examples += [
            Example("twin", "question 0", Context("the tower of stone")),
            example("another text", question="q"),
        ]
        features = featurise(examples, tiny_tokenizer("bert"), WindowOptions())
        assert len(features) == len(examples)
        assert Counter(seen) == Counter(
            ["question 0", "question 1", "question 2", "q", "the tower of stone", "another text"]
        )

    def test_offsets_of_a_shared_context_are_one_array(self) -> None:
        shared = Context(ALPHABET)
        features = featurise([Example("1", "a", shared), Example("2", "b", shared)], tiny_tokenizer("bert"), SMALL)
        assert features.offsets[0] is features.offsets[1]

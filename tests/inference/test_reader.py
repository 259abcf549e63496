"""The Reader: many questions, many and long contexts, threads, transformers checkpoints, the old pipeline's calls."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

import lamella.data.windows.features as features_module
import lamella.data.windows.tokens as tokens_module
import lamella.documents.passages as passages_module
from doubles import (
    AWKWARD,
    FAMILIES,
    corpus,
    example,
    examples_about,
    save_tiny_encoder,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from lamella import runs
from lamella.config import WindowOptions
from lamella.data.examples import Context, Example
from lamella.data.windows.features import featurise, featurise_in_slices
from lamella.data.windows.padding import Padded, pad
from lamella.data.windows.tokens import without_truncation
from lamella.encoder.fast_attention import suitable_kernels
from lamella.errors import ModelError, TooManyTokensError, UsageError
from lamella.inference.pipeline import Words
from lamella.inference.predict import predict
from lamella.inference.reader import Reader

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTIONS = ["Who kept bees?", "What was cast from an alloy?", "When?"]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(tiny_model(seed=1))


def stock_folder(folder: Path, family: str) -> Path:
    """A random question answering model of a family, as transformers saves it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForQuestionAnswering.from_config(tiny_config(family))
    with torch.no_grad():
        (model.classifier if family == "modernbert" else model.qa_outputs).weight.mul_(20)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(family)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 128}))
    return folder


class TestAsk:
    def test_answers_have_exact_places_and_their_probabilities(self, reader: Reader) -> None:
        text = corpus()[0]
        answers = reader.ask(QUESTIONS[0], text, top_k=5)
        assert len(answers) == 5
        assert all(text[answer["start"] : answer["end"]] == answer["answer"] for answer in answers)
        assert all(set(answer) == {"score", "probability", "start", "end", "answer"} for answer in answers)
        assert answers.to_json() == {
            "answers": list(answers),
            "no_answer": answers.no_answer,
            "na_prob": answers.na_prob,
            "null_score": answers.null_score,
        }
        json.dumps(answers)

    def test_a_notebook_shows_the_answers_in_their_texts(self, reader: Reader) -> None:
        first, second = corpus()[:2]
        answers = reader.ask(QUESTIONS[0], [f"<script>{first}", second], top_k=3)
        shown = answers._repr_html_()
        assert QUESTIONS[0] in shown
        assert "<script" not in shown
        assert shown.count("<mark>") + shown.count("<em>no answer</em>") == 3
        assert [answer.text for answer in answers] == [
            [f"<script>{first}", second][answer["context"]] for answer in answers
        ]

    def test_a_reader_prints_what_it_is(self, reader: Reader, tmp_path: Path) -> None:
        assert repr(reader).startswith("Reader(")
        assert "device='cpu'" in repr(reader)
        assert "threshold=0" in repr(reader)

    @pytest.mark.parametrize(("threshold", "silent"), [(-1e9, True), (1e9, False)])
    def test_the_threshold_decides_what_comes_first(self, threshold: float, silent: bool) -> None:
        model = tiny_model(seed=1, decoding={"null_score_diff_threshold": threshold})
        answers = Reader(model).ask(QUESTIONS[0], corpus()[0], top_k=3)
        assert answers.no_answer is silent
        assert (answers[0]["answer"] == "") is silent

    def test_a_withheld_answer_is_the_best_guess(self, reader: Reader) -> None:
        text = corpus()[0]
        given, silent = (reader.ask(QUESTIONS[0], text, top_k=2, threshold=threshold) for threshold in (1e9, -1e9))
        assert given.best_guess is None
        assert "best_guess" not in given.to_json()
        assert silent.best_guess == given[0] == silent[1]
        assert silent.to_json()["best_guess"] == given[0]
        assert silent.best_guess.text == text
        alone = reader.ask(QUESTIONS[0], [text, text], threshold=-1e9)
        assert [answer["answer"] for answer in alone] == [""]
        assert alone.best_guess is not None
        assert alone.best_guess["context"] == 0
        assert f"<mark>{alone.best_guess['answer']}</mark>" in alone._repr_html_()
        assert reader.ask(QUESTIONS[0], "\u200b").best_guess is None  # there is nothing to guess

    def test_a_share_of_answers_moves_the_decision_and_the_probabilities(self, reader: Reader) -> None:
        text = corpus()[0]
        usual = reader.ask(QUESTIONS, text, top_k=99)
        for share in (1e-9, 0.1, 0.5, 0.9, 1 - 1e-9):
            for answers, before in zip(reader.ask(QUESTIONS, text, top_k=99, answerable=share), usual, strict=True):
                odds = before.null_score - math.log(share / (1 - share))
                assert answers.na_prob == pytest.approx(1 / (1 + math.exp(-odds)), rel=1e-6)
                assert answers.no_answer == (odds > 0)
                assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
        assert all(answers.no_answer for answers in reader.ask(QUESTIONS, text, answerable=1e-9))
        assert not any(answers.no_answer for answers in reader.ask(QUESTIONS, text, answerable=1 - 1e-9))
        assert reader.ask(QUESTIONS, text, top_k=99) == usual
        with pytest.raises(UsageError, match="expected threshold or answerable, got both"):
            reader.ask(QUESTIONS[0], text, threshold=1.0, answerable=0.5)
        with pytest.raises(UsageError, match="answerable: expected the share of questions with an answer"):
            reader.ask(QUESTIONS[0], text, answerable=90)

    def test_a_model_that_is_calibrated_by_features(self) -> None:
        """One context, several, and passages are all decided by the same features."""
        features = [
            {"name": "null_odds", "mean": 0.0, "scale": 1.0, "weight": 0.5},
            {"name": "windows", "mean": 0.0, "scale": 1.0, "weight": 1.0},
        ]
        calibration = {"method": "features", "features": features, "bias": 0.25, "answerable": 0.5}
        plain, by_features = (tiny_model(seed=1, decoding=decoding) for decoding in ({}, {"calibration": calibration}))
        texts = corpus()[:2]
        windows = [
            len(featurise([Example("q", QUESTIONS[0], Context(text))], plain.tokenizer, plain.windows))
            for text in texts
        ]
        for context, count in ((texts[0], windows[0]), (texts, sum(windows))):
            odds = Reader(plain).ask(QUESTIONS[0], context).null_score
            answers = Reader(by_features).ask(QUESTIONS[0], context)
            assert answers.null_score == pytest.approx(0.5 * np.clip(odds, -3, 3) + min(3.0, math.log(count)) + 0.25)
            assert answers.na_prob == pytest.approx(1 / (1 + math.exp(-answers.null_score)))
            assert answers.no_answer == (answers.null_score > 0)
            eager = Reader(by_features).ask(QUESTIONS[0], context, answerable=0.8)
            assert eager.null_score == pytest.approx(answers.null_score - math.log(4))
        read = Reader(by_features).ask(QUESTIONS[0], texts[0], passages=1)
        assert read.na_prob == pytest.approx(1 / (1 + math.exp(-read.null_score)))

    def test_options_of_a_single_call(self, reader: Reader) -> None:
        text = corpus()[0]
        usual = reader.ask(QUESTIONS[0], text, top_k=5)
        silent = reader.ask(QUESTIONS[0], text, top_k=5, threshold=-1e9)
        assert (silent.no_answer, silent[0]["answer"]) == (True, "")
        assert not reader.ask(QUESTIONS[0], text, threshold=math.inf).no_answer
        assert silent.null_score == usual.null_score
        short = reader.ask(QUESTIONS, text, top_k=20, max_answer_length=1)
        tokenizer = reader.model.tokenizer.backend_tokenizer
        lengths = {
            len(tokenizer.encode(answer["answer"], add_special_tokens=False).ids)
            for answers in short
            for answer in answers
            if answer["answer"]
        }
        assert lengths == {1}
        assert reader.ask(QUESTIONS[0], text, top_k=5) == usual
        for options, message in (
            ({"threshold": "high"}, "threshold: expected a number, got 'high'"),
            ({"threshold": math.nan}, "threshold: expected a number, got nan"),
            ({"threshold": True}, "threshold: expected a number, got True"),
            ({"passages": True}, "passages: expected a whole number of at least 1, got True"),
            ({"max_answer_length": 0}, "max_answer_length: expected a whole number of at least 1, got 0"),
        ):
            with pytest.raises(UsageError, match=message):
                reader.ask(QUESTIONS[0], text, **options)

    @pytest.mark.parametrize("calibration", [None, {"method": "temperature", "temperature": 3.0, "bias": -2.0}])
    def test_probabilities_share_one_scale(self, calibration: dict[str, Any] | None) -> None:
        """The probability of no answer is `na_prob`; the answers share the rest in proportion to their scores."""
        model = tiny_model(seed=1, decoding={"calibration": calibration})
        answers = Reader(model).ask(QUESTIONS[0], corpus()[0], top_k=99)
        odds = answers.null_score if calibration is None else answers.null_score / 3 - 2
        none, spans = (
            [answer for answer in answers if not answer["answer"]],
            [answer for answer in answers if answer["answer"]],
        )
        assert [answer["probability"] for answer in none] == [answers.na_prob]
        assert answers.na_prob == pytest.approx(1 / (1 + math.exp(-odds)))
        assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
        ratios = [span["probability"] / span["score"] for span in spans]
        assert ratios == pytest.approx([ratios[0]] * len(spans))

    def test_a_text_without_tokens_has_no_answer(self, reader: Reader) -> None:
        answers = reader.ask(QUESTIONS[0], "\u200b", top_k=9)
        assert sum(answer["probability"] for answer in answers) == pytest.approx(1)

    def test_questions_in_a_list_are_answered_independently(self, reader: Reader) -> None:
        contexts = corpus()[:3]
        together = reader.ask(QUESTIONS, contexts, top_k=4)
        for answers, question, context in zip(together, QUESTIONS, contexts, strict=True):
            alone = reader.ask(question, context, top_k=4)
            assert [answer["answer"] for answer in answers] == [prediction["answer"] for prediction in alone]
            assert [answer["score"] for answer in answers] == pytest.approx(
                [prediction["score"] for prediction in alone], abs=1e-5
            )
        of_one = reader.ask(QUESTIONS, contexts[0])
        assert [result[0]["answer"] for result in of_one] == [
            reader.ask(q, contexts[0])[0]["answer"] for q in QUESTIONS
        ]
        assert reader.ask([], "text") == []

    def test_several_contexts_are_ranked_together(self, reader: Reader) -> None:
        contexts = corpus()[:4]
        answers = reader.ask(QUESTIONS[0], contexts, top_k=20)
        assert all(
            contexts[answer["context"]][answer["start"] : answer["end"]] == answer["answer"] for answer in answers
        )
        examples = [example(text, question=QUESTIONS[0], id=str(at)) for at, text in enumerate(contexts)]
        alone = predict(reader.model, examples)
        spans = sorted(
            (
                (candidate.score, at, candidate.text)
                for at in range(4)
                for candidate in alone[str(at)].candidates
                if candidate.text
            ),
            reverse=True,
        )
        found = [(answer["context"], answer["answer"]) for answer in answers if answer["answer"]]
        assert found == [(at, text) for _, at, text in spans][: len(found)]
        assert len({at for at, _ in found}) > 1
        null = min(alone[str(at)].null.score for at in range(4))
        assert answers.null_score == pytest.approx(null - spans[0][0], abs=1e-4)
        nested = reader.ask([QUESTIONS[0], QUESTIONS[1]], [contexts, contexts[0]], top_k=20)
        assert [answer["answer"] for answer in nested[0]] == [answer["answer"] for answer in answers]
        assert "context" not in nested[1][0]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("q", "text", 0), "top_k"),
            ((["q", "r"], ["text"], 1), "2 questions and 1 context"),
            (("q", [], 1), "at least one context"),
            (("q", "text", 2.5), r"top_k: expected a whole number of at least 1, got 2\.5"),
            (("q", "text", None), "top_k: expected a whole number"),
            (("", "text", 1), "question: expected a text, got an empty one"),
            ((["q", " \n"], "text", 1), "question 2: expected a text, got an empty one"),
            (("q", "", 1), "context: expected a text, got an empty one"),
            (("q", ["", "\t"], 1), "context: expected a text, got an empty one"),
            ((["q", "r"], ["text", " "], 1), "context of question 2: expected a text, got an empty one"),
            ((None, "text", 1), "question: expected a text or a list of texts, got nothing"),
            ((["q", None], "text", 1), "question: expected a text, got nothing"),
            ((b"q", "text", 1), "question: .* got bytes"),
            (("q", None, 1), "context: expected a text or a list of texts, got nothing"),
            (("q", ["text", 5], 1), "context: expected a text, got int"),
            (("q", b"text", 1), "context: .* got bytes"),
            (("q", {"a": "text"}, 1), "context: .* got a mapping with a"),
        ],
    )
    def test_invalid_questions_and_contexts_are_refused(
        self, reader: Reader, arguments: tuple[Any, Any, int], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            reader.ask(arguments[0], arguments[1], top_k=arguments[2])

    def test_a_blank_context_among_others_is_ignored(self, reader: Reader) -> None:
        text = corpus()[0]
        alone = [answer["answer"] for answer in reader.ask(QUESTIONS[0], [text], top_k=5) if answer["answer"]]
        found = [answer for answer in reader.ask(QUESTIONS[0], ["", text, " "], top_k=5) if answer["answer"]]
        assert {answer["context"] for answer in found} == {1}
        assert [answer["answer"] for answer in found] == alone

    @pytest.mark.parametrize("contexts", [["", corpus()[0]], [corpus()[0], " ", "\n"]])
    def test_a_blank_context_does_not_make_an_answer_less_likely(self, contexts: list[str]) -> None:
        reader = Reader(tiny_model(seed=1))
        decoding = reader.model.decoding.model_copy(update={"window_penalty": 1.0})
        reader.model.decoding = decoding  # type: ignore[misc]
        for question in QUESTIONS:
            found, alone = reader.ask(question, contexts), reader.ask(question, [corpus()[0]])
            assert (found.null_score, found.na_prob) == (alone.null_score, alone.na_prob)
            assert found[0]["score"] == alone[0]["score"]

    def test_any_iterable_may_be_a_list(self, reader: Reader) -> None:
        contexts = corpus()[:3]
        expected = reader.ask(QUESTIONS, contexts)
        assert reader.ask(iter(QUESTIONS), tuple(contexts)) == expected
        assert reader.ask(np.array(QUESTIONS), (text for text in contexts)) == expected
        assert reader.ask(QUESTIONS[:1], [iter(contexts)]) == reader.ask(QUESTIONS[:1], [contexts])

    @pytest.mark.parametrize("size", [0, -3, 2.5])
    def test_a_batch_holds_at_least_one_window(self, reader: Reader, size: Any) -> None:
        with pytest.raises(UsageError, match="batch_size: expected a whole number of at least 1"):
            Reader(reader.model, batch_size=size)

    def test_a_model_without_texts_cannot_be_asked(self) -> None:
        with pytest.raises(UsageError, match="only decides whether there is one"):
            Reader(tiny_model(learner={"task": "answerability"}))

    def test_threads_share_a_reader(self, reader: Reader) -> None:
        work = [(question, context) for question in QUESTIONS for context in corpus()[:8]]
        expected = [reader.ask(*pair, top_k=3) for pair in work]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda pair: reader.ask(*pair, top_k=3), work)) == expected


class Letters:
    """A model whose answer is always the letter z, wherever it is."""

    gives_text, folders = True, ()

    def __init__(self) -> None:
        self.tokenizer, self.windows = tiny_tokenizer("bert"), WindowOptions(max_seq_length=64, doc_stride=16)
        self.decoding = tiny_model().decoding
        self.largest = 0

    def logits(self, padded: Padded) -> np.ndarray:
        self.largest = max(self.largest, padded.input_ids.size)
        z = self.tokenizer.convert_tokens_to_ids("z")
        return np.repeat(np.where(padded.input_ids == z, 9.0, 0.0)[None], 2, axis=0).astype(np.float32)


class TestLongContexts:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_slices_make_the_same_windows_as_the_whole(self, family: str) -> None:
        texts = [" ".join(corpus()[:6]), "short", "", AWKWARD * 9]
        examples, windows = examples_about(texts), WindowOptions(max_seq_length=64, doc_stride=16)
        whole = featurise(examples, tiny_tokenizer(family), windows)
        slices = list(featurise_in_slices(examples, tiny_tokenizer(family), windows, size=5))
        assert len(slices) > 4
        read = sum(map(len, whole.offsets))
        limited = list(featurise_in_slices(examples, tiny_tokenizer(family), windows, size=5, most_tokens=read))
        assert [part.input_ids.tolist() for part in limited] == [part.input_ids.tolist() for part in slices]
        assert max(map(len, slices)) <= 5
        for name in ("input_ids", "context_begin", "context_end", "first_token", "max_context"):
            assert np.concatenate([getattr(part, name) for part in slices]).tolist() == getattr(whole, name).tolist()
        ids = [part.examples[number].id for part in slices for number in part.example]
        assert ids == [whole.examples[number].id for number in whole.example]

    def test_too_many_tokens_are_refused_before_the_first_of_many_slices_is_computed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(features_module, "LONG", 1)  # every context is a slice of its own
        model, contexts = Letters(), ["z " * 20] * 3
        with pytest.raises(TooManyTokensError, match="at most 59 tokens to read, got 60"):
            Reader(model, most_tokens=59).ask("Which?", contexts)
        assert model.largest == 0
        assert Reader(model, most_tokens=60).ask("Which?", contexts)[0]["answer"]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_text_is_tokenised_alike_in_pieces_and_whole(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text = " ".join([*corpus()[:5], "a  b   c \n\n d\te  \u3000 f", AWKWARD, "x" * 30, AWKWARD])
        whole = featurise([example(text)], tiny_tokenizer(family), WindowOptions())
        for size in (40, 97, 150, 1000):
            monkeypatch.setattr(tokens_module, "PIECE", size)
            pieces = featurise([example(text)], tiny_tokenizer(family), WindowOptions())
            assert pieces.input_ids.tolist() == whole.input_ids.tolist(), size
            assert pieces.offsets[0].tolist() == whole.offsets[0].tolist()

    def test_a_text_without_spaces_is_split_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokens_module, "PIECE", 50)
        text = "東京は日本" * 100
        found = featurise([example(text)], tiny_tokenizer("bert"), WindowOptions())
        assert found.offsets[0][:, 1].max() == len(text)
        assert (np.diff(found.offsets[0][:, 0]) >= 0).all()

    def test_the_answer_in_a_book_is_found_at_its_place(self) -> None:
        words = ("lorem ipsum dolor sit amet " * 4000).split()
        words[17_000] = "z"
        text, model = " ".join(words), Letters()
        best = Reader(model).ask("Where?", text)[0]
        assert best["answer"] == "z"
        assert best["start"] == text.index("z")
        assert model.largest <= 32 * 64

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
    def test_memory_does_not_grow_with_the_context(self) -> None:
        """With a real encoder in its own process, 1 MB of text needs hardly more memory than 0.1 MB."""
        code = """
import re, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
from doubles import tiny_encoder, tiny_run_config
from lamella.inference.reader import Reader
from lamella.models.model import ReaderModel
windows = {{"max_seq_length": 128, "doc_stride": 16}}
reader = Reader(ReaderModel(tiny_encoder(num_hidden_layers=1), tiny_run_config(windows=windows)).eval())
def peak(characters):
    text = "The tower was built of grey stone by people nobody remembers. " * (characters // 62)
    assert reader.ask("Who built it?", text, passages=None)[0]["end"] <= len(text)
    assert reader.ask("Who built it?", text, passages=5)[0]["end"] <= len(text)
    # Not `ru_maxrss`: a process inherits that of the larger process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(peak(100_000), peak(1_000_000))
"""
        ended = subprocess.run(
            [sys.executable, "-c", code.format(tests=str(Path(__file__).parents[1]))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        small, large = map(float, ended.stdout.split())
        assert large - small < 35, (small, large)


class TestLoad:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backend": "onnxx"}, "backend 'onnxx' does not exist. Did you mean 'onnx'?"),
            ({"precision": "int4"}, "precision 'int4' does not exist"),
            ({"torch_dtype": torch.int16}, "precision 'int16' does not exist"),
            ({"dtype": "float64"}, "precision 'float64' does not exist"),
            ({"dtype": "float16", "precision": "bf16"}, "dtype: expected the same as precision, or only one of them"),
            (
                {"dtype": "float16", "torch_dtype": torch.float32},
                "dtype: expected the same as precision, or only one of them",
            ),
            ({"threads": 0}, "threads: expected a whole number of at least 1, got 0"),
            ({"threads": "2"}, "threads: expected a whole number of at least 1, got '2'"),
            ({"device": "nowhere"}, "device: 'nowhere' cannot be used here"),
            ({"device": "xpu"}, "device: 'xpu' cannot be used here"),
        ],
    )
    def test_an_invalid_option_is_refused(self, options: dict[str, Any], message: str, tmp_path: Path) -> None:
        tiny_model().save(tmp_path / "model")
        with pytest.raises(UsageError) as caught:
            Reader.load(tmp_path / "model", **options)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)

    def test_precision_may_be_given_in_transformers_words(self, tmp_path: Path) -> None:
        stock_folder(tmp_path, "bert")

        def weights(**options: Any) -> torch.dtype:
            found = Reader.load(tmp_path, device="cpu", backend="torch", **options).model.model.dtype  # type: ignore[attr-defined]
            assert isinstance(found, torch.dtype)
            return found

        assert weights(dtype="float32") == weights(torch_dtype=torch.float32) == torch.float32
        assert weights(dtype=torch.bfloat16) == weights(torch_dtype="bfloat16", precision="bf16") == torch.bfloat16
        assert weights(torch_dtype="float16") == weights(dtype="fp16") == torch.float16
        assert weights(dtype="auto") == weights()

    def test_a_device_may_be_a_number(self, tmp_path: Path) -> None:
        """As in transformers: -1 is the CPU, another number a GPU."""
        stock_folder(tmp_path, "bert")
        for device in (-1, "cpu", torch.device("cpu")):
            assert "device='cpu'" in repr(Reader.load(tmp_path, device=device))
        gpus = torch.cuda.device_count()
        with pytest.raises(UsageError, match=f"device: 'cuda:{gpus}' cannot be used here"):
            Reader.load(tmp_path, device=gpus)

    def test_a_folder_of_several_runs_asks_for_one(self, tmp_path: Path) -> None:
        with runs.new_run(tmp_path / "both", "train", within=["first", "second"]):
            pass
        with pytest.raises(UsageError, match=r"found several runs; choose one of first, second\.$"):
            Reader.load(tmp_path / "both")


class TestStock:
    @pytest.mark.parametrize("family", sorted({*FAMILIES} - {"eurobert"}))  # transformers has no such model of it
    def test_logits_equal_transformers(self, family: str, tmp_path: Path) -> None:
        folder = stock_folder(tmp_path, family)
        reader = Reader.load(folder, precision="fp32", device="cpu", backend="torch")
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
        tokenizer, text = reader.model.tokenizer, corpus()[0][:150]
        # By default transformers 5's ALBERT tokenizer makes no token types, but its models were trained with them.
        inputs = tokenizer(QUESTIONS[0], text, return_tensors="pt", return_token_type_ids=family == "albert" or None)
        with torch.inference_mode():
            output = model(**inputs)
        (features,) = featurise_in_slices([example(text, question=QUESTIONS[0])], tokenizer, reader.model.windows)
        padded = pad(features, np.arange(1))
        length = inputs["input_ids"].shape[1]
        assert padded.input_ids[0, :length].tolist() == inputs["input_ids"][0].tolist()
        found = reader.model.logits(padded)[:, 0, :length]
        expected = torch.stack([output.start_logits[0], output.end_logits[0]]).numpy()
        assert found == pytest.approx(expected, abs=1e-4)

    def test_another_architecture_keeps_its_own_attention_and_weights(self, tmp_path: Path) -> None:
        """Qwen's attention is causal, which its mask does not show in a batch without padding."""
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        more = {"vocab_size": 500, "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": 0}
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("qwen2", **sizes, **more)
        model = transformers.AutoModelForQuestionAnswering.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        model.save_pretrained(tmp_path)
        tiny_tokenizer("bert").save_pretrained(tmp_path)
        whole, half = (
            Reader.load(tmp_path, precision=precision, device="cpu", backend="torch") for precision in ("fp32", "bf16")
        )
        examples = [example(corpus()[0][:end]) for end in range(60, 100)]
        (features,) = featurise_in_slices(examples, whole.model.tokenizer, whole.model.windows)
        windows = (pad(features, np.array([index])) for index in range(len(features)))
        padded = next(window for window in windows if window.mask.all())
        with torch.inference_mode():
            output = model(input_ids=torch.from_numpy(padded.input_ids).long())
        expected = torch.stack([output.start_logits, output.end_logits]).numpy()
        assert whole.model.logits(padded) == pytest.approx(expected, abs=1e-4)
        parameters = half.model.model.parameters()  # type: ignore[attr-defined]
        assert {parameter.dtype for parameter in parameters} == {torch.float32}, "it may not run in pure bf16"

    def test_its_attention_does_not_use_cudnn(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The CPU stands in for a GPU; the recorded kernels are those that the model's attention would use."""
        reader = Reader.load(stock_folder(tmp_path, "bert"), precision="fp32", device="cpu", backend="torch")
        met: list[tuple[bool, ...]] = []

        def kernels() -> tuple[bool, ...]:
            cuda = torch.backends.cuda
            return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()

        reader.model.model.register_forward_hook(lambda *_: met.append(kernels()))  # type: ignore[attr-defined]
        on_a_gpu = suitable_kernels
        monkeypatch.setattr(
            "lamella.models.transformers_model.suitable_kernels", lambda _: on_a_gpu(torch.device("cuda"))
        )
        before = kernels()
        reader.ask(QUESTIONS[0], corpus()[0][:150])
        assert met == [(False, True, True)]
        assert kernels() == before

    def test_an_encoder_is_not_a_reader(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="without a head for it"):
            Reader.load(save_tiny_encoder(tmp_path / "encoder"))

    def test_a_checkpoint_without_its_head_is_refused(self, tmp_path: Path) -> None:
        folder = save_tiny_encoder(tmp_path / "encoder")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForQuestionAnswering"]}))
        with pytest.raises(ModelError, match="lack qa_outputs"):
            Reader.load(folder)

    def test_a_damaged_checkpoint_gives_a_one_line_error(self, tmp_path: Path) -> None:
        folder = stock_folder(tmp_path, "bert")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(ModelError, match="expected a safetensors file, found a damaged one"):
            Reader.load(folder)


class TestPipelineFace:
    """The pipeline's rules, recomputed from the logits; benchmarks/inference.py compares with the pipeline itself."""

    def test_scores_are_probabilities_of_start_and_end(self, tmp_path: Path) -> None:
        reader = Reader.load(stock_folder(tmp_path, "bert"), precision="fp32", device="cpu")
        text = corpus()[0][:200]
        found = reader(question=QUESTIONS[0], context=text, align_to_words=False, top_k=3)
        (features,) = featurise_in_slices(
            [example(text, question=QUESTIONS[0])], reader.model.tokenizer, WindowOptions()
        )
        padded = pad(features, np.arange(1))
        logits = reader.model.logits(padded)[:, 0].astype(np.float64)
        allowed = padded.is_context[0].copy()
        allowed[0] = True
        weights = np.where(allowed, np.exp(logits - logits.max(1, keepdims=True)), 0)
        start, end = weights / weights.sum(1, keepdims=True)
        start[0] = end[0] = 0
        outer = np.triu(np.tril(start[:, None] * end[None], 14))
        assert found[0]["score"] == pytest.approx(outer.max(), rel=1e-4)
        assert [answer["score"] for answer in found] == sorted((answer["score"] for answer in found), reverse=True)
        assert all(text[answer["start"] : answer["end"]] == answer["answer"] for answer in found)

    def test_answers_are_whole_words(self, tmp_path: Path) -> None:
        reader = Reader.load(stock_folder(tmp_path, "bert"), precision="fp32", device="cpu")
        text = "Xylophones (1895) were Zoë's; unpronounceableword-like things."
        for answer in reader(question="What?", context=text, top_k=12):
            before, after = text[: answer["start"]][-1:], text[answer["end"] :][:1]
            assert not (before.isalnum() and answer["answer"][0].isalnum()), answer
            assert not (after.isalnum() and answer["answer"][-1].isalnum()), answer

    def test_a_text_without_spaces_is_tokenised_once(self) -> None:
        tokenizer, encoded = without_truncation(tiny_tokenizer("bert")), []

        def encode(text: str, **options: Any) -> Any:
            encoded.append(text)
            return tokenizer.encode(text, **options)

        text = "bees," * 1000
        words = Words(cast(Any, SimpleNamespace(encode=encode)), f"Who {text} kept?")
        for begin in range(4, 5000, 50):
            assert words.widen(begin + 1, begin + 2) == (begin, begin + 4)
        assert encoded == [text]

    def test_all_ways_to_call_it(self, reader: Reader) -> None:
        text = corpus()[0]
        single = reader(question=QUESTIONS[0], context=text)
        assert set(single) == {"score", "start", "end", "answer"}
        assert reader({"question": QUESTIONS[0], "context": text}) == single
        several = reader(question=QUESTIONS, context=text)
        assert several[0]["answer"] == single["answer"]
        assert [each["answer"] for each in reader([{"question": q, "context": text} for q in QUESTIONS])] == [
            each["answer"] for each in several
        ]
        assert len(reader(question=QUESTIONS[0], context=text, top_k=3)) == 3
        assert reader(question=[QUESTIONS[0]], context=[text]) == single
        with pytest.raises(UsageError, match="got 3 questions and 2 contexts"):
            reader(question=QUESTIONS, context=["a", "b"])

    def test_every_form_that_the_pipeline_took(self, reader: Reader) -> None:
        """One question gives a dict, several give a list, however they are passed."""
        text, (first, second) = corpus()[0], QUESTIONS[:2]
        row, other = {"question": first, "context": text}, {"question": second, "context": text}
        example = SimpleNamespace(question_text=first, context_text=text)  # transformers' SquadExample
        single, several = reader(question=first, context=text), reader(question=[first, second], context=text)
        assert single.keys() == {"score", "start", "end", "answer"}
        for call in (
            lambda: reader(first, text),
            lambda: reader(row),
            lambda: reader([row]),
            lambda: reader(example),
            lambda: reader(data=row),
            lambda: reader(X=[row]),
            lambda: reader(data=[example]),
            lambda: reader({**row, "id": 7, "answers": []}),
            lambda: reader(first, text, topk=1, max_answer_len=None, doc_stride=None, max_question_len=64),
        ):
            assert call() == single
        for call in (
            lambda: reader(row, other),
            lambda: reader([row, other]),
            lambda: reader(iter([row, other])),
            lambda: reader(data=(row, other)),
            lambda: reader({"question": [first, second], "context": [text, text]}),
        ):
            assert call() == several
        assert reader(first, text, topk=3) == reader(first, text, top_k=3)
        assert len(reader(data=[row, other], top_k=2)[1]) == 2

    @pytest.mark.parametrize("family", ["bert", "roberta"])
    def test_windows_longer_than_the_encoder_has_positions(self, family: str, tmp_path: Path) -> None:
        most = tiny_config(family).max_position_embeddings - (2 if family == "roberta" else 0)
        model, stock = tiny_model(family), Reader.load(stock_folder(tmp_path, family), precision="fp32", device="cpu")
        for reader in (Reader(model), stock):
            asked = {"question": "q", "context": " ".join(corpus())}
            assert reader(**asked, max_seq_len=most)["answer"]
            with pytest.raises(UsageError, match=f"expected at most {most}, the number of positions"):
                reader(**asked, max_seq_len=most + 1)

    def test_options_of_the_pipeline_that_change_no_answer(self, reader: Reader) -> None:
        asked = {"question": QUESTIONS[0], "context": corpus()[0]}
        assert reader(**asked, batch_size=1, padding="longest", max_question_len=64, num_workers=0) == reader(**asked)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            ({}, "question: expected a text or a list of texts, got nothing"),
            ({"question": "q"}, "context: expected a text or a list of texts, got nothing"),
            ({"question": "q", "context": ""}, "context: expected a text, got an empty one"),
            ({"question": "", "context": "text"}, "question: expected a text, got an empty one"),
            ({"question": ["q", None], "context": "text"}, "question: expected a text, got nothing"),
            (
                {"data": {"question": "q"}},
                "with question and context, or a list of such mappings, got a mapping with question",
            ),
            ({"data": ["q"]}, "with question and context, or a list of such mappings, got str"),
            ({"X": 5}, "inputs: .* got int"),
            ({"question": "q", "context": "text", "top_k": 0}, "top_k: expected a whole number of at least 1"),
            (
                {"question": "q", "context": "text", "batch_size": 0},
                "batch_size: expected a whole number of at least 1",
            ),
            (
                {"question": "q", "context": "text", "max_answer_len": 0},
                "max_answer_len: expected a whole number of at least 1",
            ),
            ({"question": "q", "context": "text", "max_seq_len": 4}, "max_seq_len: expected at least 16"),
            ({"question": "q", "context": "text", "max_seq_len": "64"}, "max_seq_len: expected a whole number .* '64'"),
            ({"question": "q", "context": "text", "doc_stride": 12.5}, "doc_stride: expected a whole number, got 12.5"),
            ({"question": "q", "context": "text", "doc_stride": 128}, "doc_stride less than that, got 128 and 128"),
            (
                {"question": "q", "context": "text", "doc_strid": 12},
                "'doc_strid' does not exist. Did you mean 'doc_str",
            ),
        ],
    )
    def test_invalid_calls_are_refused(self, reader: Reader, call: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            reader(**call)

    def test_no_answer_needs_the_option(self) -> None:
        model = tiny_model(seed=1)
        with torch.no_grad():
            model.head.task.q.zero_()  # all places score the same, and so does "no answer"
        reader = Reader(model)
        assert reader(question="q", context="a b c")["answer"] != ""
        texts = [
            answer["answer"] for answer in reader(question="q", context="a b c", top_k=9, handle_impossible_answer=True)
        ]
        assert "" in texts
        null = next(
            answer["score"]
            for answer in reader(question="q", context="a b c", top_k=9, handle_impossible_answer=True)
            if not answer["answer"]
        )
        assert null == pytest.approx((1 / 4) ** 2, rel=1e-5)
        assert math.isfinite(null)


def test_the_code_of_the_page_about_readers_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page shows it, but with fewer passages to read."""
    monkeypatch.setattr("lamella.inference.reader.PASSAGES_READ", 5)
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/reader.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(code) == 4
    names: dict[str, Any] = {}
    exec("\n".join(code), names)
    assert names["answers"][0]["answer"] == "Christiaan Huygens"
    assert names["answers"].no_answer is False
    assert names["answers"].passages == (5, 259)


def test_a_model_that_is_no_name_gets_one_line() -> None:
    with pytest.raises(UsageError, match="model: expected the name or the folder of a model, got 42"):
        Reader.load(42)  # type: ignore[arg-type]


def test_the_index_of_a_long_text_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Counted(passages_module.PassageIndex):
        def __init__(self, texts: Any) -> None:
            built.append(len(texts))
            super().__init__(texts)

    monkeypatch.setattr(passages_module, "PassageIndex", Counted)
    model = tiny_model(seed=1)
    model.decoding = model.decoding.model_copy(update={"merge": "leads"})
    reader, text = Reader(model), " ".join(corpus()) * 3
    for question in QUESTIONS:
        reader.ask(question, text)
    assert built == [1]

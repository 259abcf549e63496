"""The Python API: load a reader, and ask it questions about texts."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from lamella.data.examples import Context, Example
from lamella.decoding_options import DecodingOptions
from lamella.documents.collection import Documents
from lamella.documents.passages import Passage, PassageCache
from lamella.encoder.sources import DEFAULT_READER, READERS
from lamella.errors import UsageError, counted, shorten, warn
from lamella.inference.abstention import at_prior, calibrated
from lamella.inference.answer_layers import layers_of_answer
from lamella.inference.answer_list import Answer, Answers
from lamella.inference.arguments import as_list, check_positive, check_text
from lamella.inference.doubts import Doubts
from lamella.inference.no_answer import na_probability
from lamella.inference.pipeline import answer_as_pipeline, checked_options, question_pairs
from lamella.inference.predict import predict
from lamella.inference.prediction import Candidate, Prediction, rank_found_passages, rank_passages, rank_together
from lamella.inference.protocols import QAModel
from lamella.models.loading import Backend, Precision, load_model
from lamella.progress import Log

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("lamella")

LONG_CONTEXT = 200_000  # characters of the contexts of a question from which only passages of them are read
DOCUMENT_PASSAGES = 20  # how many passages of documents are read
PASSAGES_READ = 50  # how many: they contain 98 % of the answers in 2.5 million characters (`passages`)


class Reader:
    """Finds the answer to a question in a text, or reports that there is none. Threads may share a reader.

    >>> reader = Reader.load("runs/demo")
    >>> reader.ask("Who built it?", "The tower was built by Robert Stevenson.")
    [{'score': 0.93, 'probability': 0.84, 'start': 23, 'end': 39, 'answer': 'Robert Stevenson'}]
    """

    def __init__(
        self,
        model: QAModel,
        *,
        batch_size: int = 16,
        passages: PassageCache | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """Make a reader of a model; several readers may share the `passages` of the long texts asked about last.

        A call with more than `most_tokens` to read raises TooManyTokensError before it computes anything.
        """
        if not model.gives_text:
            raise UsageError(
                "Reader: expected a model that finds answers, got one that only decides whether there is one; "
                "use it with: lamella predict"
            )
        self.model, self.batch_size = model, check_positive("batch_size", batch_size)
        self._passages, self._most_tokens = passages or PassageCache(), most_tokens

    @classmethod
    def load(
        cls,
        name: str | os.PathLike[str] | None = None,
        *,
        device: str | int | torch.device | None = None,
        precision: Precision = "auto",
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        backend: Backend = "auto",
        threads: int | None = None,
        batch_size: int = 16,
    ) -> Reader:
        """Load a reader from a model folder, a run folder, an exported folder, or any transformers QA checkpoint.

        Without a name, load the reader that ships with the package, which brings its own small encoder. Its name is
        "default"; a folder of that name in the working directory takes precedence if it holds a model.

        `device` is `"cpu"`, `"cuda:0"` or, as in transformers, the number of a GPU and -1 for the CPU.
        `backend="auto"` runs the model on onnxruntime, without torch, if it is to run on a CPU in fp32 and a graph can
        be made from it, and on torch otherwise; `"onnx"` and `"torch"` choose. `precision="auto"` is fp32 on
        onnxruntime, and on torch bf16 on GPUs that compute it and CPUs that are faster with it; with AMX it chooses
        torch, if that is installed. `precision="int8"` runs on onnxruntime: mostly faster than fp32, a quarter of its
        size, but a few answers change. `dtype` and `torch_dtype` set the precision in transformers' words:
        `torch.bfloat16` or `"bfloat16"`. `threads` defaults to all cores.
        """
        if isinstance(device, int):  # as in transformers: -1 is the CPU
            device = "cpu" if device < 0 else f"cuda:{device}"
        for alias in (dtype, torch_dtype):
            if alias is not None:
                precision = _precision(alias, precision)
        name = READERS / DEFAULT_READER if name is None else name
        model = load_model(
            name, device=device, precision=precision, backend=backend, threads=threads, inference_only=True
        )
        return cls(model, batch_size=batch_size)

    def __repr__(self) -> str:
        folder = next(iter(self.model.folders), None)
        name = type(self.model).__name__ if folder is None else os.fspath(folder)
        threshold = self.model.decoding.null_score_diff_threshold
        return f"Reader({name!r}, device={str(getattr(self.model, 'device', 'cpu'))!r}, threshold={threshold:g})"

    def ask(
        self,
        question: str | Iterable[str],
        context: str | Iterable[Any] | Documents,
        *,
        top_k: int = 1,
        threshold: float | None = None,
        answerable: float | None = None,
        max_answer_length: int | None = None,
        passages: int | Literal["auto"] | None = "auto",
        layers: bool = False,
        log: Log | None = None,
    ) -> Any:
        """Return the `top_k` best answers to a question from a text of any length.

        There are at most as many as the model keeps (`decoding.n_best_size`, 20 by default), and "no answer".

        A question may have several contexts, which are ranked together: `context` in an answer is the number of its
        own. A list of questions returns a list of results; give one context for all of them, or a list with one entry
        per question, each a text or a list of texts. A blank question is refused, and so is a question with only blank
        contexts; a blank context among others is ignored.

        With `Documents` as the context, the best passages of all documents are read: 20 with `passages="auto"`. An
        answer has the `file` it is from, its `page`, `line` or `paragraph` there, and the `sentence` around it.

        `threshold` and `max_answer_length` (in tokens) replace the model's for this call. `answerable` is the share of
        your questions that you expect to have an answer: with 0.9 the reader answers more of them, with 0.1 fewer.
        `passages` reads only the best N passages of the contexts, ranked by the words of the question; "auto" does so,
        with 50 passages, if the contexts are longer than 200,000 characters, and None never. `log` receives a line if
        it happens, by default the logger `lamella`, level INFO. `layers` adds to each answer the weights of the
        encoder's layers for each of its tokens; it needs a head that weighs layers, and `backend="torch"`.
        """
        call = _Call(
            check_positive("top_k", top_k),
            _change_decoding(self.model.decoding, threshold, answerable, max_answer_length),
            _check_passages(passages),
            layers,
            log or logger.info,
        )
        if isinstance(question, str):
            return self._ask([(question, context)], call)[0]
        questions = as_list("question", question)
        for_all = isinstance(context, str | Documents)
        contexts = [context] * len(questions) if for_all else as_list("context", context)
        if len(contexts) != len(questions):
            raise UsageError(
                f"ask: expected one context for all questions, or one per question, got "
                f"{counted(len(questions), 'question')} and {counted(len(contexts), 'context')}."
            )
        return self._ask(list(zip(questions, contexts, strict=True)), call)

    def __call__(
        self,
        *inputs: Any,
        question: str | Iterable[str] | None = None,
        context: str | Iterable[str] | None = None,
        data: Any = None,
        X: Any = None,  # the pipeline's own name
        **options: Any,
    ) -> Any:
        """Answer as the question answering pipeline of transformers 4 did, with its options and its rules.

        Pass a question and a context, by position or by name, lists of them, or mappings with both (also as `data` or
        `X`). A single question returns one answer, or a list of `top_k`; several questions return a list. Unlike
        `ask`, "no answer" is possible only with `handle_impossible_answer`.
        """
        pairs = question_pairs(inputs, question=question, context=context, data=data, X=X)
        checked = checked_options({"batch_size": self.batch_size, **options})
        results = answer_as_pipeline(self.model, pairs, self._most_tokens, **checked)
        answers = [result[0] if len(result) == 1 else result for result in results]
        return answers[0] if len(answers) == 1 else answers

    def _ask(self, pairs: Sequence[tuple[str, Any]], call: _Call) -> list[Answers]:
        asked = [_check_question(number, *pair, several=len(pairs) > 1) for number, pair in enumerate(pairs)]
        asked = [self._choose_passages(question, call) for question in asked]
        if ranked := [question for question in asked if question.total is not None and question.documents is None]:
            characters = max(sum(map(len, question.texts)) for question in ranked)
            call.log(
                f"{characters:,} characters: reading the best {call.most_passages(characters)} of "
                f"{max(question.total or 0 for question in ranked):,} passages, ranked by the words of the question"
            )
        examples = [question.examples(number) for number, question in enumerate(asked)]
        doubts = Doubts(self.model.tokenizer, self.model.windows)
        predictions = predict(
            self.model,
            list(chain(*examples)),
            batch_size=self.batch_size,
            decoding=call.decoding,
            doubts=doubts,
            most_tokens=self._most_tokens,
            passages=self._passages,
        )
        doubts.warn()
        return [
            self._answers(
                question,
                [predictions[example.id] for example in group],
                call,
                warnings=[*question.warnings, *doubts.about(question.text, [each.context.text for each in group])],
            )
            for question, group in zip(asked, examples, strict=True)
        ]

    def _choose_passages(self, question: _Question, call: _Call) -> _Question:
        """Return the question with the passages to read, if its contexts have more of them than shall be read."""
        if question.documents is not None:
            total = len(question.documents.passages)
            most = min(total, DOCUMENT_PASSAGES if call.passages == "auto" else call.passages or total)
            passages, related = question.documents.best(question.text, most)
        else:
            limit = call.most_passages(sum(map(len, question.texts)))
            if limit is None:
                return question
            index = self._passages.get(tuple(question.texts))
            total, most = len(index), limit
            if total <= most:
                return question
            passages, related = index.best(question.text, most)
        warnings = []
        if not related and most < total:
            first = "the first passage was" if most == 1 else f"the first {most} passages were"
            warnings.append(
                f"no passage shares a word with the question {shorten(question.text)}, so {first} read; "
                "rephrase it, or read everything (passages=None; --passages all)."
            )
            warn(warnings[0])
        return replace(question, passages=tuple(passages), read=most, total=total, warnings=tuple(warnings))

    def _answers(
        self, question: _Question, predictions: Sequence[Prediction], call: _Call, *, warnings: Sequence[str]
    ) -> Answers:
        decoding = call.decoding
        if question.total is None:
            prediction = rank_together(predictions, decoding.n_best_size, contexts=question.not_blank)
        else:
            places = [(passage.text, passage.begin) for passage in question.passages]
            if question.documents is None and decoding.merge == "scores":
                prediction = rank_passages(predictions, places, decoding.n_best_size)
            else:
                found = [passage.score for passage in question.passages]
                prediction = rank_found_passages(predictions, places, found, decoding.n_best_size)
        prediction = calibrated(prediction, decoding)
        chosen = prediction.chosen(decoding.null_score_diff_threshold)
        ranked = sorted(prediction.rows, key=lambda row: row != chosen)  # stable: chosen comes first
        na_prob = float(na_probability(np.array([prediction.null_odds]), decoding.calibration)[0])
        # 0.0 if "no answer" is the only candidate.
        all_answers = sum(probability for text, _, _, _, probability, *_ in ranked if text) or 1.0

        def answer(candidate: Candidate) -> Answer:
            share = (1 - na_prob) * candidate.probability / all_answers if candidate.text else na_prob
            place = {"start": candidate.begin_char, "end": candidate.end_char, "answer": candidate.text}
            number = {"context": candidate.context} if question.several_contexts else {}
            values = {"score": candidate.probability, "probability": share, **place, **number}
            found = Answer(values, text=question.texts[candidate.context])
            if question.documents is not None and candidate.text:
                begin, end = question.documents.whole(candidate.context, candidate.begin_char, candidate.end_char)
                found |= {"start": begin, "end": end, "answer": found.text[begin:end]}  # it was read without markup
                found |= question.documents.place(candidate.context, begin)
                found["sentence"] = "".join(found.sentence())
            if call.layers and candidate.text:
                part, shift = question.part_around(candidate)  # not the whole document, and without markup
                span = {"start": candidate.begin_char - shift, "end": candidate.end_char - shift}
                found["layers"] = layers_of_answer(self.model, question.text, Answer(span, text=part), shift=shift)
            return found

        withheld = prediction.best_span if not chosen.text else None
        return Answers(
            [answer(Candidate._make(row)) for row in ranked[: call.top_k]],
            question=question.text,
            null_score=prediction.null_odds,
            na_prob=na_prob,
            no_answer=not chosen.text,
            best_guess=answer(withheld) if withheld and withheld.text else None,
            passages=None if question.total is None else (question.read, question.total),
            warnings=warnings,
        )


@dataclass(frozen=True)
class _Call:
    """The options of a call of `Reader.ask`."""

    top_k: int
    decoding: DecodingOptions
    passages: int | Literal["auto"] | None
    layers: bool
    log: Log

    def most_passages(self, characters: int) -> int | None:
        """Return how many passages of that many characters to read; None for all of them."""
        if self.passages == "auto":
            return PASSAGES_READ if characters > LONG_CONTEXT else None
        return self.passages


@dataclass(frozen=True)
class _Question:
    """A question with its contexts; if only passages of them are read, with these."""

    text: str
    texts: Sequence[str]
    several_contexts: bool
    documents: Documents | None = None  # whose texts they are
    passages: tuple[Passage, ...] = ()  # joined where they touch
    read: int = 0  # how many they were before
    total: int | None = None  # of how many; None if the contexts are read whole
    warnings: tuple[str, ...] = ()  # about the choice of the passages

    @property
    def not_blank(self) -> list[int]:
        """The numbers of the contexts to read: a blank one has no answer, but would still lower the null odds."""
        return [number for number, text in enumerate(self.texts) if text.strip()]

    def examples(self, number: int) -> list[Example]:
        """Return an example for each context or passage."""
        if self.total is None:
            parts = [self.texts[place] for place in self.not_blank]
        else:
            parts = [self._words(passage) for passage in self.passages]
        return [Example(f"{number}/{place}", self.text, Context(part)) for place, part in enumerate(parts)]

    def part_around(self, answer: Candidate) -> tuple[str, int]:
        """Return the text that an answer was read in, and where it begins in its context."""
        if self.total is None:
            return self.texts[answer.context], 0
        own = [passage for passage in self.passages if passage.text == answer.context]
        passage = next(passage for passage in own if passage.begin <= answer.begin_char < passage.end)
        return self._words(passage), passage.begin

    def _words(self, passage: Passage) -> str:
        if self.documents is not None:
            return self.documents.words(passage)
        return self.texts[passage.text][passage.begin : passage.end]


def _check_question(number: int, question: Any, context: Any, *, several: bool) -> _Question:
    which = f" {number + 1}" if several else ""
    question = check_text("question", question)
    if not question.strip():
        raise UsageError(f"question{which}: expected a text, got an empty one.")
    if isinstance(context, Documents):
        if not len(context.passages):
            raise UsageError("ask: expected documents with text, got none.")
        return _Question(question, context.texts, several_contexts=False, documents=context)
    texts = [context] if isinstance(context, str) else as_list("context", context)
    if not texts:
        raise UsageError("ask: expected at least one context per question, got an empty list.")
    texts = [check_text("context", text) for text in texts]
    if not any(map(str.strip, texts)):
        raise UsageError(f"context{which and f' of question{which}'}: expected a text, got an empty one.")
    return _Question(question, tuple(texts), several_contexts=not isinstance(context, str))


def _change_decoding(
    decoding: DecodingOptions, threshold: float | None, answerable: float | None, max_answer_length: int | None
) -> DecodingOptions:
    if answerable is not None:
        if threshold is not None:
            raise UsageError("ask: expected threshold or answerable, got both; each decides when to give no answer.")
        decoding = at_prior(decoding, answerable)
    changes: dict[str, Any] = {}
    if threshold is not None:
        if isinstance(threshold, bool) or not isinstance(threshold, Real) or math.isnan(threshold):
            raise UsageError(f"threshold: expected a number, got {shorten(threshold)}.")
        changes["null_score_diff_threshold"] = float(threshold)
    if max_answer_length is not None:
        changes["max_answer_length"] = check_positive("max_answer_length", max_answer_length)
    return decoding.model_copy(update=changes) if changes else decoding


def _check_passages(passages: Any) -> int | Literal["auto"] | None:
    if passages is None or passages == "auto":
        return cast(Literal["auto"] | None, passages)
    if isinstance(passages, str):
        raise UsageError(f"passages: expected a whole number, 'auto', or None for everything, got {shorten(passages)}.")
    return check_positive("passages", passages)


def _precision(dtype: Any, precision: Precision) -> Precision:
    """Translate a dtype of transformers; an unknown one is passed on, and refused by its own name."""
    name = str(dtype).removeprefix("torch.")
    translated = cast(Precision, {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name))
    if precision not in ("auto", translated):
        raise UsageError(f"dtype: expected the same as precision, or only one of them, got {name} and {precision}.")
    return translated

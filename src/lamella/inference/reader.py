"""The Python API: load a reader, and ask it questions about texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lamella.data.examples import Context, Example
from lamella.encoder.sources import DEFAULT_READER, READERS
from lamella.errors import UsageError, counted
from lamella.inference.answer_list import Answer, Answers
from lamella.inference.arguments import as_list, check_positive, check_text
from lamella.inference.no_answer import na_probability
from lamella.inference.pipeline import answer_as_pipeline, checked_options, question_pairs
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction, rank_together
from lamella.inference.protocols import QAModel
from lamella.models.loading import Backend, Precision, load_model

if TYPE_CHECKING:
    import torch


class Reader:
    """Finds the answer to a question in a text, or reports that there is none. Threads may share a reader.

    >>> reader = Reader.load("runs/demo")
    >>> reader.ask("Who built it?", "The tower was built by Robert Stevenson.")
    [{'score': 0.93, 'probability': 0.84, 'start': 23, 'end': 39, 'answer': 'Robert Stevenson'}]
    """

    def __init__(self, model: QAModel, *, batch_size: int = 16) -> None:
        if not model.gives_text:
            raise UsageError(
                "Reader: expected a model that finds answers, got one that only decides whether there is one; "
                "use it with: lamella predict"
            )
        self.model, self.batch_size = model, check_positive("batch_size", batch_size)

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
        `precision="auto"` is bf16 where the hardware supports it, otherwise fp32. `dtype` and `torch_dtype` set it in
        transformers' words: `torch.bfloat16` or `"bfloat16"`. `backend="auto"` runs an exported folder with onnxruntime
        (`"onnx"`, without torch) and everything else with torch (`"torch"`). `threads` defaults to all cores.
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

    def ask(self, question: str | Iterable[str], context: str | Iterable[Any], *, top_k: int = 1) -> Any:
        """Return the `top_k` best answers to a question from a text of any length.

        A question may have several contexts, which are ranked together: `context` in an answer is the number of its
        own. A list of questions returns a list of results; give one context for all of them, or a list with one entry
        per question, each a text or a list of texts. A blank question is refused, and so is a question with only blank
        contexts; a blank context among others is ignored.
        """
        check_positive("top_k", top_k)
        if isinstance(question, str):
            return self._ask([(question, context)], top_k)[0]
        questions = as_list("question", question)
        contexts = [context] * len(questions) if isinstance(context, str) else as_list("context", context)
        if len(contexts) != len(questions):
            raise UsageError(
                f"ask: expected one context for all questions, or one per question, got "
                f"{counted(len(questions), 'question')} and {counted(len(contexts), 'context')}."
            )
        return self._ask(list(zip(questions, contexts, strict=True)), top_k)

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
        results = answer_as_pipeline(self.model, pairs, **checked_options({"batch_size": self.batch_size, **options}))
        answers = [result[0] if len(result) == 1 else result for result in results]
        return answers[0] if len(answers) == 1 else answers

    def _ask(self, pairs: Sequence[tuple[str, str | Iterable[str]]], top_k: int) -> list[Answers]:
        questions = [_question(number, *pair, several=len(pairs) > 1) for number, pair in enumerate(pairs)]
        predictions = predict(
            self.model,
            [example for examples in questions for example in examples],
            batch_size=self.batch_size,
            warn=True,
        )
        return [
            self._answers(
                examples,
                rank_together([predictions[example.id] for example in examples], self.model.decoding.n_best_size),
                top_k,
                several_contexts=not isinstance(context, str),
            )
            for examples, (_, context) in zip(questions, pairs, strict=True)
        ]

    def _answers(
        self, examples: Sequence[Example], prediction: Prediction, top_k: int, *, several_contexts: bool
    ) -> Answers:
        decoding, odds = self.model.decoding, prediction.null_odds
        chosen = prediction.chosen(decoding.null_score_diff_threshold)
        ranked = sorted(prediction.candidates, key=lambda candidate: candidate != chosen)  # stable: chosen comes first
        na_prob = float(na_probability(np.array([odds]), decoding.calibration)[0])
        # 0.0 if "no answer" is the only candidate.
        all_answers = sum(candidate.probability for candidate in ranked if candidate.text) or 1.0
        answers = [
            Answer(
                {
                    "score": candidate.probability,
                    "probability": (1 - na_prob) * candidate.probability / all_answers if candidate.text else na_prob,
                    "start": candidate.begin_char,
                    "end": candidate.end_char,
                    "answer": candidate.text,
                }
                | ({"context": candidate.context} if several_contexts else {}),
                text=examples[candidate.context].context.text,
            )
            for candidate in ranked[:top_k]
        ]
        return Answers(
            answers, question=examples[0].question, null_score=odds, na_prob=na_prob, no_answer=not chosen.text
        )


def _question(number: int, question: Any, context: Any, *, several: bool) -> list[Example]:
    """Return an example for each context of a question."""
    texts = [context] if isinstance(context, str) else as_list("context", context)
    if not texts:
        raise UsageError("ask: expected at least one context per question, got an empty list.")
    question, texts = check_text("question", question), [check_text("context", text) for text in texts]
    which = f" {number + 1}" if several else ""
    if not question.strip():
        raise UsageError(f"question{which}: expected a text, got an empty one.")
    if not any(map(str.strip, texts)):
        raise UsageError(f"context{which and f' of question{which}'}: expected a text, got an empty one.")
    return [Example(f"{number}/{index}", question, Context(text)) for index, text in enumerate(texts)]


def _precision(dtype: Any, precision: Precision) -> Precision:
    """Translate a dtype of transformers; an unknown one is passed on, and refused by its own name."""
    name = str(dtype).removeprefix("torch.")
    translated = cast(Precision, {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name))
    if precision not in ("auto", translated):
        raise UsageError(f"dtype: expected the same as precision, or only one of them, got {name} and {precision}.")
    return translated

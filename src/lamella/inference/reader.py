"""The Python API: load a model, ask questions of texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lamella.data.examples import Context, Example
from lamella.errors import UsageError
from lamella.inference.decode import Prediction, rank_together
from lamella.inference.loading import Backend, Precision, load_model
from lamella.inference.pipeline import answer_as_pipeline
from lamella.inference.predict import Answering, predict
from lamella.inference.threshold import na_probability

if TYPE_CHECKING:
    import torch


class Answers(list[dict[str, Any]]):
    """The answers of one question, best first: `score` (a probability), `start` and `end` (characters), `answer`.

    "No answer" is one of them, with an empty `answer`; it leads where `no_answer` is true.
    """

    def __init__(
        self, answers: Sequence[dict[str, Any]], *, null_score: float, na_prob: float, no_answer: bool
    ) -> None:
        super().__init__(answers)
        self.null_score = null_score  # the score of "no answer" less that of the best answer
        self.na_prob = na_prob  # the probability of "no answer", calibrated where the model is
        self.no_answer = no_answer  # whether it exceeds the model's threshold

    def to_json(self) -> dict[str, Any]:
        """All of it, as the command line and the server give it."""
        return {
            "answers": list(self),
            "no_answer": self.no_answer,
            "na_prob": self.na_prob,
            "null_score": self.null_score,
        }


class Reader:
    """Finds the answer of a question in a text, or says that there is none. Threads may share one.

    >>> reader = Reader.load("runs/demo")
    >>> reader.ask("Who built it?", "The tower was built by Robert Stevenson.")
    [{'score': 0.93, 'start': 23, 'end': 39, 'answer': 'Robert Stevenson'}]
    """

    def __init__(self, model: Answering, *, batch_size: int = 16) -> None:
        if not model.gives_text:
            raise UsageError("this model tells whether a text has the answer, not where: it cannot be asked for it.")
        self.model, self.batch_size = model, batch_size

    @classmethod
    def load(
        cls,
        name: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        precision: Precision = "auto",
        backend: Backend = "auto",
        threads: int | None = None,
        batch_size: int = 16,
    ) -> Reader:
        """Load a model: a model folder or a run folder, an exported one, or any QA checkpoint of transformers.

        `precision="auto"` is bf16 where the hardware computes it, else fp32. `backend="auto"` looks at the folder:
        `"onnx"` runs an exported one, without torch, and `"torch"` any other. `threads` are all cores unless given.
        """
        model = load_model(name, device=device, precision=precision, backend=backend, threads=threads, lean=True)
        return cls(model, batch_size=batch_size)

    def ask(self, question: str | Sequence[str], context: str | Sequence[Any], *, top_k: int = 1) -> Any:
        """The `top_k` best answers of a question in a text of any length.

        A question may have several contexts, which are ranked together: `context` in an answer is the number of its
        own. A list of questions gives a list of results; it goes with one context for all, or with a list of as many,
        each a text or a list of texts.
        """
        if top_k < 1:
            raise UsageError(f"top_k: expected at least 1. Got {top_k}.")
        if isinstance(question, str):
            return self._ask([(question, context)], top_k)[0]
        contexts = [context] * len(question) if isinstance(context, str) else list(context)
        if len(contexts) != len(question):
            raise UsageError(
                f"ask: expected one context for all questions or one each. Got {len(question)} questions and "
                f"{len(contexts)} contexts."
            )
        return self._ask(list(zip(question, contexts, strict=True)), top_k)

    def __call__(
        self,
        inputs: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        *,
        question: str | Sequence[str] = (),
        context: str | Sequence[str] = (),
        top_k: int = 1,
        **options: Any,
    ) -> Any:
        """As the question answering pipeline of transformers 4 was called, with its options and by its rules.

        A question and a context give one answer, or a list of `top_k`; lists of them, or of mappings with both, a list
        of these. Unlike `ask`, it says "no answer" only if `handle_impossible_answer` is given.
        """
        if inputs is not None:
            many = not isinstance(inputs, Mapping)
            rows = inputs if many else [inputs]
            pairs = [(row["question"], row["context"]) for row in cast("Sequence[Mapping[str, str]]", rows)]
        else:
            many = not (isinstance(question, str) and isinstance(context, str))
            asked, texts = ([one] if isinstance(one, str) else list(one) for one in (question, context))
            longest = max(len(asked), len(texts))
            asked, texts = (one * longest if len(one) == 1 else one for one in (asked, texts))
            if len(asked) != len(texts):
                raise UsageError(f"expected as many questions as contexts. Got {len(asked)} and {len(texts)}.")
            pairs = list(zip(asked, texts, strict=True))
        found = answer_as_pipeline(self.model, pairs, top_k=top_k, batch_size=self.batch_size, **options)
        answers = [one[0] if len(one) == 1 else one for one in found]
        return answers if many else answers[0]

    def _ask(self, pairs: Sequence[tuple[str, str | Sequence[str]]], top_k: int) -> list[Answers]:
        examples, owners = [], []
        for number, (question, context) in enumerate(pairs):
            texts = [context] if isinstance(context, str) else list(context)
            if not texts:
                raise UsageError("ask: expected at least one context for every question. Got an empty list.")
            examples += [Example(f"{number}/{at}", question, Context(text)) for at, text in enumerate(texts)]
            owners.append([f"{number}/{at}" for at in range(len(texts))])
        predictions = predict(self.model, examples, batch_size=self.batch_size)
        return [
            self._answers(
                rank_together([predictions[id] for id in ids], self.model.decoding.n_best_size),
                top_k,
                many=not isinstance(context, str),
            )
            for ids, (_, context) in zip(owners, pairs, strict=True)
        ]

    def _answers(self, prediction: Prediction, top_k: int, *, many: bool) -> Answers:
        decoding, odds = self.model.decoding, prediction.null_odds
        chosen = prediction.chosen(decoding.null_score_diff_threshold)
        ranked = sorted(prediction.candidates, key=lambda one: one != chosen)  # stable: the chosen one leads
        answers = [
            {"score": one.probability, "start": one.begin_char, "end": one.end_char, "answer": one.text}
            | ({"context": one.context} if many else {})
            for one in ranked[:top_k]
        ]
        na_prob = float(na_probability(np.array([odds]), decoding.calibration)[0])
        return Answers(answers, null_score=odds, na_prob=na_prob, no_answer=not chosen.text)

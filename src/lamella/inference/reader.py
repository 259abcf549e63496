"""The Python API: load a model, ask questions of texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lamella.data.examples import Context, Example
from lamella.encoder.sources import DEFAULT_READER, READERS
from lamella.errors import UsageError
from lamella.inference.no_answer import na_probability
from lamella.inference.pipeline import answer_as_pipeline, checked_options
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction, rank_together
from lamella.inference.protocols import QAModel
from lamella.models.loading import Backend, Precision, load_model

if TYPE_CHECKING:
    import torch


class Answers(list[dict[str, Any]]):
    """The answers of one question, best first: `score`, `probability`, `start` and `end` (characters), `answer`.

    `score` is the share among all candidates, "no answer" being one, as official n-best files have it. `probability`
    shares out what `na_prob`, which may be calibrated, leaves to the answers; that of "no answer" is `na_prob`.

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
    [{'score': 0.93, 'probability': 0.84, 'start': 23, 'end': 39, 'answer': 'Robert Stevenson'}]
    """

    def __init__(self, model: QAModel, *, batch_size: int = 16) -> None:
        if not model.gives_text:
            raise UsageError("this model tells whether a text has the answer, not where: it cannot be asked for it.")
        self.model, self.batch_size = model, _at_least_one("batch_size", batch_size)

    @classmethod
    def load(
        cls,
        name: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        precision: Precision = "auto",
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        backend: Backend = "auto",
        threads: int | None = None,
        batch_size: int = 16,
    ) -> Reader:
        """Load a model: a model folder or a run folder, an exported one, or any QA checkpoint of transformers.

        Without a name it is the reader that comes with the package, on the small encoder that does so, too. Its name is
        "default", which a folder of that name in the working directory means instead if it holds a model.

        `precision="auto"` is bf16 where the hardware computes it, else fp32. `dtype`, or `torch_dtype`, is the same as
        transformers calls it: `torch.bfloat16` or `"bfloat16"`. `backend="auto"` looks at the folder:
        `"onnx"` runs an exported one, without torch, and `"torch"` any other. `threads` are all cores unless given.
        """
        for given in (dtype, torch_dtype):
            if given is not None:
                precision = _precision(given, precision)
        name = READERS / DEFAULT_READER if name is None else name
        model = load_model(
            name, device=device, precision=precision, backend=backend, threads=threads, inference_only=True
        )
        return cls(model, batch_size=batch_size)

    def ask(self, question: str | Iterable[str], context: str | Iterable[Any], *, top_k: int = 1) -> Any:
        """The `top_k` best answers of a question in a text of any length.

        A question may have several contexts, which are ranked together: `context` in an answer is the number of its
        own. A list of questions gives a list of results; it goes with one context for all, or with a list of as many,
        each a text or a list of texts. A question without words is refused, and so is one that has only blank contexts;
        among others a blank one does no harm.
        """
        _at_least_one("top_k", top_k)
        if isinstance(question, str):
            return self._ask([(question, context)], top_k)[0]
        questions = _several("question", question)
        contexts = [context] * len(questions) if isinstance(context, str) else _several("context", context)
        if len(contexts) != len(questions):
            raise UsageError(
                f"ask: expected one context for all questions or one each. Got {len(questions)} questions and "
                f"{len(contexts)} contexts."
            )
        return self._ask(list(zip(questions, contexts, strict=True)), top_k)

    def __call__(
        self,
        inputs: Mapping[str, str] | Iterable[Mapping[str, str]] | None = None,
        *,
        question: str | Iterable[str] | None = None,
        context: str | Iterable[str] | None = None,
        top_k: int = 1,
        **options: Any,
    ) -> Any:
        """As the question answering pipeline of transformers 4 was called, with its options and by its rules.

        A question and a context give one answer, or a list of `top_k`; lists of them, or of mappings with both, a list
        of these. Unlike `ask`, it says "no answer" only if `handle_impossible_answer` is given.
        """
        if inputs is not None:
            many = not isinstance(inputs, Mapping)
            pairs = [_pair(row) for row in (_several("inputs", inputs) if many else [inputs])]
        else:
            many = not (isinstance(question, str) and isinstance(context, str))
            asked, texts = (
                [one] if isinstance(one, str) else _several(what, one)
                for what, one in (("question", question), ("context", context))
            )
            longest = max(len(asked), len(texts))
            asked, texts = (one * longest if len(one) == 1 else one for one in (asked, texts))
            if len(asked) != len(texts):
                raise UsageError(f"expected as many questions as contexts. Got {len(asked)} and {len(texts)}.")
            pairs = list(zip(asked, texts, strict=True))
        for pair in pairs:
            for what, text in zip(("question", "context"), pair, strict=True):
                if not _text(what, text):
                    raise UsageError(f"{what}: expected a text. Got an empty one.")
        options = checked_options({"batch_size": self.batch_size, **options, "top_k": top_k})
        for name in ("top_k", "batch_size"):
            _at_least_one(name, options[name])
        found = answer_as_pipeline(self.model, pairs, **options)
        answers = [one[0] if len(one) == 1 else one for one in found]
        return answers if many else answers[0]

    def _ask(self, pairs: Sequence[tuple[str, str | Iterable[str]]], top_k: int) -> list[Answers]:
        examples, owners = [], []
        for number, (question, context) in enumerate(pairs):
            texts = [context] if isinstance(context, str) else _several("context", context)
            if not texts:
                raise UsageError("ask: expected at least one context for every question. Got an empty list.")
            asked, texts = _text("question", question), [_text("context", one) for one in texts]
            which = f" {number + 1}" if len(pairs) > 1 else ""
            if not asked.strip():
                raise UsageError(f"question{which}: expected a text. Got an empty one.")
            if not any(map(str.strip, texts)):
                raise UsageError(f"context{which and f' of question{which}'}: expected a text. Got an empty one.")
            examples += [Example(f"{number}/{at}", asked, Context(one)) for at, one in enumerate(texts)]
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
        na_prob = float(na_probability(np.array([odds]), decoding.calibration)[0])
        all_answers = sum(one.probability for one in ranked if one.text) or 1.0  # 0.0: "no answer" is all there is
        answers = [
            {
                "score": one.probability,
                "probability": (1 - na_prob) * one.probability / all_answers if one.text else na_prob,
                "start": one.begin_char,
                "end": one.end_char,
                "answer": one.text,
            }
            | ({"context": one.context} if many else {})
            for one in ranked[:top_k]
        ]
        return Answers(answers, null_score=odds, na_prob=na_prob, no_answer=not chosen.text)


def _precision(dtype: Any, precision: Precision) -> Precision:
    """What transformers calls a dtype, in our words; one that we have no word for is refused with theirs."""
    named = str(dtype).removeprefix("torch.")
    meant = cast(Precision, {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(named, named))
    if precision not in ("auto", meant):
        raise UsageError(f"dtype: is another name of precision; give one of them. Got {named} and {precision}.")
    return meant


def _several(what: str, given: Any) -> list[Any]:
    """A list of what comes in any form that can be gone through. A mapping would give its keys, bytes numbers."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise UsageError(f"{what}: expected a text or a list of them. Got {_told(given)}.")
    return list(given)


def _text(what: str, given: Any) -> str:
    if not isinstance(given, str):
        raise UsageError(f"{what}: expected a text. Got {_told(given)}.")
    return given


def _pair(row: Any) -> tuple[Any, Any]:
    if not (isinstance(row, Mapping) and {"question", "context"} <= row.keys()):
        raise UsageError(f"inputs: expected a mapping with question and context, or a list of them. Got {_told(row)}.")
    return row["question"], row["context"]


def _at_least_one(what: str, given: Any) -> int:
    if not isinstance(given, Integral) or given < 1:
        raise UsageError(f"{what}: expected a whole number of at least 1. Got {given!r}.")
    return int(given)


def _told(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"a mapping with {', '.join(map(str, given)) or 'nothing'}"
    return "nothing" if given is None else f"{type(given).__name__}"

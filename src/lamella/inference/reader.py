"""The Python API: load a model, ask a question of a text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lamella.data.examples import Context, Example
from lamella.encoder.precision import choose_device
from lamella.errors import UsageError
from lamella.inference.model import ReaderModel
from lamella.inference.predict import predict


class Reader:
    """Finds the answer of a question in a text, or says that there is none.

    >>> reader = Reader.load("runs/demo")
    >>> reader.ask("Who built it?", "The tower was built by Robert Stevenson.")
    [{'score': 0.93, 'start': 23, 'end': 39, 'answer': 'Robert Stevenson'}]
    """

    def __init__(self, model: ReaderModel) -> None:
        if not model.gives_text:
            raise UsageError("this model tells whether a text has the answer, not where: it cannot be asked for it.")
        self.model = model.eval()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Reader:
        """Load a saved model: a model folder, or a run folder that holds one."""
        return cls(ReaderModel.load(Path(path)).to(choose_device()))

    def ask(self, question: str, context: str, *, top_k: int = 1) -> list[dict[str, Any]]:
        """The `top_k` best answers, best first: `score` (a probability), `start` and `end` (characters), `answer`.

        "No answer" is one of the candidates, with an empty `answer`; the model's threshold decides whether it leads.
        """
        if top_k < 1:
            raise UsageError(f"top_k: expected at least 1. Got {top_k}.")
        example = Example(id="", question=question, context=Context(context))
        prediction = predict(self.model, [example])[""]
        chosen = prediction.text(self.model.decoding.null_score_diff_threshold)
        ranked = sorted(prediction.candidates, key=lambda one: one.text != chosen)  # stable: the chosen one leads
        return [
            {"score": one.probability, "start": one.begin_char, "end": one.end_char, "answer": one.text}
            for one in ranked[:top_k]
        ]

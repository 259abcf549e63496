"""Ask a reader a list of questions with the same options: as `Reader.ask`, or as the pipeline of transformers 4.

Options can be compared and hashed: questions with equal options are answered together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lamella.errors import UsageError, collect_warnings
from lamella.inference.abstention import at_prior
from lamella.inference.pipeline import SHORTEST
from lamella.serve.question_lists import Pair
from lamella.serve.reader_pool import LoadedReader
from lamella.serve.schemas import Ask, HuggingFaceParameters
from lamella.serve.shown_layers import ShownLayers

logger = logging.getLogger("lamella.serve")


@dataclass(frozen=True)
class AskOptions:
    """The options of questions for `Reader.ask`."""

    top_k: int = 1
    threshold: float | None = None
    answerable: float | None = None
    max_answer_length: int | None = None
    layers: bool = False

    @classmethod
    def of(cls, ask: Ask) -> AskOptions:
        """Return the options of a request."""
        return cls(ask.top_k, ask.threshold, ask.answerable, ask.max_answer_length, ask.layers)

    @property
    def alone(self) -> bool:
        """Whether each question is answered on its own: showing layers takes long."""
        return self.layers

    def answer(self, loaded: LoadedReader, pairs: Sequence[Pair], shown_layers: ShownLayers) -> list[dict[str, Any]]:
        """Return the results of a reader, as JSON values."""
        questions, contexts = zip(*pairs, strict=True)
        with loaded.queue.announced(), collect_warnings():  # the answers have them, too, each its own
            answered = loaded.reader.ask(
                questions,
                contexts,
                top_k=self.top_k,
                threshold=self.threshold,
                answerable=self.answerable,
                max_answer_length=self.max_answer_length,
                log=logger.debug,
            )
        if self.layers:
            for question, answers in zip(questions, answered, strict=True):
                shown = [answer for answer in (*answers, answers.best_guess) if answer and answer["answer"]]
                shown_layers.add(loaded.reader, loaded.listed.source, question, shown)
        common = {"model": loaded.listed.name, "threshold": self._threshold_of(loaded)}
        return [
            {**common, **answers.to_json(), **({"warnings": list(answers.warnings)} if answers.warnings else {})}
            for answers in answered
        ]

    def _threshold_of(self, loaded: LoadedReader) -> float:
        if self.threshold is not None:
            return self.threshold
        decoding = loaded.reader.model.decoding
        decoding = decoding if self.answerable is None else at_prior(decoding, self.answerable)
        return decoding.null_score_diff_threshold


@dataclass(frozen=True)
class PipelineOptions:
    """The options of questions for `Reader.__call__`."""

    values: tuple[tuple[str, Any], ...] = ()
    alone: ClassVar[bool] = False

    @classmethod
    def of(cls, parameters: HuggingFaceParameters | None) -> PipelineOptions:
        """Return the options of a request."""
        return cls(() if parameters is None else tuple(parameters.model_dump(exclude_none=True).items()))

    def answer(self, loaded: LoadedReader, pairs: Sequence[Pair], shown_layers: ShownLayers) -> list[Any]:
        """Return one answer per question, or a list of them, as the pipeline does; its schema has no warnings."""
        options = dict(self.values)
        most = loaded.reader.model.windows.max_seq_length  # the encoder may have no positions for more
        longest, overlap = options.get("max_seq_len", most), options.get("doc_stride", 0)
        if not SHORTEST <= longest <= most:
            raise UsageError(f"parameters.max_seq_len: expected {SHORTEST} to {most} tokens, got {longest}.")
        if overlap >= longest:
            raise UsageError(
                f"parameters.doc_stride: expected less than the {longest} tokens of a window (max_seq_len), got "
                f"{overlap}."
            )
        questions, contexts = zip(*pairs, strict=True)
        with loaded.queue.announced(), collect_warnings():
            answered = loaded.reader(question=questions, context=contexts, **options)
        return [answered] if len(pairs) == 1 else answered

"""Ensembles: several readers answer together, their probabilities combined by token or by span.

At the *token* level the members must see the same windows. Their start and end logits become probabilities over the
tokens that may be chosen, are combined token by token, and are decoded as the logits of one model are. At the *span*
level only the answers must be comparable: the candidates of the members' n-best lists, "no answer" included, are
matched by their places in the text. So readers with different tokenizers can answer together.

Members that only decide whether there is an answer are combined by the probability of their decisions.

Members that run a model share one pass of a common encoder. Members whose run folders hold predictions, or logits for
the token level, are combined without a model, and without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.decoding_options import DecodingOptions
from lamella.errors import DataError, UsageError, counted
from lamella.inference.combine import Combination, combine_decisions, combine_logits, combine_spans
from lamella.inference.decode import decode
from lamella.inference.members import Member
from lamella.inference.predict import decode_batch, explain_out_of_memory
from lamella.inference.prediction import Prediction, decision
from lamella.inference.prediction_files import AnswerSet
from lamella.inference.protocols import QAModel
from lamella.inference.question_ids import check_unique_ids
from lamella.inference.stored_logits import StoredLogits, same_windows
from lamella.inference.window_merger import WindowMerger
from lamella.progress import progress

Level = Literal["auto", "token", "span"]
CombinedAt = Literal["token", "span", "question"]  # question: members that only decide whether there is an answer


@dataclass(frozen=True)
class EnsembleAnswers:
    """The combined predictions of an ensemble, and the answers of each member."""

    how: Combination
    level: CombinedAt
    decoding: DecodingOptions
    predictions: Mapping[str, Prediction]
    members: Mapping[str, AnswerSet]
    gives_text: bool = True


class Ensemble:
    """Members that answer together; every problem with them is reported before any of them runs.

    `examples` are the questions, required if a member runs a model; otherwise the questions of the members' runs are
    used. The first member's decoding options apply, except its threshold, penalty and calibration, which fit only
    its own odds.
    """

    def __init__(
        self,
        members: Sequence[Member],
        examples: Sequence[Example] | None = None,
        *,
        how: Combination = "mean",
        level: Level = "auto",
        threshold: float = 0.0,
    ) -> None:
        if examples is not None:
            check_unique_ids(examples)
        if not math.isfinite(threshold):
            raise UsageError(f"--threshold: expected a finite number, got {threshold}.")
        self.members, self.how = members, how
        changes = {"null_score_diff_threshold": threshold, "window_penalty": 0.0, "calibration": None, "tuned_on": None}
        self.decoding = members[0].decoding.model_copy(update=changes)
        self.windows = _MemberWindows(examples)
        self.questions = _common_questions(members, examples)
        self.gives_text = members[0].gives_text
        self.level: CombinedAt = "question"
        self.why_not_by_token: str | None = None
        if not self.gives_text:
            if level != "auto":
                raise UsageError(f"--level {level}: the members only decide whether there is an answer; leave it out.")
            return
        self.why_not_by_token = _why_not_by_token(members, how, self.windows, self.questions)
        if level == "token" and self.why_not_by_token:
            raise UsageError(f"--level token: {self.why_not_by_token}.")
        self.level = "span" if self.why_not_by_token or level == "span" else "token"

    def answer(self, *, batch_size: int = 32) -> EnsembleAnswers:
        """Run the members that have a model, and combine the answers of all."""
        answer = {"token": self._by_token, "span": self._by_span, "question": self._by_question}[self.level]
        predictions, answers = answer(batch_size)
        names = [member.name for member in self.members]
        return EnsembleAnswers(
            self.how,
            self.level,
            self.decoding,
            {id: predictions[id] for id in self.questions},
            dict(zip(names, answers, strict=True)),
            self.gives_text,
        )

    def _by_token(self, batch_size: int) -> tuple[dict[str, Prediction], list[AnswerSet]]:
        features = self.windows.of(self.members[0])
        sources = [cast("QAModel | StoredLogits", member.logits) for member in self.members]
        scaled = self.decoding.method == "joint"  # with BERTVision's method windows compete by probability
        combined_merger = WindowMerger(self.decoding)
        mergers = [WindowMerger(member.decoding) for member in self.members]
        for padded, logits in _iterate_batches(sources, features, batch_size):
            combined = combine_logits(logits, padded, self.how, scaled=scaled)
            combined_merger.add(features, decode(combined, padded, self.decoding, normalised=False))
            for merger, member_logits, member in zip(mergers, logits, self.members, strict=True):
                if member.answers is None:
                    merger.add(features, decode(member_logits, padded, member.decoding))
        answers = [
            member.answers or AnswerSet.from_predictions(merger.predictions(features.examples), member.decoding)
            for member, merger in zip(self.members, mergers, strict=True)
        ]
        return combined_merger.predictions(features.examples), answers

    def _by_span(self, batch_size: int) -> tuple[dict[str, Prediction], list[AnswerSet]]:
        answers = _answer_separately(self.members, self.windows, batch_size)
        predictions = {
            id: combine_spans(
                [member.predictions[id] for member in answers],
                self.how,
                texts=[member.texts[id] for member in answers],
                n_best=self.decoding.n_best_size,
                question=id,
            )
            for id in self.questions
        }
        return predictions, answers

    def _by_question(self, batch_size: int) -> tuple[dict[str, Prediction], list[AnswerSet]]:
        answers = _answer_separately(self.members, self.windows, batch_size)
        predictions = {
            id: decision(
                combine_decisions(
                    [member.predictions[id].null_odds for member in answers],
                    self.how,
                    abstained=sum(not member.texts[id] for member in answers),
                )
            )
            for id in self.questions
        }
        return predictions, answers


class _MemberWindows:
    """The windows of each member: stored ones, or made with its tokenizer, once for all members that make the same."""

    def __init__(self, examples: Sequence[Example] | None) -> None:
        self.examples = examples
        self._features: dict[str, Features] = {}

    def of(self, member: Member) -> Features:
        if member.stored_logits is not None:
            return member.stored_logits.features
        assert member.model is not None
        assert self.examples is not None  # a model is opened only if there are examples
        key = self.key(member.model)
        if key not in self._features:
            self._features[key] = featurise(self.examples, member.model.tokenizer, member.model.windows)
        return self._features[key]

    @staticmethod
    def key(model: QAModel) -> str:
        """Return a key that is equal for models that certainly make the same windows."""
        tokenizer = json.loads(model.tokenizer.backend_tokenizer.to_str())
        for setting in ("truncation", "padding"):  # windows are made without either
            tokenizer.pop(setting, None)
        ids = [model.tokenizer.cls_token_id, model.tokenizer.pad_token_id]
        return json.dumps([tokenizer, ids, model.windows.model_dump()], sort_keys=True)


def _why_not_by_token(
    members: Sequence[Member], how: Combination, windows: _MemberWindows, questions: Sequence[str]
) -> str | None:
    """Return the reason why the members' logits cannot be combined, if there is one."""
    if how == "vote":
        return "a vote counts texts, so it needs the span level"
    for member in members:
        if member.logits is None:
            return f"{member.name} has no logits; predict again with --keep-logits, or name its model and --data"
    first = windows.of(members[0])
    for member in members[1:]:
        features = windows.of(member)
        if features is not first and not same_windows(first, features):
            names = f"{members[0].name} and {member.name}"
            if [example.id for example in first.examples] != [example.id for example in features.examples]:
                return f"{names} answer different questions"
            return f"{names} split the texts into different tokens or windows"
    if {example.id for example in first.examples} != set(questions):
        return f"{members[0].name} has stored the logits of more questions than the data has"
    return None


def _answer_separately(members: Sequence[Member], windows: _MemberWindows, batch_size: int) -> list[AnswerSet]:
    """Return the answers of every member; models with the same windows run on the same batches."""
    answers = {index: member.answers for index, member in enumerate(members) if member.answers is not None}
    groups: dict[str, list[int]] = {}
    for index, member in enumerate(members):
        if member.model is not None:
            groups.setdefault(windows.key(member.model), []).append(index)
    for group in groups.values():
        features = windows.of(members[group[0]])
        models = [cast(QAModel, members[index].model) for index in group]
        mergers = [WindowMerger(model.decoding, gives_text=model.gives_text) for model in models]
        for padded, logits in _iterate_batches(models, features, batch_size):
            for merger, model, model_logits in zip(mergers, models, logits, strict=True):
                merger.add(features, decode_batch(model, padded, model_logits))
        for index, merger, model in zip(group, mergers, models, strict=True):
            answers[index] = _answer_set(model, merger.predictions(features.examples))
    return [answers[index] for index in range(len(members))]


def _answer_set(model: QAModel, predictions: Mapping[str, Prediction]) -> AnswerSet:
    if model.gives_text:
        return AnswerSet.from_predictions(predictions, model.decoding)
    odds = {id: prediction.null_odds for id, prediction in predictions.items()}
    return AnswerSet.from_decisions(odds, model.decoding.null_score_diff_threshold)


def _iterate_batches(
    sources: Sequence[QAModel | StoredLogits], features: Features, batch_size: int
) -> Iterator[tuple[Padded, list[NDArray[np.float32]]]]:
    """Yield batches of windows of similar length, with the logits of all sources; a shared encoder runs once."""
    passes: dict[int, list[int]] = {}
    for index, source in enumerate(sources):
        passes.setdefault(id(getattr(source, "encoder", source)), []).append(index)
    with progress("answering", len(features)) as advance:
        for indices in longest_first(features.lengths, batch_size):
            padded = pad(features, indices)
            logits: dict[int, NDArray[np.float32]] = {}
            with explain_out_of_memory(padded):
                for group in passes.values():
                    logits |= dict(zip(group, _logits([sources[index] for index in group], padded), strict=True))
            yield padded, [logits[index] for index in range(len(sources))]
            advance(len(indices))


def _logits(sources: Sequence[Any], padded: Padded) -> list[NDArray[np.float32]]:
    if len(sources) == 1 or not hasattr(sources[0], "encoder"):
        return [source.logits(padded) for source in sources]
    from lamella.inference.one_pass import logits_of_heads

    return logits_of_heads(sources, padded)


def _common_questions(members: Sequence[Member], examples: Sequence[Example] | None) -> list[str]:
    """Return the ids of the questions to answer; check that every run answers them, and without examples no others."""
    runs = {member.name: member.answers.predictions for member in members if member.answers is not None}
    questions = list(next(iter(runs.values()))) if examples is None else [example.id for example in examples]
    for name, predictions in runs.items():
        missing = [id for id in questions if id not in predictions]
        if missing or (examples is None and len(predictions) > len(questions)):
            found = f"{len(missing)} missing (first {missing[0]})" if missing else f"got {len(predictions)}"
            raise DataError(
                f"{name}: expected answers to the same {counted(len(questions), 'question')} as the other members, "
                f"{found}; predict with all members on one file."
            )
    return questions

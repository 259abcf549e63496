"""Several readers answer together: their probabilities are combined token by token, or span by span.

At the *token* level the members see the same windows. Each one's start and end logits become probabilities over the
tokens that may be chosen, these are combined element by element, and the result is decoded as that of one model would
be. At the *span* level only the answers need to be comparable: the candidates of the members' n-best lists, "no answer"
among them, are matched by their places in the text. So readers with different tokenizers can answer together.

Members that are run share the pass of an encoder that they have in common; runs that have what is needed in their
folders are combined without any model, and without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lamella.config import DecodingOptions
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.data.padding import Padded, longest_first, pad
from lamella.errors import DataError, UsageError
from lamella.inference.combine import Combination, combine_logits, combine_spans
from lamella.inference.decode import decode
from lamella.inference.members import Member
from lamella.inference.predict import explain_out_of_memory
from lamella.inference.prediction import Prediction
from lamella.inference.prediction_files import AnswerSet
from lamella.inference.protocols import QAModel
from lamella.inference.questions import check_unique_ids
from lamella.inference.stored_logits import StoredLogits, same_windows
from lamella.inference.window_merger import WindowMerger
from lamella.progress import progress

Level = Literal["auto", "token", "span"]


@dataclass(frozen=True)
class EnsembleAnswers:
    """What members answered together, beside what each of them answered."""

    how: Combination
    level: Literal["token", "span"]
    decoding: DecodingOptions
    predictions: Mapping[str, Prediction]
    members: Mapping[str, AnswerSet]
    gives_text = True


class Ensemble:
    """Members that answer together. All that can be wrong with them is found before any of them is run.

    `examples` are the questions, and needed where a member is a model; without, they are those of the members' runs.
    Decoding is the first member's, but for threshold and calibration: those of a member were chosen for its own odds.
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
            raise UsageError(f"--threshold: expected a finite number. Got {threshold}.")
        self.members, self.how = members, how
        own = {"null_score_diff_threshold": threshold, "calibration": None, "tuned_on": None}
        self.decoding = members[0].decoding.model_copy(update=own)
        self.windows = _Windows(examples)
        self.questions = _questions_of_all(members, examples)
        self.why_not_by_token = _why_not_by_token(members, how, self.windows, self.questions)
        if level == "token" and self.why_not_by_token:
            raise UsageError(f"--level token: {self.why_not_by_token}.")
        self.level: Literal["token", "span"] = "span" if self.why_not_by_token or level == "span" else "token"

    def answer(self, *, batch_size: int = 32) -> EnsembleAnswers:
        """Run what is to be run, and combine."""
        answer = self._by_token if self.level == "token" else self._by_span
        predictions, answered = answer(batch_size)
        names = [member.name for member in self.members]
        return EnsembleAnswers(
            self.how,
            self.level,
            self.decoding,
            {id: predictions[id] for id in self.questions},
            dict(zip(names, answered, strict=True)),
        )

    def _by_token(self, batch_size: int) -> tuple[dict[str, Prediction], list[AnswerSet]]:
        features = self.windows.of(self.members[0])
        sources = [cast("QAModel | StoredLogits", member.logits) for member in self.members]
        scaled = self.decoding.method == "joint"  # BERTVision's windows compete by their probabilities
        together, own = WindowMerger(self.decoding), [WindowMerger(member.decoding) for member in self.members]
        for padded, logits in _each_batch(sources, features, batch_size):
            combined = combine_logits(logits, padded, self.how, scaled=scaled)
            together.add(features, decode(combined, padded, self.decoding, normalised=False))
            for merger, one, member in zip(own, logits, self.members, strict=True):
                if member.answered is None:
                    merger.add(features, decode(one, padded, member.decoding))
        answered = [
            member.answered or AnswerSet.by(member.decoding, merger.predictions(features.examples))
            for member, merger in zip(self.members, own, strict=True)
        ]
        return together.predictions(features.examples), answered

    def _by_span(self, batch_size: int) -> tuple[dict[str, Prediction], list[AnswerSet]]:
        answered = _answers_of_each(self.members, self.windows, batch_size)
        predictions = {
            id: combine_spans(
                [one.predictions[id] for one in answered],
                self.how,
                texts=[one.texts[id] for one in answered],
                n_best=self.decoding.n_best_size,
                question=id,
            )
            for id in self.questions
        }
        return predictions, answered


# --- what each member says


class _Windows:
    """The windows of each member: those that were kept, or cut with its tokenizer, once for all that are equal."""

    def __init__(self, examples: Sequence[Example] | None) -> None:
        self.examples = examples
        self._cut: dict[str, Features] = {}

    def of(self, member: Member) -> Features:
        if member.kept is not None:
            return member.kept.features
        assert member.model is not None
        assert self.examples is not None  # members that are models were opened for them
        key = self.key(member.model)
        if key not in self._cut:
            self._cut[key] = featurise(self.examples, member.model.tokenizer, member.model.windows)
        return self._cut[key]

    @staticmethod
    def key(model: QAModel) -> str:
        """Equal for models that are sure to cut alike."""
        tokenizer = json.loads(model.tokenizer.backend_tokenizer.to_str())
        for setting in ("truncation", "padding"):  # windows are cut without either
            tokenizer.pop(setting, None)
        ids = [model.tokenizer.cls_token_id, model.tokenizer.pad_token_id]
        return json.dumps([tokenizer, ids, model.windows.model_dump()], sort_keys=True)


def _why_not_by_token(
    members: Sequence[Member], how: Combination, windows: _Windows, questions: Sequence[str]
) -> str | None:
    """What keeps the members' logits from being combined, if anything does."""
    if how == "vote":
        return "a vote counts texts, so it is taken at the span level"
    for member in members:
        if member.logits is None:
            return f"{member.name} has no logits: predict again with --keep-logits, or name its model and --data"
    first = windows.of(members[0])
    for member in members[1:]:
        own = windows.of(member)
        if own is not first and not same_windows(first, own):
            asked = [[example.id for example in one.examples] for one in (first, own)]
            what = (
                "were asked other questions" if asked[0] != asked[1] else "cut the texts into other tokens or windows"
            )
            return f"{members[0].name} and {member.name} {what}"
    if {one.id for one in first.examples} != set(questions):
        return f"{members[0].name} kept the logits of more questions than the data has"
    return None


def _answers_of_each(members: Sequence[Member], windows: _Windows, batch_size: int) -> list[AnswerSet]:
    """What every member answers; models that cut alike are run on the same batches, and can share an encoder."""
    found = {at: member.answered for at, member in enumerate(members) if member.answered is not None}
    alike: dict[str, list[int]] = {}
    for at, member in enumerate(members):
        if member.model is not None:
            alike.setdefault(windows.key(member.model), []).append(at)
    for group in alike.values():
        features = windows.of(members[group[0]])
        models = [cast(QAModel, members[at].model) for at in group]
        mergers = [WindowMerger(model.decoding) for model in models]
        for padded, logits in _each_batch(models, features, batch_size):
            for merger, model, one in zip(mergers, models, logits, strict=True):
                merger.add(features, decode(one, padded, model.decoding))
        for at, merger, model in zip(group, mergers, models, strict=True):
            found[at] = AnswerSet.by(model.decoding, merger.predictions(features.examples))
    return [found[at] for at in range(len(members))]


def _each_batch(
    sources: Sequence[QAModel | StoredLogits], features: Features, batch_size: int
) -> Iterator[tuple[Padded, list[NDArray[np.float32]]]]:
    """Every window, in batches of like length, with the logits of all; an encoder in common runs once."""
    passes: dict[int, list[int]] = {}
    for at, source in enumerate(sources):
        passes.setdefault(id(getattr(source, "encoder", source)), []).append(at)
    with progress("answering", len(features)) as advance:
        for indices in longest_first(features.lengths, batch_size):
            padded = pad(features, indices)
            found: dict[int, NDArray[np.float32]] = {}
            with explain_out_of_memory(padded):
                for group in passes.values():
                    found |= dict(zip(group, _logits([sources[at] for at in group], padded), strict=True))
            yield padded, [found[at] for at in range(len(sources))]
            advance(len(indices))


def _logits(sources: Sequence[Any], padded: Padded) -> list[NDArray[np.float32]]:
    if len(sources) == 1 or not hasattr(sources[0], "encoder"):
        return [source.logits(padded) for source in sources]
    from lamella.inference.one_pass import logits_of_heads

    return logits_of_heads(sources, padded)


def _questions_of_all(members: Sequence[Member], examples: Sequence[Example] | None) -> list[str]:
    """The questions to answer. Runs must have been asked all of them; without a data file, the same ones each."""
    asked = {member.name: member.answered.predictions for member in members if member.answered is not None}
    questions = list(next(iter(asked.values()))) if examples is None else [one.id for one in examples]
    for name, answered in asked.items():
        missing = [id for id in questions if id not in answered]
        if missing or (examples is None and len(answered) > len(questions)):
            what = f"lacks {len(missing)} of them, {missing[0]} the first" if missing else f"answers {len(answered)}"
            raise DataError(
                f"{name}: expected answers to the same {len(questions)} questions as the others'; it {what}. Predict "
                "with all members on one file."
            )
    return questions

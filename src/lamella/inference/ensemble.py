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
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.config import DecodingOptions
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.data.padding import Padded, longest_first, pad
from lamella.errors import DataError, UsageError
from lamella.files import write_json
from lamella.inference.decode import NO_SPAN, Answer, Merger, Prediction, choosable, decode, log_of_sum, rank
from lamella.inference.logits import KeptLogits, same_windows
from lamella.inference.members import Answered, Member
from lamella.inference.predict import (
    Answering,
    explaining_memory,
    refuse_repeated_ids,
    score_predictions,
    write_predictions,
)
from lamella.progress import progress
from lamella.scoring.evaluate import Language, language_of
from lamella.scoring.metrics import score_questions
from lamella.scoring.paired import paired_difference

How = Literal["max", "mean", "product", "vote"]
Level = Literal["auto", "token", "span"]
Place = tuple[int, int]
NULL: Place = (0, 0)  # where "no answer" lies


@dataclass(frozen=True)
class Together:
    """What members answered together, beside what each of them answered."""

    how: How
    level: Literal["token", "span"]
    decoding: DecodingOptions
    predictions: Mapping[str, Prediction]
    members: Mapping[str, Answered]
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
        how: How = "mean",
        level: Level = "auto",
        threshold: float = 0.0,
    ) -> None:
        if examples is not None:
            refuse_repeated_ids(examples)
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

    def answer(self, *, batch_size: int = 32) -> Together:
        """Run what is to be run, and combine."""
        answer = self._by_token if self.level == "token" else self._by_span
        predictions, answered = answer(batch_size)
        names = [member.name for member in self.members]
        return Together(
            self.how,
            self.level,
            self.decoding,
            {id: predictions[id] for id in self.questions},
            dict(zip(names, answered, strict=True)),
        )

    def _by_token(self, batch_size: int) -> tuple[dict[str, Prediction], list[Answered]]:
        features = self.windows.of(self.members[0])
        sources = [cast("Answering | KeptLogits", member.logits) for member in self.members]
        scaled = self.decoding.method == "joint"  # BERTVision's windows compete by their probabilities
        together, own = Merger(self.decoding), [Merger(member.decoding) for member in self.members]
        for padded, logits in _each_batch(sources, features, batch_size):
            combined = combine_logits(logits, padded, self.how, scaled=scaled)
            together.add(features, decode(combined, padded, self.decoding, normalised=False))
            for merger, one, member in zip(own, logits, self.members, strict=True):
                if member.answered is None:
                    merger.add(features, decode(one, padded, member.decoding))
        answered = [
            member.answered or Answered.by(member.decoding, merger.predictions(features.examples))
            for member, merger in zip(self.members, own, strict=True)
        ]
        return together.predictions(features.examples), answered

    def _by_span(self, batch_size: int) -> tuple[dict[str, Prediction], list[Answered]]:
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


def combine_logits(
    logits: Sequence[NDArray[Any]], padded: Padded, how: How, *, scaled: bool = True
) -> NDArray[np.float64]:
    """The logarithms [2, B, T] of the members' combined start and end probabilities; -inf at tokens of no choice.

    With p_m the softmax of member m over context and [CLS]: `max` is max_m p_m, which BERTVision does (nothing is
    divided by the new sum), `mean` is Σ_m p_m / M, `product` is (Π_m p_m)^(1/M).

    `scaled` adds the mean over members of log Σ_t exp(logit_t), one number for each window. It changes nothing within a
    window, but lets the windows of a long context compare as they do for a single model, by logits and not by shares
    of each window: so that a model combined with itself is still itself.
    """
    own = [choosable(one, padded) for one in logits]
    totals = np.stack([log_of_sum(one) for one in own])  # [M, 2, B, 1]
    log_p = np.stack(own) - totals  # [M, 2, B, T]
    if how == "max":
        combined = log_p.max(0)
    elif how == "mean":
        combined = np.logaddexp.reduce(log_p, axis=0) - math.log(len(own))
    else:
        combined = log_p.mean(0)
    result: NDArray[np.float64] = combined + totals.mean(0) if scaled else combined
    return result


def combine_spans(
    predictions: Sequence[Prediction],
    how: How,
    *,
    texts: Sequence[str] = (),
    n_best: int = DecodingOptions().n_best_size,
    question: str = "",
) -> Prediction:
    """One n-best list from the members' lists.

    A place that a member does not have counts as its lowest kept one. `vote` puts the number of members that settled on
    a text (`texts`) before everything else, and the mean probability behind it: w = votes + mean / 2.

        member 1    Rome 0.6    none 0.3    in Rome 0.1
        member 2    none 0.8    Rome 0.2
        max         none 0.8    Rome 0.6    in Rome 0.2
        mean        none 0.55   Rome 0.4    in Rome 0.15
    """
    words: dict[Place, str] = {NULL: ""}
    lists: list[dict[Place, float]] = []
    lowest: list[float] = []
    for prediction in predictions:
        scores = np.array([one.score for one in prediction.candidates])
        total = np.logaddexp.reduce(scores)  # not from the probabilities: one far down the list may have become 0
        log_p = (scores - total).tolist()
        lists.append({})
        lowest.append(min(log_p) if prediction.best_span.text else float(NO_SPAN - total))
        for one, value in zip(prediction.candidates, log_p, strict=True):
            place = (one.begin_char, one.end_char) if one.text else NULL
            if words.setdefault(place, one.text) != one.text:
                raise DataError(
                    f"question {question}: the members read different contexts; at {place[0]}-{place[1]} one has "
                    f"{words[place]!r} and another {one.text!r}."
                )
            lists[-1][place] = value
    table = np.array([[own.get(place, least) for own, least in zip(lists, lowest, strict=True)] for place in words])
    combined = _combine(table, how, [list(texts).count(text) for text in words.values()])
    by_place = dict(zip(words, combined.tolist(), strict=True))
    null = by_place.pop(NULL)
    answers: dict[str, Answer] = {}  # each text once, where it scores best
    for place, value in sorted(by_place.items(), key=lambda item: (-item[1], item[0])):
        answers.setdefault(words[place], (words[place], *place, value, 0))
    return rank(list(answers.values())[:n_best], null)


def gains(together: Together, examples: Sequence[Example], language: Language) -> dict[str, Any]:
    """What answering together adds to each member's F1 and exact match, in points, with 95 % intervals.

    A member answers at its own threshold; `best_f1` is at the best threshold of both, and has no interval.
    """
    texts = {id: one.text(together.decoding.null_score_diff_threshold) for id, one in together.predictions.items()}
    ours = score_questions(examples, texts, language=language)
    ours_best = score_predictions(together, examples, together.predictions, language=language)["best_f1"]
    found = {}
    for name, member in together.members.items():
        theirs = score_questions(examples, member.texts, language=language)
        theirs_best = score_predictions(together, examples, member.predictions, language=language)["best_f1"]
        f1 = paired_difference(ours.f1, theirs.f1).in_percent()
        exact = paired_difference(ours.exact, theirs.exact).in_percent()
        found[name] = {
            "f1": f1.value,
            "f1_interval": [f1.low, f1.high],
            "exact": exact.value,
            "exact_interval": [exact.low, exact.high],
            "best_f1": ours_best - theirs_best,
        }
    return found


def write_together(
    folder: Path, together: Together, examples: Sequence[Example] | None, language: Language | None = None
) -> dict[str, Any]:
    """Write an open run folder as every other stage reads it; with `examples` that have labels, scored."""
    write_predictions(folder, together, together.predictions, examples or ())
    options = {
        "members": list(together.members),
        "how": together.how,
        "level": together.level,
        "decoding": together.decoding.model_dump(),
    }
    write_json(folder / runs.CONFIG, {"ensemble": options})
    results: dict[str, Any] = {"how": together.how, "level": together.level, "total": len(together.predictions)}
    if examples is not None:
        language = language or language_of(examples)
        results |= score_predictions(together, examples, together.predictions, language=language)
        results["gains"] = gains(together, examples, language)
        write_json(folder / runs.RESULTS, results)
    return results


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
    def key(model: Answering) -> str:
        """Equal for models that are sure to cut alike."""
        tokenizer = json.loads(model.tokenizer.backend_tokenizer.to_str())
        for setting in ("truncation", "padding"):  # windows are cut without either
            tokenizer.pop(setting, None)
        ids = [model.tokenizer.cls_token_id, model.tokenizer.pad_token_id]
        return json.dumps([tokenizer, ids, model.windows.model_dump()], sort_keys=True)


def _why_not_by_token(members: Sequence[Member], how: How, windows: _Windows, questions: Sequence[str]) -> str | None:
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


def _answers_of_each(members: Sequence[Member], windows: _Windows, batch_size: int) -> list[Answered]:
    """What every member answers; models that cut alike are run on the same batches, and can share an encoder."""
    found = {at: member.answered for at, member in enumerate(members) if member.answered is not None}
    alike: dict[str, list[int]] = {}
    for at, member in enumerate(members):
        if member.model is not None:
            alike.setdefault(windows.key(member.model), []).append(at)
    for group in alike.values():
        features = windows.of(members[group[0]])
        models = [cast(Answering, members[at].model) for at in group]
        mergers = [Merger(model.decoding) for model in models]
        for padded, logits in _each_batch(models, features, batch_size):
            for merger, model, one in zip(mergers, models, logits, strict=True):
                merger.add(features, decode(one, padded, model.decoding))
        for at, merger, model in zip(group, mergers, models, strict=True):
            found[at] = Answered.by(model.decoding, merger.predictions(features.examples))
    return [found[at] for at in range(len(members))]


def _each_batch(
    sources: Sequence[Answering | KeptLogits], features: Features, batch_size: int
) -> Iterator[tuple[Padded, list[NDArray[np.float32]]]]:
    """Every window, in batches of like length, with the logits of all; an encoder in common runs once."""
    passes: dict[int, list[int]] = {}
    for at, source in enumerate(sources):
        passes.setdefault(id(getattr(source, "encoder", source)), []).append(at)
    with progress("answering", len(features)) as advance:
        for indices in longest_first(features.lengths, batch_size):
            padded = pad(features, indices)
            found: dict[int, NDArray[np.float32]] = {}
            with explaining_memory(padded):
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


def _combine(log_p: NDArray[np.float64], how: How, votes: Sequence[int]) -> NDArray[np.float64]:
    """One logarithm for each place, from those of all members [places, M]."""
    if how == "max":
        return cast("NDArray[np.float64]", log_p.max(1))
    if how == "product":
        return cast("NDArray[np.float64]", log_p.mean(1))
    mean = np.logaddexp.reduce(log_p, axis=1) - math.log(log_p.shape[1])
    if how == "mean":
        return cast("NDArray[np.float64]", mean)
    cast_votes = np.array(votes, np.float64)
    with np.errstate(divide="ignore"):
        return cast("NDArray[np.float64]", np.logaddexp(np.log(cast_votes), mean - math.log(2)))

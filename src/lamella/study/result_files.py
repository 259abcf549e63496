"""A result file: what a run was, scored and cost, and its score at every question, in one small JSON.

It stands for the run where the run folder, the data and the model are gone: scores can be read from it, and runs
compared question by question. `FORMAT` tells it from any other JSON. Scores are in percent.

    name, command, finished, seed       which run it was
    encoder, tuning, train, options     what it was made of; files go without their folders
    start                               of a reader that started with another: that model, its sha256 if known
    teachers                            of a reader taught by others: each model, its sha256, the run of its logits
    dev                                 what it was scored on, known by the sha256 of the sorted ids of its questions
    scores                              `at_0`, `own` (at the model's own threshold), `best`, and `crossfit`: every
                                        article at the threshold that is best on the others
    cost, environment                   as the run recorded them
    per_question                        a place for each question, in the order of the sorted ids:
        scored_at    `crossfit`, or `own` where nothing can be tuned: all questions have an answer, or one context
        answerable   a text of 0 and 1
        exact        a text of 0 and 1
        partial_f1   F1 is 0 or 1 as `exact` is, except at these places: [place, F1 in 1/10,000]
        paragraph    the number of its paragraph; those of one number share a text
    sha256                              of all the rest, so that a number changed by hand is found out
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.errors import UnreadableError
from lamella.files import read_json
from lamella.scoring.metrics import QuestionScores, summarise

FORMAT = "lamella-result"
VERSION = 1
SCALE = 10_000  # of F1 in the file
SUFFIX = ".json"
HEAD = 100  # bytes, in which a result file says what it is
HASH = "sha256"  # the key of the file's own hash
SUMMED = ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1")


@dataclass(frozen=True, eq=False)
class Result:
    """A result file's content; the arrays have an entry for each question, by sorted ids."""

    content: Mapping[str, Any]
    paragraphs: NDArray[np.int64]
    answerable: NDArray[np.bool_]
    exact: NDArray[np.float64]
    f1: NDArray[np.float64]

    @property
    def ids_sha256(self) -> str:
        return str(self.content["dev"]["ids_sha256"])

    @property
    def scored_at(self) -> str:
        return str(self.content["per_question"]["scored_at"])

    def config(self) -> dict[str, dict[str, Any]]:
        """The options in their sections, as the config.json of a run has them."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.content["options"].items():
            section, _, option = key.partition(".")
            sections.setdefault(section, {})[option] = value
        return sections

    def results(self) -> dict[str, Any]:
        """The scores under the keys that eval_results.json has for them."""
        scores = self.content["scores"]
        found = {**scores["own"]}
        for front in ("best", "crossfit"):
            found |= {f"{front}_{key}": value for key, value in scores.get(front, {}).items()}
        return found | {f"{key}_at_0": value for key, value in scores.get("at_0", {}).items()}


def result_text(content: Mapping[str, Any]) -> str:
    """The file: a line for every score and option, and one for each list of all questions."""
    parts = []
    for key, value in {**content, HASH: content_hash(content)}.items():
        if key == "per_question":
            inner = ",\n".join(f"    {json.dumps(name)}: {_compact(one)}" for name, one in value.items())
            told = f"{{\n{inner}\n  }}"
        else:
            told = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(key)}: {told}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def content_hash(content: Mapping[str, Any]) -> str:
    """The sha256 of all but the hash itself: of its JSON with sorted keys, without spaces and in ASCII."""
    rest = {key: value for key, value in content.items() if key != HASH}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def per_question(scores: QuestionScores, paragraph_of: Mapping[str, str], scored_at: str) -> dict[str, Any]:
    """The lists of a result file; `paragraph_of` gives the text that a question is about."""
    order = sorted(range(len(scores.ids)), key=lambda place: scores.ids[place])
    numbers: dict[str, int] = {}
    exact, f1 = scores.exact[order], np.round(SCALE * scores.f1[order]).astype(int)
    return {
        "scored_at": scored_at,
        "answerable": _bits(scores.answerable[order]),
        "exact": _bits(exact == 1),
        "partial_f1": [[int(at), int(f1[at])] for at in np.flatnonzero(f1 != SCALE * exact)],
        "paragraph": [numbers.setdefault(paragraph_of[scores.ids[place]], len(numbers)) for place in order],
    }


def result_files(path: Path) -> list[Path]:
    """The result files that a path stands for: itself, or those that lie in a folder which is no run.

    Other JSON files of a folder are passed over.
    """
    if path.is_file():
        return [path]
    if not path.is_dir() or (path / runs.RUN).is_file():
        return []
    return [file for file in json_files(path) if _begins_as_result(file)]


def json_files(folder: Path) -> list[Path]:
    """By name."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


def is_result(content: object) -> bool:
    return isinstance(content, dict) and content.get("format") == FORMAT


def read_result(path: Path) -> Result:
    """Read a result file; one that contradicts itself is refused."""
    content = read_json(path)
    if not is_result(content):
        raise UnreadableError(f'{path}: expected a run folder, or a result file with "format": "{FORMAT}".')
    if content.get("version") != VERSION:
        raise UnreadableError(
            f"{path}: expected version {VERSION} of a result file. Found {content.get('version')!r}; "
            "read it with the lamella that wrote it."
        )
    try:
        found = result_of(content)
        problem = _problem(found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
        problem = "something is missing or of another kind"
    if problem:
        raise UnreadableError(f"{path}: expected a result file as `lamella compare --keep` writes it: {problem}.")
    return found


def result_of(content: Mapping[str, Any]) -> Result:
    """The content of a file with its lists as arrays."""
    lists = content["per_question"]
    exact = _from_bits(lists["exact"])
    f1 = SCALE * exact.astype(np.int64)
    for at, value in lists["partial_f1"]:
        if not (0 <= at < len(f1) and 0 <= value <= SCALE):
            raise ValueError
        f1[at] = value
    return Result(
        content,
        paragraphs=np.array(lists["paragraph"], np.int64),
        answerable=_from_bits(lists["answerable"]),
        exact=exact.astype(np.float64),
        f1=f1 / SCALE,
    )


def _begins_as_result(file: Path) -> bool:
    """Without reading all of it: a folder may hold large files that are none."""
    try:
        with file.open("rb") as opened:
            return FORMAT.encode() in opened.read(HEAD)
    except OSError as error:
        raise UnreadableError(f"{file}: cannot be read ({error.strerror}).") from None


def _problem(found: Result) -> str | None:
    """What a reader relies on: everything is there, and the scores are those of the questions."""
    content, count = found.content, len(found.exact)
    for key in ("encoder", "tuning", "train", "dev", "options", "cost", "environment", "scores"):
        if not isinstance(content[key], dict):
            return f"{key} is no object"
    if not count or any(len(one) != count for one in (found.paragraphs, found.answerable)):
        return "its lists of questions differ in length"
    if content["dev"]["questions"] != count or not isinstance(found.ids_sha256, str):
        return f"dev.questions is {content['dev']['questions']!r}, and {count} are listed"
    if found.paragraphs.min() < 0 or found.paragraphs.max() >= count:
        return "a paragraph has an impossible number"
    told = content["scores"][found.scored_at]
    scores = QuestionScores(("",) * count, found.answerable, found.answerable, exact=found.exact, f1=found.f1)
    for key, value in summarise(scores).items():
        if key in SUMMED and abs(told[key] - value) > 100 / SCALE:
            return f"scores.{found.scored_at}.{key} is {told[key]}, and its questions give {value:.4f}"
    if HASH in content and content[HASH] != content_hash(content):  # files of before have none
        return f"its {HASH} is that of another content, so it was changed afterwards"
    return None


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _bits(values: NDArray[np.bool_]) -> str:
    return "".join("01"[int(one)] for one in values)


def _from_bits(text: str) -> NDArray[np.bool_]:
    if set(text) - {"0", "1"}:
        raise ValueError
    return np.array([one == "1" for one in text], np.bool_)

"""A result file: the options, scores and cost of one run, and its score on every question, in one small JSON file.

It replaces the run where the run folder, the data and the model are gone: its scores can be read, and runs can be
compared question by question. `FORMAT` distinguishes it from any other JSON file. Scores are in percent.

    name, command, finished, seed       which run it was
    task                                `answerability` for a classifier, whose exact and f1 are its accuracy
    encoder, tuning, train, options     what it was made of; files are named without their folders
    start                               for a warm start: the first model, and its sha256 if known
    teachers                            for distillation: each model, its sha256, the run with its logits
    mean_of                             for a mean of models: each model, its sha256, its train data
    dev                                 what it was scored on, identified by the sha256 of the sorted question ids
    scores                              `at_0`, `own` (at the model's own threshold), `best`, and `crossfit`: every
                                        article at the threshold that is best on the others
    cost, environment                   as the run recorded them
    curve                               a list per column, with an entry per evaluation; the first files have none
    layers                              for heads that weigh layers: their numbers and mean weights
    per_question                        one entry per question, in the order of the sorted ids:
        scored_at    `crossfit`, or `own` where nothing can be tuned: all questions have an answer, or one context
        answerable   a text of 0 and 1
        exact        a text of 0 and 1
        partial_f1   F1 is 0 or 1 as in `exact`, except for these: [index, F1 in 1/10,000]
        at_0         the questions with another score at threshold 0: [index, exact, F1 in 1/10,000]; the first files
                     have no such list
        paragraph    the number of the paragraph; questions with the same number share a text
    by_question                         where questions have several contexts: `dev` (counts), `scores` and
                                        `per_question` of the single answers that questions get from all contexts; the
                                        entries above are then per context
    sha256                              of everything else, so that a number changed by hand is detected
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
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
F1_SCALE = 10_000  # of F1 in the file
SUFFIX = ".json"
HEAD_BYTES = 100  # within which a result file names its format
HASH = "sha256"  # the key of the file's own hash
LISTS = ("curve", "layers", "per_question")  # written with a line per list
BY_QUESTION = "by_question"
SUMMARY_SCORES = ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1")


@dataclass(frozen=True, eq=False)
class Result:
    """The content of a result file; the arrays have one entry per question, by sorted ids."""

    content: Mapping[str, Any]
    paragraphs: NDArray[np.int64]
    answerable: NDArray[np.bool_]
    exact: NDArray[np.float64]
    f1: NDArray[np.float64]
    at_0: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # exact and F1 at threshold 0
    by_question: Result | None = None  # where questions have several contexts; its content has scores and lists only

    @property
    def ids_sha256(self) -> str:
        """The hash of the sorted question ids."""
        return str(self.content["dev"]["ids_sha256"])

    @property
    def scored_at(self) -> str:
        """The thresholds of the scores per question: `crossfit` or `own`."""
        return str(self.content["per_question"]["scored_at"])

    @property
    def task(self) -> str:
        """What the run predicts: `span`, or `answerability` for a classifier; files of readers do not name it."""
        return str(self.content.get("task", "span"))

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the options by section, as in the config.json of a run."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.content["options"].items():
            section, _, option = key.partition(".")
            sections.setdefault(section, {})[option] = value
        return sections

    def scores(self) -> dict[str, Any]:
        """Return the scores under the keys of eval_results.json."""
        scores = self.content["scores"]
        flat = {**scores["own"]}
        for prefix in ("best", "crossfit"):
            flat |= {f"{prefix}_{key}": value for key, value in scores.get(prefix, {}).items()}
        flat |= {f"{key}_at_0": value for key, value in scores.get("at_0", {}).items()}
        if self.by_question is not None:
            flat |= {f"question_{key}": value for key, value in self.by_question.scores().items()}
        return flat


def result_text(content: Mapping[str, Any]) -> str:
    """Return the text of a result file: one line per score and option, and one per list of all questions."""
    parts = []
    for key, value in {**content, HASH: content_hash(content)}.items():
        if key in LISTS:
            text = _lines(value, _compact)
        elif key == BY_QUESTION:
            text = _lines(value, lambda part: _lines(part, _compact).replace("\n", "\n  "))
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(values: Mapping[str, Any], text_of: Callable[[Any], str]) -> str:
    """Return an object with a line per entry."""
    inner = ",\n".join(f"    {json.dumps(name)}: {text_of(value)}" for name, value in values.items())
    return f"{{\n{inner}\n  }}"


def content_hash(content: Mapping[str, Any]) -> str:
    """Return the sha256 of everything but the hash itself, as JSON with sorted keys, without spaces and in ASCII."""
    rest = {key: value for key, value in content.items() if key != HASH}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def per_question(
    scores: QuestionScores, at_0: QuestionScores, paragraph_of: Mapping[str, str], scored_at: str
) -> dict[str, Any]:
    """Return the lists of a result file, from the scores at its thresholds and at threshold 0.

    `paragraph_of` maps a question id to the text that it is about.
    """
    order = sorted(range(len(scores.ids)), key=lambda index: scores.ids[index])
    numbers: dict[str, int] = {}
    exact, f1 = scores.exact[order], np.round(F1_SCALE * scores.f1[order]).astype(int)
    exact_at_0, f1_at_0 = at_0.exact[order].astype(int), np.round(F1_SCALE * at_0.f1[order]).astype(int)
    changed = np.flatnonzero((exact_at_0 != exact) | (f1_at_0 != f1))
    return {
        "scored_at": scored_at,
        "answerable": _bits(scores.answerable[order]),
        "exact": _bits(exact == 1),
        "partial_f1": [[int(at), int(f1[at])] for at in np.flatnonzero(f1 != F1_SCALE * exact)],
        "at_0": [[int(at), int(exact_at_0[at]), int(f1_at_0[at])] for at in changed],
        "paragraph": [numbers.setdefault(paragraph_of[scores.ids[index]], len(numbers)) for index in order],
    }


def result_files(path: Path) -> list[Path]:
    """List the result files that a path names: itself, or those in a folder that is not a run.

    Other JSON files in a folder are skipped.
    """
    if path.is_file():
        return [path]
    if not path.is_dir() or (path / runs.RUN).is_file():
        return []
    return [file for file in json_files(path) if _starts_as_result(file)]


def json_files(folder: Path) -> list[Path]:
    """List the JSON files in a folder, by name."""
    return sorted(file for file in folder.glob(f"*{SUFFIX}") if file.is_file())


def is_result(content: object) -> bool:
    """Whether parsed JSON declares the format of a result file."""
    return isinstance(content, dict) and content.get("format") == FORMAT


def read_result(path: Path) -> Result:
    """Read a result file, and check that it is consistent."""
    content = read_json(path)
    if not is_result(content):
        raise UnreadableError(f'{path}: expected a run folder, or a result file with "format": "{FORMAT}".')
    if content.get("version") != VERSION:
        raise UnreadableError(
            f"{path}: expected version {VERSION} of the result file format, got {content.get('version')!r}; "
            "read it with the version of lamella that wrote it."
        )
    try:
        result = parse_result(content)
        problem = _find_problem(result)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
        problem = "a value is missing or has the wrong type"
    if problem:
        raise UnreadableError(f"{path}: expected a result file as `lamella compare --keep` writes it, but {problem}.")
    return result


def parse_result(content: Mapping[str, Any]) -> Result:
    """Return the content of a result file with its lists as arrays."""
    lists = content["per_question"]
    exact = _from_bits(lists["exact"]).astype(np.float64)
    f1 = exact.copy()
    for at, value in lists["partial_f1"]:
        f1[at] = _f1_of(at, value, len(f1))
    at_0 = None
    if "at_0" in lists:
        exact_at_0, f1_at_0 = at_0 = exact.copy(), f1.copy()
        for at, right, value in lists["at_0"]:
            f1_at_0[at] = _f1_of(at, value, len(f1))
            exact_at_0[at] = float(right)
    return Result(
        content,
        paragraphs=np.array(lists["paragraph"], np.int64),
        answerable=_from_bits(lists["answerable"]),
        exact=exact,
        f1=f1,
        at_0=at_0,
        by_question=parse_result(content[BY_QUESTION]) if BY_QUESTION in content else None,
    )


def _starts_as_result(file: Path) -> bool:
    """Whether a file names the format; reads only its head, since other files in a folder may be large."""
    try:
        with file.open("rb") as opened:
            return FORMAT.encode() in opened.read(HEAD_BYTES)
    except OSError as error:
        raise UnreadableError(f"{file}: cannot be read ({error.strerror}).") from None


def _find_problem(result: Result) -> str | None:
    """Describe the first contradiction in a result file: a missing part, or scores that its questions do not have."""
    content = result.content
    for key in ("encoder", "tuning", "train", "dev", "options", "cost", "environment", "scores"):
        if not isinstance(content[key], dict):
            return f"{key} is not an object"
    for key in {"curve", "layers"} & content.keys():
        if not isinstance(content[key], dict):
            return f"{key} is not an object"
    _check_curve(content.get("curve", {}))
    if "layers" in content:
        check_layers(content["layers"])
    for part in (result, *([result.by_question] if result.by_question else [])):
        if problem := _find_problem_in_scores(part):
            return problem
    if HASH in content and content[HASH] != content_hash(content):  # the first files had none
        return f"its {HASH} does not match its content: it was changed after it was written"
    return None


def _find_problem_in_scores(result: Result) -> str | None:
    """Describe the first score that the listed questions do not have."""
    content, count = result.content, len(result.exact)
    if not count or any(len(values) != count for values in (result.paragraphs, result.answerable)):
        return "its lists of questions differ in length"
    if content["dev"]["questions"] != count:
        return f"dev.questions is {content['dev']['questions']!r}, and {count} are listed"
    if result.paragraphs.min() < 0 or result.paragraphs.max() >= count:
        return "a paragraph number is out of range"
    for name, lists in ((result.scored_at, (result.exact, result.f1)), ("at_0", result.at_0)):
        if lists is None:
            continue
        scores = QuestionScores(("",) * count, result.answerable, result.answerable, exact=lists[0], f1=lists[1])
        stated = content["scores"][name]
        for key, value in summarise(scores).items():
            if key in SUMMARY_SCORES and abs(stated[key] - value) > 100 / F1_SCALE:
                return f"scores.{name}.{key} is {stated[key]}, and its questions give {value:.4f}"
    return None


def check_layers(layers: Mapping[str, Any]) -> None:
    """Raise an error unless each output and kind of token has a weight for every layer, and "all" is such a kind."""
    for kinds in layers["weights"].values():
        for weights in (kinds["all"], *kinds.values()):
            if len(weights) != len(layers["layers"]) or not all(type(weight) in (int, float) for weight in weights):
                raise ValueError


def _check_curve(curve: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the columns of a curve have one length and hold numbers, or null for a missing one."""
    columns = [*curve.get("parts", {}).values(), *(column for key, column in curve.items() if key != "parts")]
    if len({len(column) for column in columns}) > 1:
        raise ValueError
    if not all(value is None or type(value) in (int, float) for column in columns for value in column):
        raise ValueError


def _f1_of(index: int, value: int, count: int) -> float:
    """Return an F1 of the file as a number from 0 to 1; check that it belongs to a question."""
    if not (0 <= index < count and 0 <= value <= F1_SCALE):
        raise ValueError
    return value / F1_SCALE


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _bits(values: NDArray[np.bool_]) -> str:
    return "".join("01"[int(value)] for value in values)


def _from_bits(text: str) -> NDArray[np.bool_]:
    if set(text) - {"0", "1"}:
        raise ValueError
    return np.array([character == "1" for character in text], np.bool_)

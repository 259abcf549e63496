"""The layers that sample answers of a report were read from: at the token where an answer starts, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import MissingLibraryError
from lamella.inference.answer_layers import layers_of_answer
from lamella.inference.answer_list import Answer
from lamella.study.analysis.layer_weights import weighs_layers
from lamella.study.records import read_json_object
from lamella.study.report.values import ReportValues, rounded


def layers_of_samples(folder: Path, samples: Sequence[tuple[Example, str]]) -> list[ReportValues | None]:
    """Return the layer weights of a run's answers to some questions; None for "no answer", and for other heads.

    Runs the model of the run, once per answer.
    """
    if find_spec("torch") is None:
        raise MissingLibraryError("report --layers", ["torch"])
    if not any(text for _, text in samples) or not weighs_layers(folder):
        return [None] * len(samples)
    from lamella.models.loading import load_model

    model = load_model(folder, backend="torch")
    candidates = read_json_object(folder / runs.NBEST)
    found: list[ReportValues | None] = []
    for example, text in samples:
        begin = _begin(example, text, candidates.get(example.id))
        if not text or begin is None:
            found.append(None)
            continue
        place = {"start": begin, "end": begin + len(text), "answer": text}
        layers = layers_of_answer(model, example.question, Answer(place, text=example.context.text))
        first, last = layers["tokens"][0], layers["tokens"][-1]
        found.append(
            {
                "numbers": layers["layers"],
                "read": [
                    {"output": output, "token": token["token"], "weights": list(map(rounded, token["weights"][output]))}
                    for output, token in (("start", first), ("end", last))
                ],
            }
        )
    return found


def _begin(example: Example, text: str, candidates: object) -> int | None:
    """Return the first character of an answer: as the run recorded it, otherwise the first place that has its text."""
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict) and candidate.get("text") == text and isinstance(candidate.get("start"), int):
            begin: int = candidate["start"]
            if example.context.text[begin : begin + len(text)] == text:
                return begin
    begin = example.context.text.find(text)
    return None if begin < 0 else begin

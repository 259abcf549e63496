"""Measure what a reader that was trained on a rounded copy of its encoder loses on the original, by simulation.

    python benchmarks/rounded_base.py --model MODEL --data FILE [FILE ...] [--draws 5] [--questions 1000]
                                      [--device cpu] [--quick] [--out rounded-base.json] [--card]

The original lies within half a rounding step of each weight of the copy. Each draw adds to each weight an error that is
uniform in that range, so it is one of the encoders that could be the original, and answers the same questions with it.
The steps are found in the weights. Values that fp16 can hold have at least the step of fp16.

`change` is the F1 on a draw minus the F1 on the copy, in points. `changed` is the share of the questions whose answer
differs from the answer on the copy. Both are given as mean, smallest and largest over the draws. `difference` is the
distance of the draws from the copy in multiples of the expected error, by which a model that records the rounding
(`lamella export MODEL --half DIR --rounded-base`) recognises the original: the largest in all, and of a tensor.
`--card` adds the changes to the model and its card.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.data.demo import data_path
from lamella.data.examples import Example
from lamella.encoder.device import find_device
from lamella.encoder.identity import Rounding, rounding_steps
from lamella.encoder.lora import tensors_follow
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.sources import MODEL_WEIGHTS
from lamella.encoder.tensors import parameters_of, put_tensors, read_tensors
from lamella.files import write_json
from lamella.inference.predict import predict
from lamella.inference.questions import read_questions
from lamella.models.base_encoder import load_base
from lamella.models.facts import RoundedBaseFacts
from lamella.models.model import ReaderModel
from lamella.models.names import find_model
from lamella.models.saved import SavedModel, read_saved
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder; its rounded base encoder must be at hand")
    parser.add_argument("--data", nargs="+", default=["demo:dev"], help="questions to ask, with their answers")
    parser.add_argument("--draws", type=int, default=5, help="number of encoders to try")
    parser.add_argument("--questions", type=int, help="at most this number per file, spread over it; default: all")
    parser.add_argument("--device", help="cpu or cuda; default: the fastest")
    parser.add_argument("--quick", action="store_true", help="2 draws, 16 questions")
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--card", action="store_true", help="add the numbers to the card of the model, a folder")
    options = parser.parse_args()
    draws, most = (2, 16) if options.quick else (options.draws, options.questions)

    folder = find_model(options.model).folder
    saved, device = read_saved(folder), find_device(options.device)
    files = {file: _spread(read_questions(str(data_path(file)), labelled=True), most) for file in options.data}
    copy = load_base(folder, saved)
    if copy.original_sha256 is not None:
        raise SystemExit(
            f"{folder}: expected the rounded copy of {saved.base_name}, found the original; nothing to simulate."
        )
    rounding = Rounding.measure(parameters_of(copy.encoder.model), saved.base_name)
    steps = {name: steps_of(values) for name, values in parameters_of(copy.encoder.model).items()}
    model = with_delta(folder, saved, copy).to(device)
    on_copy = {file: answer(model, examples) for file, examples in files.items()}

    on_draws: dict[str, list[Scored]] = {file: [] for file in files}
    differences = []
    for seed in range(draws):
        encoder = load_base(folder, saved)
        shift(parameters_of(encoder.encoder.model), steps, seed)
        differences.append(rounding.compare(parameters_of(encoder.encoder.model)))
        model = with_delta(folder, saved, encoder).to(device)
        for file, examples in files.items():
            on_draws[file].append(answer(model, examples))
            print(
                f"draw {seed + 1}: {file}: F1 {on_draws[file][-1].f1:.2f}, on the copy {on_copy[file].f1:.2f}",
                flush=True,
            )
    rows = [summarise(file, on_copy[file], on_draws[file]) for file in files]
    for row in rows:
        print(
            f"{row['data']}: {row['questions']:,} questions: F1 {row['f1']:.2f} on the copy; on the draws "
            f"{row['change']['mean']:+.2f} ({row['change']['smallest']:+.2f} to {row['change']['largest']:+.2f}); "
            f"{row['changed']['mean']:.1%} of the answers differ"
        )
    if options.card:
        ReaderModel.load(folder).save_facts(folder, rounded_base=[card_facts(row, draws) for row in rows])
    if options.out is not None:
        difference = {key: max(getattr(found, key) for found in differences) for key in ("in_all", "largest")}
        record = {"model": folder.name, "encoder": saved.base_name, "draws": draws, "difference": difference}
        write_json(options.out, {**record, "files": rows})


class Scored(NamedTuple):
    """The answers to the questions of a file, by id, and their F1."""

    f1: float
    answers: dict[str, str]


def steps_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return the rounding steps of a tensor; where it has none, those of fp16, if fp16 can hold its values."""
    steps: NDArray[Any] = rounding_steps(values).astype(np.float32)
    half = values.astype(np.float16)
    if steps.all() or not np.array_equal(half, values):
        return steps
    return np.where(steps > 0, steps, np.spacing(np.abs(half)).astype(np.float32))


def shift(parameters: dict[str, NDArray[Any]], steps: dict[str, NDArray[Any]], seed: int) -> None:
    """Move each value by up to half a step."""
    random = np.random.default_rng(seed)
    for name, values in sorted(parameters.items()):
        values += steps[name] * (random.random(values.shape, np.float32) - np.float32(0.5))


def with_delta(folder: Path, saved: SavedModel, base: LoadedEncoder) -> ReaderModel:
    """Build a saved model on an encoder that is in memory."""
    with tensors_follow():
        model = ReaderModel(base, saved.config, tuned_before=saved.tuned_before)
    put_tensors(model, read_tensors(folder / MODEL_WEIGHTS), str(folder))
    return model.eval()


def answer(model: ReaderModel, examples: Sequence[Example]) -> Scored:
    predictions = predict(model, examples)
    threshold = model.decoding.null_score_diff_threshold
    scores = score_predictions(model, examples, predictions, language=language_of(examples))
    return Scored(scores["f1"], {id: prediction.text(threshold) for id, prediction in predictions.items()})


def summarise(file: str, copy: Scored, draws: Sequence[Scored]) -> dict[str, Any]:
    changed = [statistics.mean(draw.answers[id] != text for id, text in copy.answers.items()) for draw in draws]
    return {
        "data": Path(file).name,
        "questions": len(copy.answers),
        "f1": copy.f1,
        "change": _range([draw.f1 - copy.f1 for draw in draws]),
        "changed": _range(changed),
    }


def card_facts(row: dict[str, Any], draws: int) -> RoundedBaseFacts:
    change = row["change"]
    return RoundedBaseFacts(
        data=row["data"],
        questions=row["questions"],
        draws=draws,
        f1=round(row["f1"], 2),
        change=round(change["mean"], 2),
        change_low=round(change["smallest"], 2),
        change_high=round(change["largest"], 2),
        changed=round(100 * row["changed"]["mean"], 2),
    )


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "smallest": min(values), "largest": max(values)}


def _spread(examples: Sequence[Example], most: int | None) -> list[Example]:
    """Return at most `most` examples, from all parts of a file."""
    count = len(examples) if most is None else min(most, len(examples))
    return [examples[number * len(examples) // count] for number in range(count)]


if __name__ == "__main__":
    main()

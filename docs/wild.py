"""Score readers on other kinds of texts than their training data, and make the page of these scores.

    python docs/wild.py --reader default --reader models/mpnet data/tydi-en-dev-mixed.json.gz …
    python docs/wild.py --reader default --int8 data/cs224n-dev.json.gz
    python docs/wild.py --page

The first form adds the scores to results/wild/scores.json, and with `--card` to the readers' own cards. The second
adds the effect of int8 to the card. The third writes docs/results/wild.md from that file, the text and goals in
results/wild/page.toml, and the thresholds of the readers; `--check` reports whether it is current. Make the mixed sets
with `lamella convert FILE OUT --negatives 0.5`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.encoder.sources import READERS, is_model
from lamella.files import write_json, write_text
from lamella.models.facts import DomainScores
from lamella.models.saved import read_saved
from lamella.scoring.domain_scores import COVERAGES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "wild" / "scores.json"
TEXT = RESULTS.with_name("page.toml")
PAGE = ROOT / "docs" / "results" / "wild.md"
BEFORE = "{}, before"  # the name of the older reader with which a reader is compared

Scores = Mapping[str, Mapping[str, DomainScores]]  # by reader and data set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", type=Path, help="data files")
    parser.add_argument("--reader", action="append", default=[], help="a reader; repeatable")
    parser.add_argument("--card", action="store_true", help="add the scores to the card of each reader, a model folder")
    parser.add_argument("--int8", action="store_true", help="add the effect of int8 on one file to each reader's card")
    parser.add_argument("--page", action="store_true", help="write the page")
    parser.add_argument("--check", action="store_true", help="report whether the page is current")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--precision", default="auto", help="number format of the answers (default: auto)")
    arguments = parser.parse_args()
    for name in arguments.reader:
        if arguments.int8:
            add_int8(name, *arguments.data, batch_size=arguments.batch_size)
            continue
        options = {"batch_size": arguments.batch_size, "precision": arguments.precision}
        add(name, arguments.data, card=arguments.card, **options)
    if arguments.page:
        write_text(PAGE, page())
    if arguments.check and PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.relative_to(ROOT)}: is outdated; run: python docs/wild.py --page")


def add(name: str, files: Sequence[Path], *, batch_size: int, card: bool, precision: Any = "auto") -> None:
    """Add the scores of a reader on data files to the results, instead of older ones on the same data."""
    from lamella import ReaderModel, load_examples
    from lamella.inference.predict import predict
    from lamella.models.loading import load_model
    from lamella.scoring.domain_scores import domain_scores
    from lamella.scoring.metrics import language_of

    model = load_model(name, precision=precision, inference_only=True)
    fresh = {}
    for file in files:
        examples = load_examples(file, labelled=True).examples
        predictions = predict(model, examples, batch_size=batch_size)
        facts = {"language": language_of(examples), "computed": _computed(model)}
        fresh[file.name] = domain_scores(file.name, examples, predictions, model.decoding, **facts).model_dump()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"readers": []}
    entry = next((entry for entry in results["readers"] if entry["reader"] == name), None)
    if entry is None:
        entry = {"reader": name, "domains": []}
        results["readers"].append(entry)
    old = [row for row in entry["domains"] if row["data"] not in fresh]
    entry["domains"] = [*old, *fresh.values()]
    write_json(RESULTS, results)
    if card:
        reader = ReaderModel.from_pretrained(name)
        reader.save_facts(reader.folders[0], domains=[DomainScores.model_validate(row) for row in entry["domains"]])


def _computed(model: Any) -> str:
    """Describe how a model computes its answers: the device, the number format, and whether its encoder was rounded."""
    from safetensors import safe_open

    from lamella.models.onnx_model import OnnxModel
    from lamella.scoring.cost import device_name

    if isinstance(model, OnnxModel):
        text = f"on a CPU in {model.precision}, through onnxruntime"
    else:
        device = f"one {device_name(model.device)}" if model.device.type == "cuda" else "a CPU"
        text = f"on {device} in {model.precision}"
    weights = model.folders[-1] / "model.safetensors"
    if len(model.folders) > 1 and not is_model(model.folders[-1]) and weights.is_file():
        with safe_open(weights, "numpy") as tensors:
            if all(tensors.get_slice(key).get_dtype() != "F32" for key in tensors.keys()):  # noqa: SIM118
                text += ", with the encoder rounded to half precision"
    return text


def add_int8(name: str, file: Path, *, batch_size: int) -> None:
    """Add the effect of int8 on the answers to a data file to the card of a reader, a model folder."""
    from lamella import ReaderModel, load_examples
    from lamella.inference.predict import predict
    from lamella.models.facts import Int8Facts
    from lamella.models.loading import load_model
    from lamella.scoring.evaluate import score_predictions

    examples = load_examples(file, labelled=True).examples
    answers, f1 = [], []
    for precision in ("fp32", "int8"):
        graph = load_model(name, device="cpu", precision=precision, backend="onnx")
        predictions = predict(graph, examples, batch_size=batch_size)
        threshold = graph.decoding.null_score_diff_threshold
        answers.append([predictions[example.id].text(threshold) for example in examples])
        f1.append(score_predictions(graph, examples, predictions)["f1"])
    equal = 100 * sum(map(str.__eq__, *answers)) / len(examples)
    model = ReaderModel.from_pretrained(name)
    measured = Int8Facts(
        data=file.name, questions=len(examples), f1=round(f1[0], 3), int8_f1=round(f1[1], 3), equal=round(equal, 2)
    )
    model.save_facts(model.folders[0], int8=measured)


def page() -> str:
    """Return the page in Markdown."""
    text = tomllib.loads(TEXT.read_text(encoding="utf-8"))
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    scores = {
        entry["reader"]: {row["data"]: DomainScores.model_validate(row) for row in entry["domains"]}
        for entry in results["readers"]
    }
    measured = dict.fromkeys(name for rows in scores.values() for name in rows)
    names = [name for name in {**text["titles"], **measured} if name in measured]
    titles = {name: text["titles"].get(name, name) for name in names}
    parts = [text["introduction"].strip(), _computed_by(scores, titles), *_goals(scores, titles, text["goals"])]
    parts += ["## Thresholds", _thresholds(scores)]
    parts += [f"## {title}\n\n{_table(scores, name)}" for name, title in titles.items()]
    return "\n\n".join([*parts, "## Risk by coverage", _curves(scores, names)]) + "\n"


def _computed_by(scores: Scores, titles: Mapping[str, str]) -> str:
    """State with what the answers were computed, as recorded in each row; name the sets that are exceptions."""
    lines: dict[str, list[str]] = {}
    for reader, rows in scores.items():
        sets: dict[str, list[str]] = {}
        for name, row in rows.items():
            sets.setdefault(row.computed or "in a way that is not recorded", []).append(titles[name])
        most = max(sets.values(), key=len)
        for computed, names in sets.items():
            only = "" if names is most else f" ({' and '.join(names)})"
            lines.setdefault(computed, []).append(f"`{reader}`{only}")
    return "**Machines.** The answers were computed by the files of the readers:\n\n" + "\n".join(
        f"- {computed}: {', '.join(readers)}" for computed, readers in lines.items()
    )


def _goals(scores: Scores, titles: Mapping[str, str], goals: Mapping[str, Any]) -> list[str]:
    """Show what the readers were to reach, and whether they do."""
    readers = goals["readers"]
    plain = [name for name in goals["sets"] if scores[readers[0]][name].unanswerable == 0]
    mixed = [name for name in goals["sets"] if name not in plain]

    def limited(names: Sequence[str], limit: float, value: Any) -> str:
        head = f"| reader | {' | '.join(titles[name] for name in names)} | |\n|---|{'---:|' * len(names)}---|\n"
        return head + "\n".join(
            f"| `{reader}` | {' | '.join(f'{number:.2f}' for number in numbers)} | {_verdict(numbers, limit)} |"
            for reader in readers
            for numbers in [[round(value(scores[reader][name]), 2) for name in names]]
        )

    gains = ["| reader | before | now | change | goal | |", "|---|---:|---:|---:|---:|---|"]
    for reader in readers:
        before, now = (
            sum(scores[name][data].f1 for data in mixed) / len(mixed) for name in (BEFORE.format(reader), reader)
        )
        goal = goals["gain"].get(reader)
        verdict = "" if goal is None else "met" if round(now - before, 2) >= goal else "missed"
        shown = "none" if goal is None else f"+{goal:g}"
        gains.append(f"| `{reader}` | {before:.2f} | {now:.2f} | {now - before:+.2f} | {shown} | {verdict} |")
    below, eager, error = (goals[key] for key in ("below_best", "refused_eager", "calibration_error"))
    return [
        f"## Goals\n\n{goals['text'].strip()}",
        f"**Mean F1 on the {len(mixed)} mixed sets**, each set counting the same:\n\n" + "\n".join(gains),
        f"**F1 below that at the best threshold**, on each mixed set at most {below:g}:\n\n"
        + limited(mixed, below, lambda row: row.best_f1 - row.f1),
        f"**Refused with `--answer eager`**, where every question has an answer, at most {eager:g} %:\n\n"
        + limited(plain, eager, lambda row: row.refused_eager),
        f"**Calibration error**, on each mixed set at most {error:g} %:\n\n"
        + limited(mixed, error, lambda row: row.calibration_error),
    ]


def _verdict(numbers: Sequence[float], limit: float) -> str:
    missed = sum(number > limit for number in numbers)
    return f"missed on {missed} of {len(numbers)}" if missed else "met"


def _thresholds(scores: Scores) -> str:
    """Show the thresholds of the readers and how `lamella calibrate` chose them, from their config.json."""
    lines = [
        "The scores here are F1 on the files that each threshold was tuned on, cross-fitted where it was tuned.",
        "",
        "| reader | threshold | penalty per doubling of the windows | questions | F1 at 0 | at the one before | tuned "
        "| stored |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for reader in scores:
        folder = READERS / reader if (READERS / reader).is_dir() else ROOT / reader
        if not folder.is_dir():
            continue  # an older file, which is not kept
        saved = read_saved(folder)
        decoding, report = saved.config.decoding, saved.facts.calibrated
        choice = report["threshold_choice"]
        why = f", although {report['threshold_reason']}" if choice == "forced" else ""
        f1 = [report.get(key) for key in ("f1_at_0", "f1_before", "crossfit_f1")]
        cells = [f"`{reader}`", f"{decoding.null_score_diff_threshold:.2f}", f"{decoding.window_penalty:.2f}"]
        cells += [f"{report['questions']:,}", *("" if value is None else f"{value:.2f}" for value in f1)]
        lines.append(f"| {' | '.join(cells)} | {'not the tuned one' if choice == 'kept' else 'the tuned one'}{why} |")
    return "\n".join(lines)


def _table(scores: Scores, data: str) -> str:
    rows = {reader: rows[data] for reader, rows in scores.items() if data in rows}
    first = next(iter(rows.values()))
    return (
        f"`{data}`: {first.questions:,} questions, {first.unanswerable:,} unanswerable.\n\n"
        "| reader | F1 [95 %] | at 0 | at the best | answerable | unanswerable | refused | refused, eager | "
        f"coverage at F1 80 | area under risk | calibration error |\n|---{10 * '|---:'}|\n"
        + "\n".join(_row(reader, row) for reader, row in rows.items())
    )


def _curves(scores: Scores, names: Sequence[str]) -> str:
    heads = " | ".join(f"{100 * share:.0f} %" for share in COVERAGES)
    curves = [f"| reader | data | {heads} |", f"|---|---|{'---:|' * len(COVERAGES)}"]
    for name in names:
        for reader, rows in scores.items():
            if name in rows:
                risks = " | ".join(f"{risk:.1f}" for risk in rows[name].risk)
                curves.append(f"| `{reader}` | `{name}` | {risks} |")
    return (
        "If a reader answers only the questions that it is surest of, this is the risk, 100 less the mean F1 of these "
        "answers. An answer to an unanswerable question scores 0.\n\n" + "\n".join(curves)
    )


def _row(reader: str, row: DomainScores) -> str:
    cells = [row.f1_at_0, row.best_f1, row.has_answer_f1, row.no_answer_f1, row.refused, row.refused_eager]
    cells += [row.coverage_at_80, row.area_under_risk, row.calibration_error]
    shown = " | ".join("" if cell is None else f"{cell:.1f}" for cell in cells)
    return f"| `{reader}` | {row.f1:.1f} [{row.f1_low:.1f}, {row.f1_high:.1f}] | {shown} |"


if __name__ == "__main__":
    main()

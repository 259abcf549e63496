"""Score readers on other kinds of texts than their training data, and make the page of these scores.

    python docs/wild.py --reader default --reader models/mpnet data/tydi-en-dev-mixed.json.gz …
    python docs/wild.py --reader default --int8 data/cs224n-dev.json.gz
    python docs/wild.py --page

The first form adds the scores to results/wild/scores.json, and with `--card` to the readers' own cards. The second
adds the effect of int8 to the card. The third writes docs/results/wild.md from that file, and `--check` reports whether
it is current. Make the mixed sets with
`lamella convert FILE OUT --negatives 0.5`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.files import write_json, write_text
from lamella.models.facts import DomainScores
from lamella.scoring.domain_scores import COVERAGES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "wild" / "scores.json"
PAGE = ROOT / "docs" / "results" / "wild.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", type=Path, help="data files")
    parser.add_argument("--reader", action="append", default=[], help="a reader; repeatable")
    parser.add_argument("--card", action="store_true", help="add the scores to the card of each reader, a model folder")
    parser.add_argument("--int8", action="store_true", help="add the effect of int8 on one file to each reader's card")
    parser.add_argument("--page", action="store_true", help="write the page")
    parser.add_argument("--check", action="store_true", help="report whether the page is current")
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    for name in arguments.reader:
        if arguments.int8:
            add_int8(name, *arguments.data, batch_size=arguments.batch_size)
            continue
        add(name, arguments.data, batch_size=arguments.batch_size, card=arguments.card)
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    if arguments.page:
        write_text(PAGE, text)
    if arguments.check and PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)}: is outdated; run: python docs/wild.py --page")


def add(name: str, files: Sequence[Path], *, batch_size: int, card: bool) -> None:
    """Add the scores of a reader on data files to the results, instead of older ones on the same data."""
    from lamella import load_examples
    from lamella.inference.predict import predict
    from lamella.models.loading import load_model
    from lamella.scoring.cost import device_name
    from lamella.scoring.domain_scores import domain_scores

    model = load_model(name)
    fresh = {}
    for file in files:
        examples = load_examples(file, labelled=True).examples
        predictions = predict(model, examples, batch_size=batch_size)
        fresh[file.name] = domain_scores(file.name, examples, predictions, model.decoding).model_dump()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"readers": []}
    entry = next((entry for entry in results["readers"] if entry["reader"] == name), None)
    if entry is None:
        entry = {"reader": name, "domains": []}
        results["readers"].append(entry)
    entry["device"] = device_name(model.device)
    old = [row for row in entry["domains"] if row["data"] not in fresh]
    entry["domains"] = [*old, *fresh.values()]
    write_json(RESULTS, results)
    if card:
        model.save_facts(model.folders[0], domains=[DomainScores.model_validate(row) for row in entry["domains"]])


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
    measured = Int8Facts(data=file.name, questions=len(examples), f1=round(f1[0], 3), int8_f1=round(f1[1], 3), equal=round(equal, 2))
    model.save_facts(model.folders[0], int8=measured)


def page(results: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    readers = results["readers"]
    names = list(dict.fromkeys(row["data"] for entry in readers for row in entry["domains"]))
    parts = [results["introduction"].strip()]
    for name in names:
        rows = [
            (entry["reader"], DomainScores.model_validate(row))
            for entry in readers
            for row in entry["domains"]
            if row["data"] == name
        ]
        first = rows[0][1]
        parts.append(
            f"## {results['titles'].get(name, name)}\n\n"
            f"`{name}`: {first.questions:,} questions, {first.unanswerable:,} unanswerable.\n\n"
            "| reader | F1 [95 %] | at 0 | at the best | answerable | unanswerable | refused | refused, eager | "
            f"coverage at F1 80 | area under risk | calibration error |\n|---{10 * '|---:'}|\n"
            + "\n".join(_row(reader, row) for reader, row in rows)
        )
    heads = " | ".join(f"{100 * share:.0f} %" for share in COVERAGES)
    curves = [f"| reader | data | {heads} |", f"|---|---|{'---:|' * len(COVERAGES)}"]
    for name in names:
        for entry in readers:
            for row in entry["domains"]:
                if row["data"] == name:
                    risks = " | ".join(f"{risk:.1f}" for risk in row["risk"])
                    curves.append(f"| `{entry['reader']}` | `{name}` | {risks} |")
    parts.append(
        "## Risk by coverage\n\n"
        "If a reader answers only the questions that it is surest of, this is the risk, 100 less the mean F1 of these "
        "answers. An answer to an unanswerable question scores 0.\n\n" + "\n".join(curves)
    )
    return "\n\n".join(parts) + "\n"


def _row(reader: str, row: DomainScores) -> str:
    cells = [row.f1_at_0, row.best_f1, row.has_answer_f1, row.no_answer_f1, row.refused, row.refused_eager]
    cells += [row.coverage_at_80, row.area_under_risk, row.calibration_error]
    shown = " | ".join("" if cell is None else f"{cell:.1f}" for cell in cells)
    return f"| `{reader}` | {row.f1:.1f} [{row.f1_low:.1f}, {row.f1_high:.1f}] | {shown} |"


if __name__ == "__main__":
    main()

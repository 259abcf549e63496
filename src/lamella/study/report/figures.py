"""The figures of a table of results: learning curves, distillation, time, layer weights, less data, costs.

Every function takes rows, the results of each under its label: one result, or several that differ in their seeds and
are averaged. It returns SVG, or None if the results have nothing to draw. `figure_blocks` and `cost_figures` return
those with content as blocks of a page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.study.compared_readers import TIME_COSTS
from lamella.study.learning_curve import PARTS, seconds_per_tenth
from lamella.study.reader_options import name_of_base, reader_options
from lamella.study.records import is_number
from lamella.study.report.page_blocks import Figure
from lamella.study.report.svg_plot import LOG_RATIO, Line, Panel, Point, draw_panels
from lamella.study.result_files import Result

Rows = Mapping[str, Sequence[Result]]
SCORE_TITLES = {
    "exact": "EM", "f1": "F1", "answerability_accuracy": "accuracy", "answerability_f1": "no-answer F1",
}  # fmt: skip
CURVE_TITLES = {"dev_loss": "Dev loss", **SCORE_TITLES}
COST_TITLES = {
    "train_seconds": "Training time", "inference_seconds_per_1000": "Inference time",
    "trainable_parameters": "Trained parameters",
}  # fmt: skip
TIME_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}
FRACTION = "learner.fraction"
SECOND_OUTPUTS = ("end", "no answer")  # of readers and of classifiers


def figure_blocks(id: str, rows: Rows, by_run: Rows | None = None, sources: Rows | None = None) -> list[Figure]:
    """Return the figures that the results of a table have something to draw for, without those of costs.

    `by_run` are all known results by the name of their run: among them is perhaps the encoder's own head. `sources` are
    runs that rows are copies of, `bert` for `bert@0.3`: their curves are those of the copies.
    """
    trained = {**(sources or {}), **rows}
    return _figures(
        id,
        {
            "curves": (curves_figure(trained), "dev loss and scores during training"),
            "distillation": (parts_figure(trained, "distillation"), "distance to the teacher during training"),
            "tenths": (tenths_figure(trained), "score and time by tenth of an epoch"),
            "layers": (layers_figure(rows), "mean weight of every layer"),
            "less-data": (less_data_figure(rows, own_head(rows, by_run or {})), "score by fraction of the questions"),
        },
    )


def cost_figures(id: str, rows: Rows) -> list[Figure]:
    """Return the score by each cost with its Pareto front, and by the measure of parameter efficiency."""
    return _figures(
        id,
        {
            "costs": (costs_figure(rows), "score by each cost"),
            "efficiency": (efficiency_figure(rows), "(F1 − 50) / log10 of the trained parameters"),
        },
    )


def _figures(id: str, drawn: Mapping[str, tuple[str | None, str]]) -> list[Figure]:
    return [Figure(f"{id}-{name}.svg", svg, f"{id}: {alt}") for name, (svg, alt) in drawn.items() if svg is not None]


def curves_figure(rows: Rows) -> str | None:
    """Draw the dev loss and both scores during training: on the left by epochs, on the right by seconds.

    For the rows that were evaluated more than once.
    """
    curves = {label: curve for label, curve in _curves(rows).items() if len(curve["epoch"]) > 1}
    longest = max((curve["seconds"][-1] for curve in curves.values() if "seconds" in curve), default=0.0)
    unit, size = _time_unit(longest)
    panels = []
    for key, title in CURVE_TITLES.items():
        for x, x_title, scale in (("epoch", "epochs", 1.0), ("seconds", f"training time, {unit}", size)):
            lines = _lines(curves, x, key, scale)
            if any(len(line.x) > 1 for line in lines):
                panels.append(Panel(f"{title} by {x_title.partition(',')[0]}", x_title, _unit(key), lines))
    return draw_panels(panels, list(curves)) if panels else None


def parts_figure(rows: Rows, part: str) -> str | None:
    """Draw a part of the training loss, such as `distillation`, by epochs; for the rows that have it."""
    curves = {
        label: {"epoch": curve["epoch"], part: curve[PARTS][part]}
        for label, curve in _curves(rows).items()
        if part in curve[PARTS] and len(curve["epoch"]) > 1
    }
    if not curves:
        return None
    return draw_panels(
        [Panel(f"{part.capitalize()} loss", "epochs", part, _lines(curves, "epoch", part))], list(curves)
    )


def tenths_figure(rows: Rows) -> str | None:
    """Draw F1 and the seconds that each tenth of an epoch took; for rows evaluated at least that often."""
    curves, taken = {}, {}
    for label, curve in _curves(rows).items():
        if "seconds" in curve and (tenths := seconds_per_tenth(curve["epoch"], curve["seconds"])):
            curves[label] = curve
            taken[label] = {"epoch": np.array(tenths[0]), "seconds": np.array(tenths[1])}
    if not curves:
        return None
    recorded = {key for curve in curves.values() for key in curve}
    score = next((key for key in ("f1", "answerability_accuracy") if key in recorded), None)
    panels = [Panel("Seconds per tenth of an epoch", "epochs", "s", _lines(taken, "epoch", "seconds"))]
    if score:
        lines = _lines(curves, "epoch", score)
        panels.insert(0, Panel(f"{SCORE_TITLES[score]} by tenths", "epochs", _unit(score), lines))
    return draw_panels(panels, list(curves))


def layers_figure(rows: Rows) -> str | None:
    """Draw the mean weight of every layer, numbered as the encoder counts: solid for the start, dashed for the end.

    Over all tokens and, for attention, over the tokens of answers. Of classifiers: solid for "answer".
    """
    read = {
        label: [result.content["layers"] for result in results if "layers" in result.content]
        for label, results in rows.items()
    }
    read = {label: layers for label, layers in read.items() if layers}
    panels = []
    for kind, title in (("all", "all tokens"), ("answer", "tokens of the answer")):
        lines = []
        for style, layers in enumerate(read.values()):
            numbers, outputs = layers[0]["layers"], layers[0]["weights"].keys()
            alike = [each for each in layers if each["layers"] == numbers and each["weights"].keys() == outputs]
            for output in outputs:
                weights = [each["weights"][output].get(kind) for each in alike]
                known = [
                    (number, np.mean([weight[place] for weight in weights if weight]))
                    for place, number in enumerate(numbers)
                    if is_number(number) and all(weights)
                ]
                if len(known) > 1:
                    x, y = zip(*known, strict=True)
                    lines.append(Line(style, x, [float(value) for value in y], dashed=output in SECOND_OUTPUTS))
        if lines:
            last = int(max(max(line.x) for line in lines))
            ticks = range(0, last + 1, 1 if last <= 13 else 2)
            second = max(SECOND_OUTPUTS, key=lambda name: any(name in each["weights"] for (each, *_) in read.values()))
            x_title = f"layer (0: embeddings); dashed: {second}"
            panels.append(Panel(f"Layer weights, {title}", x_title, "weight", lines, x_ticks=ticks))
    return draw_panels(panels, list(read)) if panels else None


def own_head(rows: Rows, by_run: Rows) -> tuple[str, Sequence[Result]] | None:
    """Return the run whose encoder all rows read, with its own head; None if there is none, or several.

    That run may be a row itself: its own encoder, the pretrained one, does not count.
    """
    encoders = [
        (result, str(name_of_base(result.content["options"].get("encoder.name"))))
        for results in rows.values()
        for result in results
    ]
    bases = {base for _, base in encoders if by_run.get(base)}
    if len(bases) != 1:
        return None
    (base,) = bases
    own = by_run[base]
    if any(read != base and not any(result is head for head in own) for result, read in encoders):
        return None
    return f"{base}, its own head", own


def less_data_figure(rows: Rows, reference: tuple[str, Sequence[Result]] | None = None) -> str | None:
    """Draw the score by the fraction of the training questions: a line per learner, with the mean of its seeds.

    `reference` is the encoder's own head, a flat line.
    """
    groups: dict[str, dict[float, list[float]]] = {}
    names: dict[str, str] = {}
    for results in rows.values():
        for result in results:
            options = reader_options(result.content["options"])
            fraction = float(options.pop(FRACTION, 1.0))
            key = json.dumps(options, sort_keys=True)
            groups.setdefault(key, {}).setdefault(fraction, []).append(_score(result))
            names[key] = _mixer_names(options)
    drawn = {key: points for key, points in groups.items() if len(points) > 1}
    if not drawn:
        return None
    lines = []
    for style, points in enumerate(drawn.values()):
        fractions = sorted(points)
        means = [float(np.mean(points[fraction])) for fraction in fractions]
        lines.append(Line(style, [100 * fraction for fraction in fractions], means))
    references = [] if reference is None else [(reference[0], float(np.mean([_score(run) for run in reference[1]])))]
    panel = Panel(
        "Less training data", "fraction of the training questions, %", _title_of_score(rows), lines,
        references=references,
    )  # fmt: skip
    return draw_panels([panel], [names[key] for key in drawn])


def costs_figure(rows: Rows) -> str | None:
    """Draw the score by training time, inference time and trained parameters, each with its Pareto front.

    Times of the device that measured most rows; those of others cannot be compared with them.
    """
    panels = []
    for cost, title in COST_TITLES.items():
        known = {label: value for label, results in rows.items() if (value := _mean_cost(results, cost))}
        if cost != "trainable_parameters":
            device = _most_common([_device(rows[label]) for label in known])
            known = {label: value for label, value in known.items() if _device(rows[label]) == device}
        if len(set(known.values())) < 2:
            continue
        x_title, size = _cost_axis(cost, max(known.values()))
        ordered = sorted(known, key=lambda label: (known[label], -_mean_score(rows[label])))
        front: list[str] = []
        for label in ordered:
            if not front or _mean_score(rows[label]) > _mean_score(rows[front[-1]]):
                front.append(label)
        scores = {label: _mean_score(rows[label]) for label in ordered}
        points = [Point(label, known[label] / size, scores[label], faint=label not in front) for label in ordered]
        line = Line(0, [known[label] / size for label in front], [scores[label] for label in front], step=True)
        spread = max(known.values()) / min(known.values()) > LOG_RATIO
        panels.append(Panel(f"By {title.lower()}", x_title, _title_of_score(rows), [line], points=points, log_x=spread))
    return draw_panels(panels, wide=True) if panels else None


def efficiency_figure(rows: Rows) -> str | None:
    """Draw (F1 − 50) / log10 N by the number N of trained parameters, the measure of parameter efficiency.

    None if all rows train as many parameters: then the score alone shows as much.
    """
    known = {
        label: value
        for label, results in rows.items()
        if (value := _mean_cost(results, "trainable_parameters") or 0) > 1
    }
    if len(set(known.values())) < 2:
        return None
    points = [Point(label, n, (_mean_score(rows[label]) - 50) / math.log10(n)) for label, n in known.items()]
    spread = max(known.values()) / min(known.values()) > LOG_RATIO
    title = f"Parameter efficiency: ({_title_of_score(rows).partition(',')[0]} − 50) / log₁₀ N"
    return draw_panels([Panel(title, "N, trained parameters", "points", points=points, log_x=spread)], wide=True)


def _curves(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the curve of each row that has one: the mean over its seeds, or the first where they differ in length."""
    curves = {}
    for label, results in rows.items():
        known = [result.content["curve"] for result in results if result.content.get("curve", {}).get("epoch")]
        alike = [curve for curve in known if curve["epoch"] == known[0]["epoch"]]
        if alike:
            parts = _mean_columns([curve.get(PARTS, {}) for curve in alike])
            columns = _mean_columns([{key: curve[key] for key in curve if key != PARTS} for curve in alike])
            curves[label] = {**columns, PARTS: parts}
    return curves


def _mean_columns(curves: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, NDArray[np.float64]]:
    """Return the mean of each column over the curves that have it; nan where a value is missing.

    Some seeds of a row may have no times, as they shared their device.
    """
    columns: dict[str, list[Sequence[float | None]]] = {}
    for curve in curves:
        for key, values in curve.items():
            columns.setdefault(key, []).append(values)
    return {key: np.mean(np.array(of_seeds, np.float64), axis=0) for key, of_seeds in columns.items()}


def _lines(curves: Mapping[str, Mapping[str, Any]], x: str, y: str, scale: float = 1.0) -> list[Line]:
    """Return a line for each curve that has both columns; the styles count all curves, as the legend does."""
    lines = []
    for style, curve in enumerate(curves.values()):
        if x in curve and y in curve:
            known = np.isfinite(curve[x]) & np.isfinite(curve[y])
            lines.append(Line(style, (curve[x][known] / scale).tolist(), curve[y][known].tolist()))
    return lines


def _score(result: Result) -> float:
    """Return F1 at threshold 0, where the papers score; the oldest files have only the model's own threshold."""
    scores = result.content["scores"]
    return float(scores.get("at_0", scores["own"])["f1"])


def _mean_score(results: Sequence[Result]) -> float:
    return float(np.mean([_score(result) for result in results]))


def _title_of_score(rows: Rows) -> str:
    tasks = {result.task for results in rows.values() for result in results}
    return "accuracy, %" if tasks == {"answerability"} else "F1, %"


def _mean_cost(results: Sequence[Result], key: str) -> float | None:
    values = [result.content["cost"][key] for result in results if is_number(result.content["cost"].get(key))]
    complete = len(values) == len(results) or key in TIME_COSTS  # times may be recorded by some of the runs only
    return float(np.mean(values)) if values and complete else None


def _device(results: Sequence[Result]) -> str | None:
    """Return the device that times were measured on; runs without times count only if none has any."""
    costs = [result.content["cost"] for result in results]
    devices = {cost.get("device") for cost in [cost for cost in costs if cost.keys() & set(TIME_COSTS)] or costs}
    return devices.pop() if len(devices) == 1 else None


def _most_common(devices: Sequence[str | None]) -> str | None:
    known = [device for device in devices if device]
    return max(dict.fromkeys(known), key=known.count, default=None)


def _cost_axis(cost: str, largest: float) -> tuple[str, float]:
    """Return the title of the axis of a cost, and the size of its unit."""
    if cost == "train_seconds":
        unit, size = _time_unit(largest)
        return f"training time, {unit}", size
    if cost == "inference_seconds_per_1000":
        return "inference, ms per question", 1.0  # seconds per 1,000 questions
    return "trained parameters", 1.0


def _time_unit(seconds: float) -> tuple[str, float]:
    return next(((unit, size) for unit, size in TIME_UNITS.items() if seconds >= 3 * size), ("s", 1.0))


def _unit(key: str) -> str:
    return f"{SCORE_TITLES[key]}, %" if key in SCORE_TITLES else "cross-entropy"


def _mixer_names(options: Mapping[str, Any]) -> str:
    mixers = options.get("learner.mixer") or []
    names = [mixer["name"] if isinstance(mixer, Mapping) else str(mixer) for mixer in mixers]
    return " + ".join(names) + (" with skip" if options.get("learner.skip") else "") or "head"

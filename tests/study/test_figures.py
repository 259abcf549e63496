"""The figures of tables of results: what is drawn, and labels that can be read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.study.report import figures
from lamella.study.report.svg_plot import WIDE, axis_ticks, log_ticks, place_labels, tick_text
from lamella.study.result_files import Result, parse_result, read_result

KEPT = Path(__file__).parent / "kept"


def result(
    f1: float = 70.0,
    *,
    curve: Mapping[str, Any] | None = None,
    layers: Mapping[str, Any] | None = None,
    fraction: float = 1.0,
    seed: int = 0,
    **cost: Any,
) -> Result:
    content = dict(read_result(KEPT / "dot-seed0.json").content)
    content["scores"] = {**content["scores"], "at_0": {**content["scores"]["own"], "f1": f1}}
    content["cost"] = {**content["cost"], **cost}
    content["options"] = {**content["options"], "learner.fraction": fraction, "learner.seed": seed}
    content |= {key: value for key, value in (("curve", curve), ("layers", layers)) if value}
    return parse_result(content)


def curve(*f1: float, every: float = 0.1, distillation: float | None = None) -> dict[str, Any]:
    epochs = [round(every * (number + 1), 4) for number in range(len(f1))]
    parts = {} if distillation is None else {"parts": {"distillation": [distillation] * len(f1)}}
    seconds = [100 * epoch for epoch in epochs]
    return {
        "epoch": epochs,
        "seconds": seconds,
        "f1": list(f1),
        "exact": list(f1),
        "dev_loss": [2.0] * len(f1),
        **parts,
    }


def texts(svg: str | None) -> list[str]:
    assert svg is not None
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def paths(svg: str | None) -> list[str]:
    assert svg is not None
    return re.findall(r'<path d="M([^"]+)"', svg)


def test_curves_by_epochs_and_by_time() -> None:
    rows = {"dot": [result(curve=curve(50, 60)), result(curve=curve(52, 64), seed=1)], "a <b>": [result()]}
    svg = figures.curves_figure(rows)
    shown = texts(svg)
    for title in ("Dev loss", "EM", "F1"):
        assert f"{title} by epochs" in shown
        assert f"{title} by training time" in shown
    assert "dot" in shown
    assert "a <b>" not in shown  # it has no curve
    assert len(paths(svg)) == 6  # a line per panel: the seeds are averaged
    assert figures.curves_figure({"dot": [result(curve=curve(50, 60))]}) != svg
    assert figures.curves_figure({"dot": [result()]}) is None
    assert figures.curves_figure(rows) == svg


def test_times_are_those_of_the_seeds_that_have_some() -> None:
    untimed = {key: values for key, values in curve(52, 64).items() if key != "seconds"}
    svg = figures.curves_figure({"dot": [result(curve=untimed), result(curve=curve(50, 60), seed=1)]})
    assert "F1 by training time" in texts(svg)
    assert svg == figures.curves_figure({"dot": [result(curve=curve(52, 64)), result(curve=curve(50, 60), seed=1)]})


def test_a_row_evaluated_once_has_no_curve() -> None:
    rows = {"often": [result(curve=curve(50, 60))], "once": [result(curve=curve(50))]}
    assert {"often", "once"} & set(texts(figures.curves_figure(rows))) == {"often"}
    assert figures.curves_figure({"once": rows["once"]}) is None


def test_copies_of_a_run_have_its_curve() -> None:
    rows = {"BERT 1/10e": [result(50)], "BERT 2/10e": [result(60)]}
    assert figures.figure_blocks("t", rows) == []
    blocks = figures.figure_blocks("t", rows, sources={"bert": [result(curve=curve(50, 60))]})
    assert [block.name for block in blocks] == ["t-curves.svg", "t-tenths.svg"]
    assert "bert" in texts(blocks[1].svg)


def test_evaluations_within_a_hundredth_of_a_second_are_drawn() -> None:
    at_once = {**curve(50, 60), "seconds": [0.0, 0.0]}
    assert "training time, s" in texts(figures.curves_figure({"dot": [result(curve=at_once)]}))


def test_distillation_is_drawn_for_the_rows_that_have_it() -> None:
    rows = {"plain": [result(curve=curve(50, 60))], "sda": [result(curve=curve(50, 60, distillation=0.01))]}
    assert [text for text in texts(figures.parts_figure(rows, "distillation")) if text in rows] == ["sda"]
    assert figures.parts_figure({"plain": rows["plain"]}, "distillation") is None


def test_tenths_need_an_evaluation_per_tenth() -> None:
    often, rarely = result(curve=curve(50, 60, 61)), result(curve=curve(50, 60, every=1.0))
    assert "Seconds per tenth of an epoch" in texts(figures.tenths_figure({"often": [often]}))
    assert [
        text for text in texts(figures.tenths_figure({"often": [often], "rarely": [rarely]})) if text == "rarely"
    ] == []
    assert figures.tenths_figure({"rarely": [rarely]}) is None


def test_layers_are_numbered_as_the_encoder_counts() -> None:
    weights = {"start": {"all": [0.2, 0.3, 0.5]}, "end": {"all": [0.1, 0.1, 0.8]}}
    svg = figures.layers_figure({"dot": [result(layers={"layers": [10, 11, 12], "weights": weights})]})
    assert len(paths(svg)) == 2
    assert texts(svg).count("12") == 1
    assert 'stroke-dasharray="6 3"' in (svg or "")  # the end


def test_the_layers_of_classifiers_are_those_of_both_classes() -> None:
    weights = {"answer": {"all": [0.2, 0.8]}, "no answer": {"all": [0.6, 0.4]}}
    earlier = {"layers": [1, 2], "weights": {"answerability": {"all": [0.5, 0.5]}}}  # had the first class alone
    rows = {"dot": [result(layers={"layers": [1, 2], "weights": weights}), result(layers=earlier)]}
    svg = figures.layers_figure(rows)
    assert len(paths(svg)) == 2
    assert "layer (0: embeddings); dashed: no answer" in texts(svg)


def test_the_reference_line_of_less_data() -> None:
    rows = {"10 %": [result(60, fraction=0.1), result(62, fraction=0.1, seed=1)], "100 %": [result(70)]}
    svg = figures.less_data_figure(rows, ("BERT", [result(69)]))
    assert {"BERT", "dot"} <= set(texts(svg))
    assert len(paths(svg)[0].split("L")) == 2
    assert figures.less_data_figure({"100 %": [result(70)]}) is None


def test_the_reference_is_the_run_under_the_heads() -> None:
    def on(encoder: str, **given: Any) -> Result:
        plain = result(**given)
        options = {**plain.content["options"], "encoder.name": encoder}
        return parse_result({**plain.content, "options": options})

    rows = {"10 %": [on("bert@1", fraction=0.1)], "100 %": [on("bert@1")]}
    bert = {"bert@1": [result(69)], "other": [result(1)]}
    assert figures.own_head(rows, bert) == ("bert@1, its own head", bert["bert@1"])
    assert figures.own_head(rows, {"other": bert["other"]}) is None
    assert figures.own_head({**rows, "50 %": [on("other")]}, bert) is None
    (block,) = figures.figure_blocks("t", rows, bert)
    assert "bert@1, its own head" in texts(block.svg)


def test_less_data_has_a_line_per_learner_whatever_seed_and_run_its_encoder_is_from() -> None:
    """Three seeds of a head, each on the encoder of its seed; one is newer, and another is a row of that encoder."""

    def head(fraction: float, seed: int) -> Result:
        plain = result(60 + 10 * fraction + seed, fraction=fraction, seed=seed)
        newer = {"training.compile": False, "training.checkpoint_every": 50.0} if seed == 1 else {}
        options = {**plain.content["options"], "encoder.name": f"bert-seed{seed}@1", **newer}
        return parse_result({**plain.content, "options": options})

    bert = [result(58, seed=seed) for seed in range(3)]
    rows = {f"{fraction:.0%}": [head(fraction, seed) for seed in range(3)] for fraction in (0.1, 0.5, 1.0)}
    rows["BERT 1e"] = bert
    by_run = {"bert@1": bert, **{f"head-fraction{share}": results for share, results in rows.items()}}
    blocks = {block.name: block for block in figures.figure_blocks("t", rows, by_run)}
    block = blocks["t-less-data.svg"]
    (line,) = paths(block.svg)
    assert len(line.split("L")) == 3
    assert "bert@1, its own head" in texts(block.svg)


def test_costs_have_named_points_and_a_front() -> None:
    times = {"cheap": (60, 10), "good": (70, 20), "worse": (65, 30), "elsewhere": (90, 1)}
    rows = {
        name: [result(f1, train_seconds=seconds, device="other" if name == "elsewhere" else "this")]
        for name, (f1, seconds) in times.items()
    }
    svg = figures.costs_figure(rows)
    assert set(times) - set(texts(svg)) == {"elsewhere"}  # times of another device
    (front,) = paths(svg)
    assert len(front.split("L")) == 3  # from cheap to the right, then up to good


def test_rows_that_train_as_many_parameters_have_no_plot_of_their_efficiency() -> None:
    rows = {"0.1 epochs": [result(60, trainable_parameters=1000)], "1 epoch": [result(70, trainable_parameters=1000)]}
    assert figures.efficiency_figure(rows) is None
    assert figures.efficiency_figure({**rows, "head": [result(65, trainable_parameters=10)]}) is not None


def test_the_last_label_of_an_axis_is_not_cut_off() -> None:
    rows = {str(n): [result(60 + n, trainable_parameters=10**n)] for n in range(4, 9)}
    svg = figures.efficiency_figure(rows)
    assert svg is not None
    (center,) = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle" fill="#666">100M<', svg)
    assert float(center) + 4 * 7.5 / 2 <= WIDE[0]


def test_the_blocks_are_those_with_content() -> None:
    rows = {"dot": [result(curve=curve(50, 60, distillation=1.0), train_seconds=5)], "last": [result(train_seconds=9)]}
    rows["last"] = [result(train_seconds=9, trainable_parameters=10)]
    names = [block.name for block in (*figures.figure_blocks("t", rows), *figures.cost_figures("t", rows))]
    assert names == ["t-curves.svg", "t-distillation.svg", "t-tenths.svg", "t-costs.svg", "t-efficiency.svg"]
    assert figures.figure_blocks("t", {"dot": [result()]}) == []


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(300, 400), st.integers(150, 250)), min_size=2, max_size=12, unique=True))
def test_labels_do_not_overlap(points: list[tuple[float, float]]) -> None:
    boxes = place_labels(points, [60.0] * len(points), (60, 30, 740, 400))
    for box in boxes:
        assert 60 <= box[0] < box[2] <= 740
        assert 30 <= box[1] < box[3] <= 400
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
def test_ticks_enclose_the_values(values: list[float]) -> None:
    ticks = axis_ticks(values)
    assert ticks[0] <= min(values) <= max(values) <= ticks[-1]
    assert 2 <= len(ticks) <= 12
    positive = [abs(value) + 1 for value in values]
    assert log_ticks(positive)[0] <= min(positive)
    assert log_ticks(positive)[-1] >= max(positive)
    assert np.all(np.diff(ticks) > 0)


@pytest.mark.parametrize(("value", "text"), [(0.1 + 0.2, "0.3"), (20000, "20k"), (1.5e6, "1.5M"), (-2, "−2"), (0, "0")])
def test_the_text_of_a_tick(value: float, text: str) -> None:
    assert tick_text(value) == text

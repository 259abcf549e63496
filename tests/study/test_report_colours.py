"""The colours of curves in the HTML report, as people with normal and with colour-blind eyes see them."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest
from numpy.typing import NDArray

Colours = NDArray[np.float64]

CARDS = {"light": "#ffffff", "dark": "#1c2226"}  # the backgrounds, `--card` in report.css
EYES = {  # of linear RGB (Machado et al. 2009)
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def palette(theme: str) -> list[str]:
    script = (resources.files("lamella.study.report") / "assets" / "report.js").read_text("utf-8")
    match = re.search(rf"COLOURS = {{.*?{theme}: \[(.*?)\]", script, re.DOTALL)
    assert match
    return re.findall(r"#[0-9a-f]{6}", match[1])


def linear(colour: str) -> Colours:
    share = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(rgb: Colours) -> Colours:
    xyz = TO_XYZ @ rgb.clip(0, 1) / TO_XYZ.sum(1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", CARDS)
def test_curves_have_distinct_colours_for_all_eyes(theme: str, eyes: str) -> None:
    seen = {colour: lab(EYES[eyes] @ linear(colour)) for colour in palette(theme)}
    assert len(seen) == 6
    distances = {(a, b): np.linalg.norm(seen[a] - seen[b]) for a, b in itertools.combinations(seen, 2)}
    assert min(distances.values()) > 20, min(distances, key=lambda pair: distances[pair])


@pytest.mark.parametrize("theme", CARDS)
def test_curves_stand_out_from_the_background(theme: str) -> None:
    def luminance(colour: str) -> float:
        return float(TO_XYZ[1] @ linear(colour)) + 0.05

    for colour in palette(theme):
        darker, lighter = sorted((luminance(colour), luminance(CARDS[theme])))
        assert lighter / darker >= 3, colour  # WCAG 2.1, 1.4.11

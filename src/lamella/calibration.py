"""A fitted calibration: the few numbers that turn scores into the probability of "no answer"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lamella.section import Section, Share

Score = Annotated[float, Field(ge=-1e12, le=1e12)]  # sums and products of these do not overflow
Divisor = Annotated[float, Field(ge=1e-12, le=1e12)]


class TunedOn(Section):
    """The questions on which a threshold was tuned, or a calibration fitted."""

    data: str = Field(description="file names, without folders")
    questions: int = Field(ge=1)
    sha256: str = Field(description="hash of the sorted question ids")
    precision: Literal["bf16", "fp16", "int8"] | None = None  # of the answers; None: fp32, or not recorded


class FeatureWeight(Section):
    """The share of one feature of an n-best list in the log-odds of "no answer"."""

    name: Literal["null_odds", "margin", "length", "windows", "entropy"]  # see `lamella.inference.abstention`
    mean: Score
    scale: Divisor
    weight: Score  # of (value - mean) / scale


class Calibration(Section):
    """How the scores of the candidates are turned into the probability of "no answer".

    `temperature`: the logistic function of odds / temperature + bias. `isotonic`: interpolate linearly between the
    given pairs of odds and probability, constant beyond the ends. `features`: the logistic function of a weighted sum
    of features plus the bias; the null odds of a prediction are then this sum, the log-odds of "no answer".
    """

    method: Literal["temperature", "isotonic", "features"]
    temperature: Divisor = 1.0
    bias: Score = 0.0
    odds: list[float] = Field(default=[])
    probability: list[Share] = Field(default=[])
    features: list[FeatureWeight] = Field(default=[])
    answerable: float | None = Field(default=None, gt=0, lt=1)  # share of the questions it was fitted on
    fitted_on: TunedOn | None = None  # None in files of older versions, where `decoding.tuned_on` covers both

    @model_validator(mode="after")
    def _check_pairs(self) -> Calibration:
        if len(self.odds) != len(self.probability) or (self.method == "isotonic" and not self.odds):
            raise ValueError("one probability for each value of odds, and at least one pair if isotonic")
        if self.odds != sorted(set(self.odds)) or self.probability != sorted(self.probability):
            raise ValueError("strictly increasing odds with non-decreasing probabilities")
        if (self.method == "features") != bool(self.features):
            raise ValueError("features with the method features, and with no other")
        return self

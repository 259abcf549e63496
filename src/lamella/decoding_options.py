"""The options of decoding: how the logits of windows become an answer, or "no answer"."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lamella.calibration import Calibration, TunedOn
from lamella.section import Section

Merge = Literal["scores", "leads"]


class DecodingOptions(Section):
    """How logits become an answer."""

    n_best_size: int = Field(default=20, ge=1, description="candidate answers kept per question")
    max_answer_length: int = Field(default=30, ge=1, description="maximum tokens per answer")
    method: Literal["joint", "independent"] = Field(
        default="joint",
        description="`joint`: choose start and end together; `independent`: choose each separately, without a length "
        "limit (as BERTVision)",
    )
    max_context_only: bool = Field(
        default=False,
        description="an answer may start only in the window with the most context around it (as the original BERT "
        "code)",
    )
    merge: Merge = Field(
        default="scores",
        description="how the windows of a long text compete: `scores`: by the scores of their spans (as SQuAD's code); "
        '`leads`: by the lead of a span over "no answer" in its own window, and by the words that the window shares '
        "with the question",
    )
    null_score_diff_threshold: float = Field(
        default=0.0, description='answer "no answer" if its score exceeds the best span\'s score by more than this'
    )
    window_penalty: float = Field(
        default=0.0,
        ge=0,
        description='added to the score of "no answer" for each doubling of the number of windows that were read; '
        "written by `lamella calibrate`",
    )
    calibration: Calibration | None = Field(
        default=None, description='maps null odds to the probability of "no answer"; written by `lamella calibrate`'
    )
    tuned_on: TunedOn | None = Field(
        default=None, description="questions the threshold was tuned on; written by `lamella calibrate`"
    )

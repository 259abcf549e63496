"""The shipped readers: thin, complete, on encoders with portable names, with the scores of `results/`."""

from __future__ import annotations

import json
import runpy
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from lamella.encoder.sources import READERS
from lamella.files import file_sha256
from lamella.models.card import Contents, model_card
from lamella.models.facts import DomainScores
from lamella.models.saved import CARD, read_saved

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
HELD_OUT = ", ".join(
    f"{name}-{kind}.json.gz"
    for kind, names in {
        "held": ("squad2-train-backtranslated", "squad-train-human", "tydi-en-train", "hotpot-multicontext-train"),
        "long": ("squad2-train-backtranslated", "squad-train-human", "tydi-en-train"),
        "articles": ("squad2-train-backtranslated", "squad-train-human"),
    }.items()
    for name in names
)
# Files of texts written for this project; where two thirds of the questions have an answer, some are made negatives.
OWN = [f"many-kinds-held-{group}-half.json" for group in ("informal", "learned", "public", "technical")]
TUNED_ON = ", ".join([HELD_OUT, *OWN, "contrast-held-articles.json", "contrast-held-other-half.json"])
KOREAN = "korquad-train-held.json.gz, tydi-ko-train-held.json.gz"
KOREAN_RESULTS = RESULTS / "korean" / "reader"
KOREAN_SETS = {
    "korquad-dev": "KorQuAD 1.0, dev",
    "korquad-dev-mixed": "the same, mixed",
    "tydi-ko-dev": "TyDi QA, Korean dev",
    "cs224n-dev": "CS224n, dev (English)",
}
# The folder of a reader, the run that trained it, and the data that its threshold was tuned on.
SHIPPED = {
    READERS / "default": ("minilm-contrast-start", TUNED_ON),
    ROOT / "models" / "e5-small": ("e5-small-contrast-start", TUNED_ON),
    ROOT / "models" / "mpnet": ("mpnet-contrast-start", TUNED_ON),
    ROOT / "models" / "korean": ("korean/reader/korean", KOREAN),
}
WILD = {
    entry["reader"]: [DomainScores.model_validate(row) for row in entry["domains"]]
    for entry in json.loads((RESULTS / "wild" / "scores.json").read_text())["readers"]
}
# The cross-fitted F1 on the dev set of CS224n that a run was to reach.
GOALS = {
    "`default`": ("minilm-contrast-start", 76.0),
    "`models/e5-small`": ("e5-small-contrast-start", 81.0),
    "`models/mpnet`": ("mpnet-contrast-start", 83.0),
    "DeBERTa-v3-xsmall": ("deberta-by-labels-thin", 84.5),
}


def name_of(folder: Path) -> str:
    """Return what a shipped reader is loaded by, from the root of the repository."""
    return folder.name if folder.parent == READERS else f"models/{folder.name}"


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_reader_is_thin_and_documented(folder: Path) -> None:
    run, tuned_on = SHIPPED[folder]
    saved, result = read_saved(folder), json.loads((RESULTS / f"{run}.json").read_text())
    assert (folder / "model.safetensors").stat().st_size <= 11_000_000
    with safe_open(folder / "model.safetensors", "numpy") as tensors:
        shapes = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 - not a dictionary
        assert {tensor.get_dtype() for tensor in shapes} == {"F16"}
        parameters = sum(prod(tensor.get_shape()) for tensor in shapes)
    assert parameters == result["cost"]["trainable_parameters"]
    assert parameters <= 0.05 * result["encoder"]["parameters"]
    assert not Path(saved.base_name).is_absolute()
    assert saved.weights_sha256 == file_sha256(folder / "model.safetensors")
    assert saved.base_tensors_sha256 is not None, "it must load on its encoder from any file"
    assert (saved.base_name, saved.base_sha256) == (result["encoder"]["name"], result["encoder"]["sha256"])
    # Scored twice, at the end of training and from the saved run: bf16 on a GPU differs from time to time.
    assert saved.facts.results["f1"] == pytest.approx(result["scores"]["at_0"]["f1"], abs=0.02)
    assert saved.config.decoding.tuned_on is not None
    assert saved.config.decoding.tuned_on.data == tuned_on
    contents = Contents(
        name=name_of(folder),
        gives_text=True,
        trained_parameters=parameters,
        encoder_parameters=result["encoder"]["parameters"],
        bytes=(folder / "model.safetensors").stat().st_size,
        half=True,
    )
    assert (folder / CARD).read_text(encoding="utf-8") == model_card(saved, contents), "generate the card again"


def test_the_korean_reader_leaves_out_what_its_encoder_brings() -> None:
    saved = read_saved(ROOT / "models" / "korean")
    assert {path.name for path in (ROOT / "models" / "korean").iterdir()} == {CARD, "config.json", "model.safetensors"}
    assert saved.base_tokenizer_sha256 is not None
    assert saved.rounding is not None, "it must load on the original encoder, which users have"


def test_the_page_of_the_korean_reader_has_its_scores() -> None:
    page = (ROOT / "docs" / "results" / "korean-reader.md").read_text(encoding="utf-8")
    scores = json.loads((KOREAN_RESULTS / "scores.json").read_text())
    for data, title in KOREAN_SETS.items():
        thin, full = scores["korean"][data], scores["korean-full"][data]
        row = f"| {title} | {thin['total']:,} ({thin.get('NoAns_total', 0):,}) | "
        row += " | ".join(f"{value:.1f}" for value in (thin["exact"], thin["f1"], full["exact"], full["f1"]))
        assert f"{row} |\n" in page
    domains = {row.data: row for row in WILD["models/korean"]}
    for data, shipped in scores["models/korean"].items():
        refused = domains[f"{data}.json.gz"].refused
        row = f"| {KOREAN_SETS[data]} | {shipped['total']:,} | {shipped['exact']:.1f} | {shipped['f1']:.1f} | "
        assert f"{row}{shipped['f1_at_0']:.1f} | {refused:.1f} % |\n" in page
        assert shipped["f1_at_0"] == pytest.approx(scores["korean"][data]["f1"], abs=0.1), "scored on a GPU"


def test_the_korean_reader_shows_what_it_loses_on_the_original() -> None:
    page = (ROOT / "docs" / "results" / "korean-reader.md").read_text(encoding="utf-8")
    measured = read_saved(ROOT / "models" / "korean").facts.rounded_base
    result = json.loads((KOREAN_RESULTS / "rounded-base.json").read_text())
    assert [(row.data, row.questions, row.draws) for row in measured] == [
        (row["data"], row["questions"], result["draws"]) for row in result["files"]
    ]
    for row, source in zip(measured, result["files"], strict=True):
        assert row.change == pytest.approx(source["change"]["mean"], abs=0.005)
        line = f"{row.f1:.2f} | {row.change:+.2f} ({row.change_low:+.2f}, {row.change_high:+.2f}) | {row.changed:.1f} %"
        assert f"| {KOREAN_SETS[row.data.partition('.')[0]]} | {row.questions} | {line} |\n" in page


def test_the_page_of_the_readers_states_which_goals_are_reached() -> None:
    page = (RESULTS / "page.toml").read_text(encoding="utf-8")
    reached = {name: crossfit_f1(run) >= goal for name, (run, goal) in GOALS.items()}
    for text, state in (("Reached", True), ("Not reached", False)):
        names = ", ".join(name for name in GOALS if reached[name] is state) or "none"
        assert f"\n- {text}: {names}.\n" in page
    for name, (_, goal) in GOALS.items():
        assert f"{goal:g} ({name})" in page


def crossfit_f1(run: str) -> float:
    result = json.loads((RESULTS / f"{run}.json").read_text(encoding="utf-8"))
    return float(result["scores"]["crossfit"]["f1"])


def test_the_picture_of_the_readme_shows_the_runs_that_ship() -> None:
    runs = runpy.run_path(str(ROOT / "docs" / "picture.py"))["RUNS"]
    assert {shipped for _, _, shipped in runs.values()} == {
        run for folder, (run, _) in SHIPPED.items() if folder.name != "korean"
    }


def test_every_reader_in_the_folder_is_tested() -> None:
    assert {folder for folder in SHIPPED if folder.parent == ROOT / "models"} == set((ROOT / "models").iterdir())


def test_the_cards_have_the_scores_of_the_page() -> None:
    for folder in SHIPPED:
        assert read_saved(folder).facts.domains == WILD[name_of(folder)]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_card_notes_scores_from_before_windows_competed_as_they_do_now(folder: Path) -> None:
    saved = read_saved(folder)
    outdated = any(domain.merge != saved.config.decoding.merge for domain in saved.facts.domains)
    card = (folder / CARD).read_text(encoding="utf-8")
    assert ("before the windows of a long text competed as they do now" in card) == outdated

"""Languages: registration, detection, and the contract that every registered language fulfils."""

from __future__ import annotations

import unicodedata

import pytest
from typer.testing import CliRunner

from lamella import registry
from lamella.cli import app
from lamella.data.examples import Context, Example
from lamella.errors import UsageError
from lamella.languages import detect_language, get_language
from lamella.languages.scripts import main_script, script_share
from lamella.scoring.answer_metrics import exact, f1
from lamella.scoring.metrics import language_of

KOREAN = "서울은 한강을 끼고 있는 대한민국의 수도이다."
TEXTS = ["", "the", "The Elbe (1,094 km)", KOREAN, "“Ünïcödé” – 3.5", "\u00a0 x\ty "]


def test_every_module_of_a_language_registers_it() -> None:
    assert registry.names("language") == ["en", "ko"]


@pytest.mark.parametrize("name", registry.names("language"))
@pytest.mark.parametrize("text", TEXTS)
def test_the_contract_of_a_language(name: str, text: str) -> None:
    language = get_language(name)
    normalised = language.normalise(text)
    assert language.normalise(normalised) == normalised
    assert "".join(language.units(normalised)) == normalised.replace(" ", "")
    assert 0 <= language.confidence(text) <= 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "en"),
        ("12 + 3", "en"),
        ("The capital of Korea is 서울.", "en"),
        ("Die Elbe ist ein Fluss.", "en"),  # the default for all other languages
        (KOREAN, "ko"),
        (unicodedata.normalize("NFD", KOREAN), "ko"),
        ("서울(Seoul)은 대한민국의 수도이다.", "ko"),
    ],
)
def test_detection(text: str, name: str) -> None:
    assert detect_language(text) == name


def test_the_language_of_examples_is_that_of_most_contexts() -> None:
    examples = [Example(str(n), "?", Context(KOREAN if n % 3 else "Rome")) for n in range(200)]
    assert language_of(examples) == "ko"
    assert language_of([]) == "en"


def test_an_unknown_language_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="language: expected one of en, ko, got 'kr'"):
        get_language("kr")
    result = CliRunner().invoke(app, ["evaluate", "demo:dev", "none.json", "--language", "kr"])
    assert isinstance(result.exception, UsageError)  # before any file is read
    assert str(result.exception) == "language: expected one of en, ko, got 'kr'."


def test_a_new_language_is_one_class() -> None:
    class German:
        """German."""

        def normalise(self, text: str) -> str:
            return text.casefold()

        def units(self, normalised: str) -> list[str]:
            return normalised.split()

        def confidence(self, text: str) -> float:
            return float("ß" in text)

    try:
        registry.register("language", "de")(German)
        assert detect_language("Straße") == "de"
        assert exact("Die Straße", "die STRASSE", get_language("de")) == 1
        assert f1("die Straße", "Straße", get_language("de")) == pytest.approx(2 / 3)
    finally:
        registry.FAMILIES["language"].parts.pop("de", None)
        get_language.cache_clear()


def test_scripts() -> None:
    assert [main_script(text) for text in ("abc", "été", "Москва", KOREAN, "東京", "12 →")] == [
        "latin", "latin", "cyrillic", "hangul", "han", "other"
    ]  # fmt: skip
    assert script_share("ab가", "hangul") == pytest.approx(1 / 3)

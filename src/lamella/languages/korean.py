"""Korean: the metric of KorQuAD 1.0."""

from __future__ import annotations

import string

from lamella.languages.hangul import compose_hangul
from lamella.languages.scripts import script_share
from lamella.registry import register


@register("language", "ko")
class Korean:
    """Korean, detected by its Hangul: KorQuAD's normalisation, F1 over characters."""

    metrics = ("word_f1",)  # as other data sets are scored

    def normalise(self, text: str) -> str:
        """Replace quotes and brackets by spaces; lower the case; remove ASCII punctuation; collapse white space.

        Syllables are composed first, so that a text and its decomposed form (NFD) are equal.

        >>> Korean().normalise("《햄릿》(Hamlet), 3.5막")
        '햄릿 hamlet 35막'
        """
        return " ".join(compose_hangul(text).translate(_QUOTES).lower().translate(_NO_PUNCTUATION).split())

    def units(self, normalised: str) -> str:
        return normalised.replace(" ", "")  # a string is a sequence of characters

    def confidence(self, text: str) -> float:
        return script_share(text, "hangul")


_QUOTES = dict.fromkeys(map(ord, "'\"《》<>〈〉()‘’"), " ")
_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))

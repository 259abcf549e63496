"""English: the metric of SQuAD."""

from __future__ import annotations

import re
import string

from lamella.registry import register


@register("language", "en")
class English:
    """English, and the default for all other languages: SQuAD's normalisation, F1 over words."""

    def normalise(self, text: str) -> str:
        """Lower the case; remove ASCII punctuation and articles; collapse white space.

        >>> English().normalise("The  Rock'n'Roll era, an age")
        'rocknroll era age'
        """
        return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())

    def units(self, normalised: str) -> list[str]:
        return normalised.split()

    def confidence(self, text: str) -> float:
        return 0.5  # the default: any other language must be more than half sure


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))

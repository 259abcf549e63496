"""Extract the text of a PDF. This is done in a process of its own: see `text_process`."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Sequence

MOST_PAGES = 2000
LOCKED = "expected a PDF that everyone can open, got one that asks for a password; remove the password"
HUGE = "expected a PDF of reasonable size, got one that unpacks to far too much; save it as text"
SCANNED = "expected a PDF with text, got pictures only, such as a scan; recognise its text first"
DAMAGED = "expected a PDF, got a damaged one; save it again, or print it to a new PDF"
# Typesetters write "fi" as one character, which no question has, and most tokenizers do not know.
LIGATURES = str.maketrans(
    dict(zip("\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06", ("ff", "fi", "fl", "ffi", "ffl", "st", "st"), strict=True))
)
# The parts of a word that a typesetter has divided between two lines. It is looked for at the first letter of a word
# only: in a long word, to begin at each letter would take quadratic time.
DIVIDED = re.compile(r"(?<![^\W\d_])([^\W\d_]+)([-\u2010\u00ad])[^\S\n]*\n[^\S\n]*([^\W\d_]+)")
WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
SOFT_HYPHEN = "\u00ad"  # only where a word is divided
# "short- and long-term": the hyphen stands for the rest of the word, and the line happens to end there.
CONJUNCTIONS = {"and", "bis", "en", "et", "o", "oder", "of", "or", "ou", "to", "und", "y"}


class UnreadablePdfError(ValueError):
    """The reason why a PDF has no text that can be read; pypdf raises other ValueErrors where a PDF is damaged."""


def pages_of_pdf(data: bytes, most_characters: int) -> list[str]:
    """Return the text of each page of a PDF; if there is none, raise UnreadablePdfError."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, LimitReachedError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it reports every repaired detail
    pages: list[str] = []
    length = 0
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadablePdfError(LOCKED)
        if len(reader.pages) > MOST_PAGES:
            raise UnreadablePdfError(f"expected at most {MOST_PAGES:,} pages, got {len(reader.pages):,}; split it")
        for page in reader.pages:
            pages.append(page.extract_text().strip().translate(LIGATURES))
            length += len(pages[-1])
            if length > most_characters:
                raise UnreadablePdfError(f"expected at most {most_characters:,} characters, got more; split it")
    except DependencyError:
        raise UnreadablePdfError(LOCKED) from None
    except (LimitReachedError, MemoryError):
        raise UnreadablePdfError(HUGE) from None
    except UnreadablePdfError:
        raise
    except Exception:  # pypdf raises whatever a damaged structure leads to
        raise UnreadablePdfError(DAMAGED) from None
    if not any(pages):
        raise UnreadablePdfError(SCANNED)
    return join_divided_words(pages)


def join_divided_words(pages: Sequence[str]) -> list[str]:
    """Return pages in which words that were divided between two lines are whole again.

    A compound keeps its hyphen. The rest of the document shows which words are compounds: "fine-tuned" is one where
    there is "fine-tuned", "fine-tuning", or both "fine" and "tuned", unless there is "finetuned" as well.
    """
    counts = Counter(word.lower() for page in pages for word in WORD.findall(DIVIDED.sub(" ", page)))
    parts = {part for word in counts for part in word.split("-")}
    first_parts = {word.partition("-")[0] for word in counts if "-" in word} & counts.keys()

    def join(found: re.Match[str]) -> str:
        head, hyphen, tail = found.groups()
        whole, compound = head + tail, f"{head}-{tail}"
        times_whole, times_compound = counts[whole.lower()], counts[compound.lower()]
        if tail in CONJUNCTIONS or not (tail[0].islower() or (times_whole and whole.isupper())):
            return found[0]
        two_words = min(len(head), len(tail)) > 2 and {head.lower(), tail.lower()} <= parts
        abbreviation = head.isupper() and len(head) > 1 and tail.islower()
        likely = not times_whole and (abbreviation or two_words or head.lower() in first_parts)
        part_of_one = found.string[max(0, found.start() - 1)] == "-"  # of a compound of three words or more
        is_compound = part_of_one or likely or times_compound > times_whole
        return compound if is_compound and hyphen != SOFT_HYPHEN else whole

    return [DIVIDED.sub(join, page) for page in pages]

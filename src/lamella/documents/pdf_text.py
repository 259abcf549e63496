"""Extract the text of a PDF. This is done in a process of its own: see `text_process`."""

from __future__ import annotations

import io
import logging

MOST_PAGES = 2000
LOCKED = "expected a PDF that everyone can open, got one that asks for a password; remove the password"
HUGE = "expected a PDF of reasonable size, got one that unpacks to far too much; save it as text"
SCANNED = "expected a PDF with text, got pictures only, such as a scan; recognise its text first"
DAMAGED = "expected a PDF, got a damaged one; save it again, or print it to a new PDF"
# Typesetters write "fi" as one character, which no question has, and most tokenizers do not know.
LIGATURES = str.maketrans(
    dict(zip("\ufb00\ufb01\ufb02\ufb03\ufb04\ufb05\ufb06", ("ff", "fi", "fl", "ffi", "ffl", "st", "st"), strict=True))
)


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
    return pages

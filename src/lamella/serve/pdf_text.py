"""Write the text of a PDF on stdin to stdout: `python -m lamella.serve.pdf_text MOST_CHARACTERS`.

It runs in a process of its own, so that a damaged or malicious file costs the server nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys

MOST_PAGES = 2000
MOST_MEMORY = 1 << 30
MOST_SECONDS = 25  # of processor time
LOCKED = "expected a PDF that everyone can open, got one that asks for a password; remove the password"
HUGE = "expected a PDF of reasonable size, got one that unpacks to far too much; save it as text"
DAMAGED = "expected a PDF, got a damaged one; save it again, or print it to a new PDF"


def main() -> None:
    _limit_resources()
    try:
        text = text_of_pdf(sys.stdin.buffer.read(), int(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
    except MemoryError:
        sys.exit(HUGE)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


def text_of_pdf(data: bytes, most_characters: int) -> str:
    """Return the text of a PDF, its pages separated by blank lines; without any, raise ValueError with the reason."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, LimitReachedError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it reports every repaired detail
    pages: list[str] = []
    length = 0
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise ValueError(
                "expected a PDF that can be opened by everyone, got one that asks for a password; remove it"
            )
        if len(reader.pages) > MOST_PAGES:
            raise ValueError(f"expected at most {MOST_PAGES:,} pages, got {len(reader.pages):,}; split it")
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            length += len(pages[-1])
            if length > most_characters:
                raise ValueError(f"expected at most {most_characters:,} characters, got more; split it")
    except DependencyError:
        raise ValueError(
            "expected a PDF that can be opened by everyone, got an encrypted one; remove the password"
        ) from None
    except LimitReachedError:
        raise ValueError(
            "expected a PDF of reasonable size, got one that unpacks to far too much; save it as text"
        ) from None
    except (MemoryError, ValueError):
        raise
    except Exception:  # pypdf raises whatever a damaged structure leads to
        raise ValueError(DAMAGED) from None
    if not any(pages):
        raise ValueError("expected a PDF with text, got pictures only, such as a scan; recognise its text first")
    return "\n\n".join(filter(None, pages))


def _limit_resources() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))


if __name__ == "__main__":
    main()

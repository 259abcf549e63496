"""Write the text of a file on stdin to stdout: `python -m lamella.serve.text_process KIND CHARACTERS SECONDS`.

It runs in a process of its own, so that a damaged or malicious file costs the server nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys

MOST_MEMORY = 1 << 30


def main() -> None:
    kind, most_characters, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _limit_resources(seconds)
    data = sys.stdin.buffer.read()
    try:
        text = _read(data, kind, most_characters)
    except ValueError as error:
        sys.exit(str(error))
    except MemoryError:
        sys.exit("expected a file of reasonable size, got one that takes too much memory; save it as text")
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


def _read(data: bytes, kind: str, most_characters: int) -> str:
    if kind == "html":
        from lamella.data.html_text import text_of_html

        return text_of_html(data.decode("utf-8"))
    from lamella.serve.pdf_text import text_of_pdf

    return text_of_pdf(data, most_characters)


def _limit_resources(seconds: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):  # Windows has no such limits
        import resource

        os.nice(10)  # answers come first
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


if __name__ == "__main__":
    main()

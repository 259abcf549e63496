"""Turn an opened file into text: bytes and a file name in, text out. Nothing is read from disk."""

from __future__ import annotations

from pathlib import PurePath

from lamella.documents.file_text import UnknownKindError
from lamella.documents.file_text import text_of_file as read_file
from lamella.documents.text_process import TextProcess
from lamella.errors import UnreadableError, truncate
from lamella.serve.refusals import RefusedError, TooLargeError
from lamella.unpacking import TooLargeFileError

MOST_BYTES = 20 << 20
MOST_CHARACTERS = 2_000_000


class UnreadableTextError(RefusedError):
    """A file from which no text can be read."""

    kind = "unreadable_text"


class UnknownTextError(RefusedError):
    """A file of a kind that is not supported."""

    status = 415
    kind = "unsupported_file"


def text_of_file(data: bytes, name: str, content_type: str = "") -> tuple[str, str]:
    """Return the text of a file and its kind: txt, md, html, pdf or docx."""
    path = PurePath(name)
    name = f"{truncate(path.stem, 60)}{truncate(path.suffix, 20)}" or "text"
    try:
        with TextProcess() as process:
            found = read_file(
                data, name, content_type, process=process, most_bytes=MOST_BYTES, most_characters=MOST_CHARACTERS
            )
    except UnknownKindError as error:
        raise UnknownTextError(str(error)) from None
    except TooLargeFileError as error:
        raise TooLargeError(str(error)) from None
    except UnreadableError as error:
        raise UnreadableTextError(str(error)) from None
    return found.text, found.kind

"""The command that keeps the index of a folder of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lamella.cli.app import AsJson, DocumentEncoding, app


@app.command()
def index(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with the documents.")],
    encoding: DocumentEncoding = None,
    as_json: AsJson = False,
) -> None:
    """Keep an index of a folder of documents, for ask --in.

    The next `lamella index` reads only what changed.
    """
    from lamella.documents.collection import Documents
    from lamella.errors import counted, printable, sized

    documents = Documents.index(folder, encoding)
    path = documents.index_file
    size = path.stat().st_size
    if as_json:
        record = {
            "documents": len(documents),
            "passages": len(documents.passages),
            "read": documents.read,
            "removed": documents.removed,
            "skipped": documents.skipped,
            "file": str(path),
            "bytes": size,
        }
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    skipped = f", {len(documents.skipped):,} skipped" if documents.skipped else ""
    typer.echo(
        f"{printable(str(path))}: {counted(len(documents), 'document')} in "
        f"{counted(len(documents.passages), 'passage')} "
        f"({documents.read:,} read, {documents.removed:,} removed{skipped}), {sized(size)}"
    )

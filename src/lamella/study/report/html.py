"""The report: one HTML file about any number of runs, which opens anywhere and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from lamella.errors import UsageError
from lamella.files import write_text
from lamella.version import __version__


def write_report(
    folders: Sequence[Path], out: Path, *, data: str | None = None, title: str | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write the report of some run folders, or folders of runs; gives what was written, for a person to be told.

    `data` are the questions that the runs were scored on, where they do not say so themselves. In a file that ends in
    .md it is a page of words and tables, as `study/report/markdown.py` makes it.
    """
    from lamella.study.report.collect import collect

    if out.is_dir():
        raise UsageError(f"{out}: expected the name of a file to write, as report.html; it is a folder.")
    if out.exists() and not overwrite:
        raise UsageError(f"{out}: exists already; choose another --out, or pass --overwrite.")
    if out.suffix == ".md":
        from lamella.study.report.markdown import result_page

        page, count = result_page(folders, data=data, title=title)
        write_text(out, page)
        return {"report": str(out), "runs": count, "bytes": len(page.encode()), "notes": []}
    content = collect(folders, data)
    page = render(content, title=title or _title(content["runs"]))
    write_text(out, page)
    return {"report": str(out), "runs": len(content["runs"]), "bytes": len(page.encode()), "notes": content["notes"]}


def render(content: dict[str, Any], *, title: str) -> str:
    """The page with everything inside it.

    The policy in its head lets a browser load nothing and run the two scripts alone, which it knows by their hashes:
    what data or a run's name may hold is shown, never run.
    """
    page = resources.files("lamella.study.report") / "assets"
    library, script = ((page / name).read_text("utf-8") for name in ("plotly-cartesian.min.js", "report.js"))
    hashes = " ".join(f"'sha256-{_sha256(one)}'" for one in (library, script))
    made = {"made": datetime.now(UTC).strftime("%Y-%m-%d"), "lamella": __version__}
    parts = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:",
        "style": (page / "report.css").read_text("utf-8"),
        "library": library,
        "content": _embedded({**content, **made}),
        "script": script,
    }
    # In one go, so that an @name@ inside what is filled in stays text.
    return re.sub(
        "@(" + "|".join(parts) + ")@", lambda found: parts[found[1]], (page / "report.html").read_text("utf-8")
    )


def _embedded(content: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in, and has a UTF-8 form whatever it holds."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _title(records: Sequence[dict[str, Any]]) -> str:
    return str(records[0]["name"]) if len(records) == 1 else f"{len(records)} runs"

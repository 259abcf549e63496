"""HTML is read as a browser shows it."""

from __future__ import annotations

import time

import pytest

from lamella.data.html_text import looks_like_html, text_of_html


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One</p><p>Two</p>", "One\n\nTwo"),
        ("<p>One<br>Two<br/>Three</p>", "One\n\nTwo\n\nThree"),
        ("<p>One\n   two\tthree</p>", "One two three"),
        ("<p>A <b>bold</b>, <i>slanted</i> word.</p>", "A bold, slanted word."),
        ("<style>p {}</style><p>Text</p><script>if (a < b) { '</p>' }</script>", "Text"),
        ("<script>x</script>After<noscript>Enable it</noscript>", "After"),
        ("Tom &amp; Jerry &lt;3 caf&eacute; &#8364;5 &nosuch;", "Tom & Jerry <3 café €5 &nosuch;"),
        ("<table><tr><td>1655</td><td>Titan</td></tr><tr><td>1671</td></tr></table>", "1655 Titan\n\n1671"),
        ("<ul><li>one<li>two</ul>", "one\n\ntwo"),
        ("<title>Titan</title><h1>A moon</h1>", "Titan\n\nA moon"),
        ("<pre>a\n  b\r\nc\rd</pre>", "a\n\nb\n\nc\n\nd"),
        ("<!-- hidden --><p>seen</p>", "seen"),
        ("<p>2005.</p><![foo[ x ]]><p>2006.</p><!['>", "2005.\n\n2006."),
        ("<p>never closed", "never closed"),
        ("<script>never closed", ""),
        ("a < b and c > d", "a < b and c > d"),
        ("<div><div></div></div>", ""),
    ],
)
def test_the_text_of_html(html: str, text: str) -> None:
    assert text_of_html(html) == text


@pytest.mark.parametrize(
    "html",
    [
        "<!DOCTYPE html><html>",
        "\n <!doctype HTML PUBLIC '-//W3C//DTD HTML 4.01//EN'>",
        "<html lang='en'>",
        '<?xml version="1.0"?><!-- a page --><html xmlns="http://www.w3.org/1999/xhtml">',
        "<p>A fragment.</p> And more.",
        '<div class="x">text</div>',
    ],
)
def test_html_is_recognised(html: str) -> None:
    assert looks_like_html(html)


@pytest.mark.parametrize(
    "text",
    ["", "A text about <p> and </p>.", "<p> opens a paragraph.", "<3 you", "<note>x</note>", "a < b", "# <html>"],
)
def test_other_texts_are_no_html(text: str) -> None:
    assert not looks_like_html(text)


def test_many_comments_take_little_time() -> None:
    comments = "<!-- note -->\n" * 10_000
    begin = time.process_time()
    assert not looks_like_html(f"{comments}text")
    assert looks_like_html(f"{comments}<html>")
    assert time.process_time() - begin < 1

"""Decoding of text files: byte order marks, named encodings, and the guess in the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamella.errors import UnreadableError, UsageError
from lamella.files import read_text
from lamella.text_encoding import decode_text, guess_encoding, page_encoding

KOREAN = "서울은 한강을 끼고 있는 대한민국의 수도이다. 인구는 약 940만 명이다."


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_with_a_byte_order_mark_is_read(encoding: str, tmp_path: Path) -> None:
    data = f"One line.\r\n{KOREAN}\n".encode(encoding)
    assert decode_text(data, "file") == f"One line.\r\n{KOREAN}\n"
    (tmp_path / "file").write_bytes(data)
    assert read_text(tmp_path / "file") == f"One line.\n{KOREAN}\n"


def test_both_byte_orders_are_read() -> None:
    assert decode_text(b"\xff\xfeA\x00", "file") == decode_text(b"\xfe\xff\x00A", "file") == "A"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (KOREAN, "cp949"),
        ("東京は日本の首都であり、世界でも有数の都市である。", "shift_jis"),
        ("東京は日本の首都であり、世界でも有数の都市である。", "euc_jp"),
        ("北京是中华人民共和国的首都,也是全国的政治中心。", "gb18030"),
        ("Москва является столицей России.", "cp1251"),
        ("Die Straße führt über die Brücke.", "cp1252"),
        ("Café", "utf-16-le"),
        ("Café", "utf-16-be"),
    ],
)
def test_the_suspected_encoding_is_named(text: str, encoding: str) -> None:
    data = text.encode(encoding)
    assert guess_encoding(data) == encoding
    with pytest.raises(UnreadableError) as error:
        decode_text(data, "notes.txt", advice="pass --encoding {encoding}")
    assert str(error.value).startswith("notes.txt: expected UTF-8 text, got byte 0x")
    assert str(error.value).endswith(f"(probably {encoding}); pass --encoding {encoding}.")
    assert decode_text(data, "notes.txt", encoding) == text


@pytest.mark.parametrize("text", [KOREAN, "Москва является столицей России.", "Le café où l'été fut agréable."])
def test_utf8_with_a_wrong_byte_stays_utf8(text: str) -> None:
    data = f"{text} {text}".encode()
    for damaged in (data[:60] + b"\xff" + data[60:], data + "é".encode()[:1]):
        assert guess_encoding(damaged) == "utf-8-sig"
        assert damaged.decode("utf-8-sig", "replace").startswith(text[:10])
        with pytest.raises(UnreadableError, match="so the file is damaged there; save it again"):
            decode_text(damaged, "notes.txt", advice="pass --encoding {encoding}")


def test_a_page_has_an_encoding_of_its_own_unless_it_is_utf_8() -> None:
    declared = '<meta charset="windows-1252"><p>Café</p>'
    assert page_encoding(declared.encode("cp1252")) == "cp1252"
    assert page_encoding(declared.encode()) is None
    assert page_encoding((declared + 20 * "é").encode() + b"\xc3") is None  # cut inside a character
    assert page_encoding("<p>Café</p>".encode("cp1252")) is None


@pytest.mark.parametrize(
    ("declaration", "encoding"),
    [
        ('<meta charset="euc-kr">', "cp949"),
        ("<META http-equiv=Content-Type content='text/html; charset = KS_C_5601-1987'>", "cp949"),
        ('<?xml version="1.0" encoding="euc-kr"?>', "cp949"),
        ("<meta charset=nothing>", "cp1252"),  # not known, so it is guessed
        ("<meta charset=utf-8>", "cp1252"),  # but the page is not UTF-8
        ("<meta charset=punycode>", "cp1252"),  # no encoding of pages, and slow
        ("<p>charset=euc-kr</p>", "cp1252"),
    ],
)
def test_the_encoding_that_a_page_declares_is_believed(declaration: str, encoding: str) -> None:
    page = f"<html><head>{declaration}<title>서울</title></head><body>{'<div></div>' * 50}<p>{KOREAN}".encode("euc-kr")
    assert guess_encoding(page) == encoding
    assert guess_encoding(b"<meta charset=shift_jis>" + "東京は日本の首都".encode("shift_jis")) == "cp932"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_ascii_text_in_utf16_without_a_mark_is_recognised(encoding: str) -> None:
    with pytest.raises(UnreadableError) as error:
        decode_text("Plain text.".encode(encoding), "notes.txt", advice="pass --encoding {encoding}")
    assert str(error.value) == (
        f"notes.txt: expected UTF-8 text, got zero bytes (probably {encoding}); pass --encoding {encoding}."
    )
    assert decode_text(b"a\0b and much more text", "notes.txt") == "a\0b and much more text"


def test_a_wrong_encoding_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--encoding: expected the name of a text encoding, .* got 'klingon'"):
        decode_text(b"x", "file", "klingon")
    with pytest.raises(UsageError, match="got 'hex'"):
        decode_text(b"00", "file", "hex")  # a codec, but not of text
    with pytest.raises(UnreadableError, match="file: expected ascii text, got byte 0xe9 at position 3"):
        decode_text(b"caf\xe9", "file", "ascii")

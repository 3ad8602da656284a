"""The word-at-a-time parser against Python's own split, int and set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.data.text_fields import MAX_DIGITS, find_fields, hash_fields, mix64, parse_integers

printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
integers = st.one_of(
    st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1).map(str),
    st.just(""),
    st.sampled_from(["0", "-0", "007", "99999999"]),
)
tables = st.integers(1, 5).flatmap(lambda c: st.lists(st.lists(printable, min_size=c, max_size=c), min_size=1, max_size=20))


def block_of(rows: list[list[str]]) -> bytes:
    return "".join("\t".join(row) + "\n" for row in rows).encode()


@given(tables)
def test_fields_lie_where_split_finds_them(rows: list[list[str]]) -> None:
    block = block_of(rows)
    fields, bad = find_fields(block, len(rows[0]))
    found = [
        [block[a:b].decode() for a, b in zip(starts, stops, strict=True)]
        for starts, stops in zip(fields.start_NC, fields.stop_NC, strict=True)
    ]
    assert found == rows
    assert not len(bad)


@given(st.lists(st.tuples(integers, integers), min_size=1, max_size=30))
def test_integers_are_what_int_says(rows: list[tuple[str, str]]) -> None:
    fields, _ = find_fields(block_of([list(row) for row in rows]), 2)
    value_NC, bad_NC = parse_integers(fields)
    assert not bad_NC.any()
    assert value_NC.tolist() == [[int(text) if text else 0 for text in row] for row in rows]


@given(st.lists(printable, min_size=1, max_size=30))
def test_a_field_is_bad_exactly_if_it_is_no_short_integer(texts: list[str]) -> None:
    fields, _ = find_fields(block_of([[text] for text in texts]), 1)
    bad = parse_integers(fields)[1][:, 0]

    def is_integer(text: str) -> bool:
        digits = text.removeprefix("-")
        return text == "" or (digits.isdigit() and len(digits) <= MAX_DIGITS)

    assert bad.tolist() == [not is_integer(text) for text in texts]


@pytest.mark.parametrize("text", ["-", "--1", "+1", "1.0", "1e3", " 1", "1 ", "0x1", "12345678/", "/12345678", "1" * 17, "1:2"])
def test_what_looks_almost_like_an_integer_is_refused(text: str) -> None:
    fields, _ = find_fields(block_of([[text]]), 1)
    assert parse_integers(fields)[1].all()


@given(st.lists(st.tuples(printable, printable), min_size=1, max_size=40))
def test_keys_are_equal_exactly_where_texts_are(rows: list[tuple[str, str]]) -> None:
    fields, _ = find_fields(block_of([list(row) for row in rows]), 2)
    keys = hash_fields(fields).ravel().tolist()
    texts = [text for row in rows for text in row]
    assert len(set(keys)) == len(set(texts)) == len(set(zip(keys, texts, strict=True)))
    assert all((key == 0) == (text == "") for key, text in zip(keys, texts, strict=True))


def test_mixing_is_the_published_finalizer() -> None:
    def reference(k: int) -> int:
        k ^= k >> 33
        k = k * 0xFF51AFD7ED558CCD % 2**64
        k ^= k >> 33
        k = k * 0xC4CEB9FE1A85EC53 % 2**64
        return k ^ k >> 33

    bits = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    assert mix64(np.array(bits, np.uint64)).tolist() == [reference(k) for k in bits]


@given(
    st.lists(st.sampled_from(["a\tb\tc", "\t\t", "a\tb", "a\tb\tc\td", "", "a\té\tc", "a\tb\r\tc", "a\0\tb\tc"]), max_size=30),
    st.booleans(),
)
def test_malformed_lines_are_left_out_and_numbered(lines: list[str], newline_at_end: bool) -> None:
    text = "\n".join(lines) + ("\n" if newline_at_end and lines else "")
    fields, bad = find_fields(text.encode("latin-1"), 3)
    *whole, cut_off = text.split("\n")
    good = [line in ("a\tb\tc", "\t\t") for line in whole] + ([False] if cut_off else [])
    assert bad.tolist() == [number for number, is_good in enumerate(good) if not is_good]
    assert len(fields) == sum(good)
    assert fields.length_NC.tolist() == [
        [1, 1, 1] if line == "a\tb\tc" else [0, 0, 0] for line in whole if line in ("a\tb\tc", "\t\t")
    ]

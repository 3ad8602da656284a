"""Numbers and keys out of delimited text, whole blocks of rows at a time, without making a Python object for a field.

Eight bytes of a field are read as one unaligned 64-bit word and worked on by word arithmetic, which NumPy does for all fields
at once and without the interpreter lock.

Axes:  N rows,  C columns.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]
Flags: TypeAlias = NDArray[np.bool_]

MAX_DIGITS = 16
_WORD = 8
_TAB, _NEWLINE = ord("\t"), ord("\n")


def _every_byte(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


# By n: the mask that keeps the last n bytes of a word, and the digits "0" to put in front of them. The last byte in memory is
# the highest of a little-endian word.
_KEEP_LAST = np.array([(2**64 - 1) ^ (2 ** (64 - 8 * n) - 1) for n in range(_WORD + 1)], np.uint64)
_ZEROS_FIRST = ~_KEEP_LAST & _every_byte(ord("0"))
_KEEP_FIRST = np.array([2 ** (8 * n) - 1 for n in range(_WORD + 1)], np.uint64)


@dataclass(frozen=True)
class Fields:
    """Where the fields of N rows lie in a block of text."""

    words: Words  # words[i] holds the eight bytes of text from i - 8 on, so that fields at either edge can be read whole
    start_NC: Integers
    stop_NC: Integers

    def __len__(self) -> int:
        return len(self.start_NC)

    @property
    def length_NC(self) -> Integers:
        return self.stop_NC - self.start_NC

    def columns(self, first: int, stop: int) -> "Fields":
        return Fields(self.words, self.start_NC[:, first:stop], self.stop_NC[:, first:stop])


def find_fields(block: bytes, n_columns: int) -> tuple[Fields, Integers]:
    """Fields of the well-formed rows of tab-separated ``block``, and the numbers of the lines that are not.

    A line is well-formed if it has ``n_columns``, nothing but printable ASCII in them, and a newline at its end.
    """
    bad_lines = np.empty(0, np.int64)
    text, ends_N = _text_and_ends(block)
    if len(ends_N) % n_columns or not _is_regular(text, ends_N, n_columns) or _has_foreign_bytes(text):
        lines = block.split(b"\n")
        is_good = [_is_well_formed(line, n_columns) for line in lines[:-1]] + [False] * bool(lines[-1])
        bad_lines = np.flatnonzero(~np.array(is_good))
        block = b"".join(line + b"\n" for line, good in zip(lines, is_good, strict=False) if good)
        text, ends_N = _text_and_ends(block)
    stop_NC = ends_N.reshape(-1, n_columns)
    start_NC = np.concatenate([np.zeros(1, np.int64), ends_N[:-1] + 1])[: len(ends_N)].reshape(-1, n_columns)
    padded = np.concatenate([np.zeros(_WORD, np.uint8), text, np.zeros(_WORD, np.uint8)])
    words = np.ndarray((len(text) + _WORD,), "<u8", padded, strides=(1,))
    return Fields(words, start_NC, stop_NC), bad_lines


def parse_integers(fields: Fields) -> tuple[Integers, Flags]:
    """The values of integer fields, 0 for an empty field, and which fields are neither empty nor an integer."""
    negative = (fields.words[fields.start_NC + _WORD] & np.uint64(0xFF)) == ord("-")
    negative &= fields.length_NC > 0
    length = fields.length_NC - negative
    value, valid = _eight_digits(fields.words, fields.stop_NC, np.minimum(length, _WORD))
    if length.max(initial=0) > _WORD:
        upper_length = np.clip(length - _WORD, 0, _WORD)
        upper, upper_valid = _eight_digits(fields.words, np.where(upper_length > 0, fields.stop_NC - _WORD, 0), upper_length)
        value += upper * 10**_WORD
        valid &= upper_valid
    bad = ~valid | (length > MAX_DIGITS) | (negative & (length == 0))
    return np.where(negative, -value, value), bad


def hash_fields(fields: Fields) -> Words:
    """A 64-bit key for each field's text, 0 for an empty one. Texts of up to eight bytes never collide."""
    length = fields.length_NC
    key = np.zeros(length.shape, np.uint64)
    for offset in range(0, int(length.max(initial=0)), _WORD):
        rest = np.clip(length - offset, 0, _WORD)
        word = fields.words[np.where(rest > 0, fields.start_NC + offset + _WORD, 0)] & _KEEP_FIRST[rest]
        key = np.where(rest > 0, mix64(key + word), key)
    return key


def mix64(bits: Words) -> Words:
    """Murmur3's finalizer: a bijection of 64 bits that leaves 0 alone and spreads everything else."""
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return bits ^ (bits >> np.uint64(33))


def _eight_digits(words: Words, stop: Integers, length: Integers) -> tuple[Integers, Flags]:
    """The number in the ``length`` digits before ``stop``, and whether they all are digits."""
    word = (words[stop] & _KEEP_LAST[length]) | _ZEROS_FIRST[length]
    digits = word - _every_byte(ord("0"))
    # A byte outside "0".."9" has its top bit set in one of the two: below "0" by borrowing, above "9" by carrying.
    valid = (((word + _every_byte(0x80 - ord("9") - 1)) | digits) & _every_byte(0x80)) == 0
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))  # every other byte: a number of two digits
    mask = np.uint64(0x000000FF000000FF)
    low = (pairs & mask) * np.uint64(100 + (1_000_000 << 32))
    high = ((pairs >> np.uint64(16)) & mask) * np.uint64(1 + (10_000 << 32))
    return ((low + high) >> np.uint64(32)).astype(np.int64), valid


def _text_and_ends(block: bytes) -> tuple[NDArray[np.uint8], Integers]:
    text = np.frombuffer(block, np.uint8)
    return text, np.flatnonzero((text == _TAB) | (text == _NEWLINE))


def _is_regular(text: NDArray[np.uint8], ends_N: Integers, n_columns: int) -> bool:
    """Whether the block's separators are n_columns - 1 tabs and a newline over and over, with nothing behind the last."""
    is_newline = (text[ends_N] == _NEWLINE).reshape(-1, n_columns)
    complete = len(text) == 0 or text[-1] == _NEWLINE
    return bool(complete and is_newline[:, -1].all() and not is_newline[:, :-1].any())


def _has_foreign_bytes(text: NDArray[np.uint8]) -> bool:
    foreign = ((text < 0x20) & (text != _TAB) & (text != _NEWLINE)) | (text > 0x7E)
    return bool(foreign.any())


def _is_well_formed(line: bytes, n_columns: int) -> bool:
    return line.count(b"\t") == n_columns - 1 and not _has_foreign_bytes(np.frombuffer(line, np.uint8))

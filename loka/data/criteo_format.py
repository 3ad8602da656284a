"""Lines of the Criteo Display Advertising TSV: what they hold, parsing a block of them, and what is wrong with a bad one.

Axes:  N rows,  C columns,  D = 13 counts,  F = 26 categories.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loka.data.text_fields import MAX_DIGITS, Flags, Integers, Words, find_fields, hash_fields, parse_integers

N_COUNTS, N_CATEGORIES = 13, 26
COLUMNS = ("label", *(f"I{d}" for d in range(1, 14)), *(f"C{f}" for f in range(1, 27)))
WHAT_IS_EXPECTED = (
    "Expected is the Criteo Display Advertising TSV, one example a line: label (0 or 1), 13 integers, 26 categories, "
    "separated by tabs (train.txt of https://www.kaggle.com/c/criteo-display-ad-challenge)"
)


@dataclass(frozen=True)
class ParsedRows:
    """Counts as they are in the file, and categories as 64-bit keys."""

    label_N: NDArray[np.float32]
    count_ND: NDArray[np.float32]  # NaN: missing
    key_NF: Words  # 0: missing

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, index: slice | Flags) -> "ParsedRows":
        return ParsedRows(self.label_N[index], self.count_ND[index], self.key_NF[index])


def parse_rows(lines: bytes) -> tuple[ParsedRows, Integers]:
    """The rows of ``lines``, and the numbers, from 0, of the lines that are malformed."""
    fields, bad_lines = find_fields(lines, len(COLUMNS))
    numbers = fields.columns(0, 1 + N_COUNTS)
    number_NC, bad_NC = parse_integers(numbers)
    label_N, count_ND = number_NC[:, 0], number_NC[:, 1:].astype(np.float32)
    count_ND[numbers.length_NC[:, 1:] == 0] = np.nan
    bad_N = bad_NC.any(1) | (numbers.length_NC[:, 0] != 1) | (label_N > 1)
    rows = ParsedRows(label_N.astype(np.float32), count_ND, hash_fields(fields.columns(1 + N_COUNTS, len(COLUMNS))))
    if not bad_N.any():
        return rows, bad_lines
    line_N = np.delete(np.arange(len(rows) + len(bad_lines)), bad_lines)
    return rows[~bad_N], np.sort(np.concatenate([bad_lines, line_N[bad_N]]))


def explain_bad_line(line: bytes, *, is_cut_off: bool) -> tuple[int, str]:
    """Where a line that ``parse_rows`` refuses goes wrong (a column, counted from 1), and how."""
    values = line.split(b"\t")
    for column, value in enumerate(values[: len(COLUMNS)], 1):
        text = value.decode("ascii", "backslashreplace")
        foreign = next((byte for byte in value if not 0x20 <= byte <= 0x7E), None)
        if foreign is not None:
            hint = " (Windows line ends? Convert the file with dos2unix)" if foreign == ord("\r") else ""
            return column, f"{text!r} holds the byte 0x{foreign:02x}, which is not printable ASCII{hint}"
        if column == 1 and text not in ("0", "1"):
            return column, f"the label is {text!r}, not 0 or 1"
        digits = text.removeprefix("-")
        if 1 < column <= 1 + N_COUNTS and text and not (digits.isdigit() and len(digits) <= MAX_DIGITS):
            return column, f"{text!r} is not an integer of at most {MAX_DIGITS} digits"
    column = min(len(values), len(COLUMNS))
    if len(values) != len(COLUMNS):
        return column, f"the line has {len(values)} columns, not {len(COLUMNS)}" + (", and is cut off" if is_cut_off else "")
    return column, "the file ends without a newline, so its last line may be cut off; add one if it is whole"

"""The three files of MovieLens-1M, whose fields are separated by ``::``, as columns of numbers.

Axes:  N ratings,  U users,  I movies (items),  S genres of a movie.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from loka.core.errors import InvalidFile
from loka.data.batch import PADDING
from loka.data.text_blocks import Block, cut_into_blocks, map_in_order
from loka.data.text_fields import MAX_DIGITS, Flags, Integers, find_fields, parse_integers

FILES = ("ratings.dat", "users.dat", "movies.dat")
WHAT_IS_EXPECTED = (
    f"Expected is the folder of MovieLens-1M with {', '.join(FILES)} (https://files.grouplens.org/datasets/movielens/ml-1m.zip)"
)
_RATING_COLUMNS = ("user", "movie", "rating", "timestamp")
_USER_COLUMNS = ("user", "gender", "age", "occupation", "zip code")
_MOVIE_COLUMNS = ("movie", "title", "genres")
_BLOCK_BYTES, _THREADS = 1 << 20, 4

Record = TypeVar("Record")


@dataclass(frozen=True)
class Users:
    """What is known of each user. All but ``number_U`` are places, from 0, among the sorted values that occur."""

    number_U: Integers  # as in the file, sorted
    gender_U: Integers
    age_U: Integers
    occupation_U: Integers
    region_U: Integers  # by the first two characters of the zip code


@dataclass(frozen=True)
class Movies:
    number_I: Integers  # as in the file, sorted
    year_I: Integers  # of release, as written
    genre_IS: Integers  # counted from 0, PADDING behind the last
    n_genres: int


@dataclass(frozen=True)
class Ratings:
    """Who rated what, as places in ``Users`` and ``Movies``, in the order of the file."""

    user_N: Integers
    movie_N: Integers
    rating_N: Integers
    time_N: Integers  # seconds since 1970


class _BadField(Exception):
    def __init__(self, column: int, reason: str) -> None:
        self.column, self.reason = column, reason


def read_movielens(folder: Path, *, skip_bad_rows: bool) -> tuple[Users, Movies, Ratings, int]:
    """The folder's contents, and how many malformed rows were left out."""
    _check_is_folder(folder)
    user_rows, bad_users = _read_records(folder / "users.dat", _USER_COLUMNS, _parse_user, skip_bad_rows)
    movie_rows, bad_movies = _read_records(folder / "movies.dat", _MOVIE_COLUMNS, _parse_movie, skip_bad_rows)
    users, movies = _make_users(user_rows), _make_movies(movie_rows)
    ratings, bad_ratings = _read_ratings(folder / "ratings.dat", users, movies, skip_bad_rows)
    return users, movies, ratings, bad_users + bad_movies + bad_ratings


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InvalidFile(f"there is no folder {folder}. {WHAT_IS_EXPECTED}")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise InvalidFile(f"{folder} has no {' and no '.join(missing)}; it holds {found}. {WHAT_IS_EXPECTED}")
    for name in FILES:
        if not (folder / name).stat().st_size:
            raise InvalidFile(f"{folder / name} is empty. {WHAT_IS_EXPECTED}")


def _read_ratings(path: Path, users: Users, movies: Movies, skip_bad_rows: bool) -> tuple[Ratings, int]:
    def parse(block: Block) -> tuple[Integers, int]:
        lines = block.read()
        # The field parser splits at tabs. A tab that is in the file already becomes a byte that the parser refuses.
        fields, bad_lines = find_fields(lines.replace(b"\t", b"\0").replace(b"::", b"\t"), len(_RATING_COLUMNS))
        value_NC, bad_NC = parse_integers(fields)
        bad_N = (bad_NC | (fields.length_NC == 0)).any(1) | (value_NC[:, 2] < 1) | (value_NC[:, 2] > 5) | (value_NC[:, 3] < 0)
        bad_N |= ~_is_among(value_NC[:, 0], users.number_U) | ~_is_among(value_NC[:, 1], movies.number_I)
        if (len(bad_lines) or bad_N.any()) and not skip_bad_rows:
            line_N = np.delete(np.arange(len(bad_N) + len(bad_lines)), bad_lines)
            first = int(np.concatenate([bad_lines, line_N[bad_N]]).min())
            _explain_bad_rating(path, block.first_line + first + 1, lines.split(b"\n")[first], users, movies)
        return value_NC[~bad_N], len(bad_lines) + int(bad_N.sum())

    parsed = list(map_in_order(parse, cut_into_blocks(path, _BLOCK_BYTES), _THREADS))
    value_NC = np.concatenate([values for values, _ in parsed])
    if not len(value_NC):
        raise InvalidFile(f"{path} has no line that can be read. {WHAT_IS_EXPECTED}")
    user_N = np.searchsorted(users.number_U, value_NC[:, 0])
    movie_N = np.searchsorted(movies.number_I, value_NC[:, 1])
    return Ratings(user_N, movie_N, value_NC[:, 2], value_NC[:, 3]), sum(bad for _, bad in parsed)


def _explain_bad_rating(path: Path, line: int, text: bytes, users: Users, movies: Movies) -> NoReturn:
    """Raise an error that says what is wrong with a line that the block parser refuses."""

    def check(fields: list[str]) -> None:
        user, movie, rating, time = (_integer(fields, column) for column in range(1, 5))
        if not 1 <= rating <= 5:
            raise _BadField(3, f"the rating is {rating}, not 1 to 5")
        if time < 0:
            raise _BadField(4, f"the timestamp is {time}")
        if user not in users.number_U:
            raise _BadField(1, f"users.dat has no user {user}")
        if movie not in movies.number_I:
            raise _BadField(2, f"movies.dat has no movie {movie}")

    try:
        _parse_line(text, _RATING_COLUMNS, check)
        raise _BadField(len(_RATING_COLUMNS), "the file ends without a newline, so its last line may be cut off")
    except _BadField as bad:
        raise _invalid(path, line, _RATING_COLUMNS, bad) from None


def _read_records(
    path: Path, columns: tuple[str, ...], parse: Callable[[list[str]], Record], skip_bad_rows: bool
) -> tuple[list[Record], int]:
    """What ``parse`` makes of the fields of every line of a small file, and how many lines it refuses."""
    *lines, cut_off = path.read_bytes().split(b"\n")
    records: list[Record] = []
    n_bad = 0
    for number, line in enumerate([*lines, cut_off] if cut_off else lines, 1):
        try:
            record = _parse_line(line, columns, parse)
            if number > len(lines):
                raise _BadField(len(columns), "the file ends without a newline, so its last line may be cut off")
            records.append(record)
        except _BadField as bad:
            if not skip_bad_rows:
                raise _invalid(path, number, columns, bad) from None
            n_bad += 1
    if not records:
        raise InvalidFile(f"{path} has no line that can be read. {WHAT_IS_EXPECTED}")
    return records, n_bad


def _parse_line(line: bytes, columns: tuple[str, ...], parse: Callable[[list[str]], Record]) -> Record:
    fields = line.decode("latin-1").split("::")
    for column, text in enumerate(fields[: len(columns)], 1):
        if not text.isprintable():
            raise _BadField(column, f"{text!r} holds a character that is not printable")
    if len(fields) != len(columns):
        expected = "::".join(columns)
        raise _BadField(min(len(fields), len(columns)), f"the line has {len(fields)} columns, not {len(columns)} ({expected})")
    return parse(fields)


def _parse_user(fields: list[str]) -> tuple[int, str, int, int, str]:
    if fields[1] not in ("F", "M"):
        raise _BadField(2, f"the gender is {fields[1]!r}, not F or M")
    if not fields[4]:
        raise _BadField(5, "the zip code is empty")
    return _integer(fields, 1), fields[1], _integer(fields, 3), _integer(fields, 4), fields[4][:2]


def _parse_movie(fields: list[str]) -> tuple[int, int, list[str]]:
    year = re.search(r"\((\d{4})\)$", fields[1])
    if year is None:
        raise _BadField(2, f"the title {fields[1]!r} does not end with a year in parentheses")
    genres = fields[2].split("|")
    if not all(genres):
        raise _BadField(3, f"the genres {fields[2]!r} hold an empty one")
    return _integer(fields, 1), int(year[1]), genres


def _integer(fields: list[str], column: int) -> int:
    text = fields[column - 1]
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise _BadField(column, f"{text!r} is not an integer of at most {MAX_DIGITS} digits")
    return int(text)


def _invalid(path: Path, line: int, columns: tuple[str, ...], bad: _BadField) -> InvalidFile:
    return InvalidFile(
        f"{path}, line {line}, column {bad.column} ({columns[bad.column - 1]}): {bad.reason}. {WHAT_IS_EXPECTED}. "
        "To leave such rows out and count them, use skip_bad_rows (--skip-bad-rows)"
    )


def _make_users(rows: list[tuple[int, str, int, int, str]]) -> Users:
    number, gender, age, occupation, region = zip(*sorted(rows), strict=True)
    return Users(np.array(number), _places(gender), _places(age), _places(occupation), _places(region))


def _make_movies(rows: list[tuple[int, int, list[str]]]) -> Movies:
    number, year, genres = zip(*sorted(rows), strict=True)
    known = sorted({genre for of_movie in genres for genre in of_movie})
    genre_IS = np.full((len(number), max(map(len, genres))), PADDING)
    for i, of_movie in enumerate(genres):
        genre_IS[i, : len(of_movie)] = [known.index(genre) for genre in of_movie]
    return Movies(np.array(number), np.array(year), genre_IS, len(known))


def _places(values: tuple[object, ...]) -> Integers:
    """Each value's place among the distinct values, sorted."""
    return np.unique(np.array(values), return_inverse=True)[1]


def _is_among(values: Integers, known: Integers) -> Flags:
    return known[np.searchsorted(known, values) % len(known)] == values

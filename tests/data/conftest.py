"""Tiny files in the formats of the real data sets, written from a seed."""

import random
from pathlib import Path

import pytest


def criteo_line(rng: random.Random) -> str:
    counts = ["" if rng.random() < 0.2 else str(int(rng.paretovariate(0.4)) - 3) for _ in range(13)]
    categories = [
        "" if rng.random() < 0.1 else f"{int(rng.paretovariate(0.7)) % 5000 * 2654435761 % 2**32:08x}" for _ in range(26)
    ]
    return "\t".join([str(int(rng.random() < 0.25)), *counts, *categories])


@pytest.fixture(scope="session")
def criteo_lines() -> list[str]:
    rng = random.Random(0)
    return [criteo_line(rng) for _ in range(1000)]


@pytest.fixture
def criteo_file(tmp_path: Path, criteo_lines: list[str]) -> Path:
    path = tmp_path / "train.txt"
    path.write_text("".join(line + "\n" for line in criteo_lines))
    return path


MOVIELENS_USERS = [(u, "FM"[u % 2], [1, 18, 25, 35][u % 4], u % 7, f"{10000 + 1777 * u:05d}") for u in range(1, 21)]
MOVIELENS_GENRES = ["Action", "Comedy", "Drama", "Film-Noir"]
MOVIELENS_MOVIES = [
    (2 * m + 1, f"Amélie {m} ({1990 + m % 9})", "|".join(MOVIELENS_GENRES[m % 3 :][: 1 + m % 3])) for m in range(15)
]


def movielens_ratings() -> list[tuple[int, int, int, int]]:
    """Random ratings, many of a user at the same second, in no order."""
    rng = random.Random(1)
    pairs = [(user[0], movie[0]) for user in MOVIELENS_USERS for movie in MOVIELENS_MOVIES if rng.random() < 0.7]
    rng.shuffle(pairs)
    return [(user, movie, rng.randint(1, 5), 970_000_000 + 1000 * rng.randint(0, 40)) for user, movie in pairs]


@pytest.fixture
def movielens_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    files = {"users.dat": MOVIELENS_USERS, "movies.dat": MOVIELENS_MOVIES, "ratings.dat": movielens_ratings()}
    for name, rows in files.items():
        text = "".join("::".join(map(str, row)) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="latin-1")
    return folder

"""MovieLens features against a plain reading of the files, row by row, that looks at nothing it should not."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from loka.core.errors import InvalidFile, InvalidInput
from loka.data.batch import Batch
from loka.data.dataset import open_dataset
from loka.data.movielens import Movielens

Rating = tuple[int, int, int, int]


def open_movielens(folder: Path, **options: object) -> Movielens:
    data = open_dataset("movielens", path=folder, **options)
    assert isinstance(data, Movielens)
    return data


def read(path: Path) -> list[list[str]]:
    return [line.split("::") for line in path.read_text(encoding="latin-1").splitlines()]


def read_ratings(folder: Path) -> list[Rating]:
    return [(int(user), int(movie), int(rating), int(time)) for user, movie, rating, time in read(folder / "ratings.dat")]


def rows_of(batches: list[Batch], folder: Path) -> list[tuple[int, int]]:
    """(user, movie) of every example, as numbered in the files: one rating has each."""
    users = sorted(int(row[0]) for row in read(folder / "users.dat"))
    movies = sorted(int(row[0]) for row in read(folder / "movies.dat"))
    return [(users[u], movies[m]) for batch in batches for u, m in batch.onehot_BF[:, :2].tolist()]


def parts(data: Movielens) -> tuple[list[Batch], list[Batch]]:
    return list(itertools.islice(data.train(1), data.n_train)), list(data.test(16))


@pytest.mark.parametrize("split", ["random", "time"])
def test_every_rating_is_trained_or_tested_on_once(movielens_folder: Path, split: str) -> None:
    data = open_movielens(movielens_folder, split=split, test_fraction=0.25)
    ratings = read_ratings(movielens_folder)
    train, test = (rows_of(part, movielens_folder) for part in parts(data))
    assert sorted(train + test) == sorted((user, movie) for user, movie, _, _ in ratings)
    assert len(test) == round(0.25 * len(ratings))
    times = {(user, movie): time for user, movie, _, time in ratings}
    if split == "time":
        assert max(times[row] for row in train) <= min(times[row] for row in test)
    else:
        assert max(times[row] for row in train) > min(times[row] for row in test)


@pytest.mark.parametrize("split", ["random", "time"])
def test_features_are_what_a_plain_reading_of_the_past_says(movielens_folder: Path, split: str) -> None:
    data = open_movielens(movielens_folder, split=split, dense="raw", sequence_length=5, test_fraction=0.2)
    ratings = read_ratings(movielens_folder)
    by_row = {(user, movie): (rating, time) for user, movie, rating, time in ratings}
    users = {int(row[0]): row[1:] for row in read(movielens_folder / "users.dat")}
    movies = {int(row[0]): row[1:] for row in read(movielens_folder / "movies.dat")}
    movie_numbers = sorted(movies)
    distinct = [sorted({user[c] for user in users.values()}, key=lambda v: int(v) if v.isdigit() else v) for c in range(3)]
    regions = sorted({user[3][:2] for user in users.values()})
    years = sorted({int(movie[0][-5:-1]) for movie in movies.values()})
    genres = sorted({genre for movie in movies.values() for genre in movie[1].split("|")})
    train, test = parts(data)
    trained = set(rows_of(train, movielens_folder))

    def mean_before(time: int, among: list[Rating]) -> float:
        labels = [r >= 4 for u, m, r, t in among if t < time and (u, m) in trained]
        return sum(labels) / len(labels) if labels else math.nan

    for batch in [*train, *test]:
        for b, (user, movie) in enumerate(rows_of([batch], movielens_folder)):
            rating, time = by_row[user, movie]
            assert batch.label_B[b] == (rating >= 4)
            facts, year = users[user], int(movies[movie][0][-5:-1])
            ids = [distinct[c].index(facts[c]) for c in range(3)]
            assert batch.onehot_BF[b, 2:].tolist() == [*ids, regions.index(facts[3][:2]), years.index(year)]
            bag = [genres.index(genre) for genre in movies[movie][1].split("|")]
            assert batch.multihot_BGS is not None
            assert batch.multihot_BGS[b, 0].tolist() == bag + [-1] * (data.schema.bag_length - len(bag))
            of_user = [row for row in ratings if row[0] == user]
            of_movie = [row for row in ratings if row[1] == movie]
            past = sorted((row for row in of_user if row[3] < time), key=lambda row: row[3])  # ties stay in file order
            angle = 2 * math.pi * (time % 86_400) / 86_400
            expected = [
                len(past),
                mean_before(time, of_user),
                sum(row[3] < time for row in of_movie),
                mean_before(time, of_movie),
                time - past[-1][3] if past else math.nan,
                time - past[0][3] if past else math.nan,
                1970 + time / (365.2425 * 86_400) - year,
                math.sin(angle),
                math.cos(angle),
            ]
            torch.testing.assert_close(batch.dense_BD[b], torch.tensor(expected), equal_nan=True)
            recent = past[-5:]
            padding = 5 - len(recent)
            assert batch.sequence_BL is not None
            assert batch.times_BL is not None
            assert batch.sequence_BL[b].tolist() == [-1] * padding + [movie_numbers.index(row[1]) for row in recent]
            assert batch.times_BL[b].tolist() == [0.0] * padding + [float(time - row[3]) for row in recent]


@pytest.mark.parametrize("split", ["random", "time"])
def test_turning_every_test_label_round_changes_no_feature(movielens_folder: Path, split: str) -> None:
    before = parts(open_movielens(movielens_folder, split=split))
    tested = set(rows_of(before[1], movielens_folder))
    turned = [(u, m, (5 if r < 4 else 1) if (u, m) in tested else r, t) for u, m, r, t in read_ratings(movielens_folder)]
    (movielens_folder / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in turned))
    after = parts(open_movielens(movielens_folder, split=split))
    for one, other in zip(before[0] + before[1], after[0] + after[1], strict=True):
        for name in ("dense_BD", "onehot_BF", "multihot_BGS", "sequence_BL", "times_BL"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(one.label_B, 1 - other.label_B) for one, other in zip(before[1], after[1], strict=True))


def test_epochs_differ_seeds_differ_and_starting_late_is_skipping(movielens_folder: Path) -> None:
    data = open_movielens(movielens_folder)
    per_epoch = data.batches_per_epoch(16)
    batches = list(itertools.islice(data.train(16), 2 * per_epoch + 3))
    assert all(len(batch) == 16 for batch in batches)
    for start in (0, 1, per_epoch - 1, per_epoch, 2 * per_epoch + 1):
        late = next(data.train(16, start=start))
        assert torch.equal(late.onehot_BF, batches[start].onehot_BF)
        assert torch.equal(late.sequence_BL, batches[start].sequence_BL)
    assert rows_of(batches[:per_epoch], movielens_folder) != rows_of(batches[per_epoch : 2 * per_epoch], movielens_folder)
    other = open_dataset("movielens", path=movielens_folder, seed=1)
    assert not torch.equal(next(other.train(16)).onehot_BF, batches[0].onehot_BF)
    assert torch.equal(next(other.test(16)).onehot_BF, next(data.test(16)).onehot_BF)  # the split has a seed of its own
    resplit = open_movielens(movielens_folder, split_seed=1)
    assert not torch.equal(next(resplit.test(16)).onehot_BF, next(data.test(16)).onehot_BF)


def test_counts_and_durations_are_log_transformed_and_nothing_else(movielens_folder: Path) -> None:
    raw = next(open_movielens(movielens_folder, dense="raw").test(30)).dense_BD
    log = next(open_movielens(movielens_folder, dense="log").test(30)).dense_BD
    counted = [0, 2, 4, 5, 6]
    torch.testing.assert_close(log[:, counted], torch.log1p(raw[:, counted]), equal_nan=True)
    others = [1, 3, 7, 8]
    torch.testing.assert_close(log[:, others], raw[:, others], rtol=0, atol=0, equal_nan=True)


BAD_LINES = [
    ("ratings.dat", "1::1::5", "column 3 (rating): the line has 3 columns, not 4 (user::movie::rating::timestamp)"),
    ("ratings.dat", "1::1::6::970000000", "column 3 (rating): the rating is 6, not 1 to 5"),
    ("ratings.dat", "1::1::4.5::970000000", "column 3 (rating): '4.5' is not an integer"),
    ("ratings.dat", "1::1::::970000000", "column 3 (rating): '' is not an integer"),
    ("ratings.dat", "99::1::4::970000000", "column 1 (user): users.dat has no user 99"),
    ("ratings.dat", "1::2::4::970000000", "column 2 (movie): movies.dat has no movie 2"),
    ("ratings.dat", "1::1::4::-1", "column 4 (timestamp): the timestamp is -1"),
    ("ratings.dat", "1\t1::4::970000000", "column 1 (user): '1\\t1' holds a character that is not printable"),
    ("ratings.dat", "", "column 1 (user): the line has 1 columns"),
    ("users.dat", "30::X::25::1::12345", "column 2 (gender): the gender is 'X', not F or M"),
    ("users.dat", "30::F::old::1::12345", "column 3 (age): 'old' is not an integer"),
    ("users.dat", "30::F::25::1::", "column 5 (zip code): the zip code is empty"),
    ("movies.dat", "91::No Year::Drama", "column 2 (title): the title 'No Year' does not end with a year"),
    ("movies.dat", "91::A Film (1999)::Drama|", "column 3 (genres): the genres 'Drama|' hold an empty one"),
    ("movies.dat", "91::A Film (1999)", "column 2 (title): the line has 2 columns, not 3"),
]


@pytest.mark.parametrize(("name", "line", "message"), BAD_LINES)
def test_a_malformed_row_is_named_or_counted(movielens_folder: Path, name: str, line: str, message: str) -> None:
    clean = open_movielens(movielens_folder)
    path = movielens_folder / name
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:7], line.encode(), *lines[7:]]))
    with pytest.raises(InvalidFile) as error:
        open_movielens(movielens_folder)
    assert f"{path}, line 8, {message}" in str(error.value)
    data = open_movielens(movielens_folder, skip_bad_rows=True)
    assert (data.bad_rows, clean.bad_rows) == (1, 0)
    assert data.schema == clean.schema
    for one, other in zip(data.test(50), clean.test(50), strict=True):
        assert torch.equal(one.onehot_BF, other.onehot_BF)


@pytest.mark.parametrize("name", ["ratings.dat", "users.dat", "movies.dat"])
def test_a_truncated_last_line_is_named(movielens_folder: Path, name: str) -> None:
    path = movielens_folder / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InvalidFile, match=rf"{name}, line \d+, column \d \(.*\): .*cut off"):
        open_movielens(movielens_folder)


def test_a_movie_left_out_takes_its_ratings_with_it(movielens_folder: Path) -> None:
    n_ratings = sum(movie == 1 for _, movie, _, _ in read_ratings(movielens_folder))
    path = movielens_folder / "movies.dat"
    path.write_bytes(path.read_bytes().replace(b"\n", b"::\n", 1))
    data = open_movielens(movielens_folder, skip_bad_rows=True)
    assert n_ratings > 0
    assert data.bad_rows == 1 + n_ratings


def test_a_foreign_folder_is_explained(tmp_path: Path, movielens_folder: Path) -> None:
    with pytest.raises(InvalidFile, match=r"there is no folder .*nowhere. Expected is the folder of MovieLens-1M.*grouplens"):
        open_movielens(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ratings.csv").write_text("userId,movieId\n")
    with pytest.raises(InvalidFile, match=r"has no ratings.dat and no users.dat and no movies.dat; it holds ratings.csv"):
        open_movielens(tmp_path / "other")
    (movielens_folder / "users.dat").write_text("")
    with pytest.raises(InvalidFile, match=r"users.dat is empty"):
        open_movielens(movielens_folder)
    (movielens_folder / "users.dat").write_text("nothing\nof use\n")
    with pytest.raises(InvalidFile, match=r"users.dat has no line that can be read"):
        open_movielens(movielens_folder, skip_bad_rows=True)
    with pytest.raises(InvalidInput, match="needs the path of its folder"):
        open_dataset("movielens")
    with pytest.raises(InvalidInput, match="test_fraction is 0"):
        open_movielens(movielens_folder, test_fraction=0.0)

"""MovieLens-1M: would the user give the movie four stars or more?

A row's features come from facts that never change, from what the user and others had rated strictly before, and from the
labels of *training* rows strictly before; never from its own label, a later one, or that of any test row. With the random
split, a history may contain movies whose rating by the user is a test row: it shows that they were rated, not how.

Axes:  N ratings by user and then by time,  B examples,  D dense features,  F one-hot features,  S genres,  L history.
"""

import itertools
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from loka.core.errors import InvalidInput
from loka.data.batch import PADDING, Batch, FeatureSchema
from loka.data.dataset import DATASETS, Source, check_batch_size
from loka.data.dense import DenseForm
from loka.data.movielens_files import WHAT_IS_EXPECTED, read_movielens
from loka.data.movielens_history import dense_features, earlier_in_group

LIKED = 4  # stars from which a rating counts as a click


class Split(StrEnum):
    RANDOM = "random"
    TIME = "time"  # the latest ratings are tested on


class MovielensOptions(msgspec.Struct, frozen=True, kw_only=True):
    split: Split = Split.RANDOM
    test_fraction: float = 0.1
    split_seed: int = 0  # not the seed of the order, so that runs over several seeds are tested on the same rows
    sequence_length: int = 32
    dense: DenseForm = DenseForm.LOG
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise InvalidInput(f"test_fraction is {self.test_fraction}: it must lie between 0 and 1")
        if self.sequence_length < 1 or self.split_seed < 0:
            raise InvalidInput("sequence_length must be at least 1 and split_seed not negative")


class Movielens:
    """The ratings of one folder. They fit in the device's memory, where batches are gathered."""

    def __init__(self, folder: Path, seed: int, device: torch.device, options: MovielensOptions) -> None:
        self.options = options
        self._seed, self._device = seed, device
        users, movies, ratings, self.bad_rows = read_movielens(folder, skip_bad_rows=options.skip_bad_rows)
        order_N = np.lexsort((ratings.time_N, ratings.user_N))
        user_N, movie_N = ratings.user_N[order_N], ratings.movie_N[order_N]
        rating_N, time_N = ratings.rating_N[order_N], ratings.time_N[order_N]
        label_N = rating_N >= LIKED
        self._train_rows, test_rows = split_rows(time_N, options)
        self.n_train, self.n_test = len(self._train_rows), len(test_rows)
        is_train_N = np.zeros(len(time_N), np.bool_)
        is_train_N[self._train_rows] = True
        history_start_N, history_stop_N = earlier_in_group(user_N, time_N)
        dense_ND, is_count_D = dense_features(user_N, movie_N, time_N, label_N, is_train_N, movies.year_I[movie_N])

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        year_I = np.unique(movies.year_I, return_inverse=True)[1]
        user_facts = (users.gender_U, users.age_U, users.occupation_U, users.region_U)
        self._user_facts_UF, self._year_I = on_device(np.stack(user_facts, 1)), on_device(year_I)
        self._genre_IS = on_device(movies.genre_IS)
        self._user_N, self._movie_N, self._time_N = on_device(user_N), on_device(movie_N), on_device(time_N)
        self._label_N = on_device(label_N.astype(np.float32))
        dense_ND = on_device(dense_ND)
        self._dense_ND = torch.where(on_device(is_count_D), options.dense.apply(dense_ND), dense_ND)
        self._history_start_N, self._history_stop_N = on_device(history_start_N), on_device(history_stop_N)
        self._test_rows = on_device(test_rows)
        self.schema = FeatureSchema(
            n_dense=dense_ND.shape[1],
            onehot_sizes=(
                len(users.number_U),
                len(movies.number_I),
                *(int(fact_U.max()) + 1 for fact_U in user_facts),
                int(year_I.max()) + 1,
            ),
            multihot_sizes=(movies.n_genres,),
            bag_length=movies.genre_IS.shape[1],
            sequence_size=len(movies.number_I),
            sequence_length=options.sequence_length,
        )

    def batches_per_epoch(self, batch_size: int) -> int:
        check_batch_size(batch_size, self.n_train)
        return self.n_train // batch_size

    def train(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Epochs without end, each in its own order and without the rows that do not fill its last batch."""
        per_epoch = self.batches_per_epoch(batch_size)
        first_epoch, done = divmod(start, per_epoch)
        for epoch in itertools.count(first_epoch):
            order = np.random.default_rng([self._seed, epoch]).permutation(self._train_rows)
            rows = torch.from_numpy(order).to(self._device)
            for index in range(done, per_epoch):
                yield self._batch(rows[index * batch_size : (index + 1) * batch_size])
            done = 0

    def test(self, batch_size: int) -> Iterator[Batch]:
        check_batch_size(batch_size)
        yield from map(self._batch, self._test_rows.split(batch_size))

    def _batch(self, row_B: Tensor) -> Batch:
        user_B, movie_B = self._user_N[row_B], self._movie_N[row_B]
        ids = [user_B[:, None], movie_B[:, None], self._user_facts_UF[user_B], self._year_I[movie_B][:, None]]
        past_BL = self._history_stop_N[row_B][:, None] - torch.arange(self.options.sequence_length, 0, -1, device=self._device)
        absent_BL = past_BL < self._history_start_N[row_B][:, None]
        past_BL = past_BL.clamp_min(0)
        age_BL = (self._time_N[row_B][:, None] - self._time_N[past_BL]).float()
        return Batch(
            dense_BD=self._dense_ND[row_B],
            onehot_BF=torch.cat(ids, 1),
            label_B=self._label_N[row_B],
            multihot_BGS=self._genre_IS[movie_B][:, None],
            sequence_BL=self._movie_N[past_BL].masked_fill(absent_BL, PADDING),
            times_BL=age_BL.masked_fill(absent_BL, 0),
        )


def split_rows(time_N: np.ndarray, options: MovielensOptions) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are trained on, and which are tested on."""
    if options.split is Split.TIME:
        order_N = np.argsort(time_N, kind="stable")
    else:
        order_N = np.random.default_rng(options.split_seed).permutation(len(time_N))
    n_train = len(time_N) - round(len(time_N) * options.test_fraction)
    return order_N[:n_train], order_N[n_train:]


def _open(path: Path | None, seed: int, device: torch.device, options: MovielensOptions) -> Movielens:
    if path is None:
        raise InvalidInput(f"data set 'movielens' needs the path of its folder. {WHAT_IS_EXPECTED}")
    return Movielens(path, seed, device, options)


DATASETS.add("movielens", Source(MovielensOptions, _open))

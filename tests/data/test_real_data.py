"""Checks on the real files, where somebody has them: LOKA_DATA is a folder with ``ml-1m/`` and ``criteo/*.txt`` in it."""

import itertools
import os
from pathlib import Path

import pytest
import torch

from loka.data.criteo import Criteo
from loka.data.dataset import open_dataset
from loka.data.movielens import Movielens


def real_path(pattern: str) -> Path:
    folder = os.environ.get("LOKA_DATA")
    if not folder:
        pytest.skip("needs real data: set LOKA_DATA to the folder that holds ml-1m/ and criteo/")
    found = sorted(Path(folder).glob(pattern))
    if not found:
        pytest.skip(f"needs real data: there is no {pattern} in LOKA_DATA={folder}")
    return found[0]


def test_movielens_1m_is_read_whole() -> None:
    data = open_dataset("movielens", path=real_path("ml-1m"))
    assert isinstance(data, Movielens)
    assert (data.n_train, data.n_test) == (900_188, 100_021)
    assert data.schema.onehot_sizes[:2] == (6040, 3883)
    assert data.schema.multihot_sizes == (18,)
    assert data.bad_rows == 0
    train = itertools.islice(data.train(data.n_train), 1)
    liked = sum(int(batch.label_B.sum()) for batch in (*train, *data.test(4096)))
    assert liked == 575_281  # ratings of four and five stars, by the set's own README 57.5 %


def test_criteo_is_read_whole_and_as_python_reads_it() -> None:
    path = real_path("criteo/*.txt")
    data = open_dataset("criteo", path=path, dense="raw", shuffle_rows=0)
    assert isinstance(data, Criteo)
    with path.open() as file:
        n_rows = n_clicks = n_missing = total = 0
        for line in file:
            label, *counts = line.split("\t", 14)[:14]
            n_rows, n_clicks = n_rows + 1, n_clicks + int(label)
            n_missing += counts.count("")
            total += sum(int(count) for count in counts if count)
    train = itertools.islice(data.train(data.n_train), 1)
    batches = [*train, *data.test(4096)]
    assert sum(len(batch) for batch in batches) == n_rows
    assert sum(int(batch.label_B.sum()) for batch in batches) == n_clicks
    dense = torch.cat([batch.dense_BD for batch in batches]).double()
    assert int(dense.isnan().sum()) == n_missing
    assert dense.nansum().item() == total

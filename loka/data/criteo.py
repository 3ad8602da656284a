"""The Criteo Display Advertising set: a TSV of any length, streamed in bounded memory and parsed by several threads.

A line holds the label, 13 counts and 26 categories. All but the label may be empty, and are then kept as missing: NaN, or an id
of its own. Rows are in time order, so the first part is trained on and the last tested on.

Axes:  N rows,  D = 13 counts,  F = 26 categories.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from loka.core.errors import InvalidFile, InvalidInput
from loka.data.batch import Batch, FeatureSchema
from loka.data.criteo_format import COLUMNS, N_CATEGORIES, N_COUNTS, WHAT_IS_EXPECTED, ParsedRows, explain_bad_line, parse_rows
from loka.data.dataset import DATASETS, Source, check_batch_size
from loka.data.dense import DenseForm
from loka.data.text_blocks import Block, cut_into_blocks, map_in_order
from loka.data.text_fields import Integers
from loka.data.vocabulary import CountedIds, HashedIds, count_keys

Result = TypeVar("Result")


class IdForm(StrEnum):
    HASHED = "hashed"  # into ``buckets`` for each feature: needs no pass over the data
    COUNTED = "counted"  # by a vocabulary of the training part, which is read through once when the set is opened


class CriteoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How rows become examples, and how the file is read. ``threads`` and ``block_bytes`` change nothing but the speed."""

    ids: IdForm = IdForm.HASHED
    buckets: int = 65_536
    min_count: int = 10  # categories seen less often in training share one id
    dense: DenseForm = DenseForm.LOG
    train_fraction: float = 0.8
    shuffle_rows: int = 65_536  # training rows are shuffled within windows of this many; 0: file order
    skip_bad_rows: bool = False
    threads: int = 4
    block_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.buckets < 2 or self.min_count < 1:
            raise InvalidInput(f"buckets must be 2 or more and min_count 1 or more, not {self.buckets} and {self.min_count}")
        if not 0 < self.train_fraction < 1:
            raise InvalidInput(f"train_fraction is {self.train_fraction}: it must lie between 0 and 1")
        if self.shuffle_rows < 0 or self.threads < 1 or self.block_bytes < 1024:
            raise InvalidInput("shuffle_rows must not be negative, threads at least 1, block_bytes at least 1024")


@dataclass(frozen=True)
class Rows:
    """Examples before they are cut into batches."""

    label_N: NDArray[np.float32]
    count_ND: NDArray[np.float32]
    id_NF: Integers

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, index: slice | Integers) -> "Rows":
        return Rows(self.label_N[index], self.count_ND[index], self.id_NF[index])


class Criteo:
    """The rows of one file, as ``options`` say."""

    def __init__(self, path: Path, seed: int, device: torch.device, options: CriteoOptions) -> None:
        _check_is_file(path)
        self.options = options
        self._seed, self._device = seed, device
        self._blocks = cut_into_blocks(path, options.block_bytes)
        if not self._blocks:
            raise InvalidFile(f"{path} is empty. {WHAT_IS_EXPECTED}")
        self._first_row = self._count_rows()
        n_rows = int(self._first_row[-1])
        self.n_train = round(n_rows * options.train_fraction)
        self.n_test = n_rows - self.n_train
        self.bad_rows = sum(block.n_lines for block in self._blocks) - n_rows
        self._ids = self._make_ids()
        self.schema = FeatureSchema(n_dense=N_COUNTS, onehot_sizes=self._ids.sizes)

    def batches_per_epoch(self, batch_size: int) -> int:
        check_batch_size(batch_size, self.n_train)
        return self.n_train // batch_size

    def train(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Epochs without end, each in its own order and without the rows that do not fill its last batch."""
        per_epoch = self.batches_per_epoch(batch_size)
        first_epoch, done = divmod(start, per_epoch)
        for epoch in itertools.count(first_epoch):
            batches = regroup(self._epoch(epoch, skip=done * batch_size), batch_size)
            yield from map(self._batch, itertools.islice(batches, per_epoch - done))
            done = 0

    def test(self, batch_size: int) -> Iterator[Batch]:
        check_batch_size(batch_size)
        yield from map(self._batch, regroup(self._read(self.n_train, self.n_train + self.n_test), batch_size))

    def _epoch(self, epoch: int, skip: int) -> Iterator[Rows]:
        """The training rows in the order of ``epoch``, without the first ``skip``."""
        window_rows = self.options.shuffle_rows
        if not window_rows:
            yield from self._read(skip, self.n_train)
            return
        first_window = skip // window_rows
        windows = regroup(self._read(first_window * window_rows, self.n_train), window_rows)
        for number, window in enumerate(windows, first_window):
            order_N = np.random.default_rng([self._seed, epoch, number]).permutation(len(window))
            yield window[order_N[max(0, skip - number * window_rows) :]]

    def _read(self, first: int, stop: int) -> Iterator[Rows]:
        """Rows ``first`` to ``stop`` in file order."""

        def with_ids(rows: ParsedRows) -> Rows:
            return Rows(rows.label_N, rows.count_ND, self._ids.of(rows.key_NF))

        return self._map_rows(with_ids, first, stop)

    def _map_rows(self, function: Callable[[ParsedRows], Result], first: int, stop: int) -> Iterator[Result]:
        """``function`` of the rows ``first`` to ``stop``, piece by piece in file order, run by the parsing threads."""
        first_block = int(np.searchsorted(self._first_row, first, side="right")) - 1
        stop_block = int(np.searchsorted(self._first_row, stop, side="left"))

        def parse(b: int) -> Result:
            row = self._first_row[b]
            return function(self._parse(self._blocks[b])[max(0, first - row) : max(0, stop - row)])

        return map_in_order(parse, range(first_block, stop_block), self.options.threads)

    def _parse(self, block: Block) -> ParsedRows:
        lines = block.read()
        rows, bad_lines = parse_rows(lines)
        if len(bad_lines) and not self.options.skip_bad_rows:
            line = int(bad_lines[0])
            column, reason = explain_bad_line(lines.split(b"\n")[line], is_cut_off=line == lines.count(b"\n"))
            raise InvalidFile(
                f"{block.path}, line {block.first_line + line + 1}, column {column} ({COLUMNS[column - 1]}): {reason}. "
                f"{WHAT_IS_EXPECTED}. To leave such rows out and count them, use skip_bad_rows (--skip-bad-rows)"
            )
        return rows

    def _count_rows(self) -> Integers:
        """The number of rows before each block, and at the end the number of all."""
        if self.options.skip_bad_rows:
            # Bad lines must be known beforehand: the split, and the place of a resumed run, count good rows alone.
            n_rows = [len(rows) for rows in map_in_order(self._parse, self._blocks, self.options.threads)]
            if not sum(n_rows):
                raise InvalidFile(f"{self._blocks[0].path} has no line that can be read. {WHAT_IS_EXPECTED}")
        else:
            self._parse(self._blocks[0])  # so that a file of another kind is refused here
            n_rows = [block.n_lines for block in self._blocks]
        return np.cumsum([0, *n_rows])

    def _make_ids(self) -> HashedIds | CountedIds:
        if self.options.ids is IdForm.HASHED:
            return HashedIds((self.options.buckets,) * N_CATEGORIES)
        keys = self._map_rows(lambda rows: rows.key_NF, 0, self.n_train)
        return CountedIds(count_keys(keys, N_CATEGORIES, self.options.min_count))

    def _batch(self, rows: Rows) -> Batch:
        batch = Batch(
            dense_BD=self.options.dense.apply(torch.from_numpy(rows.count_ND)),
            onehot_BF=torch.from_numpy(rows.id_NF),
            label_B=torch.from_numpy(rows.label_N),
        )
        return batch.to(self._device, non_blocking=True)


def regroup(pieces: Iterator[Rows], size: int) -> Iterator[Rows]:
    """The same rows in pieces of ``size``; the last may be smaller."""
    held: list[Rows] = []
    n_held = 0
    for piece in pieces:
        held.append(piece)
        n_held += len(piece)
        if n_held < size:
            continue
        rows = _concatenate(held)
        for first in range(0, n_held - size + 1, size):
            yield rows[first : first + size]
        held = [rows[n_held - n_held % size :]]
        n_held %= size
    if n_held:
        yield _concatenate(held)


def _concatenate(pieces: list[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return Rows(
        np.concatenate([piece.label_N for piece in pieces]),
        np.concatenate([piece.count_ND for piece in pieces]),
        np.concatenate([piece.id_NF for piece in pieces]),
    )


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        texts = ", ".join(sorted(entry.name for entry in path.glob("*.t[xs][tv]"))[:5])
        inside = f"the file itself, for example one of {texts} in it" if texts else "the file itself; there is no .txt in it"
        raise InvalidFile(f"{path} is a folder: give {inside}. {WHAT_IS_EXPECTED}")
    if not path.is_file():
        raise InvalidFile(f"there is no file {path}. {WHAT_IS_EXPECTED}")


def _open(path: Path | None, seed: int, device: torch.device, options: CriteoOptions) -> Criteo:
    if path is None:
        raise InvalidInput(f"data set 'criteo' needs the path of its file. {WHAT_IS_EXPECTED}")
    return Criteo(path, seed, device, options)


DATASETS.add("criteo", Source(CriteoOptions, _open))

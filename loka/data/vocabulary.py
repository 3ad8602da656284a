"""From the 64-bit keys of categories to the ids of embedding tables: hashed, or counted beforehand.

Axes:  N rows,  F features,  V ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loka.data.text_fields import Integers, Words

MISSING_ID, RARE_ID = 0, 1  # of every counted feature; hashed features have only the first


@dataclass(frozen=True)
class HashedIds:
    """Each feature's keys spread over its buckets; bucket 0 is kept for missing values."""

    sizes: tuple[int, ...]

    def of(self, key_NF: Words) -> Integers:
        buckets_F = np.array(self.sizes, np.uint64) - np.uint64(1)
        upper_NF = key_NF >> np.uint64(32)  # keys are mixed: their upper half, scaled down, is as even as a remainder
        return np.where(key_NF == 0, MISSING_ID, 1 + ((upper_NF * buckets_F) >> np.uint64(32)).astype(np.int64))


@dataclass(frozen=True)
class CountedIds:
    """Each feature's known keys, sorted. All other keys share one id, and missing values another."""

    known: tuple[Words, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(keys_V) + 2 for keys_V in self.known)

    def of(self, key_NF: Words) -> Integers:
        id_NF = np.empty(key_NF.shape, np.int64)
        for f, known_V in enumerate(self.known):
            key_N = key_NF[:, f]
            place_N = np.searchsorted(known_V, key_N)
            is_known_N = np.append(known_V, np.uint64(0))[place_N] == key_N
            id_NF[:, f] = np.where(is_known_N, place_N + 2, RARE_ID)
        id_NF[key_NF == 0] = MISSING_ID
        return id_NF


class _KeyCounts:
    """How often each key was added. Holds the distinct keys, and a buffer of about as many, or of 65,536 while they are few."""

    def __init__(self) -> None:
        self._keys_V, self._counts_V = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._added: list[tuple[Words, Integers]] = []
        self._n_added = 0

    def add(self, key_N: Words) -> None:
        keys_V, counts_V = np.unique(key_N, return_counts=True)
        self._added.append((keys_V, counts_V))
        self._n_added += len(keys_V)
        if self._n_added > max(len(self._keys_V), 1 << 16):
            self._merge()

    def at_least(self, min_count: int) -> Words:
        self._merge()
        return self._keys_V[self._counts_V >= min_count]

    def _merge(self) -> None:
        keys = np.concatenate([self._keys_V, *(keys_V for keys_V, _ in self._added)])
        counts = np.concatenate([self._counts_V, *(counts_V for _, counts_V in self._added)])
        self._keys_V, place = np.unique(keys, return_inverse=True)
        self._counts_V = np.bincount(place, counts, len(self._keys_V)).astype(np.int64)
        self._added, self._n_added = [], 0


def count_keys(pieces: Iterable[Words], n_features: int, min_count: int) -> tuple[Words, ...]:
    """For each feature the keys, but 0 (missing), that occur ``min_count`` times or more in ``pieces`` (each N×F), sorted."""
    counts = [_KeyCounts() for _ in range(n_features)]
    for key_NF in pieces:
        for f, counter in enumerate(counts):
            counter.add(key_NF[:, f])
    return tuple(keys_V[keys_V != 0] for keys_V in (counter.at_least(min_count) for counter in counts))

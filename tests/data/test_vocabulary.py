from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loka.data.text_fields import mix64
from loka.data.vocabulary import MISSING_ID, RARE_ID, CountedIds, HashedIds, count_keys

keys = st.integers(0, 2**64 - 1)
small_keys = st.integers(0, 6)


@given(
    st.lists(st.lists(st.tuples(small_keys, small_keys), min_size=1, max_size=20), min_size=1, max_size=5), st.integers(1, 6)
)
def test_counting_piece_by_piece_is_counting_all(pieces: list[list[tuple[int, int]]], min_count: int) -> None:
    known = count_keys((np.array(piece, np.uint64) for piece in pieces), 2, min_count)
    for f in range(2):
        counts = Counter(row[f] for piece in pieces for row in piece)
        assert known[f].tolist() == sorted(key for key, count in counts.items() if key and count >= min_count)


@given(st.lists(keys, min_size=1, unique=True), st.lists(keys, min_size=1))
def test_counted_ids_are_places_in_the_vocabulary(vocabulary: list[int], looked_up: list[int]) -> None:
    known = sorted(key for key in vocabulary if key)
    ids = CountedIds((np.array(known, np.uint64),))
    asked = looked_up + vocabulary
    expected = [MISSING_ID if not key else known.index(key) + 2 if key in known else RARE_ID for key in asked]
    assert ids.of(np.array(asked, np.uint64)[:, None])[:, 0].tolist() == expected
    assert ids.sizes == (len(known) + 2,)


def test_hashed_ids_fill_all_buckets_but_the_first_evenly() -> None:
    n, buckets = 200_000, 101
    key_NF = mix64(np.arange(1, n + 1, dtype=np.uint64))[:, None]
    counts = np.bincount(HashedIds((buckets,)).of(key_NF)[:, 0], minlength=buckets)
    assert counts[MISSING_ID] == 0
    chi_squared = float(((counts[1:] - n / 100) ** 2 / (n / 100)).sum())
    assert chi_squared < 160  # 99 degrees of freedom: 99.99 % lie below
    assert HashedIds((buckets,)).of(np.zeros((1, 1), np.uint64)).item() == MISSING_ID
    assert HashedIds((2,)).of(np.full((1, 1), 2**64 - 1, np.uint64)).item() == 1

"""Casts are written again by what was prepared for the very memory they lie in, and that memory is not kept for its sake."""

import gc
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from loka.nn.weight_casts import drop_casts, rewrite_casts, store_casts


class Prepared:
    """Counts preparations, and holds the weight as a rewrite does."""

    def __init__(self) -> None:
        self.n = 0

    def of(self, weight: Tensor) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            self.n += 1
            return partial(setattr, self, "last", weight)

        return prepare


def test_prepared_anew_where_the_weight_or_a_cast_lies_elsewhere() -> None:
    module, prepared, weight = nn.Linear(4, 4), Prepared(), torch.randn(4, 4)
    store_casts(module, {"codes": torch.zeros(4, 4)})
    for expected, now in ((1, weight), (1, weight), (2, weight.t()), (3, weight.clone())):
        rewrite_casts(module, now, prepared.of(now))
        assert prepared.n == expected
    store_casts(module, {"codes": torch.ones(4, 4)})  # written where the old ones lie
    rewrite_casts(module, now, prepared.of(now))
    assert prepared.n == 3
    module._buffers["_weight_codes"] = torch.ones(4, 4)
    rewrite_casts(module, now, prepared.of(now))
    assert prepared.n == 4


def test_a_weight_that_moved_on_is_let_go() -> None:
    for leave in (drop_casts, lambda module: store_casts(module, {"codes": torch.zeros(2, 2)})):
        module, weight = nn.Linear(4, 4), torch.randn(4, 4)
        store_casts(module, {"codes": torch.zeros(4, 4)})
        rewrite_casts(module, weight, Prepared().of(weight))
        old = weakref.ref(weight)
        del weight
        gc.collect()
        assert old() is not None
        leave(module)
        gc.collect()
        assert old() is None

"""Options of benchmarks that are refused before hours of work."""

import pytest

from loka.cli import app
from loka.core.errors import InvalidInput


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gemm --shapes", "--shapes takes at least one"),
        ("gemm --kernels", "--kernels takes at least one"),
        ("quality --arms", "--arms takes at least one"),
        ("quality --seeds", "--seeds takes at least one"),
        ("quality --settings", "--settings takes at least one"),
        ("quality --parallel 0", "--parallel must be a whole number, at least 1, got 0"),
        ("model --batch-sizes", "--batch-sizes takes at least one"),
        ("model --timed-steps 0", "--timed-steps must be a whole number, at least 1, got 0"),
        ("block --ways", "--ways takes at least one"),
    ],
)
def test_nothing_and_none_are_refused(words: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        app(f"bench {words}", exit_on_error=False, result_action="return_value")

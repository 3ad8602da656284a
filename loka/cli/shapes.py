"""Shapes as typed on the command line, and the benchmark's own."""

from typing import Annotated

from cyclopts import Parameter

from loka.core.errors import InvalidInput
from loka.core.gemm import SiteShape

# The GEMMs that recommendation models are made of; every table of benchmarks uses them.
BENCHMARK_ROWS = (2048, 6144, 12288)
BENCHMARK_LAYERS = (
    (256, 768),
    (512, 512),
    (768, 1024),
    (1024, 1024),
    (2048, 1024),
    (1024, 4096),
    (2048, 2048),
    (4096, 1024),
    (4096, 4096),
)
BENCHMARK_SHAPES = tuple(SiteShape(m, k, n) for m in BENCHMARK_ROWS for k, n in BENCHMARK_LAYERS)

Shapes = Annotated[
    list[str] | None, Parameter(help="ROWSxINxOUT; the 27 benchmark shapes if not given.", consume_multiple=True)
]


def parse_shape(text: str) -> SiteShape:
    """``2048x1024x512``: rows × in_features × out_features."""
    try:
        m, k, n = (int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        m = k = n = 0
    if min(m, k, n) < 1:
        raise InvalidInput(f"a shape is ROWSxINxOUT, for example 2048x1024x512, got {text!r}")
    return SiteShape(m, k, n)

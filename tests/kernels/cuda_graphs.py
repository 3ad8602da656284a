"""Steps captured as CUDA graphs, for the tests that replay them."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """``step``, taken three times and then captured, and what it returns, which every replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result

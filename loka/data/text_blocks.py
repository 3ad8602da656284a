"""A text file of any length in blocks of whole lines, which several threads work on and which are handed on in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loka.core.errors import InvalidFile

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Block:
    """Consecutive lines of a file; ``first_line`` counts from 0."""

    path: Path
    offset: int
    size: int
    first_line: int
    n_lines: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) != self.size:
            raise InvalidFile(f"{self.path} became shorter while it was read: it must not change during a run")
        return data


def cut_into_blocks(path: Path, block_bytes: int) -> list[Block]:
    """Blocks of at most ``block_bytes`` that end where lines do. Reads the file through once, one block at a time.

    A last line without a newline counts as a line, and ends the last block.
    """
    blocks: list[Block] = []
    offset = line = 0
    with path.open("rb") as file:
        while data := file.read(block_bytes):
            size = data.rfind(b"\n") + 1
            if size == 0 and len(data) == block_bytes:
                raise InvalidFile(f"{path}, line {line + 1}: is longer than {block_bytes:,} bytes: this is not a file of rows")
            n_lines = data.count(b"\n")
            at_end = len(data) < block_bytes
            if at_end and size < len(data):
                size, n_lines = len(data), n_lines + 1
            blocks.append(Block(path, offset, size, line, n_lines))
            offset, line = offset + size, line + n_lines
            file.seek(offset)
    return blocks


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """``function`` of every item, in order. At most ``threads`` + 1 results wait to be taken, which bounds the memory."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="loka-data") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # the consumer may stop early
            for future in waiting:
                future.cancel()

import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loka.core.errors import InvalidFile
from loka.data.text_blocks import cut_into_blocks, map_in_order


@given(st.lists(st.text("ab", max_size=12), max_size=30), st.booleans(), st.integers(14, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_hold_the_file_in_whole_lines(tmp_path: Path, lines: list[str], ends_with_newline: bool, size: int) -> None:
    text = "\n".join(lines) + ("\n" if ends_with_newline else "")
    path = tmp_path / "file"
    path.write_text(text)
    blocks = cut_into_blocks(path, size)
    parts = [block.read().decode() for block in blocks]
    assert "".join(parts) == text
    assert all(part.endswith("\n") for part in parts[:-1])
    assert all(len(part) <= size for part in parts)
    line = 0
    for block, part in zip(blocks, parts, strict=True):
        assert (block.first_line, block.n_lines) == (line, len(part.splitlines()))
        line += block.n_lines


def test_a_file_without_lines_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n" + b"x" * 5000)
    with pytest.raises(InvalidFile, match="line 2: is longer than 1,024 bytes"):
        cut_into_blocks(path, 1024)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one\ntwo\n")
    (block,) = cut_into_blocks(path, 1024)
    path.write_text("one\n")
    with pytest.raises(InvalidFile, match="became shorter"):
        block.read()


def test_results_come_in_order_though_threads_finish_out_of_order() -> None:
    second_is_done = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second_is_done.wait(10)
        if item == 1:
            second_is_done.set()
        return item

    assert list(map_in_order(work, range(20), 2)) == list(range(20))


@pytest.mark.parametrize("threads", [1, 3])
def test_work_runs_ahead_of_a_slow_reader_by_a_bounded_number_of_items(threads: int) -> None:
    handed_out = 0

    def items() -> object:
        nonlocal handed_out
        for item in range(1000):
            handed_out += 1
            yield item

    results = map_in_order(lambda item: item, items(), threads)
    for taken in range(1, 50):
        next(results)
        assert handed_out <= taken + threads
    results.close()


def test_an_error_in_a_thread_reaches_the_reader_at_its_place() -> None:
    def work(item: int) -> int:
        if item == 3:
            raise InvalidFile("the third")
        return item

    results = map_in_order(work, range(10), 4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InvalidFile, match="the third"):
        next(results)

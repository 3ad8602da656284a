"""The Criteo reader against Python's csv module, and what it does with files that are not as they should be."""

import csv
import gc
import itertools
import math
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loka.core.errors import InvalidFile, InvalidInput
from loka.data.batch import Batch
from loka.data.criteo import Criteo
from loka.data.criteo_format import COLUMNS, explain_bad_line, parse_rows
from loka.data.dataset import open_dataset


def open_criteo(path: Path, **options: object) -> Criteo:
    data = open_dataset("criteo", path=path, **options)
    assert isinstance(data, Criteo)
    return data


def in_one(batches: list[Batch]) -> Batch:
    return Batch(
        torch.cat([batch.dense_BD for batch in batches]),
        torch.cat([batch.onehot_BF for batch in batches]),
        torch.cat([batch.label_B for batch in batches]),
    )


def epoch_of(data: Criteo, batch_size: int, number: int = 0) -> Batch:
    n = data.batches_per_epoch(batch_size)
    return in_one(list(itertools.islice(data.train(batch_size, start=n * number), n)))


def assert_same(a: Batch, b: Batch) -> None:
    assert torch.equal(a.label_B, b.label_B)
    assert torch.equal(a.onehot_BF, b.onehot_BF)
    torch.testing.assert_close(a.dense_BD, b.dense_BD, rtol=0, atol=0, equal_nan=True)


def numbered_file(path: Path, lines: list[str]) -> Path:
    """The lines with their number, from 1, as the first count: rows can be told apart after a shuffle."""
    rows = [line.split("\t") for line in lines]
    path.write_text("".join("\t".join([row[0], str(number), *row[2:]]) + "\n" for number, row in enumerate(rows, 1)))
    return path


@pytest.mark.parametrize(("threads", "block_bytes"), [(1, 1024), (4, 1500), (4, 1 << 20)])
def test_rows_are_those_of_a_plain_csv_reader(criteo_file: Path, threads: int, block_bytes: int) -> None:
    data = open_criteo(criteo_file, dense="raw", shuffle_rows=0, threads=threads, block_bytes=block_bytes)
    found = in_one([epoch_of(data, 100), *data.test(64)])
    with criteo_file.open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert found.label_B.tolist() == [float(row[0]) for row in rows]
    counts = torch.tensor([[float(text) if text else math.nan for text in row[1:14]] for row in rows])
    torch.testing.assert_close(found.dense_BD, counts, rtol=0, atol=0, equal_nan=True)
    for f in range(26):
        texts, ids = [row[14 + f] for row in rows], found.onehot_BF[:, f].tolist()
        assert all((text == "") == (i == 0) for text, i in zip(texts, ids, strict=True))
        assert all(0 <= i < 65_536 for i in ids)
        assert len(dict(zip(texts, ids, strict=True))) == len(set(zip(texts, ids, strict=True)))  # one id a text


def test_counts_are_log_transformed_with_their_sign(criteo_file: Path) -> None:
    raw = epoch_of(open_criteo(criteo_file, dense="raw"), 100).dense_BD.double()
    log = epoch_of(open_criteo(criteo_file, dense="log"), 100).dense_BD
    assert (raw < 0).any()
    assert (raw > 1e6).any()
    expected = torch.where(raw < 0, -torch.log(1 - raw), torch.log(1 + raw)).float()
    torch.testing.assert_close(log, expected, equal_nan=True)


def test_the_first_part_is_trained_on_and_the_last_tested_on(tmp_path: Path, criteo_lines: list[str]) -> None:
    data = open_criteo(numbered_file(tmp_path / "t", criteo_lines), dense="raw", train_fraction=0.7, shuffle_rows=300)
    assert (data.n_train, data.n_test) == (700, 300)
    assert sorted(epoch_of(data, 100).dense_BD[:, 0].tolist()) == list(range(1, 701))
    sizes = [len(batch) for batch in data.test(128)]
    assert sizes == [128, 128, 44]
    assert in_one(list(data.test(128))).dense_BD[:, 0].tolist() == list(range(701, 1001))


def test_rows_are_shuffled_within_their_window_and_anew_each_epoch(tmp_path: Path, criteo_lines: list[str]) -> None:
    data = open_criteo(numbered_file(tmp_path / "t", criteo_lines), dense="raw", shuffle_rows=200, block_bytes=3000)
    epochs = [epoch_of(data, 50, number).dense_BD[:, 0].tolist() for number in range(2)]
    for order in epochs:
        for window in range(4):
            part = order[200 * window : 200 * (window + 1)]
            assert sorted(part) == list(range(200 * window + 1, 200 * window + 201))
            assert part != sorted(part)
    assert epochs[0] != epochs[1]
    other_seed = open_dataset("criteo", path=tmp_path / "t", seed=1, dense="raw", shuffle_rows=200)
    assert next(other_seed.train(800)).dense_BD[:, 0].tolist() != epochs[0]


def test_how_the_file_is_cut_and_how_many_threads_read_it_changes_nothing(criteo_file: Path) -> None:
    one = open_criteo(criteo_file, threads=1, block_bytes=1024, shuffle_rows=100)
    other = open_criteo(criteo_file, threads=3, block_bytes=50_000, shuffle_rows=100)
    assert_same(epoch_of(one, 33), epoch_of(other, 33))


@given(start=st.integers(0, 60), batch_size=st.integers(20, 300), shuffle_rows=st.sampled_from([0, 1, 70, 10_000]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_starting_late_is_skipping(criteo_file: Path, start: int, batch_size: int, shuffle_rows: int) -> None:
    data = open_criteo(criteo_file, shuffle_rows=shuffle_rows, threads=1, block_bytes=5000)
    expected = itertools.islice(data.train(batch_size), start, start + 3)
    for late, batch in zip(data.train(batch_size, start=start), expected, strict=False):
        assert len(late) == batch_size
        assert_same(late, batch)


def test_a_vocabulary_is_counted_on_training_rows_and_rare_categories_share_an_id(
    criteo_file: Path, criteo_lines: list[str]
) -> None:
    data = open_criteo(criteo_file, ids="counted", min_count=5, shuffle_rows=0)
    found = in_one([epoch_of(data, 100), *data.test(100)])
    rows = [line.split("\t") for line in criteo_lines]
    for f in range(26):
        counts = Counter(row[14 + f] for row in rows[:800] if row[14 + f])
        known = {text for text, count in counts.items() if count >= 5}
        assert data.schema.onehot_sizes[f] == len(known) + 2
        ids = {}
        for row, i in zip(rows, found.onehot_BF[:, f].tolist(), strict=True):
            kind = "missing" if not row[14 + f] else row[14 + f] if row[14 + f] in known else "rare"
            assert ids.setdefault(kind, i) == i
        assert ids.pop("missing", 0) == 0
        assert ids.pop("rare", 1) == 1
        assert sorted(ids.values()) == list(range(2, len(known) + 2))


BAD_LINES = {  # what replaces (column, text) → what the message says
    "label": (1, "2", "column 1 (label): the label is '2', not 0 or 1"),
    "empty label": (1, "", "column 1 (label): the label is '', not 0 or 1"),
    "label with zeros": (1, "01", "column 1 (label): the label is '01', not 0 or 1"),
    "decimal": (4, "1.5", "column 4 (I3): '1.5' is not an integer"),
    "word": (14, "abc", "column 14 (I13): 'abc' is not an integer"),
    "too many digits": (2, "9" * 17, "column 2 (I1): '99999999999999999' is not an integer of at most 16 digits"),
    "encoding": (20, "ca\xe9fe", "column 20 (C6): 'ca\\\\xe9fe' holds the byte 0xe9"),
    "control": (39, "a\0b", "column 39 (C25): 'a\\x00b' holds the byte 0x00"),
    "windows": (40, "68fd1e64\r", "column 40 (C26): '68fd1e64\\r' holds the byte 0x0d, which is not printable ASCII (Windows"),
    "extra column": (40, "a\tb", "column 40 (C26): the line has 41 columns, not 40"),
    "lost line end": (7, "1\n2", "column 7 (I6): the line has 7 columns, not 40"),
}


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("block_bytes", [2000, 1 << 20])
def test_a_malformed_row_is_named_or_counted(tmp_path: Path, criteo_lines: list[str], case: str, block_bytes: int) -> None:
    column, text, message = BAD_LINES[case]
    row = criteo_lines[700].split("\t")
    row[column - 1] = text
    bad = "\t".join(row)
    path, without = tmp_path / "bad.txt", tmp_path / "without.txt"
    path.write_bytes("".join(line + "\n" for line in [*criteo_lines[:700], bad, *criteo_lines[701:]]).encode("latin-1"))
    without.write_text("".join(line + "\n" for line in criteo_lines[:700] + criteo_lines[701:]))
    with pytest.raises(InvalidFile) as error:
        epoch_of(open_criteo(path, block_bytes=block_bytes), 100)
    assert f"{path}, line 701, {message}" in str(error.value)
    assert "skip_bad_rows" in str(error.value)
    skipping, expected = open_criteo(path, skip_bad_rows=True, block_bytes=block_bytes), open_criteo(without)
    assert skipping.bad_rows == (2 if case == "lost line end" else 1)
    assert expected.bad_rows == 0
    assert (skipping.n_train, skipping.n_test) == (expected.n_train, expected.n_test)
    assert_same(epoch_of(skipping, 90), epoch_of(expected, 90))
    assert_same(in_one(list(skipping.test(90))), in_one(list(expected.test(90))))


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_truncated_last_line_is_named_or_counted(criteo_file: Path, cut: int) -> None:
    whole = criteo_file.read_bytes()
    criteo_file.write_bytes(whole[:-cut])
    lost = whole[-cut:].count(b"\n") - 1
    with pytest.raises(InvalidFile, match=rf"line {1000 - lost}, column .*cut off"):
        list(open_criteo(criteo_file).test(100))
    data = open_criteo(criteo_file, skip_bad_rows=True)
    assert (data.bad_rows, data.n_train + data.n_test) == (1, 999 - lost)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 29), st.integers(0, 39), st.sampled_from(["", "0", "-3", "x", "1\t1", "1.", "é", "1" * 17, "\r"])
        ),
        max_size=4,
    )
)
def test_the_block_parser_and_the_explanation_agree_on_what_is_bad(
    criteo_lines: list[str], edits: list[tuple[int, int, str]]
) -> None:
    rows = [line.split("\t") for line in criteo_lines[:30]]
    for row, column, text in edits:
        rows[row][column] = text
    lines = ["\t".join(row).encode("latin-1") for row in rows]
    parsed, bad = parse_rows(b"".join(line + b"\n" for line in lines))

    def is_explained(line: bytes) -> bool:
        return "without a newline" not in explain_bad_line(line, is_cut_off=False)[1]  # the last resort: nothing else found

    assert bad.tolist() == [number for number, line in enumerate(lines) if is_explained(line)]
    assert len(parsed) == 30 - len(bad)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty. Expected is the Criteo Display Advertising TSV"),
        (b"\x1f\x8b\x08\0gzip\n" * 5, "line 1, column 1 (label): .* holds the byte 0x1f"),
        (b"user,item\n1,2\n", "line 1, column 1 (label): the label is 'user,item'"),
        (b"\n", "line 1, column 1 (label): the label is ''"),
    ],
)
def test_a_foreign_file_is_refused_when_opened(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match=message.replace("(", r"\(").replace(")", r"\)")):
        open_criteo(path)
    with pytest.raises(InvalidFile, match=r"empty|no line that can be read"):
        open_criteo(path, skip_bad_rows=True)


def test_a_folder_or_nothing_in_place_of_the_file_is_explained(tmp_path: Path, criteo_file: Path) -> None:
    with pytest.raises(InvalidFile, match=r"is a folder: give the file itself, for example one of train.txt"):
        open_criteo(tmp_path)
    with pytest.raises(InvalidFile, match=r"there is no file .*nowhere. Expected is the Criteo.*kaggle"):
        open_criteo(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="needs the path of its file"):
        open_dataset("criteo")
    with pytest.raises(InvalidInput, match="batch_size 801 is larger than the 800 training examples"):
        next(open_criteo(criteo_file).train(801))


def test_a_file_much_larger_than_the_buffers_is_never_held(tmp_path: Path, criteo_lines: list[str]) -> None:
    path = tmp_path / "large.txt"
    text = "".join(line + "\n" for line in criteo_lines).encode()
    with path.open("wb") as file:
        for _ in range(100):
            file.write(text)
    size = path.stat().st_size
    assert size > 15e6
    data = open_criteo(path, threads=2, block_bytes=1 << 15, shuffle_rows=1000)
    gc.collect()
    tracemalloc.start()
    try:
        n = sum(len(batch) for batch in itertools.islice(data.train(500), data.batches_per_epoch(500)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n == 80_000
    assert peak < size / 5


def test_a_reader_that_stops_early_leaves_no_thread_behind(criteo_file: Path) -> None:
    batches = open_criteo(criteo_file, block_bytes=2000, shuffle_rows=0).train(10)
    next(batches)
    assert any(thread.name.startswith("loka-data") for thread in threading.enumerate())
    batches.close()
    gc.collect()
    assert not any(thread.name.startswith("loka-data") for thread in threading.enumerate())


@pytest.mark.parametrize(
    "options",
    [{"buckets": 1}, {"min_count": 0}, {"train_fraction": 1.0}, {"shuffle_rows": -1}, {"threads": 0}, {"block_bytes": 9}],
)
def test_options_out_of_range_are_refused(criteo_file: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        open_criteo(criteo_file, **options)


def test_columns_are_named_as_criteo_does() -> None:
    assert len(COLUMNS) == 40
    assert (COLUMNS[0], COLUMNS[1], COLUMNS[13], COLUMNS[14], COLUMNS[39]) == ("label", "I1", "I13", "C1", "C26")

"""What every data set offers, and how one is opened by name.

A data set is added by writing one file in this package that ends with ``DATASETS.add(name, Source(Options, Class))``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from loka.core.errors import InvalidInput
from loka.core.names import did_you_mean
from loka.core.registry import Registry
from loka.data.batch import Batch, FeatureSchema

Options = TypeVar("Options", bound=msgspec.Struct)


class Dataset(Protocol):
    """Labelled examples in batches: an endless training stream, and a held-out part to be read through once."""

    @property
    def schema(self) -> FeatureSchema: ...

    @property
    def bad_rows(self) -> int:
        """How many malformed rows were left out; 0 unless the set was opened with ``skip_bad_rows``."""
        ...

    def batches_per_epoch(self, batch_size: int) -> int | None:
        """How many training batches there are before examples come again; None where they never do."""
        ...

    def train(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Endless batches of exactly ``batch_size``, the same on every call; ``start`` skips that many without making them."""
        ...

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Every held-out example once; the last batch may be smaller."""
        ...


@dataclass(frozen=True)
class Source:
    """How a kind of data set is opened: the class of its options, and a function of (path, seed, device, options)."""

    options: type[msgspec.Struct]
    open: Callable[[Path | None, int, torch.device, Any], Dataset]


DATASETS: Registry[Source] = Registry("data set", "loka.data")


def open_dataset(
    name: str, *, path: str | Path | None = None, seed: int = 0, device: torch.device | str = "cpu", **options: object
) -> Dataset:
    """Open a data set of ``DATASETS``; ``seed`` decides the order of its training examples.

    ``options`` are the fields of the set's options class, e.g. ``dense="raw"``.
    """
    source = DATASETS.get(name)
    if seed < 0:
        raise InvalidInput(f"seed is {seed}: it must be 0 or more")
    parsed = parse_options(name, source.options, options)
    return source.open(None if path is None else Path(path), seed, torch.device(device), parsed)


def parse_options(name: str, options_type: type[Options], options: Mapping[str, object]) -> Options:
    """Make ``options_type`` from a mapping; a name or value it does not take is refused, listing the names it takes.

    As from a command line, numbers may come as text, and lists and nested options as JSON text.
    """
    decoded = {option: _from_json(name, option, value) for option, value in options.items()}
    _check_names(f"data set {name!r}", options_type, decoded)
    try:
        return msgspec.convert(decoded, options_type, strict=False, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"data set {name!r}: {error}") from error


def _from_json(name: str, option: str, value: object) -> object:
    if not (isinstance(value, str) and value.startswith(("[", "{"))):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"data set {name!r}, option {option!r}: {value} is not JSON: {error}") from error


def _check_names(owner: str, options_type: type[msgspec.Struct], options: Mapping[str, object]) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(options_type)}
    for option, value in options.items():
        if option not in known:
            raise InvalidInput(f"{owner} has no option {option!r}.{did_you_mean(option, known)} Known: {', '.join(known)}")
        nested = known[option]
        if isinstance(value, Mapping) and isinstance(nested, type) and issubclass(nested, msgspec.Struct):
            _check_names(f"{owner}, option {option!r},", nested, value)


def check_batch_size(batch_size: int, examples: int | None = None) -> None:
    """Refuse a batch size that cannot be filled; ``examples`` is how many there are to train on."""
    if batch_size < 1:
        raise InvalidInput(f"batch_size is {batch_size}: it must be 1 or more")
    if examples is not None and batch_size > examples:
        raise InvalidInput(f"batch_size {batch_size} is larger than the {examples} training examples: choose a smaller one")

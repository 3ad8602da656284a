"""Named tensors, alone or beside a document, as safetensors. Nothing is ever unpickled."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from loka.core.errors import InvalidFile
from loka.core.files import atomic_path

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """As safetensors has it; a full disk is an ``OSError`` here as everywhere."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # imports torch

    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path.parent} cannot be written to: {error}") from error


@contextmanager
def vectors_beside(path: Path, vectors: "Mapping[str, Tensor]") -> Iterator[None]:
    """Write ``vectors`` to ``path``, or nothing where there are none, together with the document that is written inside: what
    was there is replaced when both are on disk."""
    if not vectors:
        yield
        path.unlink(missing_ok=True)  # what an earlier document left
        return
    with atomic_path(path) as temporary:
        write_tensors(temporary, {name: vector.detach().cpu().contiguous() for name, vector in vectors.items()})
        yield


def read_vectors(path: Path) -> "dict[str, Tensor]":
    """What ``vectors_beside`` wrote; nothing where there is no file."""
    if not path.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # imports torch

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} cannot be read ({error}): remove it and make it again") from error

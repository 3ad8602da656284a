"""Named tensors beside a document, as safetensors. Nothing is ever unpickled."""

from pathlib import Path
from typing import TYPE_CHECKING

from loka.core.errors import InvalidFile
from loka.core.files import atomic_path

if TYPE_CHECKING:
    from torch import Tensor


def write_vectors(path: Path, vectors: "dict[str, Tensor]") -> None:
    """Write ``vectors``; with none, remove what an earlier document left there."""
    if not vectors:
        path.unlink(missing_ok=True)
        return
    from safetensors.torch import save_file  # imports torch

    with atomic_path(path) as temporary:
        save_file({name: vector.detach().cpu().contiguous() for name, vector in vectors.items()}, temporary)


def read_vectors(path: Path) -> "dict[str, Tensor]":
    """What ``write_vectors`` wrote; nothing where there is no file."""
    if not path.exists():
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # imports torch

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} cannot be read ({error}): remove it and make it again") from error

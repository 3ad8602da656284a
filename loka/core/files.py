"""Files that are whole or not there: every save writes beside the target, syncs, and renames."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loka.core.errors import InvalidInput


def require_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a folder that cannot be made or written to, before the work whose result it shall hold."""
    there = _nearest_folder(Path(path))
    try:  # who may write does not tell everywhere: not in /proc, nor where a quota is used up
        tempfile.TemporaryDirectory(dir=there, prefix=".loka.").cleanup()
    except OSError as failure:
        raise _not_writable(there, failure) from failure


def _nearest_folder(path: Path) -> Path:
    """``path``, or what is there of the folders around it."""
    there = next(part for part in (path, *path.parents) if part.exists())
    if not there.is_dir():
        raise InvalidInput(f"{there} is a file: name a folder")
    return there


def _not_writable(folder: Path, failure: OSError) -> InvalidInput:
    return InvalidInput(f"{folder} cannot be written to ({failure.strerror}): name another folder")


def file_in(run: str | os.PathLike[str], name: str) -> Path:
    """The path of ``name`` in the folder ``run``, or ``run`` itself where that is the path of such a file."""
    if not (isinstance(run, str) or hasattr(run, "__fspath__")):
        raise InvalidInput(f"a run is named by the path of its folder, got {run!r}")
    path = Path(run)
    if path.suffix == Path(name).suffix and not path.is_dir():
        return path
    if path.is_file():
        raise InvalidInput(f"{path} is a file, and no {name}: name the folder of a run, or the path of its {name}")
    return path / name


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; on success it replaces ``target``, on an exception it vanishes."""
    target = Path(target)
    there = _nearest_folder(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as failure:
        raise _not_writable(there, failure) from failure
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as failure:
        if failure.filename is None and failure.errno is not None:  # a full disk, which names no file
            raise OSError(failure.errno, failure.strerror, str(target)) from failure
        raise
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(target: str | os.PathLike[str], data: bytes | str) -> None:
    with atomic_path(target) as path:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

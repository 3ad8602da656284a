"""One process at a time: locks that end with whoever holds them, however it ends."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from loka.core.errors import InvalidInput
from loka.core.files import require_folder

logger = logging.getLogger("loka")
CANNOT = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)  # the last is NFS's answer for a folder


def lock(file: int | IO[bytes], folder: Path) -> None:
    """Lock ``file`` for this process until it is closed. Where another process holds it, raise, naming ``folder``."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidInput(f"another process is at the run in {folder}: wait for it, or name another folder") from None
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        logger.warning("%s lies where files cannot be locked: see that one process alone is at it", folder)


@contextmanager
def alone_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """The folder made, and no other process in here with the same one until the end."""
    with _opened(folder) as descriptor:
        lock(descriptor, Path(folder))
        yield


@contextmanager
def in_turn(folder: str | os.PathLike[str]) -> Iterator[None]:
    """The same for a moment, which others wait for; where files cannot be locked, at once."""
    with _opened(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
        yield


@contextmanager
def _opened(folder: str | os.PathLike[str]) -> Iterator[int]:
    require_folder(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

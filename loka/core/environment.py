"""Where a number was measured: hardware, versions and date, for every file that carries measurements."""

import datetime
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from loka.core.gemm import Device
from loka.core.version import __version__

LIBRARIES = ("torch", "triton", "fbgemm-gpu-genai", "torchao", "numpy")  # those whose version changes what is measured


class Environment(msgspec.Struct, frozen=True):
    device: str
    python: str
    loka: str
    libraries: dict[str, str]
    cuda: str | None
    date: str  # ISO, UTC

    @property
    def slug(self) -> str:
        """Hardware and date as the beginning of a file's name, e.g. ``nvidia-h200-2026-11-15``."""
        name = re.sub(r"\((R|TM)\)|CPU|Processor|@ *[\d.]+ *[GM]Hz|\(sm_\d+\)", " ", self.device)
        return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{self.date}"

    def __str__(self) -> str:
        libraries = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        cuda = f", CUDA {self.cuda}" if self.cuda else ""
        return f"{self.device}, {libraries}{cuda}, Python {self.python}, {self.date}"


def current_environment(device: Device) -> Environment:
    """This machine's, for measurements made on ``device``."""
    import torch

    return Environment(
        device=f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)" if device.type == "cpu" else str(device),
        python=platform.python_version(),
        loka=__version__,
        libraries={name: version for name in LIBRARIES if (version := _version(name))},
        cuda=torch.version.cuda if device.type == "cuda" else None,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def current_command() -> str:
    """The command that is running, as a reader would type it: without the folders of this machine."""
    program = Path(sys.argv[0]).name
    words = [Path(word).name if word.startswith(("/", "~", "..")) else word for word in sys.argv[1:]]
    return shlex.join([*(["loka"] if program in ("loka", "__main__.py") else ["python", f"benchmarks/{program}"]), *words])


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

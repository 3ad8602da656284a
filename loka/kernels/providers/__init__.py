"""One file a library. Vendor libraries are imported inside the functions that need them."""

import importlib
import pkgutil


def import_all() -> None:
    """Import every provider's file, which registers its kernels and casters."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

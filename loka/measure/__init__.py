"""What kernels cost: error and time.

``loka.measure`` is this package and the call a user makes, ``loka.measure(record)``: it is ``loka.measure.survey.measure``.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.core.record import Record
    from loka.core.survey import Survey


class _CallablePackage(ModuleType):
    """Importing any file of a package binds the package's name in its parent, over whatever else was called so."""

    def __call__(self, record: "Record", **options: Any) -> "Survey":
        from loka.measure.survey import measure

        return measure(record, **options)


sys.modules[__name__].__class__ = _CallablePackage

"""What benchmarks that gather results share: rows are written as they are measured, and the same call again continues."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from loka.core.errors import InvalidInput
from loka.core.results import GatheredResults

if TYPE_CHECKING:
    import torch

Row = TypeVar("Row")
Out = Annotated[str, Parameter(help="Folder for what is written; with --results that is beside the file.")]
Results = Annotated[Path | None, Parameter(help="Results file to continue; one of today's in --out if not given.")]


def gathered_results(name: str, where: "torch.device", out: str, results: Path | None) -> GatheredResults:
    from loka.core.environment import current_command, current_environment
    from loka.kernels.device import device_of

    return GatheredResults(out, name, current_environment(device_of(where)), current_command(), results)


def refuse_empty(**options: list[Any] | None) -> None:
    """Refuse an option that takes names but was given none: neither nothing nor all is likely to be meant."""
    for name, given in options.items():
        if given == []:
            raise InvalidInput(f"--{name.replace('_', '-')} takes at least one: name it, or leave the option out")


def typed_rows(gathered: GatheredResults, kind: type[Row]) -> list[Row]:
    import msgspec

    return [msgspec.convert(row, kind) for row in gathered.rows.values()]  # "key" belongs to the file


def finish(gathered: GatheredResults, tables: str, *, shown: str | None = None) -> None:
    """Write ``tables`` beside the results; print ``shown``, or all of them if that is not given, and where they are."""
    print(tables if shown is None else shown)
    print(f"wrote {gathered.write_markdown(tables)} and {gathered.json_path}")

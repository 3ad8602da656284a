"""record.safetensors: a Record's tensors by site, and in the metadata the rest as a JSON document."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from loka.core.documents import parse_document, same_fields
from loka.core.environment import Environment
from loka.core.errors import InvalidFile
from loka.core.files import atomic_path, file_in
from loka.core.recipe import Format
from loka.core.site_record import Finding, SiteFacts, SiteRecord
from loka.core.statistics import Rule, Statistic
from loka.core.vectors import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "loka.record/8"
same_fields(
    "loka.record/2",  # without ``entry``: no norm in front of a site is known
    "loka.record/3",  # without ``stays``: apply_plan says then where nothing can stand in for a site
    "loka.record/4",  # without ``cast_in_step``: weights are cast after steps
    "loka.record/5",  # without ``id``
    "loka.record/6",  # without ``across``: every x lies as its rows do
    "loka.record/7",  # without ``feeds_product``: no output is known to be read by a product
)
FILE = "record.safetensors"


class RecordDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of record.safetensors."""

    fingerprint: str
    environment: Environment
    dtype: Format
    step_us: float | None
    steps_seen: int
    sites: tuple[SiteFacts, ...]
    rules: dict[str, Rule]  # of every statistic
    findings: tuple[Finding, ...]
    uncovered: tuple[str, ...]
    id: str = ""


def write_record(run: str | Path, document: RecordDocument, sites: Mapping[str, SiteRecord]) -> Path:
    """Into the folder ``run``, whole or not at all."""
    fields = {"schema": SCHEMA, **msgspec.to_builtins(document, str_keys=True)}
    path = Path(run) / FILE
    with atomic_path(path) as temporary:
        write_tensors(temporary, _tensors(sites), metadata={"document": msgspec.json.encode(fields).decode()})
    return path


def read_record(run: str | Path) -> tuple[RecordDocument, dict[str, SiteRecord]]:
    """What ``write_record`` wrote, now or under an older schema, by its folder or by its own path."""
    path = file_in(run, FILE)
    document, tensors = _read(path)
    if len({facts.name for facts in document.sites}) < len(document.sites):
        raise InvalidFile(f"{path} names a site twice: it was written by something else. Make it again")
    own = _by_site(tensors, [facts.name for facts in document.sites])
    return document, {facts.name: _site(facts, document.rules, own[facts.name], path) for facts in document.sites}


def id_in(run: str | Path) -> str:
    """The id of the Record in the folder ``run``, without reading its tensors; "" where there is no Record, or one too old."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(run) / FILE, framework="pt") as file:
            return msgspec.json.decode((file.metadata() or {}).get("document", "{}"), type=_Id).id
    except (OSError, SafetensorError, msgspec.MsgspecError):
        return ""


class _Id(msgspec.Struct):
    id: str = ""


def _tensors(sites: Mapping[str, SiteRecord]) -> "dict[str, Tensor]":
    """By ``<site>/weight``, ``<site>/bias`` and ``<site>/<statistic>/<tensor>``."""
    tensors: dict[str, Tensor] = {}
    for name, site in sites.items():
        tensors[f"{name}/weight"] = site.weight_NK
        if site.bias_N is not None:
            tensors[f"{name}/bias"] = site.bias_N
        for statistic_name, statistic in site.statistics.items():
            for tensor_name, tensor in statistic.tensors.items():
                tensors[f"{name}/{statistic_name}/{tensor_name}"] = tensor
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _read(path: Path) -> "tuple[RecordDocument, dict[str, Tensor]]":
    from safetensors import SafetensorError, safe_open

    made_by = f"loka probe WORKLOAD -o {quote(str(path.parent))}"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InvalidFile(f"there is no {path}: make it with `{made_by}`") from None
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} cannot be read ({error}): make it again with `{made_by}`") from error
    if "document" not in metadata:
        raise InvalidFile(f"{path} holds tensors but no Record: make one with `{made_by}`")
    return parse_document(metadata["document"], path, SCHEMA, RecordDocument, made_by=made_by), tensors


def _by_site(tensors: "dict[str, Tensor]", sites: list[str]) -> "dict[str, dict[str, Tensor]]":
    """Each site's tensors, by the rest of their names; of sites ``a`` and ``a/b`` the longer takes what begins with both."""
    own: dict[str, dict[str, Tensor]] = {site: {} for site in sites}
    for name, tensor in tensors.items():
        parts = name.split("/")
        for end in range(len(parts) - 1, 0, -1):
            if (site := "/".join(parts[:end])) in own:
                own[site]["/".join(parts[end:])] = tensor
                break
    return own


def _site(facts: SiteFacts, rules: dict[str, Rule], own: "dict[str, Tensor]", path: Path) -> SiteRecord:
    if "weight" not in own:
        raise InvalidFile(f"{path} names the site {facts.name} but holds no weight of it: make it again")
    shape = tuple(own["weight"].shape)
    if shape != (facts.n, facts.k) or any(not (rows > 0 and calls > 0) for rows, calls in facts.calls.items()):
        raise InvalidFile(
            f"{path} says that {facts.name} is {facts.k}×{facts.n}, called {facts.calls or 'never'}, and holds a weight of "
            f"{'×'.join(map(str, reversed(shape)))}: it was written by something else. Make it again"
        )
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in own.items():
        statistic, slash, tensor_name = name.partition("/")
        if slash:
            if statistic not in rules:
                raise InvalidFile(f"{path} holds {statistic} of {facts.name} and no rule for it: make it again")
            states.setdefault(statistic, {})[tensor_name] = tensor
    return SiteRecord(
        **{f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)},
        weight_NK=own["weight"],
        bias_N=own.get("bias"),
        statistics={name: Statistic(rules[name], state) for name, state in states.items()},
    )

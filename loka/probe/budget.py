"""How much a Probe may remember: which form of covariance each site gets within a memory budget."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from loka.core.errors import InvalidInput
from loka.core.marginals import LEVELS
from loka.core.moments import Covariance, covariance_elements

WIDEST = 4096  # features of x and dy, past which no covariance is whole: those took a GPU as long as all else that is learned
_BYTES = 4
_FORMS = tuple(Covariance)


@dataclass(frozen=True)
class Memory:
    """The covariance form of every site, and the bytes all of them take."""

    forms: Mapping[str, Covariance]
    bytes: int
    budget: int

    def __str__(self) -> str:
        counts = {form: sum(chosen is form for chosen in self.forms.values()) for form in Covariance}
        parts = ", ".join(f"{count} {form}" for form, count in counts.items() if count)
        sites = "1 site takes" if len(self.forms) == 1 else f"{len(self.forms)} sites take"
        return f"{sites} {_mib(self.bytes)} of {_mib(self.budget)} (covariance: {parts})"


def plan_memory(sites: Mapping[str, nn.Linear], budget: int, *, taken: int = 0) -> Memory:
    """Full covariances, except of sites wider than WIDEST; while the budget is exceeded, the largest site falls back to a
    smaller form.

    ``taken`` bytes of the budget are spent on other things already.
    """
    forms = {name: Covariance.FULL if _features(site) <= WIDEST else Covariance.BLOCKS for name, site in sites.items()}
    sizes = {name: _site_bytes(site, forms[name]) for name, site in sites.items()}
    while taken + sum(sizes.values()) > budget:
        open_sites = [name for name in sites if forms[name] is not _FORMS[-1]]
        if not open_sites:
            raise InvalidInput(
                f"memory_budget={_mib(budget)} is too small: the {len(sites)} sites of this model take "
                f"{_mib(taken + sum(sizes.values()))} in the smallest form. Give more, or probe a part of the model"
            )
        largest = max(open_sites, key=lambda name: sizes[name])
        forms[largest] = _smaller(sites[largest], forms[largest])
        sizes[largest] = _site_bytes(sites[largest], forms[largest])
    return Memory(forms, taken + sum(sizes.values()), budget)


def _smaller(site: nn.Linear, form: Covariance) -> Covariance:
    """The next form that is smaller: a narrow site's blocks take no less than the whole."""
    size = _site_bytes(site, form)
    following = _FORMS[_FORMS.index(form) + 1 :]
    return next((other for other in following if _site_bytes(site, other) < size), _FORMS[-1])


def _features(site: nn.Linear) -> int:
    """Of x, and of dy's two parts."""
    return site.in_features + site.out_features + 1


def _site_bytes(site: nn.Linear, form: Covariance) -> int:
    """S, with the gradient of the weight where S is whole; the mean, the quantiles and the reference of dy."""
    k, n, features = site.in_features, site.out_features, _features(site)
    gradient = k * n if form is Covariance.FULL else 0
    return _BYTES * (covariance_elements(form, features) + gradient + (1 + LEVELS[form]) * features + n)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"

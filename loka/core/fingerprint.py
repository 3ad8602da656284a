"""What makes a model the one that a Record, Survey or Plan speaks of: its sites and their shapes, not its weights."""

import hashlib
from collections.abc import Iterable


def fingerprint(sites: Iterable[tuple[str, int, int, bool]]) -> str:
    """Sixteen hex digits of the sites given as (name, in_features, out_features, has_bias), in any order."""
    lines = sorted(f"{name} {k} {n} {has_bias}" for name, k, n, has_bias in sites)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

"""Whether optional packages are there, without importing them."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether ``package`` could be imported; a broken or blocked one counts as absent."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False

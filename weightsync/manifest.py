"""The manifest of one update: what the trainer published, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.digest import digest_root
from weightsync.errors import IntegrityError, MissingNameError, ProtocolError
from weightsync.types import TensorMeta

_MAX_NAMED = 5


@dataclass(frozen=True)
class Manifest:
    """Wire forms and digests of every tensor of an update, and one root over them."""

    metas: tuple[TensorMeta, ...]
    digests: Mapping[str, int]
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied names that travelled once

    @property
    def root(self) -> str:
        return digest_root(self.metas, self.digests)

    def to_json(self) -> dict[str, Any]:
        tensors = [[m.name, m.dtype, m.shape, f"{self.digests[m.name]:016x}"] for m in self.metas]
        return {"tensors": tensors, "aliases": dict(self.aliases), "root": self.root}

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        """Parse and check the root. Raises :class:`ProtocolError`."""
        try:
            metas, digests = [], {}
            for name, dtype, shape, digest in value["tensors"]:
                metas.append(TensorMeta(str(name), str(dtype), tuple(map(int, shape))))
                digests[str(name)] = int(digest, 16)
            aliases = {str(k): str(v) for k, v in value["aliases"].items()}
            manifest = cls(tuple(metas), digests, aliases)
            root = value["root"]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed manifest: {error!r}") from error
        if len(digests) != len(metas):
            raise ProtocolError("manifest: a tensor is listed twice")
        if manifest.root != root:
            raise ProtocolError(f"manifest: root {root!r} does not fit its list ({manifest.root})")
        return manifest

    def check(self, found: Mapping[str, int], what: str) -> None:
        """Compare with digests of this side; ``what`` says which bytes those are of.

        Raises :class:`MissingNameError` or :class:`IntegrityError` naming the tensors.
        """
        missing = [n for n in self.digests if n not in found]
        if missing:
            raise MissingNameError(f"{what}: {name_some(missing)} not there to be verified")
        wrong = [n for n, d in self.digests.items() if found[n] != d]
        if wrong:
            n = wrong[0]
            raise IntegrityError(
                f"{what}: {len(wrong)} of {len(self.digests)} digests differ: {name_some(wrong)} "
                f"(first: got {found[n]:016x}, expected {self.digests[n]:016x})"
            )


def name_some(names: Sequence[str]) -> str:
    """A few names for an error message, and how many more there are."""
    some = ", ".join(map(repr, names[:_MAX_NAMED]))
    more = len(names) - _MAX_NAMED
    return f"{some} and {more} more" if more > 0 else some

"""Who holds which page of the KV cache, and which pages can be used again. Integers only."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from weightsync.session import Version

#: Label of a model's weights; None until a first update was published.
WeightVersion = Version | None


class PrefixReuse(StrEnum):
    """Which cached prefixes a request may use."""

    NEVER = "never"
    SAME_VERSION = "same_version"  # computed under the weights that are live now
    ANY_VERSION = "any_version"  # also under older weights; outputs then say that their KV is stale


def root_key(version: WeightVersion, reuse: PrefixReuse) -> bytes:
    """Where a chain of page keys begins: the version is in it, so that other weights' KV never fits."""
    if reuse is PrefixReuse.ANY_VERSION:
        return b"any version"
    name = "none" if version is None else f"{version.number} of {version.run_id}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page: its tokens, and by ``parent`` everything before them."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class CachedPage:
    """What is remembered of a page whose contents may be used again."""

    key: bytes
    version: WeightVersion  # of the weights that computed it


class PagePool:
    """Pages 0 .. ``num_pages`` - 1: free, held (by one or several requests), or kept for reuse.

    A kept page is held by nobody and still has its contents; the one unused for longest is taken
    when free pages run out.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages
        self._cached: dict[int, CachedPage] = {}
        self._by_key: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    @property
    def num_kept(self) -> int:
        """Pages that are only remembered for reuse."""
        return len(self._kept)

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages for one holder, or None, and nothing changed, if there are not as many."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                page, _ = self._kept.popitem(last=False)
                self._forget(page)
                self._free.append(page)
            page = self._free.pop()
            self._num_holders[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder of cached pages."""
        for page in pages:
            if self._num_holders[page] == 0:
                del self._kept[page]
            self._num_holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less; the last page of a sequence becomes the first to be taken."""
        for page in reversed(pages):
            if self._num_holders[page] < 1:
                raise RuntimeError(f"page {page} is released and nobody holds it")
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                if page in self._cached:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    # --- reuse ----------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The page with this key's contents."""
        return self._by_key.get(key)

    def cached(self, page: int) -> CachedPage | None:
        return self._cached.get(page)

    def remember(self, page: int, entry: CachedPage) -> None:
        """A held page is full: others may share it. The first page of a key stays the one found."""
        if entry.key not in self._by_key and page not in self._cached:
            self._cached[page] = entry
            self._by_key[entry.key] = page

    def forget(self, pages: Sequence[int]) -> None:
        """Never share these again; whoever holds them goes on."""
        for page in pages:
            self._forget(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def forget_all(self) -> int:
        """Remember nothing; returns how many pages were forgotten."""
        pages = list(self._cached)
        self.forget(pages)
        return len(pages)

    def _forget(self, page: int) -> None:
        entry = self._cached.pop(page, None)
        if entry is not None:
            del self._by_key[entry.key]

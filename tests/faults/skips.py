"""What a fault test may need that is not everywhere."""

from __future__ import annotations

import pytest

from weightsync.transports import get_transport
from weightsync.types import Contract

_READS = get_transport("p2p").capabilities().contracts[Contract.DIRECT]
NEEDS_NIXL = pytest.mark.skipif(not _READS.is_usable, reason=f"p2p: {_READS.reason}")

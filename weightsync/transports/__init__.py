"""The transports, by name; a transport is imported when it is asked for."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

from weightsync.errors import ConfigError

if TYPE_CHECKING:  # the names alone cost nothing: the command line lists them
    from weightsync.transports.base import Transport

#: name -> (module, class)
_REGISTRY = MappingProxyType(
    {
        "broadcast": ("weightsync.transports.broadcast", "BroadcastTransport"),
        "disk-delta": ("weightsync.transports.disk_delta", "DiskDeltaTransport"),
        "ipc": ("weightsync.transports.ipc", "IpcTransport"),
        "loopback": ("weightsync.transports.loopback", "LoopbackTransport"),
        "p2p": ("weightsync.transports.p2p", "P2pTransport"),
    }
)


def transport_names() -> tuple[str, ...]:
    """The names :func:`get_transport` takes."""
    return tuple(sorted(_REGISTRY))


def get_transport(name: str) -> Transport:
    """The transport called ``name``. Importing it needs none of its optional packages."""
    try:
        module, attribute = _REGISTRY[name]
    except KeyError:
        known = ", ".join(transport_names())
        raise ConfigError(f"unknown transport {name!r}; known: {known}") from None
    transport: Transport = getattr(importlib.import_module(module), attribute)()
    return transport


__all__ = ["get_transport", "transport_names"]

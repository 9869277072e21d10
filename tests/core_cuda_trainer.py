"""A trainer process for tests of the core on a GPU: models of several seeds, sent by ``ipc``."""

from __future__ import annotations

from typing import Any

from core_models import make_model, torch
from core_traffic import LIMIT_S, OPTIONS, refit
from processes import Pipe

from weightsync.sender import Sender


def serve(pipe: Pipe) -> None:
    """Child: holds models of each seed on the GPU and updates an engine with them."""
    models: dict[int, Any] = {}
    options = {**OPTIONS, "transport": "ipc"}
    with Sender.connect([pipe.receive()], **options) as sender:
        pipe.send("connected")
        while (order := pipe.receive(LIMIT_S)) is not None:
            version, seed = order
            if seed not in models:
                models[seed] = make_model("dense", torch.float32, seed).to("cuda:0")
            refit(sender, version, models[seed])
            pipe.send(version)

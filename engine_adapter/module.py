"""Any ``torch.nn.Module`` as an engine: a refit lands in the live module.

A module has no loop of its own, so run every forward pass inside ``with adapter.step():``; the
receiver changes weights only between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_adapter.base import Fingerprint
from engine_adapter.tensors import TensorEngine, fingerprint_of
from weightsync.errors import LayoutError
from weightsync.naming import Rule, module_tensors, rules_for
from weightsync.tensors import view_of
from weightsync.watch import Look, ModuleWatch


class ModuleAdapter(TensorEngine):
    """Serves the parameters of ``module`` (tied ones once) in checkpoint names.

    ``rules`` rename, drop, split fused experts and include buffers; None takes those that
    transformers models need. ``dropped`` lists what is out, and why. The module must not be moved,
    cast or re-allocated while the adapter lives. Raises :class:`LayoutError` or
    :class:`ConfigError` naming the tensor.
    """

    def __init__(
        self, module: Any, *, rules: Sequence[Rule] | None = None, opaque: Sequence[str] = ()
    ) -> None:
        self.module = module
        ruled = module_tensors(module, rules_for(module) if rules is None else rules)
        self.dropped: Mapping[str, str] = ruled.dropped
        self._named = dict(ruled.named)
        buffers = module.named_buffers(remove_duplicate=False)
        self._buffers = frozenset(n for n, _ in buffers if n not in ruled.dropped)
        super().__init__(ruled.named, opaque)
        self._watch = ModuleWatch(module)

    def fingerprint(self) -> Mapping[str, Fingerprint]:
        """Of what the module holds *now*: a parameter or served buffer that was replaced shows."""
        buffers = self.module.named_buffers(remove_duplicate=False)
        held = [
            *self.module.named_parameters(),
            *((n, b) for n, b in buffers if n in self._buffers),
        ]
        return {name: fingerprint_of(view_of(t.detach(), name)) for name, t in held}

    def moved(self, look: Look) -> Sequence[str]:
        if not self._watch.has_changed(look):
            return []
        moved = self._moved_by_fingerprint()
        if not moved:  # only what is not served changed
            self._watch = ModuleWatch(self.module)
        return moved

    def write(self, name: str, tensor: Any) -> None:
        target = self._named[name]
        if tuple(target.shape) != tuple(tensor.shape):
            raise LayoutError(f"{name!r}: got shape {tensor.shape}, the slot has {target.shape}")
        if not hasattr(tensor, "untyped_storage"):
            import torch

            tensor = torch.from_numpy(tensor)
        target.copy_(tensor)

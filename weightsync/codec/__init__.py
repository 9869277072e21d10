"""Sparse deltas of tensors: encode, decode, apply (docs/delta.md)."""

from weightsync.codec.apply import Changes, apply_changes, decode_record, decode_tensor
from weightsync.codec.encode import Variant, encode_span, encode_tensor
from weightsync.codec.spans import block_digests, num_blocks, spans_of, tensor_digest

__all__ = [
    "Changes",
    "Variant",
    "apply_changes",
    "block_digests",
    "decode_record",
    "decode_tensor",
    "encode_span",
    "encode_tensor",
    "num_blocks",
    "spans_of",
    "tensor_digest",
]

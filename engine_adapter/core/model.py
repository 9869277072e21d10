"""The decoder: one forward step over the rows of a batch, for every family that is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine_adapter.core.arena import Arena, MemoryKind, MemoryTag
from engine_adapter.core.attention import Attention, FusedAttention, FusedHeads
from engine_adapter.core.batch import StepBatch
from engine_adapter.core.config import ModelConfig, read_config
from engine_adapter.core.cuda_products import CudaProduct
from engine_adapter.core.gate import choose_gate
from engine_adapter.core.heads import HeadShape, place_heads
from engine_adapter.core.kv_cache import KvCache
from engine_adapter.core.layers import (
    AttentionWeights,
    Compute,
    DenseMlp,
    Layer,
    Mlp,
)
from engine_adapter.core.loader import checkpoint_dtype, load_weights
from engine_adapter.core.moe import ExpertsMlp, choose_experts
from engine_adapter.core.norm import choose_add_norm, choose_norm
from engine_adapter.core.parallel import ALONE, Group
from engine_adapter.core.products import Products, choose_product, parse_products
from engine_adapter.core.rope import fill_tables
from engine_adapter.core.shards import Shards
from engine_adapter.core.slots import SlotTable
from engine_adapter.core.weights import EMBEDDING, HEAD, StorageSpec, storage_specs
from weightsync.errors import ConfigError

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_REMEDY = "use dtype='bfloat16', a smaller model, or more ranks (tp_size)"


class DecoderModel:
    """One rank of a decoder; its weights are uninitialised until slots are written.

    ``max_positions`` bounds the context (default: what the configuration allows); ``products`` says
    who computes matrix products: bits equal transformers' with ``torch`` alone. Raises
    :class:`ConfigError` if the model cannot be split as ``shards`` says, and
    :class:`CapacityError` if its weights do not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        max_positions: int | None = None,
        shards: Shards | None = None,
        group: Group = ALONE,
        products: Products | str = Products.AUTO,
        memory: MemoryKind = MemoryKind.PLAIN,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.shards = Shards() if shards is None else shards
        if self.shards.world_size != group.size or self.shards.rank != group.rank:
            raise ConfigError(
                f"rank {self.shards.rank} of {self.shards.world_size} over a group whose rank "
                f"{group.rank} of {group.size} this is"
            )
        chosen = parse_products(products)
        product = choose_product(chosen, dtype, self.device)
        gate = choose_gate(chosen, dtype, self.device)
        self._norm_rows = choose_norm(chosen, dtype, self.device)
        self._add_norm = choose_add_norm(self._norm_rows)
        self._dense = Compute(product, group if self.shards.tp_size > 1 else ALONE, gate)
        self._sparse = Compute(product, group, gate)
        self.max_positions = _positions(config, max_positions)
        specs = storage_specs(config, self.shards)
        self._experts = ExpertsMlp
        if config.experts is not None and isinstance(product, CudaProduct):
            sizes = config.experts.num_experts, config.experts.top_k
            self._experts = choose_experts(*sizes, _expert_shapes(specs), dtype, self.device)
        #: Rows of a step below which products pad it.
        self.least_rows = 1
        if isinstance(product, CudaProduct):
            product.prove(_product_shapes(specs), dtype, self.device)
            self.least_rows = product.least_rows
        weights, storages = _allocate(specs, dtype, self.device, memory)
        #: Of weights and of tables.
        self.arenas = [weights]
        self.slots = SlotTable(storages, specs, {HEAD: EMBEDDING} if config.is_tied else {})
        self.embed_tokens = storages["embed_tokens"]
        self.norm = storages["norm"]
        self.lm_head = storages["embed_tokens" if config.is_tied else "lm_head"]
        self.layers = [self._layer(i, storages) for i in range(config.num_layers)]
        self._add_rope_tables(memory)

    @classmethod
    def from_pretrained(
        cls,
        directory: Path | str,
        *,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
        shards: Shards | None = None,
        group: Group = ALONE,
        products: Products | str = Products.AUTO,
        memory: MemoryKind = MemoryKind.PLAIN,
    ) -> DecoderModel:
        """Build from a Hugging Face directory and load this rank's share of its weights.

        ``dtype`` is torch's word or ``auto``: that of the checkpoint. Raises what
        :func:`read_config`, the constructor and :func:`load_weights` raise.
        """
        path = Path(directory).expanduser()
        config = read_config(path)
        word = checkpoint_dtype(path, config) if dtype == "auto" else dtype
        if word not in DTYPES:
            raise ConfigError(f"dtype {word!r} is not served; known: auto, {', '.join(DTYPES)}")
        model = cls(
            config,
            DTYPES[word],
            device,
            max_positions=max_positions,
            shards=shards,
            group=group,
            products=products,
            memory=memory,
        )
        load_weights(path, model.slots, config)
        model.slots.refresh()
        return model

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of this rank: what its KV cache holds."""
        first, last = self.shards.kv_heads(self.config.num_kv_heads)
        return last - first

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        first, last = self.shards.heads(self.config.num_heads)
        return last - first

    @property
    def asks_device(self) -> bool:
        """Whether a step on a CUDA device waits for what it finds there, as picking experts may."""
        return self.config.experts is not None and self._experts is ExpertsMlp

    # --- building -----------------------------------------------------------------------------------

    def _layer(self, i: int, storages: Mapping[str, Tensor]) -> Layer:
        def get(part: str) -> Tensor:
            return storages[f"layers.{i}.{part}"]

        def find(part: str) -> Tensor | None:
            return storages.get(f"layers.{i}.{part}")

        attention = AttentionWeights(
            qkv=get("qkv"),
            qkv_bias=find("qkv_bias"),
            q_norm=find("q_norm"),
            k_norm=find("k_norm"),
            o=get("o"),
            o_bias=find("o_bias"),
        )
        mlp: Mlp
        experts = self.config.experts
        if experts is not None and self.config.has_experts(i):
            mlp = self._experts(
                router=get("router"),
                gate_up=get("experts_gate_up"),
                down=get("experts_down"),
                first_expert=self.shards.ep_range(experts.num_experts)[0],
                top_k=experts.top_k,
                is_normalised=experts.is_normalised,
                compute=self._sparse,
            )
        else:
            mlp = DenseMlp(
                get("gate_up"), get("down"), find("gate_up_bias"), find("down_bias"), self._dense
            )
        return Layer(get("input_norm"), attention, get("post_norm"), mlp)

    def _add_rope_tables(self, memory: MemoryKind) -> None:
        size = (self.max_positions, self.config.head_dim // 2)
        arena = Arena(
            MemoryTag.STATIC,
            [(size, self.dtype)] * 2,
            str(self.device),
            remedy="lower max_positions",
            purpose="rotary tables",
            kind=memory,
        )
        self.arenas.append(arena)
        self.cos, self.sin = arena.tensors()
        fill_tables(self.config.rope, self.cos, self.sin, self.config.head_dim)
        self.slots.add_constant("rope.cos", self.cos)
        self.slots.add_constant("rope.sin", self.sin)

    # --- a step ---------------------------------------------------------------------------------------

    def forward(self, batch: StepBatch, cache: KvCache, attention: Attention) -> Tensor:
        """Logits of ``batch.logit_rows``: [L, vocabulary], the model's dtype, on every rank.

        Writes the rows' keys and values into ``cache``.
        """
        states = self._embed(batch.token_ids)
        mix = self._mixer(batch, cache, attention)
        eps = self.config.norm_eps
        normed = self._norm_rows(states, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            weights = layer.attention
            mixed = mix(i, self._fused_heads(weights, normed))
            delta = self._dense.row_parallel(mixed, weights.o, weights.o_bias)
            states, normed = self._add_norm(states, delta, layer.post_norm, eps)
            delta = layer.mlp.forward(normed)
            if i + 1 < len(self.layers):
                states, normed = self._add_norm(states, delta, self.layers[i + 1].input_norm, eps)
        # The last norm is of the wanted rows alone.
        return self._logits((states + delta).index_select(0, batch.logit_rows))

    def _mixer(
        self, batch: StepBatch, cache: KvCache, attention: Attention
    ) -> Callable[[int, Tensor], Tensor]:
        """From a layer's number and its fused heads to what its attention gives."""
        if isinstance(attention, FusedAttention):

            def mix_fused(i: int, fused: Tensor) -> Tensor:
                weights = self.layers[i].attention
                norms = weights.q_norm, weights.k_norm
                heads = FusedHeads(fused, *norms, self.cos, self.sin, self.config.norm_eps)
                return attention.attend_fused(i, heads, batch, cache)

            return mix_fused
        shape = HeadShape(self.num_heads, self.num_kv_heads, self.config.norm_eps)
        place = place_heads(shape, self._norm_rows, self.cos, self.sin, batch.positions)

        def mix(i: int, fused: Tensor) -> Tensor:
            weights = self.layers[i].attention
            query, key, value = place(fused, weights.q_norm, weights.k_norm)
            return attention.attend(i, query, key, value, batch, cache)

        return mix

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._dense.group.size == 1:
            return self.embed_tokens.index_select(0, token_ids)
        first, last = self.shards.tp_range(self.config.vocab_size)
        is_here = (token_ids >= first) & (token_ids < last)
        rows = self.embed_tokens.index_select(0, torch.where(is_here, token_ids - first, 0))
        # One rank has the row and all others add zero: exact.
        return self._dense.group.sum_in_order(rows * is_here[:, None])

    def _fused_heads(self, weights: AttentionWeights, states: Tensor) -> Tensor:
        """[R, heads + 2 kv_heads, head_dim] of this rank."""
        fused = self._dense.product(states, weights.qkv, weights.qkv_bias)
        return fused.view(fused.shape[0], -1, self.config.head_dim)

    def _logits(self, states: Tensor) -> Tensor:
        normed = self._norm_rows(states, self.norm, self.config.norm_eps)
        logits = self._dense.product(normed, self.lm_head)
        return self._dense.group.join_columns(logits, self._vocabulary_widths())

    def _vocabulary_widths(self) -> list[int]:
        vocab, size = self.config.vocab_size, self.shards.tp_size
        return [(r + 1) * vocab // size - r * vocab // size for r in range(size)]


def _positions(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_positions
    if not 1 <= wanted <= config.max_positions:
        raise ConfigError(
            f"max_positions {wanted}: the model has 1 to {config.max_positions} of them"
        )
    return wanted


def _product_shapes(specs: Sequence[StorageSpec]) -> list[tuple[int, int]]:
    """Of every weight that rows are multiplied with: [out, in]."""
    return [(spec.shape[0], spec.shape[1]) for spec in specs if len(spec.shape) == 2]


def _expert_shapes(specs: Sequence[StorageSpec]) -> list[tuple[int, int, int]]:
    """Of every weight that holds experts: [experts, out, in]."""
    shapes = [spec.shape for spec in specs if len(spec.shape) == 3]
    return [(shape[0], shape[1], shape[2]) for shape in shapes]


def _allocate(
    specs: Sequence[StorageSpec], dtype: torch.dtype, device: torch.device, memory: MemoryKind
) -> tuple[Arena, dict[str, Tensor]]:
    wanted = [(spec.shape, dtype) for spec in specs]
    arena = Arena(MemoryTag.WEIGHTS, wanted, str(device), remedy=_REMEDY, kind=memory)
    return arena, {spec.name: t for spec, t in zip(specs, arena.tensors(), strict=True)}

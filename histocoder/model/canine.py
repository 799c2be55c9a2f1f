"""CANINE (Clark et al. 2022, https://arxiv.org/abs/2103.06874), without computations that the
encoding does not need.

Modules and parameters have the names of transformers' `CanineModel`, so that its weights load
unchanged. transformers is imported only to load its models, since the import takes seconds.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_exporting

from histocoder.errors import UserError
from histocoder.model.layers import (
    EncoderConfig,
    TransformerLayer,
    Weights,
    WithoutInit,
    add_norm,
    additive,
    attention,
    dropout,
    layer_norm,
    linear,
    padded,
    residual_and_linear,
    reusable,
)

_PRIMES = (31, 43, 59, 61, 73, 97, 103, 113, 137, 149, 157, 173, 181, 193, 211, 223)
"""Multipliers of CANINE's hash functions (section 3.1)."""
_HASH_TABLE = "HashBucketCodepointEmbedder_"
POSITIONS = "char_embeddings.char_position_embeddings.weight"  # in a `Canine`'s state dict


@dataclass
class CanineConfig(EncoderConfig):
    """Sizes of a CANINE under transformers' names; by default those of CANINE-s."""

    model_type: ClassVar[str] = "canine"

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 16384
    type_vocab_size: int = 16
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    downsampling_rate: int = 4
    upsampling_kernel_size: int = 4
    num_hash_functions: int = 8
    num_hash_buckets: int = 16384
    local_transformer_stride: int = 128


class Canine(nn.Module):
    """CANINE with random weights.

    Returns what transformers' `CanineModel` returns for `attention_mask=input_ids != 0`, faster:
    local attention is attention within blocks, convolutions are matrix products, and the second
    convolution computes the part of a molecule once instead of once for each of its characters.
    """

    _primes: Tensor  # multipliers of the hash functions, of shape (num_hash_functions,)

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(dim, eps=config.layer_norm_eps)

        def layers(number: int) -> Any:
            modules = [CanineLayer(config) for _ in range(number)]
            return nn.ModuleDict({"layer": nn.ModuleList(modules)})

        # Each hash function gives a part of a character's embedding.
        buckets = config.num_hash_buckets
        embeddings: dict[str, nn.Module] = {}
        for i in range(config.num_hash_functions):
            embeddings[f"{_HASH_TABLE}{i}"] = nn.Embedding(
                buckets, dim // config.num_hash_functions
            )
        embeddings["char_position_embeddings"] = nn.Embedding(buckets, dim)
        embeddings["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, dim)
        embeddings["LayerNorm"] = norm()
        self.char_embeddings: Any = nn.ModuleDict(embeddings)

        # The layers, with convolutions from characters to molecules and back between them.
        self.initial_char_encoder = layers(1)
        conv = nn.Conv1d(dim, dim, config.downsampling_rate)
        self.chars_to_molecules: Any = nn.ModuleDict({"conv": conv, "LayerNorm": norm()})
        self.encoder = layers(config.num_hidden_layers)
        conv = nn.Conv1d(2 * dim, dim, config.upsampling_kernel_size)
        self.projection: Any = nn.ModuleDict({"conv": conv, "LayerNorm": norm()})
        self.final_char_encoder = layers(1)
        self.pooler: Any = nn.ModuleDict({"dense": nn.Linear(dim, dim)})

        # A buffer, since a copy in each pass would make a GPU wait; no state dict holds it.
        with torch.device("cpu"):
            primes = torch.tensor(_PRIMES[: config.num_hash_functions])
        self.register_buffer("_primes", primes, persistent=False)
        self.apply(self._initialize)

    @classmethod
    def from_transformers(cls, model: Any) -> "Canine":
        """Return a CANINE that shares the weights of `model`, transformers' `CanineModel`."""
        with torch.device("meta"), WithoutInit():
            canine = cls(CanineConfig.from_dict(model.config.to_dict()))
        weights = model.float().state_dict()
        canine.load_state_dict({name: weights[name] for name in canine.state_dict()}, assign=True)
        return canine

    def trim_positions(self, num_positions: int) -> None:
        """Drop the positions beyond `num_positions`, which would take gradients and optimizer
        state.
        """
        table = self.char_embeddings.char_position_embeddings
        rows = table.weight.detach()[:num_positions].clone()
        table.weight = nn.Parameter(rows, table.weight.requires_grad)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Cut the loaded table of positions, of published models 16,384 rows, to those that are
        read.
        """
        num_positions = len(self.get_parameter(POSITIONS))
        table = state_dict.get(prefix + POSITIONS)
        if table is not None:
            if len(table) < num_positions:
                raise UserError(
                    f"The model reads {len(table)} positions at most; set --max-len to "
                    "that or less."
                )
            state_dict[prefix + POSITIONS] = table[:num_positions]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _initialize(self, module: nn.Module) -> None:
        """Initialize weights as CANINE's authors do."""
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, input_ids: Tensor, *, dtype: torch.dtype, trimmed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the encodings (B, L, dim) of `input_ids` (B, L), 0 where padded, and the pooled
        ones (B, dim).

        L is a multiple of 4. If it is `trimmed_length`'s, the last 6 positions are padding in every
        row: 4 for the molecule that CANINE drops, and 2 that the last convolution looks at. With
        `trimmed` they are not computed.
        """
        p = self.config.hidden_dropout_prob if self.training else 0.0
        rate = self.config.downsampling_rate
        num_chars = num_encoded = input_ids.shape[1]
        if trimmed:
            num_chars -= rate
            num_encoded = num_chars - 2

        # Characters attend to their block.
        chars = dropout(self._embedded(input_ids[:, :num_chars]).to(dtype), p)
        is_char = input_ids.ne(0)
        mask = reusable(is_char[:, None, None], dtype)
        block_mask = self._within_blocks(mask[..., :num_chars], dtype)
        chars = _apply(self.initial_char_encoder, chars, block_mask)

        # Molecules, CLS before them, attend to all others.
        weights = Weights(dtype, self.chars_to_molecules, self.projection, self.pooler)
        is_molecule = is_char.unflatten(1, (-1, rate)).any(-1)
        molecules = self._molecules(chars, weights, drop_last=not trimmed)
        molecules = _apply(self.encoder, molecules, reusable(is_molecule[:, None, None], dtype))
        pooled = torch.tanh(linear(molecules[:, 0], self.pooler.dense, weights))

        # Back to characters, which now know their molecules.
        encoded = dropout(self._projected(chars, molecules[:, 1:], weights, num_encoded), p)
        return _apply(self.final_char_encoder, encoded, mask[..., :num_encoded]), pooled

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """Return embeddings of characters, by several hashes of each, of positions, and of the
        first token type.
        """
        tables = self.char_embeddings
        hashes = (input_ids.long() + 1)[..., None] * self._primes % self.config.num_hash_buckets
        shards = [
            tables[f"{_HASH_TABLE}{i}"](hashes[..., i])
            for i in range(self.config.num_hash_functions)
        ]
        positions = tables.char_position_embeddings.weight[: input_ids.shape[1]]
        positions = positions + tables.token_type_embeddings.weight[0]
        return tables.LayerNorm(torch.cat(shards, dim=-1) + positions)

    def _molecules(self, chars: Tensor, weights: Weights, *, drop_last: bool) -> Tensor:
        """Return CLS and one molecule for every `rate` characters of `chars` (B, L, dim)."""
        conv = self.chars_to_molecules.conv
        windows = chars.unflatten(1, (-1, self.config.downsampling_rate))
        windows = windows.flatten(2)  # (B, L / rate, rate * dim)
        weight = weights[conv.weight].permute(0, 2, 1).flatten(1)
        molecules = F.gelu(F.linear(windows, weight, weights[conv.bias]))
        if drop_last:
            molecules = molecules[:, :-1]
        molecules = torch.cat([chars[:, :1], molecules], dim=1)
        return layer_norm(molecules, self.chars_to_molecules.LayerNorm, weights)

    def _projected(
        self, chars: Tensor, molecules: Tensor, weights: Weights, num_encoded: int
    ) -> Tensor:
        """Convolve over the first characters (B, L, dim), each beside its molecule of (B, M,
        dim).
        """
        conv = self.projection.conv
        weight = weights[conv.weight]  # (dim, 2 * dim, taps), for characters, then for molecules
        dim, _, taps = weight.shape
        of_chars, of_molecules = weight.split(dim, dim=1)
        length = chars.shape[1]
        rate = self.config.downsampling_rate

        # The part of the characters: a product with windows of them, (B, L, taps * dim).
        before = (taps - 1) // 2
        padded = F.pad(chars, (0, 0, before, taps - 1 - before))
        windows = torch.cat([padded[:, k : k + length] for k in range(taps)], dim=-1)
        out = F.linear(windows, of_chars.permute(0, 2, 1).flatten(1), weights[conv.bias])

        # The part of the molecules, computed once for each, (B, M, taps, dim). They are contiguous,
        # or torch copies the weight for each row of the batch when no gradients are needed.
        by_tap = F.linear(molecules.contiguous(), of_molecules.permute(2, 0, 1).flatten(0, 1))
        by_tap = by_tap.unflatten(-1, (taps, dim))

        # The last molecule stands in for one that was dropped.
        num_missing = length // rate - molecules.shape[1]
        if num_missing:
            repeated = by_tap[:, -1:].expand(-1, num_missing, -1, -1)
            by_tap = torch.cat([by_tap, repeated], dim=1)

        # Each character gets its molecule's part of each tap.
        for k in range(taps):
            ahead = k - before
            out = out + F.pad(by_tap[:, :, k].repeat_interleave(rate, dim=1), (0, 0, -ahead, ahead))
        return layer_norm(F.gelu(out)[:, :num_encoded], self.projection.LayerNorm, weights)

    def _within_blocks(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Restrict `mask` (B, 1, 1, L) to attention within blocks, if there are several."""
        # a graph is for batches of any length
        length = mask.shape[-1]
        stride = self.config.local_transformer_stride
        most = len(self.get_parameter(POSITIONS)) if is_exporting() else length
        if most <= stride:
            return mask
        block = torch.arange(length, device=mask.device) // stride
        return additive(mask, dtype).masked_fill(block[:, None] != block, -torch.inf)


class CanineLayer(TransformerLayer):
    """Self-attention and a feed-forward network, each followed by a layer norm."""

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size
        wide = config.intermediate_size

        def output(num_inputs: int) -> nn.ModuleDict:
            norm = nn.LayerNorm(dim, eps=config.layer_norm_eps)
            return nn.ModuleDict({"dense": nn.Linear(num_inputs, dim), "LayerNorm": norm})

        names = ("query", "key", "value")
        projections = nn.ModuleDict({name: nn.Linear(dim, dim) for name in names})
        self.attention: Any = nn.ModuleDict({"self": projections, "output": output(dim)})
        self.intermediate: Any = nn.ModuleDict({"dense": nn.Linear(dim, wide)})
        self.output: Any = output(wide)

    def forward(self, x: Tensor, mask: Tensor, real: Tensor | None = None) -> Tensor:
        """Compute the layer over `x` (B, L, dim), with a `mask` (B, 1, 1 or L, L) as `attention`
        takes it.

        With `real`, the indices (n,) of the positions that are no padding, `x` is that of these
        positions, (n, dim); padding may be among them.
        """
        hidden_p = attention_p = 0.0
        if self.training:
            hidden_p = self.config.hidden_dropout_prob
            attention_p = self.config.attention_probs_dropout_prob
        weights = Weights(x.dtype, self, joined=list(self.attention["self"].values()))

        # Attention takes whole rows, with zeros for padding; the other products skip it.
        x, sources = self._sources(x, weights)
        if real is not None:
            sources = [padded(torch.cat(sources, dim=-1), real, (len(mask), mask.shape[-1]))]
        mixed = attention(
            *sources, num_heads=self.config.num_attention_heads, mask=mask, dropout_p=attention_p
        )
        if real is not None:
            mixed = mixed.flatten(0, 1).index_select(0, real)
        output = self.attention.output
        update = linear(mixed, output.dense, weights)
        x = add_norm(x, update, output.LayerNorm, hidden_p, weights)

        # Feed-forward network.
        dense = self.intermediate.dense
        x, wide = residual_and_linear(x, weights[dense.weight], weights[dense.bias])
        update = linear(F.gelu(wide), self.output.dense, weights)
        return add_norm(x, update, self.output.LayerNorm, hidden_p, weights)

    def _sources(self, x: Tensor, weights: Weights) -> tuple[Tensor, list[Tensor]]:
        """Return `x`, and its queries, keys and values; on a GPU side by side, by one product."""
        projections = self.attention["self"].values()
        if x.device.type == "cpu":
            return x, [linear(x, projection, weights) for projection in projections]
        weight, bias = weights.of_joined()
        x, source = residual_and_linear(x, weight, bias)
        return x, [source]


def _apply(layers: Any, x: Tensor, mask: Tensor) -> Tensor:
    for layer in layers.layer:
        x = layer(x, mask)
    return x

"""The model: an encoder, CANINE or another, a decoder over code tokens, and a flat head over the
pooled encoding.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_exporting

from histocoder.config import ModelConfig
from histocoder.model.canine import Canine, CanineLayer
from histocoder.model.decoder import Decoder, Prior, class_blocks
from histocoder.model.encoder import Encoder, encode_pretrained, encoder_from_config
from histocoder.model.layers import Dropout, TransformerLayer, WithoutInit, linear
from histocoder.model.linear_expert import LinearExpert
from histocoder.model.nearest import NearestExpert
from histocoder.model.ngram import Lookup, NgramEncoder
from histocoder.text.tokenizers import CHARACTERS, PretrainedTokenizer, Tokenizer


class MixerOutput(NamedTuple):
    """Logits of both heads, as `MixerModel.forward` returns them."""

    seq2seq_logits: Tensor | None
    """Logits of the token that follows each target position, of shape (ceil(B / decoder_stride), L,
    vocab_size).

    None if the decoder does not learn."""
    flat_logits: Tensor
    """Logits of each code of the key, of shape (B, num_classes)."""
    attribute_logits: Tensor | None = None
    """Logits of `ModelConfig.attribute_labels`, of shape (B, num_labels); None without any."""


class CosineClassifier(nn.Linear):
    """Classifies encodings by their cosine similarity with each class's weights, times a learned
    scale, plus a bias.

    The encodings' mean is subtracted first, since encodings of pretrained models share most of
    their direction. From Gidaris and Komodakis, "Dynamic Few-Shot Visual Learning without
    Forgetting" (2018).
    """

    mean: Tensor

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__(dim, num_classes)
        self.scale = nn.Parameter(torch.full((1,), 16.0))  # FSDP has no scalars
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, pooled: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of encodings (B, dim)."""
        directions = F.normalize(pooled - self.mean.to(pooled.dtype), dim=-1)
        directions_of_classes = F.normalize(self.weight.to(pooled.dtype), dim=-1)
        cosines = F.linear(directions, directions_of_classes)
        return self.scale * cosines + self.bias.to(pooled.dtype)

    @torch.no_grad()
    def set_directions(self, pooled: Tensor, shares: Tensor) -> None:
        """Initialize with the mean of encodings (n, dim), and the sum of each class's encodings as
        its weights.

        `shares` (n, num_classes) is how much of a row belongs to each class; classes without any
        keep their weights.
        """
        self.mean.copy_(pooled.mean(0))
        sums = shares.T @ F.normalize(pooled - self.mean, dim=-1)
        has_rows = shares.sum(0) > 0
        self.weight[has_rows] = F.normalize(sums[has_rows], dim=-1)


class MixerModel(nn.Module):
    """An encoder with two heads, a sequence decoder and a flat linear head.

    If `config` has them, there are also experts: linear ones on codes and on attributes, and the
    nearest rows; and a linear head on attributes.

    Without `encoder`, one of `config.encoder`'s sizes gets random weights.
    """

    # hashes of the keys of all descriptions that it was trained on; see `key_hashes`
    trained_on: Tensor | None
    # tokens (num_classes, block_size) of each class; None without `config.decoder_prior`
    class_blocks: Tensor | None
    # precision of activations and matrix products, which may be set; weights stay in their own
    dtype: torch.dtype

    def __init__(
        self,
        config: ModelConfig,
        encoder: "Encoder | None" = None,
        *,
        tokenizer: Tokenizer = CHARACTERS,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder_is_frozen = False
        self.dtype = torch.float32
        self.tokenizer: Tokenizer = tokenizer
        if isinstance(tokenizer, PretrainedTokenizer) and not config.reads_language:
            self.tokenizer = tokenizer.without_language()
        self.encoder = encoder if encoder is not None else encoder_from_config(config.encoder)
        if isinstance(self.encoder, Canine):
            self.encoder.trim_positions(config.max_len)

        dim = self.encoder.config.hidden_size
        self.decoder = Decoder(
            config.vocab_size,
            dim,
            num_layers=config.decoder_num_layers,
            num_heads=config.decoder_num_heads,
            dim_feedforward=config.decoder_dim_feedforward,
            dropout=config.dropout,
        )
        self.decoder.requires_grad_(config.decoder_learns)
        self.register_buffer("class_blocks", self._start_from_prior(), persistent=False)

        # A new head starts with the probability 1 / num_classes for each class, not with 1 / 2.
        self.dropout = Dropout(config.dropout)
        head = CosineClassifier if config.flat_head == "cosine" else nn.Linear
        self.linear_decoder = head(dim, config.num_classes)
        nn.init.constant_(self.linear_decoder.bias, -math.log(max(config.num_classes, 2)))

        # The experts and the record of descriptions have zeros, for a state dict to be loaded into.
        self.linear_expert = _empty_expert(
            config.num_linear_features,
            config.num_classes,
            config.num_linear_weights,
            threshold=config.linear_threshold,
        )
        self.nearest_expert = None
        if config.num_nearest_rows:
            self.nearest_expert = NearestExpert(config.num_nearest_rows, dim, config.num_classes)
        num_labels = len(config.attribute_labels)
        self.attribute_expert = _empty_expert(
            config.num_attribute_features,
            num_labels,
            config.num_attribute_weights,
            threshold=config.attribute_threshold,
        )
        self.attribute_head = nn.Linear(dim, num_labels) if num_labels else None
        hashes = None
        if config.num_trained_on:
            hashes = torch.zeros(config.num_trained_on, dtype=torch.int32)
        self.register_buffer("trained_on", hashes)

    def _start_from_prior(self) -> Tensor | None:
        """Let a new decoder add nothing to the flat head's prior; return `class_blocks`."""
        if not self.config.decoder_prior:
            return None
        nn.init.zeros_(self.decoder.head.weight)
        nn.init.zeros_(self.decoder.head.bias)
        with torch.device("cpu"):  # no state dict holds it
            return class_blocks(self.config.codes, self.config.formatter)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        tokenizer: Tokenizer = CHARACTERS,
    ) -> "MixerModel":
        """Build a model of `weights`, which are its own from then on; raise a RuntimeError if names
        or shapes differ from the model's.
        """
        # Earlier versions did not record how many weights the experts have.
        if "linear_expert.values" in weights:
            config = replace(config, num_linear_weights=len(weights["linear_expert.values"]))
        if "attribute_expert.values" in weights:
            config = replace(config, num_attribute_weights=len(weights["attribute_expert.values"]))

        with torch.device("meta"), WithoutInit():
            model = cls(config, tokenizer=tokenizer)
        empty = model.state_dict()
        state = {name: weight.to(empty.get(name, weight).dtype) for name, weight in weights.items()}

        # Loading replaces parameters, and with them the attributes of a table with sparse gradients.
        attributes = list(map(vars, model.parameters()))
        model.load_state_dict(state, assign=True)
        for parameter, attributes_before in zip(model.parameters(), attributes, strict=True):
            vars(parameter).update(attributes_before)
        return model

    def has_learned(self, hashes: Tensor) -> None:
        """Record the hashes of descriptions that the model is trained on, beside those that it was
        trained on before.

        `hashes` are those of `key_hashes`, of shape (n,).
        """
        before = hashes if self.trained_on is None else self.trained_on
        self.trained_on = torch.cat([before, hashes.to(before.device)]).unique()
        self.config = replace(self.config, num_trained_on=len(self.trained_on))

    def freeze_encoder(self) -> None:
        """Freeze the encoder: compute no gradients for it, and keep it in evaluation mode."""
        self.encoder.requires_grad_(False).eval()
        self.encoder_is_frozen = True

    def train(self, mode: bool = True) -> "MixerModel":
        """Set training mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        self.encoder.train(mode and not self.encoder_is_frozen)
        return self

    def checkpoint_layers(self) -> None:
        """Keep only the input of each layer for the backward pass, which computes the rest again,
        bit for bit.
        """
        if not isinstance(self.encoder, Canine | NgramEncoder):
            # transformers has renamed the method
            name = "activation_checkpointing_enable"
            if not hasattr(self.encoder, name):
                name = "gradient_checkpointing_enable"
            getattr(self.encoder, name)({"use_reentrant": False})
        for module in self.modules():
            if isinstance(module, TransformerLayer):
                module.is_checkpointed = True

    def layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the transformer layers of the encoder, and those of the decoder."""
        modules = list(self.encoder.modules())
        of_encoder: list[nn.Module] = [m for m in modules if isinstance(m, CanineLayer)]
        if not of_encoder:  # in transformers' encoders, the first list is that of the layers
            of_encoder.extend(next(m for m in modules if isinstance(m, nn.ModuleList)))
        return of_encoder, list(self.decoder.layers)

    def encode(
        self,
        input_ids: Tensor,
        encoded: tuple[Tensor, Tensor] | None = None,
        lookup: Lookup | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return memory (B, M, dim), pooled encoding (B, dim) and memory mask (B, M) of token ids
        (B, S).

        The ids are padded to the tokenizer's `num_positions`. M is S, less if the last positions
        are padding in every row, or the number of words of an n-gram encoder. The mask is True for
        memory that the decoder attends to; None for all of it. `encoded` gives memory and pooled
        encoding, if they were computed before; `lookup` the n-grams of an n-gram encoder, if they
        were prepared.
        """
        mask = input_ids.ne(self.tokenizer.pad_id)
        if encoded is not None:
            memory, pooled = encoded
        elif isinstance(self.encoder, NgramEncoder):
            memory, pooled, mask = self.encoder(input_ids, lookup, dtype=self.dtype)
        elif isinstance(self.encoder, Canine):
            is_short = input_ids.shape[1] < self.config.max_len
            trimmed = self.config.mask_memory and not is_exporting() and is_short
            memory, pooled = self.encoder(input_ids, dtype=self.dtype, trimmed=trimmed)
        else:
            is_cls = self.config.pooling == "auto" and self.tokenizer.begins_with_cls
            memory, pooled = encode_pretrained(
                self.encoder, input_ids, mask, dtype=self.dtype, is_cls=is_cls
            )
        if not self.config.mask_memory:
            return memory, pooled, None
        return memory, pooled, mask[:, : memory.shape[1]]

    def classify(self, pooled: Tensor) -> Tensor:
        """Return the flat head's logits (B, num_classes) of pooled encodings (B, dim), in fp32."""
        pooled = self.dropout(pooled).float()
        if isinstance(self.linear_decoder, CosineClassifier):
            return self.linear_decoder(pooled)
        return linear(pooled, self.linear_decoder)

    def classify_attributes(self, pooled: Tensor) -> Tensor | None:
        """Return the logits (B, num_labels) of attributes of pooled encodings (B, dim), in fp32;
        None without any.
        """
        if self.attribute_head is None:
            return None
        return linear(self.dropout(pooled).float(), self.attribute_head)

    def class_probabilities(self, flat_logits: Tensor) -> Tensor:
        """Return the probabilities of the flat head's logits (B, num_classes)."""
        if self.config.flat_loss == "softmax":
            return flat_logits.softmax(-1)
        return flat_logits.sigmoid()

    def prior(self, flat_logits: Tensor) -> Prior | None:
        """Return the decoder's prior from detached flat logits (B, num_classes); None if the model
        has none.
        """
        if self.class_blocks is None:
            return None
        return Prior.from_logits(flat_logits.detach(), self.class_blocks, self.config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        target_tokens: Tensor,
        encoded: tuple[Tensor, Tensor] | None = None,
        *,
        decoder_stride: int = 1,
        lookup: Lookup | None = None,
    ) -> MixerOutput:
        """Encode a batch as `encode` does, and return the logits of both heads.

        The decoder gets every `decoder_stride`-th row, from the first on, and the target tokens of
        these rows, of shape (ceil(B / decoder_stride), L), BOS first, without EOS.
        """
        memory, pooled, memory_mask = self.encode(input_ids, encoded, lookup)
        flat_logits = self.classify(pooled)
        of_attributes = self.classify_attributes(pooled)
        if not self.config.decoder_learns:
            return MixerOutput(None, flat_logits, of_attributes)
        rows = slice(None, None, decoder_stride)
        if memory_mask is not None:
            memory_mask = memory_mask[rows]
        seq2seq_logits = self.decoder(
            target_tokens, memory[rows], memory_mask, self.prior(flat_logits[rows])
        )
        return MixerOutput(seq2seq_logits, flat_logits, of_attributes)


def _empty_expert(
    num_features: int, num_classes: int, num_weights: int, *, threshold: float
) -> LinearExpert | None:
    """Return a linear expert with zeros for its weights; None without features."""
    if not num_features:
        return None
    return LinearExpert(num_features, num_classes, num_weights, threshold=threshold)

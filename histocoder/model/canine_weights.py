"""CANINE's weights, in modules that name them as transformers' `CanineModel` does.

Importing transformers takes longer than importing torch; of it a CANINE whose weights are here needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from histocoder.errors import UserError

if TYPE_CHECKING:
    from transformers import CanineModel

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


@dataclass
class CanineConfig:
    """The sizes of a CANINE under transformers' names; by default CANINE-s's (Clark et al. 2022)."""

    model_type: ClassVar[str] = "canine"

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
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

    def __post_init__(self) -> None:
        """Raise a UserError where the activation is unknown."""
        if self.hidden_act not in _ACTIVATIONS:
            raise UserError(f"A CANINE with {self.hidden_act!r} is unknown here; hidden_act may be gelu or relu.")

    @classmethod
    def of(cls, config: dict[str, Any]) -> CanineConfig:
        """Return the sizes among the fields of a config file; the others say nothing about an encoder."""
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the fields of a config file, as a `PretrainedConfig` has this method."""
        return {"model_type": self.model_type, **asdict(self)}

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """What `hidden_act` names."""
        return _ACTIVATIONS[self.hidden_act]


class Canine(nn.Module):
    """The weights of a CANINE, random at first; `canine.canine` computes with them."""

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        self.config = config
        self.char_embeddings = _Embeddings(config)
        self.initial_char_encoder = _Encoder(config, num_layers=1)
        self.chars_to_molecules = _Convolution(config, inputs=1, taps=config.downsampling_rate)
        self.encoder = _Encoder(config, num_layers=config.num_hidden_layers)
        self.projection = _Convolution(config, inputs=2, taps=config.upsampling_kernel_size)
        self.final_char_encoder = _Encoder(config, num_layers=1)
        self.pooler = _Dense(config.hidden_size, config.hidden_size)
        self.apply(self._initialize)

    @classmethod
    def of(cls, model: CanineModel) -> Canine:
        """With the weights of one of transformers', which both hold from now on."""
        with Unfilled():
            found = cls(CanineConfig.of(model.config.to_dict()))
        weights = model.float().state_dict()
        found.load_state_dict({name: weights[name] for name in found.state_dict()}, assign=True)
        return found

    def _initialize(self, module: nn.Module) -> None:
        """Initialize weights as CANINE's authors do."""
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _norm(config: CanineConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class _Embeddings(nn.Module):
    """Of characters by several hashes of each, of positions, and of the first type."""

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size // config.num_hash_functions
        for i in range(config.num_hash_functions):
            setattr(self, f"HashBucketCodepointEmbedder_{i}", nn.Embedding(config.num_hash_buckets, dim))
        self.char_position_embeddings = nn.Embedding(config.num_hash_buckets, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = _norm(config)


class _Encoder(nn.Module):
    def __init__(self, config: CanineConfig, *, num_layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(num_layers))


class Layer(nn.Module):
    """A transformer layer, whose norms come after what they are of."""

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        dim, wide = config.hidden_size, config.intermediate_size
        self.config = config
        self.attention = nn.ModuleDict({"self": _Projections(config), "output": _Update(dim, config)})
        self.intermediate = _Dense(dim, wide)
        self.output = _Update(wide, config)


class _Projections(nn.Module):
    """Of attention."""

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))


class _Dense(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, out)


class _Update(_Dense):
    """What a residual branch ends with."""

    def __init__(self, width: int, config: CanineConfig) -> None:
        super().__init__(width, config.hidden_size)
        self.LayerNorm = _norm(config)


class _Convolution(nn.Module):
    """Over `taps` neighbours, each of so many `inputs` side by side."""

    def __init__(self, config: CanineConfig, *, inputs: int, taps: int) -> None:
        super().__init__()
        self.config = config
        self.conv = nn.Conv1d(inputs * config.hidden_size, config.hidden_size, taps)
        self.LayerNorm = _norm(config)


def trim_positions(encoder: nn.Module, max_len: int) -> None:
    """Take the positions beyond `max_len` out of training, so that they need no gradients and no optimizer state.

    State dicts have the table's full shape as before, in both directions. Other encoders than CANINE, which have few
    positions or none, stay as they are.
    """
    if not isinstance(encoder, Canine):
        return
    table = encoder.char_embeddings.char_position_embeddings
    if len(table.weight) <= max_len:
        return
    rest = table.weight.detach()[max_len:].clone()
    requires_grad = table.weight.requires_grad
    table.weight = nn.Parameter(table.weight.detach()[:max_len].clone(), requires_grad=requires_grad)

    def join(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
        kept: Any = state[prefix + "weight"]
        if hasattr(kept, "full_tensor"):  # of FSDP
            kept = kept.to(kept.device_mesh.device_type).full_tensor()
        state[prefix + "weight"] = torch.cat([kept, rest.to(kept)])

    def split(_module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        full = state[prefix + "weight"]
        rest.copy_(full[max_len:])
        state[prefix + "weight"] = full[:max_len]

    table.register_state_dict_post_hook(join)
    table.register_load_state_dict_pre_hook(split)


_FILLING = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class Unfilled(TorchFunctionMode):
    """Within it, what would be filled with random numbers keeps whatever lies in its memory.

    Of CANINE's sizes these numbers take longer than all else that is done to open a model.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, unless it fills the tensor."""
        kwargs = kwargs or {}
        if func in _FILLING:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)

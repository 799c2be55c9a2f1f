"""FSDP: each rank holds a shard of weights, gradients and optimizer state; layers are whole while
they compute.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from histocoder import distributed
from histocoder.config import TrainConfig
from histocoder.model import MixerModel
from histocoder.model.layers import TransformerLayer
from histocoder.training.optimizer import trained_parameters

# whole tensors, on rank 0 alone
_ON_PRIMARY = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Shards:
    """A model with FSDP by PyTorch's `fully_shard` (Zhao et al. 2023); see `Strategy`.

    Each layer is its own FSDP unit, gathered in the precision of the run (in fp32 for encoders
    other than CANINE). All other parameters are gathered with the model, in fp32.
    """

    def __init__(self, model: MixerModel, config: TrainConfig, device: torch.device) -> None:
        self._model = model
        self.wrapped: nn.Module = model  # which is sharded in place
        self.total_norm: Callable[[list[Tensor]], Tensor] | None = _norm_of_shards

        # the model as it is before, with weights on the meta device, for `whole`
        empty = {}
        for parameter in model.parameters():
            empty[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        self._empty = copy.deepcopy(model, empty)

        shard = partial(
            fully_shard,
            mesh=init_device_mesh(device.type, (distributed.world_size(),)),
            reshard_after_forward=config.fsdp == "full_shard",
        )
        reduce_dtype = torch.bfloat16 if config.bf16_gradients else torch.float32
        in_fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        in_run_dtype = in_fp32
        if model.dtype != torch.float32:
            in_run_dtype = replace(in_fp32, param_dtype=model.dtype)

        # layers of other encoders than CANINE are under autocast, which looks for weights in fp32
        for layer in itertools.chain.from_iterable(model.layers()):
            policy = in_fp32
            if isinstance(layer, TransformerLayer):
                policy = in_run_dtype
            shard(layer, mp_policy=policy)
        shard(model, mp_policy=in_fp32)

        # logits are a view, as of each linear layer; nothing changes them in place
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning
        )

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def average_sparse_gradients(self) -> None:
        """Do nothing: no model with a table is sharded."""

    @contextmanager
    def whole(self) -> Iterator[MixerModel]:
        """Give a second model, with the whole weights on this rank's device."""
        weights: Any = get_model_state_dict(
            self._model, options=StateDictOptions(full_state_dict=True)
        )
        self._empty.load_state_dict(weights, assign=True)
        try:
            yield self._empty.train(self._model.training)
        finally:
            for module in self._empty.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    empty = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                    setattr(module, name, empty)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in rank 0's CPU memory; they are gathered one by one."""
        return cast(dict[str, Tensor], get_model_state_dict(self._model, options=_ON_PRIMARY))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load whole weights, of which each rank keeps its shards."""
        shards = self._model.state_dict()
        local = {name: _sharded(weight, shards[name]) for name, weight in weights.items()}
        self._model.load_state_dict(local)

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state in rank 0's CPU memory."""
        # torch's function would take a first step where there has been none
        state = optimizer.state_dict()
        if not state["state"]:
            return state
        by_name: Any = get_optimizer_state_dict(self._model, optimizer, options=_ON_PRIMARY)

        # one process numbers its trained parameters
        names = [name for name, weight in self._model.named_parameters() if weight.requires_grad]
        moments = by_name.get("state", {})
        state["state"] = {i: moments[name] for i, name in enumerate(names) if name in moments}
        return state

    def local_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the moments of this rank's shards."""
        parameters = trained_parameters(optimizer)
        moments: dict[int, dict[str, Tensor]] = {}
        for i, values in state["state"].items():
            moments[i] = {name: _sharded(value, parameters[i]) for name, value in values.items()}
        return state | {"state": moments}


def _norm_of_shards(gradients: Iterable[Any]) -> Tensor:
    """Return the norm of gradients, of which each rank has its shards."""
    shards = [gradient.to_local() for gradient in gradients]
    return distributed.all_reduce(nn.utils.get_total_norm(shards).square()).sqrt()


def _sharded(tensor: Tensor, example: Tensor) -> Tensor:
    """Return a tensor, whole on each rank, sharded as another one is, without communication; a
    number of steps stays whole.
    """
    if tensor.dim() == 0 or not isinstance(example, DTensor):
        return tensor
    sharded = distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)
    return sharded.to(example.device)

"""FSDP: each rank holds a shard of weights, gradients and optimizer state; layers are whole while
they compute.
"""

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from histocoder.model import MixerModel
from histocoder.model.layers import TransformerLayer
from histocoder.training.learner import Learner

_ON_PRIMARY = StateDictOptions(
    full_state_dict=True, cpu_offload=True
)  # whole tensors on rank 0 alone


class ShardedLearner(Learner):
    """A learner with FSDP by PyTorch's `fully_shard` (Zhao et al. 2023).

    Each layer is its own FSDP unit, gathered in the precision of the run (in fp32 for encoders
    other than CANINE). All other parameters are gathered with the model, in fp32.
    """

    @staticmethod
    def total_norm(gradients: Iterable[Any]) -> Tensor:
        """Return the norm of gradients, of which each rank has its shards."""
        own = [gradient.to_local() for gradient in gradients]
        return distributed.all_reduce(nn.utils.get_total_norm(own).square()).sqrt()

    def wrap(self) -> nn.Module:
        """Shard the model in place."""
        model = self.model
        self._empty = (
            copy.deepcopy(  # the model before it was sharded, with weights on the meta device
                model,
                {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()},
            )
        )
        mesh = init_device_mesh(self.device.type, (distributed.world_size(),))
        shard = partial(
            fully_shard, mesh=mesh, reshard_after_forward=self.config.fsdp == "full_shard"
        )
        reduce_dtype = torch.bfloat16 if self.config.bf16_gradients else torch.float32
        in_fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        in_run_dtype = (
            in_fp32 if model.dtype == torch.float32 else replace(in_fp32, param_dtype=model.dtype)
        )
        for layer in itertools.chain(*model.layers()):
            # layers of other encoders than CANINE are under autocast, which looks for weights in
            # fp32
            shard(layer, mp_policy=in_run_dtype if isinstance(layer, TransformerLayer) else in_fp32)
        shard(model, mp_policy=in_fp32)
        # logits are a view, as of each linear layer; nothing changes them in place
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning
        )
        return model

    @contextmanager
    def whole(self) -> Iterator[MixerModel]:
        """Give a second model, with the whole weights on this rank's device."""
        weights: Any = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True)
        )
        self._empty.load_state_dict(weights, assign=True)
        try:
            yield self._empty.train(self.model.training)
        finally:
            for module in self._empty.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(
                        module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                    )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in rank 0's CPU memory; they are gathered one by one."""
        return cast(dict[str, Tensor], get_model_state_dict(self.model, options=_ON_PRIMARY))

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state in rank 0's CPU memory."""
        state = self.optimizer.state_dict()
        # torch's function would take a first step where there has been none
        whole: Any = (
            get_optimizer_state_dict(self.model, self.optimizer, options=_ON_PRIMARY)
            if state["state"]
            else {}
        )
        names = [
            name for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]
        return {
            **state,
            "state": {names.index(name): values for name, values in whole.get("state", {}).items()},
        }

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Any] | None = None) -> None:
        """Load whole weights and, if given, the whole state of the optimizer; each rank keeps its
        shards.
        """
        own = self.model.state_dict()
        self.model.load_state_dict(
            {name: _sharded(weight, own[name]) for name, weight in weights.items()}
        )
        if optimizer is not None:
            like = [p for group in self.optimizer.param_groups for p in group["params"]]
            shards = {
                i: {
                    name: _sharded(value, like[i]) if value.dim() else value
                    for name, value in values.items()
                }
                for i, values in optimizer["state"].items()
            }
            self.optimizer.load_state_dict({**optimizer, "state": shards})


def _sharded(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor, whole on each rank, sharded as another one is; without communication."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to(
        like.device
    )

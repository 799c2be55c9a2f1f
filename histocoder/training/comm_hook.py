"""Gradients exchanged in fp16; a part of `strategies`."""
# without postponed annotations, since DDP reads those of hooks

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_LARGEST, _SMALLEST = 2.0**15, 1e-30
"""What the largest gradient becomes in fp16, which ends at 2¹⁶; what is smaller than that counts as 0."""


def fp16_hook(stream: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of DDP's over all processes in fp16, scaled so that its largest gradient is near fp16's largest.

    As they are, most gradients of a loss that is a mean over rows and classes are too small for fp16. What is not
    finite stays so.

    Parameters
    ----------
    stream : torch.cuda.Stream or None
        One for this alone, so that the backward pass does not wait; None on a CPU.
    bucket : GradBucket
    """
    gradients = bucket.buffer()
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        largest = torch.linalg.vector_norm(gradients, math.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        scale = _LARGEST / largest.clamp(min=_SMALLEST)
        halved = (gradients * (scale / dist.get_world_size())).half()
        exchange = dist.all_reduce(halved, async_op=True).get_future()

    def write_back(exchanged: Future[list[Tensor]]) -> Tensor:
        if stream is not None:
            scale.record_stream(torch.cuda.current_stream())
        return gradients.copy_(exchanged.value()[0]).div_(scale)

    return exchange.then(write_back)

"""Losses and accuracies over validation data, the same for every number of processes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from histocoder import distributed, losses, metrics
from histocoder.config import NUM_GREEDY
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import SequentialSampler
from histocoder.decoding.greedy import greedy
from histocoder.model import MixerModel


@torch.no_grad()
def validate(
    model: MixerModel,
    data: OccupationDataset,
    *,
    num_blocks: int,
    batch_size: int,
    seq2seq_weight: float,
    device: torch.device,
) -> dict[str, float]:
    """Losses and accuracies over all rows, each counted once, whatever the number of processes.

    Parameters
    ----------
    model : MixerModel
        Unwrapped.
    data : OccupationDataset
    num_blocks, batch_size : int
    seq2seq_weight : float
    device : torch.device

    Returns
    -------
    dict
        `val_loss`, `val_loss_linear`, `val_loss_seq2seq`: as if all rows were one batch. In percent: `seq_acc` (exact
        set of codes) and `token_acc`, with teacher forcing on all rows; `flat_acc` (exact set above 0.5); and
        `greedy_seq_acc`, the exact set of codes decoded freely, on `NUM_GREEDY` rows, the same ones each time.
    """
    model.eval()
    rank, world_size = distributed.rank(), distributed.world_size()
    sampler = SequentialSampler(data.lengths(), batch_size=batch_size, num_replicas=world_size, rank=rank)
    in_sample = np.zeros(len(data), dtype=bool)
    in_sample[np.random.default_rng(0).permutation(len(data))[:NUM_GREEDY]] = True
    sums = torch.zeros(9, dtype=torch.float64)
    for share in sampler:
        freely = torch.from_numpy(in_sample[share.rows]).to(device)
        sums += _batch_sums(model, data[share].to(device), freely, num_blocks=num_blocks)
    model.train()
    target, unused, flat, forced_right, correct, real, flat_right, greedy_right, sampled = distributed.reduce_sum(
        sums
    ).tolist()
    n = len(data)
    seq2seq = target / (n * max(int(data.num_target_blocks.max()), 1)) + unused / (n * num_blocks)
    return {
        "val_loss": seq2seq_weight * seq2seq + (1 - seq2seq_weight) * flat / n,
        "val_loss_linear": flat / n,
        "val_loss_seq2seq": seq2seq,
        "seq_acc": 100 * forced_right / n,
        "token_acc": 100 * correct / max(real, 1),
        "flat_acc": 100 * flat_right / n,
        "greedy_seq_acc": 100 * greedy_right / max(sampled, 1),
    }


def _batch_sums(model: MixerModel, batch: Batch, freely: Tensor, *, num_blocks: int) -> Tensor:
    """What a batch adds to each of `validate`'s sums, on the CPU; `freely` (B,) marks rows to decode freely as well."""
    memory, pooled, memory_mask = model.encode(batch.input_ids, batch.encoded)
    logits = model.decoder(batch.targets[:, :-2], memory, memory_mask)
    flat_logits = model.classify(pooled)
    target_loss, unused_loss = losses.block_losses(logits, batch.targets, num_blocks=num_blocks)
    true, forced = batch.targets[:, 1:-1], logits.argmax(-1)
    correct, real = metrics.token_matches(true, forced, num_blocks=num_blocks)
    right = torch.zeros((), device=memory.device)
    if freely.any():
        mask = None if memory_mask is None else memory_mask[freely]
        memory = memory.to(model.decoder.head.weight.dtype)
        length = true.shape[1]
        tokens, _ = greedy(model.decoder, memory[freely], mask, num_tokens=length, block_size=length // num_blocks)
        right = metrics.exact_set(true[freely], tokens[:, 1:], num_blocks=num_blocks).sum()
    parts = (
        target_loss.sum(),
        unused_loss.sum(),
        losses.flat_bce(flat_logits, batch.class_ids, num_rows=1),
        metrics.exact_set(true, forced, num_blocks=num_blocks).sum(),
        correct.sum(),
        real.sum(),
        metrics.flat_exact_set(flat_logits, batch.class_ids).sum(),
        right,
        freely.sum(),
    )
    return torch.stack([part.float() for part in parts]).cpu()

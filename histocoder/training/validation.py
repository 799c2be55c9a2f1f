"""Losses and accuracies over validation data, the same for every number of processes."""

import numpy as np
import torch
from torch import Tensor

from histocoder import distributed
from histocoder.config import NUM_GREEDY, TrainConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import SequentialSampler
from histocoder.formatters import EOS, PAD
from histocoder.inference.search import greedy
from histocoder.inference.stepper import DecoderInputs
from histocoder.model import MixerModel
from histocoder.training import losses
from histocoder.training.frozen import FrozenOutputs

_MOST_CODES = 3  # rows with this many codes or more are reported together


@torch.no_grad()
def validate(
    model: MixerModel,
    data: OccupationDataset,
    config: TrainConfig,
    *,
    device: torch.device,
    outputs: FrozenOutputs | None = None,
) -> dict[str, float]:
    """Return losses and accuracies over all rows, each counted once, whatever the number of ranks; a collective call.

    Returns
    -------
    dict
        `val_loss`, `val_loss_linear`, `val_loss_seq2seq`: as if all rows were one batch. In percent: `seq_acc` (exact
        set of codes) and `token_acc`, with teacher forcing on all rows; `flat_acc` (exact set, of the best class and
        those above the default threshold); and `greedy_seq_acc`, the exact set of codes decoded freely, on `NUM_GREEDY`
        rows, the same ones each time. Where rows have several codes, `flat_acc_{k}` and `greedy_seq_acc_{k}` are the
        accuracies on rows with k codes; k = 3 means 3 or more.
    """
    model.eval()
    num_blocks = model.config.formatter["num_blocks"]
    rank, world_size = distributed.rank(), distributed.world_size()
    sampler = SequentialSampler(data.lengths(), batch_size=config.batch_size, num_replicas=world_size, rank=rank)
    in_sample = np.zeros(len(data), dtype=bool)
    in_sample[np.random.default_rng(0).permutation(len(data))[:NUM_GREEDY]] = True
    sums, by_codes = torch.zeros(6, dtype=torch.float64), torch.zeros(4, _MOST_CODES + 1, dtype=torch.float64)
    for share in sampler:
        freely = torch.from_numpy(in_sample[share.rows]).to(device)
        batch = data[share]
        encoded = model.encode(batch.input_ids.to(device), None if outputs is None else outputs.of(batch))
        of_batch, of_batch_by_codes = _batch_sums(model, batch.to(device), encoded, freely, num_blocks=num_blocks)
        sums += of_batch
        by_codes += of_batch_by_codes
    model.train()
    target, unused, flat, forced_right, correct, real = distributed.all_reduce(sums).tolist()
    by_codes = distributed.all_reduce(by_codes)
    n = len(data)
    seq2seq = target / (n * max(int(data.num_target_blocks.max()), 1)) + unused / (n * num_blocks)
    results = {
        "val_loss": config.seq2seq_weight * seq2seq + (1 - config.seq2seq_weight) * flat / n,
        "val_loss_linear": flat / n,
        "val_loss_seq2seq": seq2seq,
        "seq_acc": 100 * forced_right / n,
        "token_acc": 100 * correct / max(real, 1),
    }
    several = bool(by_codes[1, 2:].sum())
    for name, right, rows in (("flat_acc", *by_codes[:2]), ("greedy_seq_acc", *by_codes[2:])):
        results[name] = 100 * float(right.sum() / rows.sum().clamp(min=1))
        if several:
            shares = 100 * right / rows
            results |= {f"{name}_{k}": float(shares[k]) for k in range(1, _MOST_CODES + 1) if rows[k]}
    return results


def _batch_sums(
    model: MixerModel,
    batch: Batch,
    encoded: tuple[Tensor, Tensor, Tensor | None],
    freely: Tensor,
    *,
    num_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Return a batch's part of `validate`'s sums, on the CPU; `freely` (B,) marks rows to decode freely as well."""
    memory, pooled, memory_mask = encoded
    flat_logits = model.classify(pooled)
    prior = model.prior(flat_logits)
    logits = model.decoder(batch.targets[:, :-2], memory, memory_mask, prior)
    target_loss, unused_loss = losses.block_losses(logits, batch.targets, num_blocks=num_blocks)
    true, forced = batch.targets[:, 1:-1], logits.argmax(-1)
    correct, real = token_matches(true, forced, num_blocks=num_blocks)
    right = torch.zeros_like(freely)
    if freely.any():
        mask = None if memory_mask is None else memory_mask[freely]
        memory = memory.to(model.decoder.head.weight.dtype)
        prior = None if prior is None else prior.rows(freely)
        length = true.shape[1]
        source = DecoderInputs(memory[freely], mask, prior)
        tokens, _ = greedy(model.decoder, source, num_tokens=length, block_size=length // num_blocks)
        right[freely] = exact_set(true[freely], tokens[:, 1:], num_blocks=num_blocks)
    flat_right = flat_exact_set(
        model.class_probabilities(flat_logits), batch.class_ids, threshold=model.config.default_threshold
    )
    parts = (
        target_loss.sum(),
        unused_loss.sum(),
        losses.flat_loss(flat_logits, batch.class_ids, kind=model.config.flat_loss, num_rows=1),
        exact_set(true, forced, num_blocks=num_blocks).sum(),
        correct.sum(),
        real.sum(),
    )
    num_codes = losses.target_blocks(batch.targets, num_blocks=num_blocks).clamp(max=_MOST_CODES)
    groups = [num_codes[flat_right], num_codes, num_codes[right], num_codes[freely]]
    by_codes = torch.stack([torch.bincount(group.cpu(), minlength=_MOST_CODES + 1) for group in groups])
    return torch.stack([part.float() for part in parts]).cpu(), by_codes


def _blocks(tokens: Tensor, num_blocks: int) -> Tensor:
    """Return token blocks in one spelling: EOS behind a block's first EOS, PAD in a block that begins with PAD."""
    blocks = tokens.unflatten(1, (num_blocks, -1))
    ended = blocks.eq(EOS).cumsum(-1).gt(0)
    unused = blocks[..., :1].eq(PAD)
    return blocks.masked_fill(ended, EOS).masked_fill(unused, PAD)


def exact_set(target: Tensor, predicted: Tensor, *, num_blocks: int) -> Tensor:
    """Return whether the predicted codes are the target's codes in any order, of shape (B,); one too many is wrong.

    Tokens are of shape (B, num_blocks * block_size), without BOS and EOS around them.

    Examples
    --------
    >>> import torch
    >>> exact_set(torch.tensor([[5, 6, 1]]), torch.tensor([[6, 5, 1]]), num_blocks=3)
    tensor([True])
    >>> exact_set(torch.tensor([[5, 1, 1]]), torch.tensor([[5, 6, 1]]), num_blocks=3)
    tensor([False])
    """
    true, guess = _blocks(target, num_blocks), _blocks(predicted, num_blocks)
    same = (true[:, :, None] == guess[:, None]).all(-1)  # (B, true, guess)
    found = same.any(2) | true[..., 0].eq(PAD)
    right = same.any(1) | guess[..., 0].eq(PAD)
    return found.all(1) & right.all(1)


def token_matches(target: Tensor, predicted: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of correct and of real tokens of each row, of shape (B,); tokens as in `exact_set`.

    As in the block loss, each of k target blocks is compared with the one of the first k predicted blocks that fits it
    best.
    """
    true, guess = target.unflatten(1, (num_blocks, -1)), predicted.unflatten(1, (num_blocks, -1))
    real = true.ne(PAD)
    used = real.any(-1)
    hits = (true[:, :, None].eq(guess[:, None]) & real[:, :, None]).sum(-1)  # (B, true, guess)
    best = hits.masked_fill(~used[:, None, :], 0).max(-1).values
    return best.sum(1), real.sum((1, 2))


def chosen_classes(probabilities: Tensor, threshold: float, *, most: int) -> Tensor:
    """Return the flat head's answer, of shape (B, num_classes): the best class, and `most` in all above a threshold.

    Examples
    --------
    >>> import torch
    >>> chosen_classes(torch.tensor([[0.2, 0.1], [0.4, 0.6]]), 0.3, most=2)
    tensor([[ True, False],
            [ True,  True]])
    """
    best = probabilities.topk(min(most, probabilities.shape[1]))
    counts = best.values > threshold
    counts[:, 0] = True
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, best.indices, counts)


def flat_exact_set(probabilities: Tensor, class_ids: Tensor, *, threshold: float) -> Tensor:
    """Return whether the flat head's answer is exactly the target's classes, of shape (B,).

    Probabilities are of shape (B, num_classes); class ids of shape (B, num_blocks), -1 where there is none. See
    `chosen_classes` for the threshold.
    """
    guess = chosen_classes(probabilities, threshold, most=class_ids.shape[1])
    return guess.eq(losses.multi_hot(class_ids, probabilities.shape[1]).bool()).all(1)

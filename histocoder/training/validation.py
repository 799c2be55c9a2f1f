"""Validation: losses and accuracies over all rows, each counted once, whatever the number of
ranks.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocoder import distributed
from histocoder.config import NUM_GREEDY, TrainConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import SequentialSampler
from histocoder.formatters import EOS, PAD
from histocoder.inference.incremental import DecoderInputs
from histocoder.inference.search import greedy
from histocoder.model import MixerModel
from histocoder.training.encoded_rows import FrozenOutputs
from histocoder.training.losses import (
    attribute_loss,
    block_losses,
    flat_loss,
    multi_hot,
    split_by_attribute,
)

_BATCH_GROWTH = 4  # rows of a validation batch by those of a training batch, which keeps gradients


class Sums(NamedTuple):
    """Sums over rows, each of shape (), and the last two of shape (num_attributes,)."""

    target_loss: Tensor  # of the decoder, of the blocks that a row has, with teacher forcing
    unused_loss: Tensor  # of its other blocks
    flat_loss: Tensor
    attribute_loss: Tensor
    forced_right: Tensor  # rows whose set of codes is right with teacher forcing
    right_tokens: Tensor
    real_tokens: Tensor
    flat_right: Tensor  # rows whose set of codes is right by the flat head
    greedy_right: Tensor  # rows of the sample whose freely decoded set of codes is right
    right_attributes: Tensor  # rows where each attribute is right
    known_attributes: Tensor  # rows where each attribute is known

    def to_vector(self) -> Tensor:
        """Return the sums one after the other, on the CPU: a GPU is waited for only once."""
        device = self.flat_loss.device
        return torch.cat([part.float().to(device).view(-1) for part in self]).cpu()


@torch.no_grad()
def validate(
    model: MixerModel,
    data: OccupationDataset,
    config: TrainConfig,
    *,
    outputs: FrozenOutputs | None = None,
) -> dict[str, float]:
    """Return losses and accuracies over all rows; a collective call.

    `val_loss`, `val_loss_linear`, `val_loss_seq2seq` are as if all rows were one batch. In percent
    are `seq_acc` (exact set of codes) and `token_acc`, with teacher forcing on all rows; `flat_acc`
    (exact set, of the best class and those above the default threshold); `greedy_seq_acc`, the
    exact set of codes decoded freely, on `NUM_GREEDY` rows, the same ones each time; and of each
    attribute `acc_…`, of the rows where it is known. `outputs` are those of a frozen encoder.
    """
    model.eval()
    device = model.linear_decoder.weight.device
    num_rows = len(data)
    sampler = SequentialSampler(
        data.lengths(),
        batch_size=_BATCH_GROWTH * config.batch_size,
        num_replicas=distributed.world_size(),
        rank=distributed.rank(),
    )

    # free decoding takes longest, so a sample of the rows has to do
    in_sample = np.zeros(num_rows, dtype=bool)
    in_sample[np.random.default_rng(0).permutation(num_rows)[:NUM_GREEDY]] = True

    # this rank's rows, and then those of all
    num_attributes = len(model.config.attributes)
    sizes = [1] * (len(Sums._fields) - 2) + [num_attributes] * 2  # see `Sums`
    total = torch.zeros(sum(sizes), dtype=torch.float64)
    for indices in sampler:
        batch = data[indices].to(device)
        decodes_freely = torch.from_numpy(in_sample[indices.rows]).to(device)
        total += _batch_sums(model, batch, decodes_freely, outputs=outputs).to_vector()
    model.train()
    sums = Sums._make(distributed.all_reduce(total).split(sizes))

    # losses as if all rows were one batch
    num_blocks = model.config.formatter["num_blocks"]
    num_target_blocks = max(int(data.num_target_blocks.max()), 1)
    flat_sum = float(sums.flat_loss)
    seq2seq = float(sums.target_loss) / (num_rows * num_target_blocks)
    seq2seq += float(sums.unused_loss) / (num_rows * num_blocks)
    loss = config.seq2seq_weight * seq2seq + (1 - config.seq2seq_weight) * flat_sum / num_rows
    results = {
        "val_loss": loss + config.attribute_weight * float(sums.attribute_loss) / num_rows,
        "val_loss_linear": flat_sum / num_rows,
        "val_loss_seq2seq": seq2seq,
        "seq_acc": 100 * float(sums.forced_right) / num_rows,
        "token_acc": 100 * float(sums.right_tokens) / max(float(sums.real_tokens), 1),
        "flat_acc": 100 * float(sums.flat_right) / num_rows,
        "greedy_seq_acc": 100 * float(sums.greedy_right) / in_sample.sum(),
    }
    accuracies = 100 * sums.right_attributes / sums.known_attributes.clamp(min=1)
    for name, accuracy in zip(model.config.attributes, accuracies.tolist(), strict=True):
        results[f"acc_{name}"] = accuracy
    return results


def _batch_sums(
    model: MixerModel, batch: Batch, decodes_freely: Tensor, *, outputs: FrozenOutputs | None
) -> Sums:
    """Return a batch's part of `validate`'s sums; `decodes_freely` (B,) marks the rows of the
    sample.
    """
    config = model.config
    encoded = None
    if outputs is not None:
        encoded = outputs.of(batch)
    memory, pooled, memory_mask = model.encode(batch.input_ids, encoded)
    counts = torch.ones(len(pooled), device=pooled.device)  # each row counts once

    # the flat head, whose probabilities the decoder starts from
    flat_logits = model.classify(pooled)
    is_flat_right = flat_exact_set(
        model.class_probabilities(flat_logits), batch.class_ids, threshold=config.default_threshold
    )

    # the decoder with teacher forcing
    num_blocks = config.formatter["num_blocks"]
    prior = model.prior(flat_logits)
    logits = model.decoder(batch.targets[:, :-2], memory, memory_mask, prior)
    target_losses, unused_losses = block_losses(logits, batch.targets, num_blocks=num_blocks)
    true_tokens = batch.targets[:, 1:-1]
    forced_tokens = logits.argmax(-1)
    right_tokens, real_tokens = token_matches(true_tokens, forced_tokens, num_blocks=num_blocks)

    # and without, for the rows of the sample
    greedy_right = torch.zeros(())
    if decodes_freely.any():
        memory = memory.to(model.decoder.head.weight.dtype)
        source = DecoderInputs(memory, memory_mask, prior).rows(decodes_freely)
        greedy_right = _num_right_greedily(model, source, true_tokens[decodes_freely])

    # attributes, of the rows where they are known
    attributes_loss = torch.zeros(())
    right_attributes = torch.zeros(0)
    attribute_logits = model.classify_attributes(pooled)
    if attribute_logits is not None:
        attributes_loss = attribute_loss(attribute_logits, batch.attribute_ids, config, counts)
        parts = split_by_attribute(attribute_logits, config)
        answers = torch.stack([part.argmax(1) for part in parts], dim=1)
        right_attributes = answers.eq(batch.attribute_ids).sum(0)

    return Sums(
        target_loss=target_losses.sum(),
        unused_loss=unused_losses.sum(),
        flat_loss=flat_loss(
            flat_logits, batch.class_ids, kind=config.flat_loss, num_rows=1, counts=counts
        ),
        attribute_loss=attributes_loss,
        forced_right=exact_set(true_tokens, forced_tokens, num_blocks=num_blocks).sum(),
        right_tokens=right_tokens.sum(),
        real_tokens=real_tokens.sum(),
        flat_right=is_flat_right.sum(),
        greedy_right=greedy_right,
        right_attributes=right_attributes,
        known_attributes=batch.attribute_ids.ge(0).sum(0),
    )


def _num_right_greedily(model: MixerModel, source: DecoderInputs, true_tokens: Tensor) -> Tensor:
    """Return the number of rows, of shape (), whose freely decoded codes are the true ones."""
    num_blocks = model.config.formatter["num_blocks"]
    num_tokens = true_tokens.shape[1]
    tokens, _ = greedy(
        model.decoder, source, num_tokens=num_tokens, block_size=num_tokens // num_blocks
    )
    return exact_set(true_tokens, tokens[:, 1:], num_blocks=num_blocks).sum()


def _blocks(tokens: Tensor, num_blocks: int) -> Tensor:
    """Return token blocks in one spelling: EOS behind a block's first EOS, PAD in a block that
    begins with PAD.
    """
    blocks = tokens.unflatten(1, (num_blocks, -1))
    has_ended = blocks.eq(EOS).cumsum(-1).gt(0)
    is_unused = blocks[..., :1].eq(PAD)
    return blocks.masked_fill(has_ended, EOS).masked_fill(is_unused, PAD)


def exact_set(target: Tensor, predicted: Tensor, *, num_blocks: int) -> Tensor:
    """Return whether the predicted codes are the target's codes in any order, of shape (B,); one
    too many is wrong.

    Tokens are of shape (B, num_blocks * block_size), without BOS and EOS around them.

    Examples
    --------
    >>> import torch
    >>> exact_set(torch.tensor([[5, 6, 1]]), torch.tensor([[6, 5, 1]]), num_blocks=3)
    tensor([True])
    """
    true_blocks = _blocks(target, num_blocks)
    blocks = _blocks(predicted, num_blocks)
    is_same = (true_blocks[:, :, None] == blocks[:, None]).all(-1)  # (B, true, predicted)

    # each true code was predicted, and each predicted one is true
    is_predicted = is_same.any(2) | true_blocks[..., 0].eq(PAD)
    is_true = is_same.any(1) | blocks[..., 0].eq(PAD)
    return is_predicted.all(1) & is_true.all(1)


def token_matches(target: Tensor, predicted: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of correct and of real tokens of each row, of shape (B,); tokens as in
    `exact_set`.

    As in the block loss, each of k target blocks is compared with the one of the first k predicted
    blocks that fits it best.
    """
    true_blocks = target.unflatten(1, (num_blocks, -1))
    blocks = predicted.unflatten(1, (num_blocks, -1))
    is_real = true_blocks.ne(PAD)
    is_used = is_real.any(-1)
    is_hit = true_blocks[:, :, None].eq(blocks[:, None]) & is_real[:, :, None]
    hits = is_hit.sum(-1)  # (B, true, predicted)
    best = hits.masked_fill(~is_used[:, None, :], 0).max(-1).values
    return best.sum(1), is_real.sum((1, 2))


def flat_exact_set(probabilities: Tensor, class_ids: Tensor, *, threshold: float) -> Tensor:
    """Return whether the flat head's answer is exactly the target's classes, of shape (B,).

    The answer is the best class, and further ones above a threshold, as many as there are blocks in
    all. Probabilities are of shape (B, num_classes); class ids of shape (B, num_blocks), -1 where
    there is none.
    """
    num_classes = probabilities.shape[1]
    best = probabilities.topk(min(class_ids.shape[1], num_classes))
    is_answer = best.values > threshold
    is_answer[:, 0] = True
    answer = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, best.indices, is_answer)
    return answer.eq(multi_hot(class_ids, num_classes).bool()).all(1)

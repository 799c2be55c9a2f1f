"""Losses and accuracies, of a batch and of validation data; losses of a batch's parts add up to the
batch's.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder import distributed
from histocoder.config import NUM_GREEDY, FitConfig, ModelConfig, TrainConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.samplers import SequentialSampler
from histocoder.formatters import EOS, PAD
from histocoder.inference.search import greedy
from histocoder.inference.stepper import DecoderInputs
from histocoder.model import MixerModel, MixerOutput
from histocoder.training.frozen import FrozenOutputs

_TIMES_AS_MANY = 4  # rows of a validation batch, which needs no memory for gradients


def block_losses(logits: Tensor, targets: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the order-invariant cross-entropy of blocks, in fp32, before any averaging over rows.

    With k codes in a row's target, each target block takes the smallest cross-entropy that it has
    with one of the first k predicted blocks (the mean over its positions); the other predicted
    blocks are pushed to PAD. This is the loss of OccCANINE (Dahl, Johansen and Vedel, "Breaking the
    HISCO Barrier", 2024).

    Parameters
    ----------
    logits : Tensor of shape (B, L, vocab_size)
        Logits of the tokens behind BOS; L is `num_blocks * block_size`, or one more for EOS, which
        is ignored.
    targets : Tensor of int, of shape (B, 2 + num_blocks * block_size)
        BOS, blocks, EOS; a row's codes come first, unused blocks are all PAD.
    num_blocks : int

    Returns
    -------
    target, unused : Tensor of shape (B, num_blocks)
        Each target block's smallest cross-entropy, 0 where there is no such block; and each unused
        predicted block's cross-entropy to PAD, 0 where it is used.
    """
    codes = targets[:, 1:-1].unflatten(1, (num_blocks, -1)).long()  # (B, N, S)
    logits = logits[:, : codes[0].numel()].unflatten(1, (num_blocks, -1)).float()  # (B, N, S, V)
    log_probs = F.log_softmax(logits, dim=-1)
    real = codes.ne(PAD)  # (B, N, S)
    used = real.any(-1)  # (B, N)

    # cross-entropy of every target block i with every predicted block j, at each position: (B, j,
    # S, i)
    index = codes.transpose(1, 2)[:, None].expand(-1, num_blocks, -1, -1)
    weights = real / real.sum(-1, keepdim=True).clamp(min=1)  # (B, i, S)
    pairs = (
        (-log_probs.gather(-1, index) * weights.transpose(1, 2)[:, None]).sum(2).transpose(1, 2)
    )  # (B, i, j)
    target = pairs.masked_fill(~used[:, None, :], torch.inf).min(dim=-1).values
    target = torch.where(used, target, 0.0)

    unused = torch.where(used, 0.0, -log_probs[..., PAD].mean(-1))
    return target, unused


def block_order_invariant(
    logits: Tensor,
    targets: Tensor,
    *,
    num_blocks: int,
    num_rows: int | None = None,
    num_target_blocks: int | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the block loss as one number, of shape (); see `block_losses` for logits and targets.

    Target blocks are averaged over all rows (a row without that block counts as 0) and then over
    the target blocks that occur; unused blocks over all rows and blocks. `num_rows` and
    `num_target_blocks` are those of the batch of which these rows are a part, so that its parts'
    losses add up to its own; by default these rows are all of it. `counts`, of shape (B,), is how
    often each row occurs, once by default.
    """
    target, unused = block_losses(logits, targets, num_blocks=num_blocks)
    if counts is None:
        counts = torch.ones(len(targets), device=targets.device)
    if num_rows is None:
        num_rows = int(counts.sum())
    if num_target_blocks is None:
        num_target_blocks = int(
            targets[:, 1:-1].unflatten(1, (num_blocks, -1)).ne(PAD).any(-1).sum(-1).max()
        )
    target_sum, unused_sum = (counts @ x.sum(1) for x in (target, unused))
    return target_sum / (num_rows * max(num_target_blocks, 1)) + unused_sum / (
        num_rows * num_blocks
    )


def multi_hot(class_ids: Tensor, num_classes: int) -> Tensor:
    """Return 1.0 at each row's classes, else 0.0, of shape (B, num_classes); a class id of -1 is
    none.
    """
    spare = torch.zeros(len(class_ids), num_classes + 1, device=class_ids.device)
    return spare.scatter(1, torch.where(class_ids < 0, num_classes, class_ids).long(), 1.0)[
        :, :num_classes
    ]


def flat_loss(
    logits: Tensor,
    class_ids: Tensor,
    *,
    kind: str,
    label_smoothing: float = 0.0,
    num_rows: int | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the flat head's loss, averaged over rows, of shape ().

    Parameters
    ----------
    logits : Tensor of shape (B, num_classes)
    class_ids : Tensor of int, of shape (B, num_blocks)
        -1 where there is none.
    kind : {"softmax", "bce", "bce-mean"}
        softmax: cross-entropy, with the target spread evenly over a row's codes; 0 for rows without
        any. bce: binary cross-entropy summed over classes. bce-mean: averaged over classes, as by
        OccCANINE, which makes its gradients smaller the more classes there are.
    label_smoothing : float
        Share of a softmax's target that is spread over all classes (Szegedy et al. 2016).
    num_rows, counts : optional
        See `block_order_invariant`.
    """
    if counts is None:
        counts = torch.ones(len(logits), device=logits.device)
    targets = multi_hot(class_ids, logits.shape[1])
    if kind == "softmax":
        shares = targets / targets.sum(1, keepdim=True).clamp(min=1)
        if label_smoothing:
            shares = shares.lerp(shares.sum(1, keepdim=True) / logits.shape[1], label_smoothing)
        rows = -(shares * F.log_softmax(logits.float(), dim=-1)).sum(1)
    else:
        rows = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(1)
    num_terms = logits.shape[1] if kind == "bce-mean" else 1
    return counts @ rows / ((num_rows or int(counts.sum())) * num_terms)


def attribute_sums(
    logits: Tensor | None, attribute_ids: Tensor, config: ModelConfig, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the attributes' cross-entropies, and how many of each, (A,), are right and
    are known.

    Logits are of shape (B, num_labels), ids (B, A), of which -1 is not known, and counts (B,).
    """
    if logits is None:
        return counts.new_zeros(()), counts.new_zeros(0), counts.new_zeros(0)
    parts = logits.float().split([1 + len(labels) for labels in config.attributes.values()], dim=1)
    pairs = list(zip(parts, attribute_ids.T, strict=True))
    losses = (F.cross_entropy(part, ids, ignore_index=-1, reduction="none") for part, ids in pairs)
    right = torch.stack([(part.argmax(1) == ids).sum() for part, ids in pairs])
    return counts @ torch.stack([*losses]).sum(0), right, attribute_ids.ge(0).sum(0)


def mixed_loss(output: MixerOutput, batch: Batch, config: ModelConfig, fit: FitConfig) -> Tensor:
    """Return this rank's part of the global batch's loss: `w * block loss + (1 - w) * flat loss`,
    and attributes'.

    With a `decoder_stride` in the settings `fit`, the rows that the decoder is given represent all
    of them. Without logits of a decoder, the flat loss counts alone.
    """
    loss = flat_loss(
        output.flat_logits,
        batch.class_ids,
        kind=config.flat_loss,
        label_smoothing=fit.label_smoothing,
        num_rows=batch.num_rows,
        counts=batch.counts,
    )
    if output.seq2seq_logits is not None:
        stride = fit.decoder_stride
        counts = batch.counts[::stride]
        block = block_order_invariant(
            output.seq2seq_logits,
            batch.targets[::stride],
            num_blocks=config.formatter["num_blocks"],
            num_rows=batch.num_rows,
            num_target_blocks=batch.num_target_blocks,
            counts=counts if stride == 1 else counts * (batch.counts.sum() / counts.sum()),
        )
        loss = fit.seq2seq_weight * block + (1 - fit.seq2seq_weight) * loss
    if output.attribute_logits is None:
        return loss
    of_attributes = attribute_sums(
        output.attribute_logits, batch.attribute_ids, config, batch.counts
    )[0]
    return loss + fit.attribute_weight * of_attributes / batch.num_rows


@torch.no_grad()
def validate(
    model: MixerModel,
    data: OccupationDataset,
    config: TrainConfig,
    *,
    outputs: FrozenOutputs | None = None,
) -> dict[str, float]:
    """Return losses and accuracies over all rows, each counted once, whatever the number of ranks;
    a collective call.

    `val_loss`, `val_loss_linear`, `val_loss_seq2seq` are as if all rows were one batch. In percent
    are `seq_acc` (exact set of codes) and `token_acc`, with teacher forcing on all rows; `flat_acc`
    (exact set, of the best class and those above the default threshold); `greedy_seq_acc`, the
    exact set of codes decoded freely, on `NUM_GREEDY` rows, the same ones each time; and of each
    attribute `acc_…`, of the rows where it is known.
    """
    model.eval()
    device, n = model.linear_decoder.weight.device, len(data)
    rank, world_size = distributed.rank(), distributed.world_size()
    size = _TIMES_AS_MANY * config.batch_size
    sampler = SequentialSampler(data.lengths(), batch_size=size, num_replicas=world_size, rank=rank)
    in_sample = np.zeros(n, dtype=bool)
    in_sample[np.random.default_rng(0).permutation(n)[:NUM_GREEDY]] = True
    names = [*model.config.attributes]
    sums = torch.zeros(9 + 2 * len(names), dtype=torch.float64)
    for share in sampler:
        freely = torch.from_numpy(in_sample[share.rows]).to(device)
        batch = data[share].to(device)
        encoded = model.encode(batch.input_ids, None if outputs is None else outputs.of(batch))
        sums += _batch_sums(model, batch, encoded, freely)
    model.train()
    sums = distributed.all_reduce(sums)
    target, unused, flat, forced_right, correct, real, flat_right, right, of_attributes = sums[
        :9
    ].tolist()
    shares = 100 * sums[9 : 9 + len(names)] / sums[9 + len(names) :].clamp(min=1)
    num_blocks = model.config.formatter["num_blocks"]
    seq2seq = target / (n * max(int(data.num_target_blocks.max()), 1)) + unused / (n * num_blocks)
    return {
        "val_loss": config.seq2seq_weight * seq2seq
        + (1 - config.seq2seq_weight) * flat / n
        + config.attribute_weight * of_attributes / n,
        "val_loss_linear": flat / n,
        "val_loss_seq2seq": seq2seq,
        "seq_acc": 100 * forced_right / n,
        "token_acc": 100 * correct / max(real, 1),
        "flat_acc": 100 * flat_right / n,
        "greedy_seq_acc": 100 * right / in_sample.sum(),
        **{f"acc_{name}": share for name, share in zip(names, shares.tolist(), strict=True)},
    }


def _batch_sums(
    model: MixerModel, batch: Batch, encoded: tuple[Tensor, Tensor, Tensor | None], freely: Tensor
) -> Tensor:
    """Return a batch's part of `validate`'s sums, on the CPU; `freely` (B,) marks rows to decode
    freely as well.
    """
    memory, pooled, memory_mask = encoded
    num_blocks = model.config.formatter["num_blocks"]
    flat_logits = model.classify(pooled)
    prior = model.prior(flat_logits)
    logits = model.decoder(batch.targets[:, :-2], memory, memory_mask, prior)
    target_loss, unused_loss = block_losses(logits, batch.targets, num_blocks=num_blocks)
    true, forced = batch.targets[:, 1:-1], logits.argmax(-1)
    correct, real = token_matches(true, forced, num_blocks=num_blocks)
    right = torch.zeros(())
    if freely.any():
        mask = None if memory_mask is None else memory_mask[freely]
        memory = memory.to(model.decoder.head.weight.dtype)
        source = DecoderInputs(memory[freely], mask, None if prior is None else prior.rows(freely))
        length = true.shape[1]
        tokens, _ = greedy(
            model.decoder, source, num_tokens=length, block_size=length // num_blocks
        )
        right = exact_set(true[freely], tokens[:, 1:], num_blocks=num_blocks).sum()
    probabilities = model.class_probabilities(flat_logits)
    once = torch.ones(len(pooled), device=pooled.device)
    of_attributes = attribute_sums(
        model.classify_attributes(pooled), batch.attribute_ids, model.config, once
    )
    parts = (
        target_loss.sum(),
        unused_loss.sum(),
        flat_loss(flat_logits, batch.class_ids, kind=model.config.flat_loss, num_rows=1),
        exact_set(true, forced, num_blocks=num_blocks).sum(),
        correct.sum(),
        real.sum(),
        flat_exact_set(
            probabilities, batch.class_ids, threshold=model.config.default_threshold
        ).sum(),
        right,
        *of_attributes,
    )
    return torch.cat([part.float().to(flat_logits.device).view(-1) for part in parts]).cpu()


def _blocks(tokens: Tensor, num_blocks: int) -> Tensor:
    """Return token blocks in one spelling: EOS behind a block's first EOS, PAD in a block that
    begins with PAD.
    """
    blocks = tokens.unflatten(1, (num_blocks, -1))
    ended = blocks.eq(EOS).cumsum(-1).gt(0)
    unused = blocks[..., :1].eq(PAD)
    return blocks.masked_fill(ended, EOS).masked_fill(unused, PAD)


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
    true, guess = _blocks(target, num_blocks), _blocks(predicted, num_blocks)
    same = (true[:, :, None] == guess[:, None]).all(-1)  # (B, true, guess)
    found = same.any(2) | true[..., 0].eq(PAD)
    right = same.any(1) | guess[..., 0].eq(PAD)
    return found.all(1) & right.all(1)


def token_matches(target: Tensor, predicted: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of correct and of real tokens of each row, of shape (B,); tokens as in
    `exact_set`.

    As in the block loss, each of k target blocks is compared with the one of the first k predicted
    blocks that fits it best.
    """
    true, guess = target.unflatten(1, (num_blocks, -1)), predicted.unflatten(1, (num_blocks, -1))
    real = true.ne(PAD)
    used = real.any(-1)
    hits = (true[:, :, None].eq(guess[:, None]) & real[:, :, None]).sum(-1)  # (B, true, guess)
    best = hits.masked_fill(~used[:, None, :], 0).max(-1).values
    return best.sum(1), real.sum((1, 2))


def flat_exact_set(probabilities: Tensor, class_ids: Tensor, *, threshold: float) -> Tensor:
    """Return whether the flat head's answer is exactly the target's classes, of shape (B,).

    The answer is the best class, and further ones above a threshold, as many as there are blocks in
    all. Probabilities are of shape (B, num_classes); class ids of shape (B, num_blocks), -1 where
    there is none.
    """
    best = probabilities.topk(min(class_ids.shape[1], probabilities.shape[1]))
    counts = best.values > threshold
    counts[:, 0] = True
    guess = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, best.indices, counts)
    return guess.eq(multi_hot(class_ids, probabilities.shape[1]).bool()).all(1)

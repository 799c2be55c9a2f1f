"""The losses of decoder and flat head, and their mixture; losses of a batch's parts add up to the batch's."""

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.config import FitConfig, ModelConfig
from histocoder.data.dataset import Batch
from histocoder.formatters.systems import PAD
from histocoder.model import MixerOutput


def block_losses(logits: Tensor, targets: Tensor, *, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the order-invariant cross-entropy of blocks, in fp32, before any averaging over rows.

    With k codes in a row's target, each target block takes the smallest cross-entropy that it has with one of the
    first k predicted blocks (the mean over its positions); the other predicted blocks are pushed to PAD. This is the
    loss of OccCANINE (Dahl, Johansen and Vedel, "Breaking the HISCO Barrier", 2024).

    Parameters
    ----------
    logits : Tensor of shape (B, L, vocab_size)
        Logits of the tokens behind BOS; L is `num_blocks * block_size`, or one more for EOS, which is ignored.
    targets : Tensor of int, of shape (B, 2 + num_blocks * block_size)
        BOS, blocks, EOS; a row's codes come first, unused blocks are all PAD.
    num_blocks : int

    Returns
    -------
    target, unused : Tensor of shape (B, num_blocks)
        Each target block's smallest cross-entropy, 0 where there is no such block; and each unused predicted block's
        cross-entropy to PAD, 0 where it is used.
    """
    codes = targets[:, 1:-1].unflatten(1, (num_blocks, -1)).long()  # (B, N, S)
    logits = logits[:, : codes[0].numel()].unflatten(1, (num_blocks, -1)).float()  # (B, N, S, V)
    log_probs = F.log_softmax(logits, dim=-1)
    real = codes.ne(PAD)  # (B, N, S)
    used = real.any(-1)  # (B, N)

    # cross-entropy of every target block i with every predicted block j, at each position: (B, j, S, i)
    index = codes.transpose(1, 2)[:, None].expand(-1, num_blocks, -1, -1)
    weights = real / real.sum(-1, keepdim=True).clamp(min=1)  # (B, i, S)
    pairs = (-log_probs.gather(-1, index) * weights.transpose(1, 2)[:, None]).sum(2).transpose(1, 2)  # (B, i, j)
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

    Target blocks are averaged over all rows (a row without that block counts as 0) and then over the target blocks
    that occur; unused blocks over all rows and blocks. `num_rows` and `num_target_blocks` are those of the batch of
    which these rows are a part, so that its parts' losses add up to its own; by default these rows are all of it.
    `counts`, of shape (B,), is how often each row occurs, once by default.
    """
    target, unused = block_losses(logits, targets, num_blocks=num_blocks)
    if counts is None:
        counts = torch.ones(len(targets), device=targets.device)
    if num_rows is None:
        num_rows = int(counts.sum())
    if num_target_blocks is None:
        num_target_blocks = int(target_blocks(targets, num_blocks=num_blocks).max())
    target_sum, unused_sum = (counts @ x.sum(1) for x in (target, unused))
    return target_sum / (num_rows * max(num_target_blocks, 1)) + unused_sum / (num_rows * num_blocks)


def target_blocks(targets: Tensor, *, num_blocks: int) -> Tensor:
    """Return the number of codes in each target of shape (B, 2 + num_blocks * block_size); of shape (B,)."""
    return targets[:, 1:-1].unflatten(1, (num_blocks, -1)).ne(PAD).any(-1).sum(-1)


def multi_hot(class_ids: Tensor, num_classes: int) -> Tensor:
    """Return 1.0 at each row's classes, else 0.0, of shape (B, num_classes); a class id of -1 is none."""
    spare = torch.zeros(len(class_ids), num_classes + 1, device=class_ids.device)
    return spare.scatter(1, torch.where(class_ids < 0, num_classes, class_ids).long(), 1.0)[:, :num_classes]


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
        softmax: cross-entropy, with the target spread evenly over a row's codes; 0 for rows without any. bce: binary
        cross-entropy summed over classes. bce-mean: averaged over classes, as by OccCANINE, which makes its gradients
        smaller the more classes there are.
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


def mixed_loss(output: MixerOutput, batch: Batch, config: ModelConfig, fit: FitConfig) -> Tensor:
    """Return this rank's part of the global batch's loss: `w * block loss + (1 - w) * flat loss`.

    With a `decoder_stride` in the settings `fit`, the rows that the decoder is given represent all of them.
    """
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
    flat = flat_loss(
        output.flat_logits,
        batch.class_ids,
        kind=config.flat_loss,
        label_smoothing=fit.label_smoothing,
        num_rows=batch.num_rows,
        counts=batch.counts,
    )
    return fit.seq2seq_weight * block + (1 - fit.seq2seq_weight) * flat

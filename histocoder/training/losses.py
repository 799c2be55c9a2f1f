"""Losses of a batch; those of its parts add up to the batch's."""

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.config import FitConfig, ModelConfig
from histocoder.data.dataset import Batch
from histocoder.formatters import PAD
from histocoder.model import MixerOutput


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
    is_real = codes.ne(PAD)  # (B, N, S)
    is_used = is_real.any(-1)  # (B, N)

    # cross-entropy of every target block i with every predicted block j, at each position
    token_ids = codes.transpose(1, 2)[:, None].expand(-1, num_blocks, -1, -1)
    losses = -log_probs.gather(-1, token_ids)  # (B, j, S, i)

    # their mean over the positions that the target block has
    weights = is_real / is_real.sum(-1, keepdim=True).clamp(min=1)  # (B, i, S)
    pairs = (losses * weights.transpose(1, 2)[:, None]).sum(2).transpose(1, 2)  # (B, i, j)

    # the predicted block that fits best; infinities of unused blocks never meet a gradient
    best = pairs.masked_fill(~is_used[:, None, :], torch.inf).min(dim=-1).values
    target = torch.where(is_used, best, 0.0)
    unused = torch.where(is_used, 0.0, -log_probs[..., PAD].mean(-1))
    return target, unused


def block_order_invariant(
    logits: Tensor,
    targets: Tensor,
    *,
    num_blocks: int,
    num_rows: int,
    num_target_blocks: int,
    counts: Tensor,
) -> Tensor:
    """Return the block loss as one number, of shape (); see `block_losses` for logits and targets.

    Target blocks are averaged over all rows (a row without that block counts as 0) and then over
    the target blocks that occur; unused blocks over all rows and blocks. `num_rows` and
    `num_target_blocks` are those of the batch of which these rows are a part, so that its parts'
    losses add up to its own. `counts`, of shape (B,), is how often each row occurs.
    """
    target, unused = block_losses(logits, targets, num_blocks=num_blocks)
    target_mean = counts @ target.sum(1) / (num_rows * max(num_target_blocks, 1))
    unused_mean = counts @ unused.sum(1) / (num_rows * num_blocks)
    return target_mean + unused_mean


def multi_hot(class_ids: Tensor, num_classes: int) -> Tensor:
    """Return 1.0 at each row's classes, else 0.0, of shape (B, num_classes); a class id of -1 is
    none.
    """
    # a further column takes what is no class
    columns = torch.where(class_ids < 0, num_classes, class_ids).long()
    hot = torch.zeros(len(class_ids), num_classes + 1, device=class_ids.device)
    return hot.scatter(1, columns, 1.0)[:, :num_classes]


def flat_loss(
    logits: Tensor,
    class_ids: Tensor,
    *,
    kind: str,
    num_rows: int,
    counts: Tensor,
    label_smoothing: float = 0.0,
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
    num_rows : int
    counts : Tensor of shape (B,)
        See `block_order_invariant`.
    label_smoothing : float
        Share of a softmax's target that is spread over all classes (Szegedy et al. 2016).
    """
    num_classes = logits.shape[1]
    targets = multi_hot(class_ids, num_classes)

    num_terms = 1
    if kind == "softmax":
        shares = targets / targets.sum(1, keepdim=True).clamp(min=1)
        if label_smoothing:
            # a row without any code has no target to smooth
            evenly = shares.sum(1, keepdim=True) / num_classes
            shares = shares.lerp(evenly, label_smoothing)
        losses = -(shares * F.log_softmax(logits.float(), dim=-1)).sum(1)
    else:
        terms = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")
        losses = terms.sum(1)
        if kind == "bce-mean":
            num_terms = num_classes
    return counts @ losses / (num_rows * num_terms)


def attribute_loss(
    logits: Tensor, attribute_ids: Tensor, config: ModelConfig, counts: Tensor
) -> Tensor:
    """Return the sum over rows of the attributes' cross-entropies, of shape ().

    Logits are of shape (B, num_labels), ids (B, A), of which -1 is not known, and counts (B,).
    """
    losses = []
    for column, part in enumerate(split_by_attribute(logits.float(), config)):
        ids = attribute_ids[:, column]
        losses.append(F.cross_entropy(part, ids, ignore_index=-1, reduction="none"))
    return counts @ torch.stack(losses).sum(0)


def split_by_attribute(logits: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
    """Return the logits of each attribute, of shape (B, 1 + its categories), the first of none."""
    return logits.split([1 + len(labels) for labels in config.attributes.values()], dim=1)


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

    # the decoder may have read every n-th row alone, whose counts then add up to those of all rows
    if output.seq2seq_logits is not None:
        stride = fit.decoder_stride
        counts = batch.counts[::stride]
        if stride > 1:
            counts = counts * (batch.counts.sum() / counts.sum())
        block = block_order_invariant(
            output.seq2seq_logits,
            batch.targets[::stride],
            num_blocks=config.formatter["num_blocks"],
            num_rows=batch.num_rows,
            num_target_blocks=batch.num_target_blocks,
            counts=counts,
        )
        loss = fit.seq2seq_weight * block + (1 - fit.seq2seq_weight) * loss

    if output.attribute_logits is not None:
        attributes = attribute_loss(
            output.attribute_logits, batch.attribute_ids, config, batch.counts
        )
        loss = loss + fit.attribute_weight * attributes / batch.num_rows
    return loss

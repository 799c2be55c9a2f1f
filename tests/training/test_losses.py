import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import shared
from models import tiny_model

from histocoder.config import FLAT_LOSSES, FitConfig
from histocoder.data.dataset import Batch
from histocoder.formatters import PAD, build_formatter
from histocoder.training.losses import block_order_invariant, flat_loss, mixed_loss, multi_hot

FORMATTER = build_formatter("hisco", num_blocks=4)
ROWS = ["61110", "61110&41025", "-1&-2&-3", "99910", "12345&54321&11111&22222"]
TARGETS = torch.from_numpy(FORMATTER.encode(ROWS)).long()
LOGITS = torch.randn(len(ROWS), 20, FORMATTER.vocab_size, generator=torch.Generator().manual_seed(1)) * 3


def loop_over_blocks(logits: torch.Tensor, targets: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The definition, one block pair at a time."""
    blocks = targets[:, 1:-1].reshape(len(targets), num_blocks, -1)
    guesses = logits.reshape(len(targets), num_blocks, -1, logits.shape[-1])
    by_block: dict[int, torch.Tensor] = {}
    unused = torch.zeros(())
    for row in range(len(targets)):
        k = sum(bool((block != PAD).any()) for block in blocks[row])
        for i, j in itertools.product(range(num_blocks), range(num_blocks)):
            if i < k and j == 0:
                losses = [F.cross_entropy(guesses[row, g], blocks[row, i], ignore_index=PAD) for g in range(k)]
                by_block[i] = by_block.get(i, torch.zeros(())) + torch.stack(losses).min()
        for j in range(k, num_blocks):
            unused = unused + F.cross_entropy(guesses[row, j], torch.full_like(blocks[row, 0], PAD))
    return sum(by_block.values(), torch.zeros(())) / len(targets) / len(by_block) + unused / len(targets) / num_blocks


def test_block_loss_is_its_definition_in_any_order():
    loss = block_order_invariant(LOGITS, TARGETS, num_blocks=4)
    torch.testing.assert_close(loss, loop_over_blocks(LOGITS, TARGETS, 4))
    permuted = torch.from_numpy(FORMATTER.encode(["&".join(reversed(row.split("&"))) for row in ROWS])).long()
    torch.testing.assert_close(block_order_invariant(LOGITS, permuted, num_blocks=4), loss)


def test_block_loss_agrees_with_the_reference():
    for case in json.loads(shared("reference/occcanine/expected.json").read_text())["loss_cases"]:
        logits = torch.tensor(case["yhat"], requires_grad=True)
        loss = block_order_invariant(logits, torch.tensor(case["target"]), num_blocks=case["num_blocks"])
        loss.backward()
        assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
        assert logits.grad is not None
        assert logits.grad.abs().sum().item() == pytest.approx(case["grad_abs_sum"], rel=1e-5)


def test_parts_of_a_batch_add_up_to_it():
    whole = {"num_rows": len(ROWS), "num_target_blocks": 4}
    class_ids = torch.tensor([[0, -1], [1, 2], [3, -1], [0, 4], [2, -1]])
    flat_logits = torch.randn(len(ROWS), 5, generator=torch.Generator().manual_seed(2))
    parts = [slice(0, 2), slice(2, 5)]
    block = sum(block_order_invariant(LOGITS[p], TARGETS[p], num_blocks=4, **whole) for p in parts)
    for kind in FLAT_LOSSES:
        flat = sum(flat_loss(flat_logits[p], class_ids[p], kind=kind, num_rows=len(ROWS)) for p in parts)
        torch.testing.assert_close(flat, flat_loss(flat_logits, class_ids, kind=kind))
    torch.testing.assert_close(block, block_order_invariant(LOGITS, TARGETS, num_blocks=4))


def test_gradients_of_rows_without_codes_are_finite():
    targets = TARGETS.clone()
    targets[0, 1:-1] = PAD
    logits = LOGITS.clone().requires_grad_()
    block_order_invariant(logits, targets, num_blocks=4).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_flat_losses_are_torchs_own():
    class_ids = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    hot = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]])
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(multi_hot(class_ids, 3), hot)
    mean = F.binary_cross_entropy_with_logits(logits, hot)
    torch.testing.assert_close(flat_loss(logits, class_ids, kind="bce-mean"), mean)
    torch.testing.assert_close(flat_loss(logits, class_ids, kind="bce"), 3 * mean)
    spread = torch.tensor([[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]])
    torch.testing.assert_close(flat_loss(logits, class_ids, kind="softmax"), F.cross_entropy(logits, spread))
    assert float(flat_loss(logits[:2, :1], torch.zeros(2, 1, dtype=torch.int64), kind="softmax")) == 0  # one class


def test_the_decoder_learns_from_every_nth_row():
    model, num_rows = tiny_model(), len(ROWS)
    targets = torch.from_numpy(build_formatter("hisco", num_blocks=2).encode([row[:5] for row in ROWS])).long()
    input_ids = torch.randint(97, 123, (num_rows, 16), generator=torch.Generator().manual_seed(4))
    batch = Batch(
        input_ids=input_ids,
        targets=targets,
        class_ids=torch.zeros(num_rows, 2, dtype=torch.int64),
        attribute_ids=torch.zeros(num_rows, 0, dtype=torch.int64),
        num_rows=num_rows,
        num_target_blocks=1,
        weight=1.0,
        rows=np.arange(num_rows),
        counts=torch.ones(num_rows),
    )
    every, third = model(input_ids, targets[:, :-2]), model(input_ids, targets[::3, :-2], decoder_stride=3)
    torch.testing.assert_close(third.seq2seq_logits, every.seq2seq_logits[::3])
    found = mixed_loss(third, batch, model.config, FitConfig(seq2seq_weight=1.0, decoder_stride=3))
    torch.testing.assert_close(found, block_order_invariant(third.seq2seq_logits, targets[::3], num_blocks=2))
    flat = [
        mixed_loss(output, batch, model.config, FitConfig(seq2seq_weight=0.0, decoder_stride=stride))
        for output, stride in ((third, 3), (every, 1))
    ]
    assert torch.equal(*flat)

"""Losses, what validation counts as right, and when a model is the best so far."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import shared, spied
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_model
from trainers import begin, dataset

from histocoder.checkpoints.training_state import TrainState
from histocoder.config import FLAT_LOSSES, FitConfig
from histocoder.data.dataset import Batch
from histocoder.formatters import PAD, build_formatter
from histocoder.model import MixerModel
from histocoder.training import validation
from histocoder.training.losses import block_order_invariant, flat_loss, mixed_loss, multi_hot

FORMATTER = build_formatter("hisco", num_blocks=4)
ROWS = ["61110", "61110&41025", "-1&-2&-3", "99910", "12345&54321&11111&22222"]
TARGETS = torch.from_numpy(FORMATTER.encode(ROWS)).long()
LOGITS = (
    torch.randn(len(ROWS), 20, FORMATTER.vocab_size, generator=torch.Generator().manual_seed(1)) * 3
)


def loop_over_blocks(logits: torch.Tensor, targets: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The definition, one block pair at a time."""
    blocks = targets[:, 1:-1].reshape(len(targets), num_blocks, -1)
    guesses = logits.reshape(len(targets), num_blocks, -1, logits.shape[-1])
    by_block: dict[int, torch.Tensor] = {}
    unused = torch.zeros(())
    for row in range(len(targets)):
        k = sum(bool((block != PAD).any()) for block in blocks[row])
        for i in range(k):
            each = [
                F.cross_entropy(guesses[row, g], blocks[row, i], ignore_index=PAD) for g in range(k)
            ]
            by_block[i] = by_block.get(i, torch.zeros(())) + torch.stack(each).min()
        for j in range(k, num_blocks):
            unused = unused + F.cross_entropy(guesses[row, j], torch.full_like(blocks[row, 0], PAD))
    return (
        sum(by_block.values(), torch.zeros(())) / len(targets) / len(by_block)
        + unused / len(targets) / num_blocks
    )


def block_loss(logits: torch.Tensor, targets: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The block loss of rows that are a whole batch, each once."""
    is_used = targets[:, 1:-1].unflatten(1, (num_blocks, -1)).ne(PAD).any(-1)
    return block_order_invariant(
        logits,
        targets,
        num_blocks=num_blocks,
        num_rows=len(targets),
        num_target_blocks=int(is_used.sum(-1).max()),
        counts=torch.ones(len(targets)),
    )


def whole_flat_loss(logits: torch.Tensor, class_ids: torch.Tensor, kind: str) -> torch.Tensor:
    """The flat head's loss of rows that are a whole batch, each once."""
    counts = torch.ones(len(logits))
    return flat_loss(logits, class_ids, kind=kind, num_rows=len(logits), counts=counts)


def test_block_loss_is_its_definition_in_any_order():
    loss = block_loss(LOGITS, TARGETS, 4)
    torch.testing.assert_close(loss, loop_over_blocks(LOGITS, TARGETS, 4))
    permuted = torch.from_numpy(
        FORMATTER.encode(["&".join(reversed(row.split("&"))) for row in ROWS])
    ).long()
    torch.testing.assert_close(block_loss(LOGITS, permuted, 4), loss)


def test_block_loss_agrees_with_the_reference():
    for case in json.loads(shared("reference/occcanine/expected.json").read_text())["loss_cases"]:
        logits = torch.tensor(case["yhat"], requires_grad=True)
        loss = block_loss(logits, torch.tensor(case["target"]), case["num_blocks"])
        loss.backward()
        assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
        assert logits.grad is not None
        assert logits.grad.abs().sum().item() == pytest.approx(case["grad_abs_sum"], rel=1e-5)


PARTS = [slice(0, 2), slice(2, 5)]
"""Rows of each part of the batch `ROWS`."""


def test_block_losses_of_parts_add_up():
    loss = torch.zeros(())
    for part in PARTS:
        rows = LOGITS[part]
        loss = loss + block_order_invariant(
            rows,
            TARGETS[part],
            num_blocks=4,
            num_rows=len(ROWS),
            num_target_blocks=4,
            counts=torch.ones(len(rows)),
        )
    torch.testing.assert_close(loss, block_loss(LOGITS, TARGETS, 4))


@pytest.mark.parametrize("kind", FLAT_LOSSES)
def test_flat_losses_of_parts_add_up(kind: str):
    class_ids = torch.tensor([[0, -1], [1, 2], [3, -1], [0, 4], [2, -1]])
    logits = torch.randn(len(ROWS), 5, generator=torch.Generator().manual_seed(2))
    loss = torch.zeros(())
    for part in PARTS:
        counts = torch.ones(len(logits[part]))
        loss = loss + flat_loss(
            logits[part], class_ids[part], kind=kind, num_rows=len(ROWS), counts=counts
        )
    torch.testing.assert_close(loss, whole_flat_loss(logits, class_ids, kind))


def test_gradients_of_rows_without_codes_are_finite():
    targets = TARGETS.clone()
    targets[0, 1:-1] = PAD
    logits = LOGITS.clone().requires_grad_()
    block_loss(logits, targets, 4).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


CLASS_IDS = torch.tensor([[0, 2], [1, -1], [-1, -1]])
FLAT_LOGITS = torch.randn(3, 3, generator=torch.Generator().manual_seed(3))


def test_multi_hot_by_hand():
    assert multi_hot(CLASS_IDS, 3).tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_binary_losses_are_torchs_own():
    mean = F.binary_cross_entropy_with_logits(FLAT_LOGITS, multi_hot(CLASS_IDS, 3))
    torch.testing.assert_close(whole_flat_loss(FLAT_LOGITS, CLASS_IDS, "bce-mean"), mean)
    torch.testing.assert_close(whole_flat_loss(FLAT_LOGITS, CLASS_IDS, "bce"), 3 * mean)


def test_softmax_spreads_its_target_over_codes():
    spread = torch.tensor([[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]])
    expected = F.cross_entropy(FLAT_LOGITS, spread)
    torch.testing.assert_close(whole_flat_loss(FLAT_LOGITS, CLASS_IDS, "softmax"), expected)


def test_softmax_of_a_single_class_is_certain():
    class_ids = torch.zeros(2, 1, dtype=torch.int64)
    assert float(whole_flat_loss(FLAT_LOGITS[:2, :1], class_ids, "softmax")) == 0


def test_the_decoder_learns_from_every_nth_row():
    model, num_rows = tiny_model(), len(ROWS)
    targets = torch.from_numpy(
        build_formatter("hisco", num_blocks=2).encode([row[:5] for row in ROWS])
    ).long()
    input_ids = torch.randint(97, 123, (num_rows, 16), generator=torch.Generator().manual_seed(4))
    ids = {
        name: torch.zeros(num_rows, n, dtype=torch.int64)
        for name, n in (("class_ids", 2), ("attribute_ids", 0))
    }
    each = {"rows": torch.arange(num_rows), "counts": torch.ones(num_rows)}
    batch = Batch(
        input_ids, targets, **ids, **each, num_rows=num_rows, num_target_blocks=1, weight=1.0
    )
    every, third = (
        model(input_ids, targets[:, :-2]),
        model(input_ids, targets[::3, :-2], decoder_stride=3),
    )
    torch.testing.assert_close(third.seq2seq_logits, every.seq2seq_logits[::3])
    found = mixed_loss(third, batch, model.config, FitConfig(seq2seq_weight=1.0, decoder_stride=3))
    torch.testing.assert_close(found, block_loss(third.seq2seq_logits, targets[::3], 2))
    flat_third = mixed_loss(
        third, batch, model.config, FitConfig(seq2seq_weight=0.0, decoder_stride=3)
    )
    flat_every = mixed_loss(
        every, batch, model.config, FitConfig(seq2seq_weight=0.0, decoder_stride=1)
    )
    assert torch.equal(flat_third, flat_every)


OCC = build_formatter("occ1950", num_blocks=2)
GENERAL = build_formatter("general", num_blocks=2, block_size=4)
CODES = st.lists(st.sampled_from(["1", "22", "333", "4444"]), min_size=1, max_size=2)


def tokens(formatter, codes: str) -> torch.Tensor:
    return torch.from_numpy(formatter.encode([codes]))[:, 1:-1].long()


@given(CODES, CODES)
def test_exact_set_agrees_with_sets_of_decoded_codes(truth: list[str], guess: list[str]):
    right = validation.exact_set(
        tokens(GENERAL, "&".join(truth)), tokens(GENERAL, "&".join(guess)), num_blocks=2
    )
    assert right.item() is (set(truth) == set(guess))


def test_token_matches_by_hand():
    def matches(truth: str, guess: str) -> list[int]:
        return [
            n.item()
            for n in validation.token_matches(tokens(OCC, truth), tokens(OCC, guess), num_blocks=2)
        ]

    assert matches("100&205", "105&105") == [4, 6]
    assert matches("100", "999&100") == [
        0,
        3,
    ]  # with one code, only the first block is held against it
    assert matches("100&205", "205&100") == [6, 6]  # in any order


def test_flat_exact_set_needs_exactly_the_classes():
    class_ids = torch.tensor([[0, 2], [0, 2], [0, 2], [2, -1]])
    probabilities = torch.tensor(
        [[0.9, 0.1, 0.8], [0.9, 0.6, 0.7], [0.9, 0.1, 0.2], [0.1, 0.1, 0.2]]
    )
    # the second: no more than two count; the last: its best class counts below the threshold too
    assert validation.flat_exact_set(probabilities, class_ids, threshold=0.5).tolist() == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("num_rows", "error"), [(100, 4.0), (1024, 1.25), (100_000, 0.634)])
def test_the_best_is_known_to_a_standard_error(num_rows: int, error: float):
    """Of 80 %, by all rows and by those of them that are decoded, 1,024 at most."""
    for accuracy, is_kept in ((80 - 0.99 * error, True), (80 - 1.01 * error, False)):
        state = TrainState()
        for mean in (80.0, accuracy):
            results = {"greedy_seq_acc": mean + 1, "flat_acc": mean - 1, "val_loss": 1.0}
            kept = state.improves(results, num_rows=num_rows)
        assert kept is is_kept


def test_validation_does_not_depend_on_batches(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
):
    data = dataset(tmp_path, table)
    sizes = spied(monkeypatch, MixerModel, "encode", lambda _, ids, *__: [len(ids)])
    found = []
    for number, batch_size in enumerate((1, 1 + len(data) // 4)):
        trainer = begin(tmp_path / str(number), data, batch_size=batch_size)
        found.append(validation.validate(trainer.model, data, trainer.config))
    assert sizes == [4] * (len(data) // 4) + [len(data) % 4] * (len(data) % 4 > 0) + [len(data)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)

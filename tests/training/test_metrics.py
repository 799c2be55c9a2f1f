"""What validation counts as right, and when a model is the best so far."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import begin, dataset

from histocoder.checkpoints.training_state import TrainState
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel
from histocoder.training.losses import exact_set, flat_exact_set, token_matches, validate

OCC = build_formatter("occ1950", num_blocks=2)
GENERAL = build_formatter("general", num_blocks=2, block_size=4)
CODES = st.lists(st.sampled_from(["1", "22", "333", "4444"]), min_size=1, max_size=2)


def tokens(formatter, codes: str) -> torch.Tensor:
    return torch.from_numpy(formatter.encode([codes]))[:, 1:-1].long()


@given(CODES, CODES)
def test_exact_set_agrees_with_sets_of_decoded_codes(truth: list[str], guess: list[str]):
    right = exact_set(tokens(GENERAL, "&".join(truth)), tokens(GENERAL, "&".join(guess)), num_blocks=2)
    assert right.item() is (set(truth) == set(guess))


@pytest.mark.parametrize(
    ("truth", "guess", "num_correct", "num_real"),
    [
        ("100&205", "105&105", 4, 6),
        ("100", "999&100", 0, 3),  # with one code, only the first block is held against it
        ("100&205", "205&100", 6, 6),  # in any order
    ],
)
def test_token_matches_by_hand(truth: str, guess: str, num_correct: int, num_real: int):
    correct, real = token_matches(tokens(OCC, truth), tokens(OCC, guess), num_blocks=2)
    assert (correct.tolist(), real.tolist()) == ([num_correct], [num_real])


def test_flat_exact_set_needs_exactly_the_classes():
    class_ids = torch.tensor([[0, 2], [0, 2], [0, 2], [2, -1]])
    probabilities = torch.tensor([[0.9, 0.1, 0.8], [0.9, 0.6, 0.7], [0.9, 0.1, 0.2], [0.1, 0.1, 0.2]])
    right = flat_exact_set(probabilities, class_ids, threshold=0.5)
    # the second: no more than two count; the last: its best class counts below the threshold too
    assert right.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("num_rows", "error"), [(100, 4.0), (1024, 1.25), (100_000, 0.634)])
def test_the_best_is_known_to_a_standard_error(num_rows: int, error: float):
    """Of 80 %, by all rows and by those of them that are decoded, 1,024 at most."""
    for accuracy, is_kept in ((80 - 0.99 * error, True), (80 - 1.01 * error, False)):
        state = TrainState()
        for mean in (80.0, accuracy):
            results = {"greedy_seq_acc": mean + 1, "flat_acc": mean - 1, "val_loss": 1.0}
            kept = state.improves(results, num_rows=num_rows)
        assert kept is is_kept


def test_validation_does_not_depend_on_batches(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch):
    data, sizes, encode = dataset(tmp_path, table, ("hisco_1",)), [], MixerModel.encode

    def counting(model: MixerModel, ids: torch.Tensor, *rest: object) -> object:
        sizes.append(len(ids))
        return encode(model, ids, *rest)

    monkeypatch.setattr(MixerModel, "encode", counting)
    found = []
    for number, batch_size in enumerate((1, 1 + len(data) // 4)):
        trainer = begin(tmp_path / str(number), data, precision="fp32", num_classes=8, batch_size=batch_size)
        found.append(validate(trainer.model, data, trainer.config))
    assert sizes == [4] * (len(data) // 4) + [len(data) % 4] * (len(data) % 4 > 0) + [len(data)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)

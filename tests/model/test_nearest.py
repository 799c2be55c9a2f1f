"""The expert that remembers training rows."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import write
from models import tiny_model
from trainers import dataset

from histocoder.model.nearest import NearestExpert
from histocoder.ops import kernels
from histocoder.training.encoded_rows import fit_nearest_expert, pooled_encodings

NUM_CLASSES = 7


@pytest.fixture(params=[12, 100])
def remembered(
    request: pytest.FixtureRequest,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, NearestExpert]:
    """Encodings, first and last characters and classes of 50 rows, and the expert that remembers
    them.
    """
    generator = torch.Generator().manual_seed(0)
    encodings = torch.randn(50, request.param, generator=generator)
    ends = torch.randint(97, 100, (50, 2), generator=generator, dtype=torch.int32)
    class_ids = torch.randint(
        NUM_CLASSES - 1, (50,), generator=generator
    )  # the last class has no rows
    return (
        encodings,
        ends,
        class_ids,
        NearestExpert.of(encodings, ends, class_ids, num_classes=NUM_CLASSES),
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_votes_come_from_each_class_nearest_row(
    remembered: tuple, compiled: bool, monkeypatch: pytest.MonkeyPatch
):
    encodings, ends, class_ids, expert = remembered
    if not compiled:
        monkeypatch.setattr(kernels, "supports", lambda _: False)
    elif kernels.library() is None:
        pytest.skip("no kernels are compiled")
    queries = torch.randn(300, encodings.shape[1], generator=torch.Generator().manual_seed(1))
    queries[0] = encodings[0]
    of_queries = ends.repeat(6, 1)
    votes = expert(queries, of_queries, torch.arange(NUM_CLASSES).repeat(300, 1))

    def projected(rows: torch.Tensor) -> torch.Tensor:
        centred = F.normalize(F.normalize(rows, dim=1) - expert.mean, dim=1)
        return F.normalize(centred @ expert.components, dim=1)

    cosines = projected(queries) @ projected(encodings).T
    for i, class_id in itertools.product(range(300), range(NUM_CLASSES)):
        rows = (class_ids == class_id).nonzero()[:, 0]
        cosine = cosines[i, rows] if len(rows) else torch.tensor([-1.0])
        expected = np.exp(20 * (float(cosine.max()) - 1)) + 1e-3
        assert votes["nearest"][i, class_id].item() == pytest.approx(
            np.log(expected), abs=0.1
        )  # rows are bf16
        gap = cosine.sort().values[-2:].diff()
        if len(rows) and (not len(gap) or gap > 0.01):
            same = (ends[rows[cosine.argmax()]] == of_queries[i]).float().tolist()
            assert [votes["begins"][i, class_id].item(), votes["ends"][i, class_id].item()] == same
    assert votes["nearest"][0, class_ids[0]] > -0.1
    assert (
        torch.all(votes["nearest"][:, -1] == np.log(np.float32(1e-3)))
        and not votes["begins"][:, -1].any()
    )


def test_descriptions_are_remembered_with_their_usual_codes(tmp_path: Path):
    rows = [*["cook,53100"] * 3, "cook,53110", "baker,77610", "baker,77620", "tailor,79100"]
    data = dataset(tmp_path / "cache", write(tmp_path / "table.csv", "occ1,hisco_1", *rows))
    model = tiny_model(codes=data.classes)
    counts = fit_nearest_expert(model, data).first.diff().tolist()
    remembered = [
        code for code, count in zip(data.classes, counts, strict=True) for _ in range(count)
    ]
    assert remembered == ["53100", "77610", "77620", "79100"]
    alone = pooled_encodings(model, data, np.array([2]))
    assert torch.allclose(
        pooled_encodings(model, data, np.arange(len(data)))[2], alone[0], atol=1e-5
    )


def test_rows_that_are_added_are_remembered_beside_the_others():
    generator = torch.Generator().manual_seed(0)
    encodings = torch.randn(9, 8, generator=generator)
    ends = torch.randint(97, 122, (9, 2), generator=generator, dtype=torch.int32)
    class_ids = torch.tensor([2, 0, 1, 2, 2, 0, 1, 1, 0])
    first = NearestExpert.of(encodings[:6], ends[:6], class_ids[:6], num_classes=3)
    both = first.with_rows(encodings[6:], ends[6:], class_ids[6:])
    assert both.first.tolist() == [0, 3, 6, 9]
    before = first(encodings, ends, class_ids[:, None])
    after = both(encodings, ends, class_ids[:, None])
    torch.testing.assert_close(after["nearest"][:6], before["nearest"][:6])
    assert (after["nearest"][6:] > -0.1).all()

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from histocoder.ops import kernels
from histocoder.training.optimizer import AdamW


@pytest.fixture(autouse=True, params=["in C", "in torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("the kernels were not compiled")


def optimizer_of(parameters: Iterable[nn.Parameter], **options: float) -> AdamW:
    return AdamW(
        [{"params": list(parameters)}],
        **{"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0, **options},
    )


def layers() -> nn.Sequential:
    """With weights that are more than one thread's at a time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6000), nn.Linear(6000, 3), nn.LayerNorm(3))


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
def test_it_clips_and_steps_as_torch_does(max_grad_norm: float):
    ours, theirs = layers(), layers()
    mine = optimizer_of(ours.parameters(), lr=1e-3, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator) * 10.0 ** (seed % 3 - 2)
            other.grad = one.grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
        for optimizer in (mine, reference):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(mine.grad_norm, norm, atol=0, rtol=1e-5)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()], atol=1e-6, rtol=0)
    reference.load_state_dict(mine.state_dict())  # the state is torch's, there and back
    mine.load_state_dict(reference.state_dict())


def test_steps_for_rows_are_sparse_adams():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(50, 40)) for _ in range(2))
    ours.is_sparse_table = True  # type: ignore[attr-defined]
    mine, reference = (
        optimizer_of([ours], max_grad_norm=3.0),
        torch.optim.SparseAdam([theirs], lr=1e-2),
    )
    for rows in ([1, 3, 1], [3, 4, 0], [1, 1, 7]):
        gradient = torch.sparse_coo_tensor(
            [rows], torch.randn(3, 40), ours.shape, check_invariants=True
        )
        ours.grad, theirs.grad = gradient.clone(), gradient * (3.0 / gradient.to_dense().norm())
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_a_step_that_is_not_finite_changes_nothing():
    model, table = layers(), nn.Parameter(torch.ones(5, 2))
    table.is_sparse_table = True  # type: ignore[attr-defined]
    parameters = [*model.parameters(), table]
    optimizer = optimizer_of(parameters)
    before = [p.detach().clone() for p in parameters]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    table.grad = torch.sparse_coo_tensor(
        [[1]], torch.full((1, 2), torch.nan), table.shape, check_invariants=True
    )
    optimizer.step()
    assert not optimizer.grad_norm.isfinite()
    torch.testing.assert_close(parameters, before, rtol=0, atol=0)

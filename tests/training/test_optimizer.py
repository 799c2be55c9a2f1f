import pytest
import torch
from torch import nn

from histocoder.model.copies import in_precision, keep_copies, kept_copy
from histocoder.ops import kernels
from histocoder.training.optimizer import AdamW, collect


@pytest.fixture(autouse=True, params=["in C", "in torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("the kernels were not compiled")


def layers() -> nn.Sequential:
    """With weights that are more than one thread's at a time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6000), nn.Linear(6000, 3), nn.LayerNorm(3))


def stepped(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A loss whose gradients are large now and then, as `dtype` computes it."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)) * 10 ** (seed % 3)
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight, bias = (in_precision(p, dtype) for p in (layer.weight, layer.bias))
            x = nn.functional.linear(x.to(dtype), weight, bias).tanh()
        else:
            x = layer(x.float())
    return x.square().sum()


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e9])
def test_it_clips_and_steps_as_torch_does(max_grad_norm: float):
    ours, theirs = layers(), layers()
    mine = AdamW(ours.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator) * 10.0 ** (seed % 3 - 2)
            other.grad = one.grad.clone()
        mine.step()
        mine.zero_grad()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(mine.grad_norm, norm, atol=0, rtol=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    reference.load_state_dict(mine.state_dict())  # the state is torch's, there and back
    mine.load_state_dict(reference.state_dict())


def test_a_step_for_rows_is_one_for_a_smaller_table():
    torch.manual_seed(0)
    start, rows = torch.randn(50, 40), torch.tensor([3, 7, 8, 49])
    table, few = nn.Parameter(start.clone()), nn.Parameter(start[rows])
    table.is_sparse_table = True  # type: ignore[attr-defined]
    ours = AdamW([table], lr=1e-2, weight_decay=0.1, max_grad_norm=3.0)
    reference = AdamW([few], lr=1e-2, weight_decay=0.0, max_grad_norm=3.0)
    for _ in range(4):
        gradient = torch.randn(4, 40)
        table.grad = torch.sparse_coo_tensor(rows[None], gradient, table.shape, check_invariants=True)
        few.grad = gradient.clone()
        for optimizer in (ours, reference):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(table[rows], few)
    others = torch.ones(50, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(table[others], start[others])


def test_what_has_no_gradient_stays():
    model = layers()
    before = model[1].weight.clone()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    model[0](torch.ones(2, 7)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, before)


def test_kept_copies_train_as_copies_made_at_each_use():
    kept, made = layers(), layers()
    keep_copies(kept)
    optimizers = [AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0) for m in (kept, made)]
    for seed in range(6):
        for model, optimizer in zip((kept, made), optimizers, strict=True):
            stepped(model, seed, torch.bfloat16).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(kept.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)  # steps are 1e-2


def test_a_copy_follows_its_weight():
    model = layers()
    keep_copies(model)
    weight = model[0].weight
    with torch.inference_mode():
        copy = in_precision(weight, torch.bfloat16)
    assert not copy.is_inference() and copy.requires_grad
    assert in_precision(weight, torch.bfloat16) is copy
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert torch.equal(in_precision(weight, torch.bfloat16), weight.bfloat16())
    assert in_precision(weight, torch.float32) is weight
    assert kept_copy(model[2].weight).tensor is None  # nobody asked for it


def test_weights_are_rounded_once_a_step():
    kept, made = layers(), layers()
    keep_copies(kept)
    stepped(kept, 0, torch.bfloat16)

    def casts(model: nn.Module) -> int:
        with torch.profiler.profile() as profile:
            stepped(model, 1, torch.bfloat16)
        return sum(event.name == "aten::copy_" for event in profile.events())

    assert casts(made) - casts(kept) == 4


def test_no_gradient_is_lost_between_a_weight_and_its_copy():
    model = layers()
    keep_copies(model)
    weight = model[1].weight
    optimizer = AdamW([weight], lr=1e-2, weight_decay=0.0, max_grad_norm=1e9)
    (2 * in_precision(weight, torch.bfloat16).sum() + 3 * weight.sum()).backward()
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(5 * weight.numel() ** 0.5)
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(weight.numel() ** 0.5)


def test_gradients_that_accumulate_are_summed_in_fp32():
    model = layers()
    keep_copies(model)
    weight = model[1].weight
    optimizer = AdamW([weight], lr=1e-2, weight_decay=0.0, max_grad_norm=1e9)
    for _ in range(600):  # in bf16, 256 and 1 are 256
        in_precision(weight, torch.bfloat16).sum().backward()
        collect(model.parameters())
    in_precision(weight, torch.bfloat16).sum().backward()
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(601 * weight.numel() ** 0.5, rel=1e-4)


def test_a_copy_is_trained_once_its_weight_is():
    weight = layers()[0].requires_grad_(False).weight
    keep_copies(layer := nn.ParameterList([weight]))
    assert not in_precision(layer[0], torch.bfloat16).requires_grad
    weight.requires_grad_(True)
    assert in_precision(weight, torch.bfloat16).requires_grad


def test_a_copy_that_a_step_has_changed_is_not_used_for_gradients_of_before():
    model = layers()
    keep_copies(model)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, max_grad_norm=1.0)
    first, second = stepped(model, 0, torch.bfloat16), stepped(model, 1, torch.bfloat16)
    first.backward()
    optimizer.step()
    in_precision(model[0].weight, torch.bfloat16)  # up to date from now on, if it was not
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()

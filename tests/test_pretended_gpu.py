"""The pretended GPU refuses what CUDA refuses, allows what CUDA allows, and counts waits and
launches.
"""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import cases
from pretended_gpu import CudaTensor, Log, pretended_gpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

HERE, THERE = "cpu", "cuda"


def numbers(device: str = THERE, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, the same on each device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape or (4, 4), generator=generator).to(device, dtype)


def long(*values: Any, device: str = THERE) -> Tensor:
    return torch.tensor([*values], device=device)


@cases(
    ("call", "message"),
    (lambda: numbers() + numbers(HERE), "same device"),
    (lambda: numbers() @ numbers(HERE), "same device"),
    (lambda: torch.cat([numbers(), numbers(HERE)]), "same device"),
    (lambda: torch.stack([numbers()[0, 0], torch.ones(())]), "same device"),
    (lambda: numbers().gather(1, long([0], device=HERE)), "same device"),
    (lambda: numbers(HERE)[long(0)], "same device"),
    (lambda: numbers().index_put_((long(0),), numbers(HERE)[:1]), "same device"),
    (lambda: F.embedding(long(0), numbers(HERE)), "same device"),
    (
        lambda: F.scaled_dot_product_attention(
            *[numbers(THERE, 1, 1, 2, 4)] * 2, numbers(HERE, 1, 1, 2, 4)
        ),
        "device",
    ),
    (lambda: F.mse_loss(numbers().requires_grad_(), numbers(HERE)), "same device"),
    (lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"), "cuda:0 and cuda:1"),
    (lambda: torch.ones(2, device="cuda:2"), "invalid device ordinal"),
    (lambda: numbers().numpy(), "to host memory first"),
    (lambda: numbers().detach().__array__(), "to host memory first"),
    (lambda: long(1, 2)[None] @ long(1, 2)[:, None], "not implemented for"),
    (
        lambda: F.layer_norm(numbers(dtype=torch.bfloat16), (4,), torch.ones(4, device=THERE)),
        "expected scalar type",
    ),
    (
        lambda: F.scaled_dot_product_attention(*[torch.ones(65_536, 1, 1, 1, device=THERE)] * 3),
        "configuration",
    ),
    (lambda: pickle.dumps(numbers()), "another process"),
    (lambda: numbers().pin_memory(), "can be pinned"),
)
def test_what_cuda_refuses_is_refused(call: Callable[[], object], message: str):
    with pretended_gpu(num_gpus=2), pytest.raises((RuntimeError, TypeError), match=message):
        call()


@cases(
    "call",
    (lambda device: numbers(device) * torch.tensor(2.0)),
    (lambda device: torch.where(numbers(device) > 0, numbers(device), torch.tensor(0.0))),
    (lambda device: numbers(device).masked_fill(numbers(device) > 0, torch.tensor(-1.0))),
    (lambda device: numbers(device)[long(1, 0, device=HERE)]),
    (lambda device: numbers(device)[[1, 0]]),
    (lambda device: numbers(device)[numbers(device) > 0]),
    (lambda device: numbers(device).index_put_((long(1, device=HERE),), torch.tensor(3.0))),
    (lambda device: numbers(device).copy_(numbers(HERE) + 1)),
    (lambda device: torch.full((2,), float(numbers(device)[0, 0]), device=device)),
    (
        lambda device: (
            torch.zeros_like(numbers(HERE), device=device) + numbers(device).new_tensor([1.0])
        )
    ),
    (lambda device: numbers(HERE).to(numbers(device, dtype=torch.float16)).float()),
    (
        lambda device: F.embedding_bag(
            long(0, 2, 1, device=device), numbers(device), long(0, 1, device=device)
        )
    ),
    (lambda device: numbers(device).unique()),
    (lambda device: F.layer_norm(numbers(device), (4,))),
)
def test_what_cuda_allows_gives_the_same_numbers(call: Callable[[str], Tensor]):
    with pretended_gpu():
        there = call(THERE)
        assert (
            isinstance(there, CudaTensor)
            and there.device == torch.device("cuda", 0)
            and there.is_cuda
        )
        torch.testing.assert_close(there.cpu(), call(HERE))
        assert there.tolist() == there.cpu().tolist()


@cases(
    ("call", "reason"),
    (lambda x: x.sum().item(), "_local_scalar_dense"),
    (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
    (lambda x: x[: x[0].argmax()], "_local_scalar_dense"),
    (lambda x: x.tolist(), "copies to the CPU"),
    (lambda x: x.cpu(), "copies to the CPU"),
    (lambda x: torch.empty(4, 4).copy_(x), "copies to the CPU"),
    (lambda x: x.copy_(torch.ones(4, 4)), "copies to the GPU"),
    (lambda x: torch.ones(2).to(THERE), "copies to the GPU"),
    (
        lambda x: torch.ones(2).to(THERE, non_blocking=True),
        "copies to the GPU",
    ),  # from pageable memory
    (lambda x: torch.ones(2).pin_memory().to(THERE), "copies to the GPU"),
    (lambda x: torch.tensor([1, 2], device=THERE), "tensor"),
    (lambda x: x[x > 0], "index by a mask"),
    (lambda x: x[torch.tensor([0])], "index by indices on the CPU"),
    (lambda x: (x > 0).nonzero(), "nonzero"),
    (lambda x: x.unique(), "_unique2"),
    (
        lambda x: torch.repeat_interleave(x, torch.ones(4, dtype=int, device=THERE), dim=0),
        "repeat_interleave",
    ),
    (lambda x: torch.cuda.synchronize(), "synchronize"),
    (lambda x: x * 2 + torch.tensor(1.0), None),
    (lambda x: torch.ones(2).pin_memory().to(THERE, non_blocking=True), None),
    (lambda x: x.to("cpu", non_blocking=True), None),
    (lambda x: torch.zeros(3, device=THERE), None),
    (lambda x: x.__setitem__(x > 0, 0.0), None),
    (
        lambda x: torch.repeat_interleave(
            x, torch.ones(4, dtype=int, device=THERE), dim=0, output_size=4
        ),
        None,
    ),
    (lambda x: nn.utils.get_total_norm([x]), None),
)
def test_a_wait_of_the_host_is_counted(
    gpu: Log, call: Callable[[Tensor], object], reason: str | None
):
    x = numbers()
    gpu.clear()
    call(x)
    assert [wait.partition(" ")[2] for wait in gpu.waits] == ([] if reason is None else [reason])
    assert all(wait.startswith("test_pretended_gpu.py:") for wait in gpu.waits)


def test_operators_are_counted_as_launches(gpu: Log):
    x = numbers().requires_grad_()
    gpu.clear()
    y = F.dropout(x.T.contiguous()[None, None] * 2, 0.5)
    attended = F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
    assert gpu.launches == {
        "clone": 1,
        "mul": 1,
        "native_dropout": 1,
        "scaled_dot_product_attention": 1,
    }
    gpu.clear()
    attended.sum().backward()
    assert gpu.launches["scaled_dot_product_attention backward"] == 1
    assert sum(gpu.lines.values()) == sum(gpu.launches.values())


def test_sync_debug_mode_makes_waits_errors(gpu: Log):
    torch.cuda.set_sync_debug_mode("error")
    numbers_there = torch.ones((), device=THERE)
    with pytest.raises(RuntimeError, match="synchroniz"):
        numbers_there.item()
    torch.cuda.set_sync_debug_mode("default")
    assert numbers_there.item() == 1


@cases("mask", None, torch.tensor([[True, False, True]]), torch.tensor([[0.5, -1.0, 0.0]]))
def test_attention_is_that_of_a_cpu(gpu: Log, mask: Tensor | None):
    def gradients(device: str) -> list[Tensor]:
        sources = [numbers(device, 2, 2, 3, 4).requires_grad_() for _ in range(3)]
        out = F.scaled_dot_product_attention(
            *sources, attn_mask=None if mask is None else mask.to(device)
        )
        (out * numbers(device, 2, 2, 3, 4)).sum().backward()
        return [out.cpu(), *(source.grad.cpu() for source in sources)]

    torch.testing.assert_close(gradients(THERE), gradients(HERE))


def test_a_gpu_draws_its_own_random_numbers(gpu: Log):
    def draws() -> Tensor:
        ones = torch.ones(1, 1, 3, 3, device=THERE)
        attended = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
        return torch.cat(
            [
                torch.rand(3, device=THERE),
                F.dropout(ones, 0.5).flatten(),
                attended.flatten().normal_(),
            ]
        )

    torch.manual_seed(1)
    here = torch.get_rng_state()
    there = torch.cuda.get_rng_state()
    first = draws()
    assert not torch.equal(first, draws())
    torch.cuda.set_rng_state(there)
    assert torch.equal(first, draws())
    assert torch.equal(torch.get_rng_state(), here)


def test_a_module_keeps_its_parameters_when_moved(gpu: Log):
    module = nn.Linear(4, 4)
    weight = module.weight
    weight.is_table = True
    module.bias.grad = torch.ones(4)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module.to(THERE)
    assert (
        module.weight is weight
        and weight.is_table
        and isinstance(weight, nn.Parameter)
        and weight.is_cuda
    )
    assert module.bias.grad.is_cuda
    twin = copy.deepcopy(module)
    assert (
        twin.weight.is_table and twin.weight is not weight and isinstance(twin.weight, nn.Parameter)
    )
    twin.load_state_dict(nn.Linear(4, 4).state_dict())
    module(numbers()).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["step"].is_cuda
    module.cpu()
    assert type(module.weight) is nn.Parameter and module.weight is weight and weight.is_table


def test_checkpointed_layers_are_computed_again_alike(gpu: Log):
    layer = nn.Linear(4, 4).to(THERE)

    def forward(x: Tensor) -> Tensor:
        return F.dropout(layer(x).relu(), 0.5)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(2)
        x = numbers().requires_grad_()
        (call(x) * 2).sum().backward()
        return x.grad

    with torch.autocast("cuda", torch.bfloat16):
        again = gradient(lambda x: checkpoint(forward, x, use_reentrant=False))
        assert torch.equal(again, gradient(forward)) and again.any()


def test_a_saved_gpu_tensor_needs_a_map_location(tmp_path: Path):
    with pretended_gpu():
        torch.save({"here": numbers(HERE), "there": numbers()}, tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert torch.equal(loaded["there"], numbers(HERE)) and torch.equal(
        loaded["here"], numbers(HERE)
    )


def test_a_loader_pins_its_batches(gpu: Log):
    (batch,) = DataLoader([torch.ones(2), torch.ones(2)], batch_size=2, pin_memory=True)
    assert batch.is_pinned() and not torch.ones(2).is_pinned()


def _use_gpu() -> None:
    torch.ones(2, device=THERE)


def test_a_forked_process_has_no_gpu(gpu: Log):
    process = multiprocessing.get_context("fork").Process(target=_use_gpu)
    process.start()
    process.join()
    assert process.exitcode == 1


@cases(
    "call",
    (lambda: numbers().cumsum(0)),
    (lambda: torch.bincount(long(1, 2), weights=torch.ones(2, device=THERE))),
    (lambda: numbers() @ numbers()),
)
def test_deterministic_mode_refuses_what_varies(
    gpu: Log, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    call()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="eterministic"):
            call()
        long(1, 2).cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_pretended_after_the_end():
    before = [vars(torch.cuda).copy(), vars(Tensor).copy(), vars(nn.Module).copy()]
    with pretended_gpu(capability=(7, 0)):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (7, 0)
        rest = numbers()
    assert [vars(torch.cuda).copy(), vars(Tensor).copy(), vars(nn.Module).copy()] == before
    with pytest.raises(RuntimeError, match="after its end"):
        rest + 1

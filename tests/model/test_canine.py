"""CANINE against `transformers.CanineModel`."""

import pytest
import torch
from models import some_ids
from transformers import CanineConfig, CanineModel

from histocoder.model import trimmed_length
from histocoder.model.canine import Canine
from histocoder.model.canine import CanineConfig as CanineConfigOfOurs


def both() -> tuple[CanineModel, Canine]:
    """Theirs, and ours of the same weights."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = CanineModel(CanineConfig(**sizes, num_hash_buckets=512, num_hash_functions=4))
    return model.eval(), Canine.from_transformers(model).eval()


def theirs(model: CanineModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(input_ids=ids, attention_mask=ids.ne(0).float())
    return output.last_hidden_state, output.pooler_output


def ours(model: Canine, ids: torch.Tensor, *, trimmed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return model(ids, dtype=torch.float32, trimmed=trimmed)


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 64, 128, 132, 300])
def test_it_agrees_with_transformers_at_every_position(width: int):
    (model, own), ids = both(), some_ids([width, width // 2, 3], width)
    for mine, their in zip(ours(own, ids, trimmed=False), theirs(model, ids), strict=True):
        torch.testing.assert_close(mine, their, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("longest", [*range(2, 18), 31, 32, 33, 34, 60, 61])
def test_trimmed_batches_are_encoded_as_padded_ones(longest: int):
    (model, own), lengths = both(), [longest, max(longest - 3, 2)]
    ids = some_ids(lengths, 64)
    memory, pooled = theirs(model, ids)
    width = trimmed_length(longest, 64)
    short_memory, short_pooled = ours(own, ids[:, :width], trimmed=width < 64)
    torch.testing.assert_close(short_pooled, pooled, atol=1e-5, rtol=0)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(short_memory[row, :length], memory[row, :length], atol=1e-5, rtol=0)


def test_gradients_agree_with_transformers():
    ids = some_ids([20, 17], 64)
    gradients = []
    their_model, own = both()
    trimmed = trimmed_length(20, 64)
    of_both = {their_model: theirs(their_model, ids), own: ours(own, ids[:, :trimmed], trimmed=True)}
    for model, (memory, pooled) in of_both.items():
        real = ids[:, : memory.shape[1]].ne(0)
        (memory[real].square().sum() + pooled.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert set(gradients[0]) == set(gradients[1])
    for name, their in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], their, atol=2e-4, rtol=1e-4, msg=name)


def test_new_weights_are_drawn_as_transformers_draw_them():
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_hash_buckets": 512}
    theirs, own = CanineModel(CanineConfig(**sizes)), Canine(CanineConfigOfOurs(**sizes))
    # in their order as well, by which optimizers of runs that began with theirs have their states
    names = [(name, parameter.shape) for name, parameter in theirs.named_parameters()]
    assert names == [(name, parameter.shape) for name, parameter in own.named_parameters()]
    for name, their in theirs.state_dict().items():
        mine = own.state_dict()[name]
        assert mine.mean().item() == pytest.approx(their.mean().item(), abs=0.005), name
        assert mine.std().item() == pytest.approx(their.std().item(), rel=0.1), name

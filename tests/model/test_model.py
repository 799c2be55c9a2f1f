"""The mixer model: its outputs, and its parts."""

import pytest
import torch
from conftest import cases
from jobs import weights
from models import some_ids, tiny_model
from pretended_gpu import Log
from pretrained import save_pretrained
from torch import nn
from transformers import CanineConfig, CanineModel

from histocoder.errors import UserError
from histocoder.model import Decoder, MixerModel, load_encoder, trimmed_length
from histocoder.model.canine import Canine
from histocoder.model.canine import CanineConfig as CanineConfigOfOurs
from histocoder.model.layers import scaled_dot_product


@torch.no_grad()
def test_decoder_agrees_with_torchs_own():
    torch.manual_seed(0)
    ours = Decoder(18, 32, num_layers=2, num_heads=4).eval()
    theirs = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(32, 4, 32, dropout=0.0, batch_first=True), 2
    ).eval()
    state = {
        k.removeprefix("decoder."): v
        for k, v in ours.state_dict().items()
        if k.startswith("decoder.")
    }
    theirs.load_state_dict(state)
    tokens, memory = torch.randint(0, 18, (3, 7)), torch.randn(3, 5, 32)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    causal = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(7), "tgt_is_causal": True}
    hidden = theirs(ours.embed(tokens, slice(7)), memory, memory_key_padding_mask=~mask, **causal)
    torch.testing.assert_close(ours(tokens, memory, mask), ours.head(hidden), atol=1e-5, rtol=1e-5)


@cases(
    "mask",
    None,
    torch.ones(1, 1, 1, 2).bool(),
    torch.tensor([[True, False], [False, True], [True, True]])[:, None, None],
)
def test_attention_on_a_gpu_takes_any_batch(gpu: Log, mask: torch.Tensor | None):
    sources = [torch.randn(3, 2, 2, 4) for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(*sources, attn_mask=mask)
    many = [source.repeat(21_846, 1, 1, 1).cuda() for source in sources]  # 65,538
    masks = mask.repeat(21_846, 1, 1, 1).cuda() if mask is not None and len(mask) > 1 else mask
    masks = masks if masks is None else masks.cuda()
    attended = scaled_dot_product(*many, masks).cpu()
    torch.testing.assert_close(attended, expected.repeat(21_846, 1, 1, 1))


def test_frozen_encoders_get_no_dropout():
    model = tiny_model()
    model.encoder.config.hidden_dropout_prob = 0.9
    ids = some_ids([20], 32)
    model.train()
    assert not torch.equal(model.encode(ids)[1], model.encode(ids)[1])
    model.freeze_encoder()
    model.train()
    assert torch.equal(model.encode(ids)[1], model.encode(ids)[1])


def test_only_positions_that_are_read_are_kept():
    name, own = "encoder.char_embeddings.char_position_embeddings.weight", tiny_model().state_dict()
    assert load_encoder(
        "tiny", max_len=64
    ).char_embeddings.char_position_embeddings.weight.shape == (256, 64)
    for given in (
        own,
        {**own, name: torch.cat([own[name], torch.ones(192, 64)])},
    ):  # the second as published
        model = MixerModel.from_weights(tiny_model().config, given)
        assert torch.equal(model.get_parameter(name), own[name]) and len(own[name]) == 64
    with pytest.raises(UserError, match="reads 40 positions at most; set --max-len"):
        tiny_model().load_state_dict({**own, name: own[name][:40]})


def test_encoder_from_a_folder(tmp_path):
    saved = save_pretrained("canine", tmp_path / "canine")
    found, expected = load_encoder(str(saved), max_len=64).state_dict(), weights(saved)
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )
    with pytest.raises(UserError, match="130 positions"):
        load_encoder(str(saved), max_len=512)


def both() -> tuple[CanineModel, Canine]:
    """Theirs, and ours of the same weights."""
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    model = CanineModel(CanineConfig(**sizes, num_hash_buckets=512, num_hash_functions=4))
    return model.eval(), Canine.from_transformers(model).eval()


def theirs(model: CanineModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(input_ids=ids, attention_mask=ids.ne(0).float())
    return output.last_hidden_state, output.pooler_output


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 64, 128, 132, 300])
def test_it_agrees_with_transformers_at_every_position(width: int):
    (model, own), ids = both(), some_ids([width, width // 2, 3], width)
    torch.testing.assert_close(
        own(ids, dtype=torch.float32, trimmed=False), theirs(model, ids), atol=1e-5, rtol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("longest", [*range(2, 18), 31, 32, 33, 34, 60, 61])
def test_trimmed_batches_are_encoded_as_padded_ones(longest: int):
    (model, own), lengths = both(), [longest, max(longest - 3, 2)]
    ids = some_ids(lengths, 64)
    memory, pooled = theirs(model, ids)
    width = trimmed_length(longest, 64)
    short_memory, short_pooled = own(ids[:, :width], dtype=torch.float32, trimmed=width < 64)
    torch.testing.assert_close(short_pooled, pooled, atol=1e-5, rtol=0)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            short_memory[row, :length], memory[row, :length], atol=1e-5, rtol=0
        )


def test_gradients_agree_with_transformers():
    ids = some_ids([20, 17], 64)
    gradients = []
    their_model, own = both()
    trimmed = trimmed_length(20, 64)
    of_both = {
        their_model: theirs(their_model, ids),
        own: own(ids[:, :trimmed], dtype=torch.float32, trimmed=True),
    }
    for model, (memory, pooled) in of_both.items():
        real = ids[:, : memory.shape[1]].ne(0)
        (memory[real].square().sum() + pooled.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, atol=2e-4, rtol=1e-4)


def test_new_weights_are_drawn_as_transformers_draw_them():
    sizes = {
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_hash_buckets": 512,
    }
    theirs, own = CanineModel(CanineConfig(**sizes)), Canine(CanineConfigOfOurs(**sizes))
    # in their order as well, by which optimizers of runs that began with theirs have their states
    names = [(name, parameter.shape) for name, parameter in theirs.named_parameters()]
    assert names == [(name, parameter.shape) for name, parameter in own.named_parameters()]
    for name, their in theirs.state_dict().items():
        mine = own.state_dict()[name]
        assert mine.mean().item() == pytest.approx(their.mean().item(), abs=0.005), name
        assert mine.std().item() == pytest.approx(their.std().item(), rel=0.1), name

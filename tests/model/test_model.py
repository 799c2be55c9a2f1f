"""The mixer model: its outputs, and its parts."""

import pytest
import torch
from models import some_ids, tiny_model
from pretrained import save_pretrained
from safetensors.torch import load_file
from torch import nn

from histocoder.errors import UserError
from histocoder.formatters import BOS
from histocoder.inference.search import greedy
from histocoder.inference.stepper import DecoderInputs
from histocoder.model import Decoder, MixerModel, load_encoder


@torch.no_grad()
def test_decoder_agrees_with_torchs_own():
    torch.manual_seed(0)
    ours = Decoder(18, 32, num_layers=2, num_heads=4).eval()
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 32, dropout=0.0, batch_first=True), 2).eval()
    state = {k.removeprefix("decoder."): v for k, v in ours.state_dict().items() if k.startswith("decoder.")}
    theirs.load_state_dict(state)
    tokens, memory = torch.randint(0, 18, (3, 7)), torch.randn(3, 5, 32)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    hidden = theirs(
        ours.embed(tokens, slice(7)),
        memory,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(7),
        memory_key_padding_mask=~mask,
        tgt_is_causal=True,
    )
    torch.testing.assert_close(ours(tokens, memory, mask), ours.head(hidden), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cached_decoding_is_uncached_decoding():
    model = tiny_model()
    memory, _, mask = model.encode(some_ids([20, 9, 3], 32))
    tokens, probabilities = greedy(model.decoder, DecoderInputs(memory, mask), num_tokens=10, block_size=10)
    oracle = torch.full((3, 1), BOS)
    for position in range(10):
        logits = model.decoder(oracle, memory, mask)[:, -1]
        torch.testing.assert_close(probabilities[:, position], logits.softmax(-1).max(-1).values)
        oracle = torch.cat([oracle, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(tokens, oracle)


def test_frozen_encoders_get_no_gradient_and_no_dropout():
    model = tiny_model()
    model.encoder.config.hidden_dropout_prob = 0.9
    ids = some_ids([20], 32)
    model.train()
    assert not torch.equal(model.encode(ids)[1], model.encode(ids)[1])
    model.freeze_encoder()
    model.train()
    assert torch.equal(model.encode(ids)[1], model.encode(ids)[1])
    model(ids, torch.full((1, 4), BOS)).flat_logits.sum().backward()
    assert all(p.grad is None for p in model.encoder.parameters())
    assert model.linear_decoder.weight.grad is not None


def test_only_positions_that_are_read_are_kept():
    encoder = load_encoder("tiny", max_len=64)
    name, weights = "encoder.char_embeddings.char_position_embeddings.weight", tiny_model().state_dict()
    published = {**weights, name: torch.cat([weights[name], torch.ones(192, 64)])}
    assert encoder.char_embeddings.char_position_embeddings.weight.shape == (256, 64)
    for weights_of in (weights, published):
        model = MixerModel.from_weights(tiny_model().config, weights_of)
        assert torch.equal(model.get_parameter(name), weights[name]) and len(weights[name]) == 64
    with pytest.raises(UserError, match="reads 40 positions at most; set --max-len"):
        tiny_model().load_state_dict({**weights, name: weights[name][:40]})


def test_encoder_from_a_folder(tmp_path):
    saved = save_pretrained("canine", tmp_path / "canine")
    weights = load_encoder(str(saved), max_len=64).state_dict()
    assert weights.keys() == load_file(saved / "model.safetensors").keys()
    assert all(torch.equal(weights[name], weight) for name, weight in load_file(saved / "model.safetensors").items())
    with pytest.raises(UserError, match="130 positions"):
        load_encoder(str(saved), max_len=512)

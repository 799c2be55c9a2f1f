"""What the decoder starts from: the flat head's beliefs, along every way in which codes are decoded."""

import torch

from histocoder.formatters import BOS, PAD, build_formatter
from histocoder.inference.combined import set_probability
from histocoder.inference.search import CodeTrie, TrieSearch, greedy
from histocoder.inference.stepper import DecoderInputs
from histocoder.model import Decoder, Prior
from histocoder.model.decoder import class_blocks

HISCO = build_formatter("hisco", num_blocks=3)
CODES = ["61110", "61115", "61220", "-1", "-2", "01110", "95410", "95440", "95120", "99999"]


def decoder_and_prior(rows: int = 6, *, silent: bool = False) -> tuple[Decoder, torch.Tensor, Prior]:
    """With a silent decoder, whose own logits are all alike, what is decoded is the prior's."""
    torch.manual_seed(5)
    decoder = Decoder(HISCO.vocab_size + 1, 32, num_layers=2, num_heads=4).eval()
    torch.nn.init.normal_(decoder.head.weight, std=0.0 if silent else 0.5)
    torch.nn.init.zeros_(decoder.head.bias)
    blocks = class_blocks(CODES, HISCO.to_config())
    prior = Prior.from_logits(2 * torch.randn(rows, len(CODES)), blocks, HISCO.vocab_size + 1)
    return decoder, torch.randn(rows, 5, 32), prior


@torch.no_grad()
def test_all_ways_of_decoding_follow_the_same_prior():
    decoder, memory, prior = decoder_and_prior()
    search = TrieSearch(decoder, CodeTrie(CODES, HISCO))
    full = search.full(DecoderInputs(memory, None, prior))
    for index, block in enumerate(class_blocks(CODES, HISCO.to_config())):
        tokens = torch.cat([torch.tensor([BOS]), block]).expand(len(memory), -1)
        log_probs = decoder(tokens[:, :-1], memory, None, prior).log_softmax(-1)  # teacher forcing
        expected = log_probs.gather(-1, tokens[:, 1:, None])[..., 0].sum(1).exp()
        torch.testing.assert_close(full[:, index], expected, atol=1e-6, rtol=1e-4)
    _codes, probabilities = search.top_k(DecoderInputs(memory, None, prior), k=3)
    torch.testing.assert_close(probabilities, full.topk(3).values, atol=1e-6, rtol=1e-4)
    tokens, found = greedy(decoder, DecoderInputs(memory, None, prior), num_tokens=15, block_size=5)
    forced = decoder(tokens[:, :-1], memory, None, prior).softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ended = tokens[:, 1:].unflatten(1, (3, 5))[..., 0].eq(PAD).cumsum(1).bool().repeat_interleave(5, 1)
    torch.testing.assert_close(found[~ended], forced[~ended], atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_a_silent_decoder_answers_as_the_flat_head():
    decoder, memory, prior = decoder_and_prior(rows=40, silent=True)
    full = TrieSearch(decoder, CodeTrie(CODES, HISCO)).full(DecoderInputs(memory, None, prior))
    torch.testing.assert_close(full.sort(descending=True).values, prior.shares, atol=0.01, rtol=0.02)


@torch.no_grad()
def test_likely_second_codes_are_written():
    decoder, memory, _ = decoder_and_prior(silent=True)
    decoder.head.bias[PAD] -= 1  # to stop and to go on are equally likely by the prior alone
    logits = torch.full((2, len(CODES)), -9.0)
    logits[0, 2] = 9.0
    logits[1, [2, 6]] = 9.0
    prior = Prior.from_logits(logits, class_blocks(CODES, HISCO.to_config()), HISCO.vocab_size + 1)
    tokens, probabilities = greedy(decoder, DecoderInputs(memory[:2], None, prior), num_tokens=15, block_size=5)
    codes = HISCO.decode(tokens.numpy())
    assert codes[0].tolist() == [CODES[2], None, None]
    assert set(codes[1].tolist()) == {CODES[2], CODES[6], None} and codes[1, 2] is None
    is_code = torch.tensor([[code is not None for code in row] for row in codes])
    conf = set_probability(
        decoder, DecoderInputs(memory[:2], None, prior), tokens[:, 1:], probabilities, is_code=is_code
    )
    assert conf[0] > 0.95 and conf[1] > probabilities[1, :10].prod()  # of both orders

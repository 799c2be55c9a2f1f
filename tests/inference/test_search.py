"""Decoding against brute force, an uncached, row-by-row oracle; and what it makes of the flat
head's beliefs.
"""

import itertools

import pytest
import torch
from conftest import spied
from torch import Tensor

from histocoder.formatters import BOS, PAD, Formatter, build_formatter
from histocoder.inference.incremental import DecoderInputs, IncrementalDecoder
from histocoder.inference.search import CodeTrie, TrieSearch, greedy, set_probability
from histocoder.model import Decoder, Prior
from histocoder.model.decoder import class_blocks

HISCO = build_formatter("hisco", num_blocks=3)
GENERAL = build_formatter("general", num_blocks=2, block_size=4)
HISCO_CODES = ["61110", "61115", "61220", "-1", "-2", "01110", "95410", "95440", "95120", "99999"]
GENERAL_CODES = ["A", "A1", "A1b2", "B-", "-1", "12", "123", "1234"]


def decoder_and_memory(
    formatter: Formatter, rows: int = 5, num_positions: int = 7
) -> tuple[Decoder, Tensor, Tensor]:
    torch.manual_seed(3)
    decoder = Decoder(formatter.vocab_size + 1, 32, num_layers=2, num_heads=4).eval()
    torch.nn.init.normal_(decoder.head.weight, std=0.6)  # so that probabilities differ
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    memory = torch.randn(rows, num_positions, 32)
    return decoder, memory, torch.arange(num_positions) < torch.arange(3, 3 + rows)[:, None]


def oracle(decoder: Decoder, memory: Tensor, mask: Tensor | None, tokens: list[int]) -> list[float]:
    """The probability of a sequence, one token of one row at a time, the whole prefix each time."""
    found = [1.0] * len(memory)
    for row, (i, token) in itertools.product(range(len(memory)), enumerate(tokens)):
        prefix = torch.tensor([[BOS, *tokens[:i]]])
        logits = decoder(
            prefix, memory[row : row + 1], None if mask is None else mask[row : row + 1]
        )[0, -1]
        found[row] *= logits.softmax(-1)[token].item()
    return found


@pytest.mark.parametrize("num_positions", [7, 40])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("formatter", "codes"), [(HISCO, HISCO_CODES), (GENERAL, GENERAL_CODES)])
@torch.no_grad()
def test_full_search_is_brute_force(
    formatter: Formatter, codes: list[str], masked: bool, num_positions: int
):
    decoder, memory, mask = decoder_and_memory(formatter, num_positions=num_positions)
    mask = mask if masked else None
    probs = TrieSearch(decoder, CodeTrie(codes, formatter)).full(DecoderInputs(memory, mask))
    for i, code in enumerate(codes):
        expected = torch.tensor(oracle(decoder, memory, mask, formatter.system.to_block(code)))
        torch.testing.assert_close(probs[:, i], expected, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("k", [1, 5, 90, 999])  # for 90 and more a beam has too many nodes itself
@torch.no_grad()
def test_top_k_is_the_head_of_full(k: int, rows: int, dtype: torch.dtype):
    formatter = build_formatter("occ1950", num_blocks=1)
    decoder, memory, mask = decoder_and_memory(formatter, rows=rows)
    memory = memory.to(dtype)
    search = TrieSearch(
        decoder.to(dtype), CodeTrie([f"{i:03}" for i in range(0, 1000, 7)], formatter)
    )
    codes, probs = search.top_k(DecoderInputs(memory, mask), k=k)
    best = search.full(DecoderInputs(memory, mask)).topk(min(k, 143))
    torch.testing.assert_close(
        probs, best.values, rtol=1e-5 if dtype == torch.float32 else 0.1, atol=1e-7
    )
    assert all(len(set(row)) == min(k, 143) for row in codes.tolist())
    if dtype == torch.float32:
        assert torch.equal(codes, best.indices)


@torch.no_grad()
def test_constrained_greedy_stays_in_the_key():
    decoder, memory, mask = decoder_and_memory(HISCO, rows=40)
    trie = CodeTrie(HISCO_CODES, HISCO)
    tokens, _ = greedy(decoder, DecoderInputs(memory, mask), num_tokens=15, block_size=5, trie=trie)
    decoded = HISCO.decode(tokens.numpy())
    assert all(row[0] in HISCO_CODES for row in decoded)
    assert all(code is None or code in HISCO_CODES for row in decoded for code in row)
    free, probabilities = greedy(decoder, DecoderInputs(memory, mask), num_tokens=15, block_size=5)
    assert any(
        code not in {*HISCO_CODES, None} for row in HISCO.decode(free.numpy()) for code in row
    )
    best = decoder(free[:, :5], memory, mask).softmax(-1).max(-1)  # uncached
    assert torch.equal(free[:, 1:6], best.indices)
    torch.testing.assert_close(probabilities[:, :5], best.values)

    for row in range(
        3
    ):  # the same by hand: at each step the best of the tokens that some code goes on with
        prefix: list[int] = []
        for _ in range(5):
            blocks = [HISCO.system.to_block(code) for code in HISCO_CODES]
            allowed = {block[len(prefix)] for block in blocks if block[: len(prefix)] == prefix}
            logits = decoder(
                torch.tensor([[BOS, *prefix]]), memory[row : row + 1], mask[row : row + 1]
            )[0, -1]
            prefix.append(max(allowed, key=lambda token: logits[token].item()))
        assert tokens[row, 1:6].tolist() == prefix


@torch.no_grad()
def test_ended_rows_are_not_decoded_further(monkeypatch: pytest.MonkeyPatch):
    decoder, memory, mask = decoder_and_memory(HISCO, rows=24)
    decoder.head.bias[PAD] = 2.5  # so that rows end at different blocks
    sizes = {"num_tokens": 15, "block_size": 5}
    alone = [
        greedy(decoder, DecoderInputs(memory[i : i + 1], mask[i : i + 1]), **sizes)
        for i in range(len(memory))
    ]
    nodes = spied(monkeypatch, IncrementalDecoder, "step", lambda *_, real: [int(real.sum())])
    tokens, probabilities = greedy(decoder, DecoderInputs(memory, mask), **sizes)
    assert torch.equal(tokens, torch.cat([row for row, _ in alone]))
    torch.testing.assert_close(probabilities, torch.cat([row for _, row in alone]))
    used = tokens[:, 1:].unflatten(1, (3, 5))[..., 0].ne(PAD).sum(1)
    assert len(used.unique()) > 1 and sum(nodes) == 5 * (used + 1).clamp(max=3).sum()


@torch.no_grad()
def test_nodes_of_trees_see_their_ancestors_alone():
    decoder, memory, mask = decoder_and_memory(HISCO)
    batch, stepper = len(memory), IncrementalDecoder(decoder, DecoderInputs(memory, mask))
    paths, parents = torch.full((batch, 1, 1), BOS), torch.zeros(batch, 1, dtype=torch.long)
    real = torch.ones(batch, 1, dtype=torch.bool)
    for width in (1, 4, 6, 3):
        if width > 1:
            parents = real.float().multinomial(width, replacement=True)
            tokens = torch.randint(5, HISCO.vocab_size, (batch, width, 1))
            paths = torch.cat(
                [paths.gather(1, parents[..., None].expand(-1, -1, paths.shape[2])), tokens], dim=2
            )
            real = torch.rand(batch, width) > 0.5
            real[:, 0] = True
        logits = stepper.step(paths[..., -1], parents, real)
        for row, column in real.nonzero().tolist():
            expected = decoder(
                paths[row, column][None], memory[row : row + 1], mask[row : row + 1]
            )[0, -1]
            torch.testing.assert_close(logits[row, column], expected)


@pytest.mark.parametrize(
    "codes", [["61110"], ["61110", "-1"], ["01110", "95410", "-2"], ["-1", "-1", "61110"]]
)
@torch.no_grad()
def test_set_probability_sums_over_orders(codes: list[str]):
    decoder, memory, mask = decoder_and_memory(HISCO)
    tokens = torch.from_numpy(HISCO.encode(["&".join(codes)] * 5))[:, 1:-1].long()
    expected = torch.zeros(5)
    for order in set(itertools.permutations(codes)):
        blocks = [token for code in order for token in HISCO.system.to_block(code)]
        expected += torch.tensor(
            oracle(decoder, memory, mask, (blocks + [PAD] * 5)[:15])
        )  # one unused block ends them
    decoded = decoder(
        torch.cat([torch.full((5, 1), BOS), tokens[:, :-1]], dim=1), memory, mask
    ).softmax(-1)
    probabilities = decoded.gather(-1, tokens[..., None])[..., 0]
    is_code = tokens[:, ::5].ne(PAD)
    found = set_probability(
        decoder, DecoderInputs(memory, mask), tokens, probabilities, is_code=is_code
    )
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-3)
    is_code[:, 0] = False  # a block that is no code: then the sequence alone counts
    alone = torch.tensor(oracle(decoder, memory, mask, tokens[0, : 5 * (len(codes) + 1)].tolist()))
    found = set_probability(
        decoder, DecoderInputs(memory, mask), tokens, probabilities, is_code=is_code
    )
    torch.testing.assert_close(found, alone, atol=1e-9, rtol=1e-3)


def test_codes_of_the_same_tokens_are_refused():
    with pytest.raises(ValueError, match="same tokens"):
        CodeTrie(["12", "12"], GENERAL)


# What the decoder starts from: the flat head's beliefs, along every way in which codes are decoded


def decoder_and_prior(rows: int = 6, *, silent: bool = False) -> tuple[Decoder, Tensor, Prior]:
    """With a silent decoder, whose own logits are all alike, what is decoded is the prior's."""
    torch.manual_seed(5)
    decoder = Decoder(HISCO.vocab_size + 1, 32, num_layers=2, num_heads=4).eval()
    torch.nn.init.normal_(decoder.head.weight, std=0.0 if silent else 0.5)
    torch.nn.init.zeros_(decoder.head.bias)
    blocks = class_blocks(HISCO_CODES, HISCO.to_config())
    prior = Prior.from_logits(2 * torch.randn(rows, len(HISCO_CODES)), blocks, HISCO.vocab_size + 1)
    return decoder, torch.randn(rows, 5, 32), prior


@torch.no_grad()
def test_all_ways_of_decoding_follow_the_same_prior():
    decoder, memory, prior = decoder_and_prior()
    search, inputs = (
        TrieSearch(decoder, CodeTrie(HISCO_CODES, HISCO)),
        DecoderInputs(memory, None, prior),
    )
    full = search.full(inputs)
    for index, block in enumerate(class_blocks(HISCO_CODES, HISCO.to_config())):
        tokens = torch.cat([torch.tensor([BOS]), block]).expand(len(memory), -1)
        log_probs = decoder(tokens[:, :-1], memory, None, prior).log_softmax(-1)  # teacher forcing
        expected = log_probs.gather(-1, tokens[:, 1:, None])[..., 0].sum(1).exp()
        torch.testing.assert_close(full[:, index], expected, atol=1e-6, rtol=1e-4)
    _codes, probabilities = search.top_k(inputs, k=3)
    torch.testing.assert_close(probabilities, full.topk(3).values, atol=1e-6, rtol=1e-4)
    tokens, found = greedy(decoder, inputs, num_tokens=15, block_size=5)
    forced = (
        decoder(tokens[:, :-1], memory, None, prior)
        .softmax(-1)
        .gather(-1, tokens[:, 1:, None])[..., 0]
    )
    ended = (
        tokens[:, 1:].unflatten(1, (3, 5))[..., 0].eq(PAD).cumsum(1).bool().repeat_interleave(5, 1)
    )
    torch.testing.assert_close(found[~ended], forced[~ended], atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_a_silent_decoder_answers_as_the_flat_head():
    decoder, memory, prior = decoder_and_prior(rows=40, silent=True)
    full = TrieSearch(decoder, CodeTrie(HISCO_CODES, HISCO)).full(
        DecoderInputs(memory, None, prior)
    )
    torch.testing.assert_close(
        full.sort(descending=True).values, prior.shares, atol=0.01, rtol=0.02
    )


@torch.no_grad()
def test_likely_second_codes_are_written():
    decoder, memory, _ = decoder_and_prior(silent=True)
    decoder.head.bias[PAD] -= 1  # to stop and to go on are equally likely by the prior alone
    logits = torch.full((2, len(HISCO_CODES)), -9.0)
    logits[0, 2] = 9.0
    logits[1, [2, 6]] = 9.0
    prior = Prior.from_logits(
        logits, class_blocks(HISCO_CODES, HISCO.to_config()), HISCO.vocab_size + 1
    )
    inputs = DecoderInputs(memory[:2], None, prior)
    tokens, probabilities = greedy(decoder, inputs, num_tokens=15, block_size=5)
    codes = HISCO.decode(tokens.numpy())
    assert codes[0].tolist() == [HISCO_CODES[2], None, None]
    assert set(codes[1].tolist()) == {HISCO_CODES[2], HISCO_CODES[6], None} and codes[1, 2] is None
    is_code = torch.tensor([[code is not None for code in row] for row in codes])
    conf = set_probability(decoder, inputs, tokens[:, 1:], probabilities, is_code=is_code)
    assert conf[0] > 0.95 and conf[1] > probabilities[1, :10].prod()  # of both orders

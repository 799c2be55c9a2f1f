"""Trie search against brute force, an uncached, row-by-row oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from histocoder.decoding.confidence import set_probability
from histocoder.decoding.greedy import greedy
from histocoder.decoding.search import full_search, top_k_search
from histocoder.decoding.trie import CodeTrie
from histocoder.formatters import BOS, PAD, Formatter, build_formatter
from histocoder.model import Decoder

HISCO = build_formatter("hisco", num_blocks=3)
GENERAL = build_formatter("general", num_blocks=2, block_size=4)
HISCO_CODES = ["61110", "61115", "61220", "-1", "-2", "01110", "95410", "95440", "95120", "99999"]
GENERAL_CODES = ["A", "A1", "A1b2", "B-", "-1", "12", "123", "1234"]


def decoder_and_memory(formatter: Formatter, rows: int = 5) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    decoder = Decoder(formatter.vocab_size + 1, 32, num_layers=2, num_heads=4).eval()
    torch.nn.init.normal_(decoder.head.weight, std=0.6)  # so that probabilities differ
    memory = torch.randn(rows, 7, 32)
    mask = torch.arange(7) < torch.arange(3, 3 + rows)[:, None]
    return decoder, memory, mask


def oracle(decoder: Decoder, memory: torch.Tensor, mask: torch.Tensor, tokens: list[int]) -> list[float]:
    """The probability of a sequence, one token of one row at a time, the whole prefix each time."""
    found = []
    for row in range(len(memory)):
        probability = 1.0
        for i, token in enumerate(tokens):
            prefix = torch.tensor([[BOS, *tokens[:i]]])
            logits = decoder(prefix, memory[row : row + 1], mask[row : row + 1])[0, -1]
            probability *= logits.softmax(-1)[token].item()
        found.append(probability)
    return found


@pytest.mark.parametrize(("formatter", "codes"), [(HISCO, HISCO_CODES), (GENERAL, GENERAL_CODES)])
@torch.no_grad()
def test_full_search_is_brute_force(formatter: Formatter, codes: list[str]):
    decoder, memory, mask = decoder_and_memory(formatter)
    probs = full_search(decoder, memory, mask, CodeTrie(codes, formatter))
    for i, code in enumerate(codes):
        expected = torch.tensor(oracle(decoder, memory, mask, formatter.system.to_block(code)))
        torch.testing.assert_close(probs[:, i], expected, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("k", [1, 3, 10, 99])
@torch.no_grad()
def test_top_k_is_the_head_of_full(k: int):
    decoder, memory, mask = decoder_and_memory(HISCO)
    trie = CodeTrie(HISCO_CODES, HISCO)
    best = full_search(decoder, memory, mask, trie).topk(min(k, len(HISCO_CODES)))
    codes, probs = top_k_search(decoder, memory, mask, trie, k=k)
    assert torch.equal(codes, best.indices)
    torch.testing.assert_close(probs, best.values)


@torch.no_grad()
def test_top_k_leaves_out_most_of_the_trie(monkeypatch: pytest.MonkeyPatch):
    formatter = build_formatter("occ1950", num_blocks=1)
    decoder, memory, mask = decoder_and_memory(formatter)
    torch.nn.init.normal_(decoder.head.weight, std=5)  # a model that is sure of itself
    trie = CodeTrie([f"{i:03}" for i in range(1000)], formatter)
    nodes = []
    step = Decoder.step_tree
    monkeypatch.setattr(Decoder, "step_tree", lambda self, t, p, c: nodes.append(t.numel()) or step(self, t, p, c))
    top_k_search(decoder, memory, mask, trie, k=3)
    of_top_k, nodes[:] = sum(nodes), []
    full_search(decoder, memory, mask, trie)
    assert len(nodes) == 3  # a call for each level, not for each node
    assert of_top_k < sum(nodes) / 3


@torch.no_grad()
def test_constrained_greedy_stays_in_the_key_and_follows_the_best_branch():
    decoder, memory, mask = decoder_and_memory(HISCO, rows=40)
    trie = CodeTrie(HISCO_CODES, HISCO)
    tokens, _ = greedy(decoder, memory, mask, num_tokens=15, block_size=5, trie=trie)
    decoded = HISCO.decode(tokens.numpy())
    assert all(row[0] in HISCO_CODES for row in decoded)
    assert all(code is None or code in HISCO_CODES for row in decoded for code in row)
    free, _ = greedy(decoder, memory, mask, num_tokens=15, block_size=5)
    assert any(code not in {*HISCO_CODES, None} for row in HISCO.decode(free.numpy()) for code in row)

    for row in range(3):  # the same by hand: at each step the best of the tokens that some code goes on with
        prefix: list[int] = []
        for _ in range(5):
            blocks = [HISCO.system.to_block(code) for code in HISCO_CODES]
            allowed = {block[len(prefix)] for block in blocks if block[: len(prefix)] == prefix}
            logits = decoder(torch.tensor([[BOS, *prefix]]), memory[row : row + 1], mask[row : row + 1])[0, -1]
            prefix.append(max(allowed, key=lambda token: logits[token].item()))
        assert tokens[row, 1:6].tolist() == prefix


@torch.no_grad()
def test_greedy_stops_when_all_rows_have_ended(monkeypatch: pytest.MonkeyPatch):
    decoder, memory, mask = decoder_and_memory(HISCO)
    torch.nn.init.zeros_(decoder.head.weight)
    decoder.head.bias[PAD] = 50.0
    calls = []
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, t, c: calls.append(1) or step(self, t, c))
    tokens, probabilities = greedy(decoder, memory, mask, num_tokens=15, block_size=5)
    assert len(calls) == 5 and tokens[:, 1:].eq(PAD).all() and probabilities.shape == (5, 15)


@pytest.mark.parametrize("codes", [["61110"], ["61110", "-1"], ["01110", "95410", "-2"], ["-1", "-1", "61110"]])
@torch.no_grad()
def test_set_probability_sums_over_orders(codes: list[str]):
    import itertools

    decoder, memory, mask = decoder_and_memory(HISCO)
    tokens = torch.from_numpy(HISCO.encode(["&".join(codes)] * 5))[:, 1:-1].long()
    expected = torch.zeros(5)
    for order in set(itertools.permutations(codes)):
        blocks = [token for code in order for token in HISCO.system.to_block(code)]
        expected += torch.tensor(oracle(decoder, memory, mask, (blocks + [PAD] * 5)[:15]))  # one unused block ends them
    decoded = decoder(torch.cat([torch.full((5, 1), BOS), tokens[:, :-1]], dim=1), memory, mask).softmax(-1)
    probabilities = decoded.gather(-1, tokens[..., None])[..., 0]
    is_code = tokens[:, ::5].ne(PAD)
    found = set_probability(decoder, memory, mask, tokens, probabilities, is_code=is_code)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-3)
    is_code[:, 0] = False  # a block that is no code: then the sequence alone counts
    alone = torch.tensor(oracle(decoder, memory, mask, tokens[0, : 5 * (len(codes) + 1)].tolist()))
    found = set_probability(decoder, memory, mask, tokens, probabilities, is_code=is_code)
    torch.testing.assert_close(found, alone, atol=1e-9, rtol=1e-3)


@given(st.sets(st.sampled_from(GENERAL_CODES + HISCO_CODES[:3]), min_size=1))
def test_a_trie_holds_its_codes(codes: set[str]):
    formatter = build_formatter("general", num_blocks=1, block_size=5)
    trie = CodeTrie(sorted(codes), formatter)
    paths = [([], 0)]
    for children, tokens in zip(trie.children, trie.tokens, strict=True):
        paths = [
            ([*path, token], child)
            for path, node in paths
            for child, token in zip(children[node].tolist(), tokens[node].tolist(), strict=True)
            if child >= 0
        ]
    assert {sorted(codes)[place]: path for path, place in paths} == {c: formatter.system.to_block(c) for c in codes}


def test_codes_of_the_same_tokens_are_refused():
    with pytest.raises(ValueError, match="same tokens"):
        CodeTrie(["12", "12"], GENERAL)

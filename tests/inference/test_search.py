"""Trie search against brute force, an uncached, row-by-row oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from histocoder.formatters import BOS, PAD, Formatter, build_formatter
from histocoder.inference import confidence, search
from histocoder.inference.confidence import set_probability
from histocoder.inference.greedy import greedy
from histocoder.inference.search import TrieSearch
from histocoder.inference.stepper import Stepper
from histocoder.inference.trie import CodeTrie, TreeLayout
from histocoder.model import Decoder

HISCO = build_formatter("hisco", num_blocks=3)
GENERAL = build_formatter("general", num_blocks=2, block_size=4)
HISCO_CODES = ["61110", "61115", "61220", "-1", "-2", "01110", "95410", "95440", "95120", "99999"]
GENERAL_CODES = ["A", "A1", "A1b2", "B-", "-1", "12", "123", "1234"]


def decoder_and_memory(
    formatter: Formatter, rows: int = 5, num_positions: int = 7
) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    decoder = Decoder(formatter.vocab_size + 1, 32, num_layers=2, num_heads=4).eval()
    torch.nn.init.normal_(decoder.head.weight, std=0.6)  # so that probabilities differ
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    memory = torch.randn(rows, num_positions, 32)
    mask = torch.arange(num_positions) < torch.arange(3, 3 + rows)[:, None]
    return decoder, memory, mask


def oracle(decoder: Decoder, memory: torch.Tensor, mask: torch.Tensor | None, tokens: list[int]) -> list[float]:
    """The probability of a sequence, one token of one row at a time, the whole prefix each time."""
    found = []
    for row in range(len(memory)):
        probability = 1.0
        for i, token in enumerate(tokens):
            prefix = torch.tensor([[BOS, *tokens[:i]]])
            logits = decoder(prefix, memory[row : row + 1], None if mask is None else mask[row : row + 1])[0, -1]
            probability *= logits.softmax(-1)[token].item()
        found.append(probability)
    return found


@pytest.mark.parametrize("num_positions", [7, 20])  # shorter and longer than what is folded into the weights
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("formatter", "codes"), [(HISCO, HISCO_CODES), (GENERAL, GENERAL_CODES)])
@torch.no_grad()
def test_full_search_is_brute_force(formatter: Formatter, codes: list[str], masked: bool, num_positions: int):
    decoder, memory, mask = decoder_and_memory(formatter, num_positions=num_positions)
    mask = mask if masked else None
    probs = TrieSearch(decoder, CodeTrie(codes, formatter)).full(memory, mask)
    for i, code in enumerate(codes):
        expected = torch.tensor(oracle(decoder, memory, mask, formatter.system.to_block(code)))
        torch.testing.assert_close(probs[:, i], expected, atol=1e-7, rtol=1e-4)


@torch.no_grad()
def test_full_search_is_the_same_in_small_parts(monkeypatch: pytest.MonkeyPatch):
    decoder, memory, mask = decoder_and_memory(HISCO, rows=40)
    trie = CodeTrie(HISCO_CODES, HISCO)
    whole = TrieSearch(decoder, trie).full(memory, mask)
    monkeypatch.setitem(search._NODES_AT_ONCE, "cpu", 1)  # a row at a time, memory of 16 rows
    torch.testing.assert_close(TrieSearch(decoder, trie).full(memory, mask), whole)


@torch.no_grad()
def test_what_rows_share_is_computed_once_for_all_batches():
    decoder, memory, mask = decoder_and_memory(HISCO)
    codes = [f"{i:05}" for i in range(0, 100_000, 61)]
    trie = CodeTrie(codes, HISCO)
    counts = [0, 0]
    for i, layer in enumerate(decoder.decoder.layers):
        layer.norm1.register_forward_hook(
            lambda _, inputs, __, i=i: counts.__setitem__(i, counts[i] + inputs[0][..., 0].numel())
        )
    found = TrieSearch(decoder, trie)
    for _ in range(3):
        found.full(memory, mask)
    assert counts[1] == 3 * len(memory) * counts[0]
    assert counts[0] < 1.15 * sum(len(level) for level in trie.children)  # nodes that stand in several bins


@pytest.mark.parametrize("bin_size", [61, 64])
def test_bins_are_of_a_size_that_vectors_hold(bin_size: int):
    layout = TreeLayout(CodeTrie([f"{i:05}" for i in range(0, 100_000, 61)], HISCO), bin_size)
    assert layout.tokens.shape[1] == 64


@given(st.sets(st.integers(0, 99_999), min_size=1), st.integers(1, 40))
def test_each_node_of_a_layout_sees_its_ancestors_and_nothing_else(numbers: set[int], bin_size: int):
    trie = CodeTrie([f"{i:05}" for i in sorted(numbers)], HISCO)
    layout = TreeLayout(trie, bin_size)
    size = layout.tokens.shape[1]
    for block, places in zip(trie.blocks.tolist(), layout.places.tolist(), strict=True):
        for depth, place in enumerate(places):
            bin_, node = divmod(place, size)
            seen = layout.visible[bin_, node].nonzero()[:, 0]
            found = sorted(zip(layout.depths[bin_, seen].tolist(), layout.tokens[bin_, seen].tolist(), strict=True))
            assert found == list(enumerate([BOS, *block[:depth]]))


@pytest.mark.parametrize("few", [0, 64])  # whether rows are given up and searched in full
@pytest.mark.parametrize("k", [1, 3, 10, 99])
@torch.no_grad()
def test_top_k_is_the_head_of_full(k: int, few: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "_FEW", few)
    monkeypatch.setattr(search, "_CROWDED", 0.8)
    decoder, memory, mask = decoder_and_memory(HISCO, rows=9)
    trie = CodeTrie(HISCO_CODES, HISCO)
    best = TrieSearch(decoder, trie).full(memory, mask).topk(min(k, len(HISCO_CODES)))
    codes, probs = TrieSearch(decoder, trie).top_k(memory, mask, k=k)
    assert torch.equal(codes, best.indices)
    torch.testing.assert_close(probs, best.values)


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.bfloat16, -0.5)])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("k", [1, 5, 30, 90])  # for 30 and more a beam has too many nodes itself
@torch.no_grad()
def test_top_k_finds_k_codes(k: int, rows: int, dtype: torch.dtype, slack: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(search._SLACK, dtype, slack)  # below 0 as if the second descent came to far lower scores
    formatter = build_formatter("occ1950", num_blocks=1)
    decoder, memory, mask = decoder_and_memory(formatter, rows=rows)
    memory = memory.to(dtype)
    found = TrieSearch(decoder.to(dtype), trie := CodeTrie([f"{i:03}" for i in range(0, 1000, 7)], formatter))
    codes, probs = found.top_k(memory, mask, k=k)
    best = found.full(memory, mask).topk(k).values
    torch.testing.assert_close(probs, best, rtol=1e-5 if dtype == torch.float32 else 0.1, atol=1e-7)
    assert (probs > 0).all() and all(len(set(row)) == k for row in codes.tolist()) and len(trie.blocks) == 143


@torch.no_grad()
def test_top_k_leaves_out_most_of_the_trie(monkeypatch: pytest.MonkeyPatch):
    formatter = build_formatter("occ1950", num_blocks=1)
    decoder, memory, mask = decoder_and_memory(formatter)
    torch.nn.init.normal_(decoder.head.weight, std=5)  # a model that is sure of itself
    trie = CodeTrie([f"{i:03}" for i in range(1000)], formatter)
    nodes = []
    step = Stepper.step_tree
    monkeypatch.setattr(Stepper, "step_tree", lambda self, t, p, r: nodes.append(int(r.sum())) or step(self, t, p, r))
    monkeypatch.setattr(TrieSearch, "full", None)  # is not needed
    TrieSearch(decoder, trie).top_k(memory, mask, k=3)
    assert len(nodes) == 6  # two descents, a call for each level, not for each node
    assert sum(nodes) < len(memory) * 111 / 3


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
    step = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda self, t: calls.append(1) or step(self, t))
    tokens, probabilities = greedy(decoder, memory, mask, num_tokens=15, block_size=5)
    assert len(calls) == 5 and tokens[:, 1:].eq(PAD).all() and probabilities.shape == (5, 15)


@torch.no_grad()
def test_rows_that_have_ended_are_not_decoded_further(monkeypatch: pytest.MonkeyPatch):
    decoder, memory, mask = decoder_and_memory(HISCO, rows=24)
    decoder.head.bias[PAD] = 2.5  # so that rows end at different blocks
    alone = [
        greedy(decoder, memory[i : i + 1], mask[i : i + 1], num_tokens=15, block_size=5) for i in range(len(memory))
    ]
    decoded = []
    step = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda self, t: decoded.append(len(t)) or step(self, t))
    tokens, probabilities = greedy(decoder, memory, mask, num_tokens=15, block_size=5)
    assert torch.equal(tokens, torch.cat([row for row, _ in alone]))
    torch.testing.assert_close(probabilities, torch.cat([row for _, row in alone]))
    used = tokens[:, 1:].unflatten(1, (3, 5))[..., 0].ne(PAD).sum(1)
    needed = (5 * (used + 1).clamp(max=3)).sum()
    assert len(used.unique()) > 1 and needed <= sum(decoded) < 1.34 * needed


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


@torch.no_grad()
def test_orders_that_begin_alike_are_computed_together(monkeypatch: pytest.MonkeyPatch):
    decoder, memory, mask = decoder_and_memory(HISCO)
    torch.nn.init.zeros_(decoder.head.weight)
    torch.nn.init.zeros_(decoder.head.bias)  # each token as probable as the next: 19 ** -5 for a code
    codes = ["01110", "95410", "-2"]
    tokens = torch.from_numpy(HISCO.encode(["&".join(codes)] * 5))[:, 1:-1].long()
    nodes = []
    step = Stepper.step_tree
    monkeypatch.setattr(Stepper, "step_tree", lambda self, t, p, r: nodes.append(int(r.sum())) or step(self, t, p, r))
    probabilities = torch.full((5, 15), 1 / 19)
    is_code = torch.ones(5, 3, dtype=torch.bool)
    monkeypatch.setattr(confidence, "_NEGLIGIBLE", 1e-30)
    found = set_probability(decoder, memory, mask, tokens, probabilities, is_code=is_code)
    torch.testing.assert_close(found, torch.full((5,), 6 * 19.0**-15))
    # the beginning, three first blocks, five second ones (not the given order's) and as many third ones
    assert sum(nodes) == len(memory) * (1 + 5 * 3 + 5 * 5 + 4 * 5)
    nodes.clear()
    monkeypatch.undo()
    monkeypatch.setattr(Stepper, "step_tree", lambda self, t, p, r: nodes.append(int(r.sum())) or step(self, t, p, r))
    set_probability(decoder, memory, mask, tokens, probabilities, is_code=is_code)
    assert sum(nodes) < len(memory) * (1 + 5 * 3 + 3 * 5)  # beginnings of less than 1e-8 are not followed


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

"""Decoding with exported graphs: greedy.py, confidence.py and combined.py in numpy, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from histocoder.formatters.tokens import BOS, PAD

NUM_CANDIDATES = 8  # codes of a row that experts beside the decoder propose; the decoder adds its own
LEAST = 1e-9  # least probability, which is not 0 so that no expert has a veto
LEAST_DOUBT = 1e-6  # least probability on either side of odds
_SEQUENCES_AT_ONCE = 4096


class OnnxStepper:
    """Predicts what follows sequences that grow, or trees of them; see `Stepper`.

    `step` is the session of the decoder's step; `started` has `memory_mask` and the outputs of the decoder's start,
    with a row for each description.
    """

    def __init__(self, step: Any, started: dict[str, np.ndarray]) -> None:
        self._step, self._started, self._depth = step, started, 0
        batch, layers, _, heads, _, head_dim = started["of_memory"].shape
        self._state = {
            "own": np.zeros((batch, layers, 2, heads, 0, head_dim), dtype=np.float32),
            "visible": np.zeros((batch, 1, 0), dtype=bool),
        }
        if "shares" in started:
            unwritten = np.ones((batch, 1, started["shares"].shape[1]), dtype=bool)
            self._state |= {"left": unwritten, "fits": unwritten, "ended": np.zeros((batch, 1), dtype=bool)}

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Return log-probabilities (B, vocab_size) of the tokens that follow `tokens` (B,), each row's newest."""
        return self.step_tree(tokens[:, None], np.zeros_like(tokens)[:, None])[:, 0]

    def step_tree(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Return log-probabilities (B, W, vocab_size) for the nodes of the next level; see `Stepper.step_tree`."""
        newest = {"tokens": tokens, "parents": parents, "depth": np.array([self._depth])}
        log_probs, *state = self._step.run(None, newest | self._started | self._state)
        self._state = dict(zip(self._state, state, strict=True))
        self._depth += 1
        return log_probs

    def keep(self, rows: np.ndarray) -> None:
        self._started = {name: array[rows] for name, array in self._started.items()}
        self._state = {name: array[rows] for name, array in self._state.items()}


Start: TypeAlias = Callable[[np.ndarray], OnnxStepper]  # starts to decode rows of a batch, which may repeat


def greedy(
    start: Start, num_rows: int, *, num_blocks: int, block_size: int, blocks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Take the most probable token at each position; return tokens, and probabilities among all tokens.

    Both are of shape (num_rows, num_blocks * block_size). A row ends with its first block that begins with PAD; what
    follows is PAD, of probability 1. With `blocks` (num_codes, block_size), only these are written.
    """
    tokens = np.full((num_rows, num_blocks * block_size), PAD)
    probabilities = np.ones(tokens.shape, dtype=np.float32)
    rows = np.arange(num_rows)  # those that go on
    stepper, newest = start(rows), np.full(num_rows, BOS)
    for i in range(tokens.shape[1]):
        place = i % block_size
        allowed = probs = np.exp(stepper.step(newest))
        if blocks is not None:
            if place == 0:
                fits = np.ones((len(rows), len(blocks)), dtype=bool)
            is_allowed = np.zeros(probs.shape, dtype=bool)
            row, code = fits.nonzero()
            is_allowed[row, blocks[code, place]] = True
            # a block behind the first may be unused, and is so to its end
            is_allowed[:, PAD] = ~fits.any(1) | (place == 0 and i > 0)
            allowed = np.where(is_allowed, probs, -1.0)
        newest = allowed.argmax(-1)
        if blocks is not None:
            fits &= blocks[:, place] == newest[:, None]
        tokens[rows, i], probabilities[rows, i] = newest, np.take_along_axis(probs, newest[:, None], 1)[:, 0]
        if place == block_size - 1:
            going_on = np.flatnonzero(tokens[rows, i - place] != PAD)
            rows, newest = rows[going_on], newest[going_on]
            if not len(rows):
                break
            stepper.keep(going_on)
    return tokens, probabilities


def set_probability(start: Start, tokens: np.ndarray, probabilities: np.ndarray, is_code: np.ndarray) -> np.ndarray:
    """Return the probability of each row's set of codes, summed over the orders in which they can be written.

    `greedy` returns the tokens and probabilities. `is_code` (n, num_blocks) is False for blocks that are not codes; in
    a row with such a used block, only the sequence itself counts.
    """
    num_rows, num_blocks = is_code.shape
    blocks = tokens.reshape(num_rows, num_blocks, -1)
    used = blocks[..., 0] != PAD
    counts = used.sum(1)
    of_blocks = probabilities.reshape(blocks.shape).prod(-1)
    total = np.where(np.arange(num_blocks) <= counts[:, None], of_blocks, 1.0).prod(1)
    several = (is_code | ~used).all(1) & (counts > 1)
    for count in np.unique(counts[several]):
        orders = np.array(list(itertools.permutations(range(count))))  # the given one first
        behind = np.arange(count, min(count + 1, num_blocks))  # an unused block
        orders = np.hstack([orders, np.tile(behind, (len(orders), 1))])
        rows = np.flatnonzero(several & (counts == count))
        for some in np.array_split(rows, -(-len(rows) * len(orders) // _SEQUENCES_AT_ONCE)):
            written = blocks[some][:, orders].reshape(len(some), len(orders), -1)
            is_new = ~_repeats(written)
            is_new[:, 0] = False  # counted above
            log_probs = _log_probability(start(np.repeat(some, len(orders))), written.reshape(-1, written.shape[2]))
            total[some] += np.where(is_new, np.exp(log_probs).reshape(is_new.shape), 0.0).sum(1)
    return total.clip(max=1.0)


def _log_probability(stepper: OnnxStepper, sequences: np.ndarray) -> np.ndarray:
    """Return the log-probability of each sequence (n, length), of shape (n,)."""
    newest, total = np.full(len(sequences), BOS), np.zeros(len(sequences), dtype=np.float32)
    for following in sequences.T:
        total += np.take_along_axis(stepper.step(newest), following[:, None], 1)[:, 0]
        newest = following
    return total


def _repeats(x: np.ndarray) -> np.ndarray:
    """Return whether each item on the second axis of `x` (n, m, …) equals an earlier one, of shape (n, m)."""
    same = (x[:, :, None] == x[:, None]).reshape(*x.shape[:2], x.shape[1], -1).all(-1)
    return np.tril(same, -1).any(-1)


def combined(
    start: Start,
    beliefs: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    blocks: np.ndarray,
    *,
    num_blocks: int,
    missing: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decode n rows by a weighted product of experts, as `CombinedSearch` does.

    `beliefs` are probabilities of the key's codes, of shape (n, num_codes), and `blocks` their tokens, of shape
    (num_codes, block_size). Return codes as their indices, -1 for none, and probabilities, both of shape
    (n, num_blocks), and the confidence (n,).
    """
    num_rows, size = len(next(iter(beliefs.values()))), blocks.shape[1]
    logs = {name: np.log(belief.clip(LEAST)) for name, belief in beliefs.items()}
    candidates = _candidates(start, logs, blocks, num_blocks=num_blocks)
    of_others = np.sum([weights[name] * np.take_along_axis(vote, candidates, 1) for name, vote in logs.items()], axis=0)
    codes, conf = np.full((num_rows, num_blocks), -1), np.ones(num_rows)
    probabilities = np.full((num_rows, num_blocks), np.nan)
    rows = np.arange(num_rows)  # those that go on, as in all arrays below
    stepper, taken = start(rows), _repeats(candidates)
    newest, parents = np.full((num_rows, 1), BOS), np.zeros((num_rows, 1), dtype=np.int64)
    for number in range(num_blocks):
        end = PAD if number else missing
        written, log_odds = _decoder_votes(stepper, newest, parents, blocks[candidates], end=end)
        scores = weights["decoder"] * written + of_others
        of_codes = softmax(np.where(taken, np.finfo(scores.dtype).min, scores))
        if number:
            log_odds = weights.get("end", 1.0) * log_odds + weights.get("few", 0.0)
        ended = np.where(taken.all(1), 1.0, 1 / (1 + np.exp(-log_odds)))  # there is no code beyond the candidates
        shares = of_codes * (1 - ended[:, None])
        of_best = shares.max(1)
        goes_on = of_best >= np.maximum(ended, weights.get("further", 0.0) if number else 0.0)
        conf[rows] *= np.where(goes_on, of_best, ended)
        on = np.flatnonzero(goes_on)
        rows, best, of_best = rows[on], shares.argmax(1)[on, None], of_best[on]
        if not len(rows):
            break
        candidates, taken, of_others = candidates[on], taken[on], of_others[on]
        chosen = np.take_along_axis(candidates, best, 1)
        codes[rows, number], probabilities[rows, number] = chosen[:, 0], of_best
        taken = taken | (candidates == chosen)
        newest, parents = blocks[chosen][..., -1], best if size > 1 else np.zeros_like(best)
        stepper.keep(on)
    return codes, probabilities, conf


def _decoder_votes(
    stepper: OnnxStepper, newest: np.ndarray, parents: np.ndarray, blocks: np.ndarray, *, end: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities (B, K) of codes with the tokens (B, K, size), and log-odds (B,) of none."""
    first = stepper.step_tree(newest, parents)[:, 0]
    written = np.take_along_axis(first, blocks[..., 0], 1)
    level = np.zeros_like(blocks[..., 0])
    for i in range(1, blocks.shape[2]):
        following = stepper.step_tree(blocks[..., i - 1], level)
        written = written + np.take_along_axis(following, blocks[..., i : i + 1], 2)[..., 0]
        level = np.broadcast_to(np.arange(blocks.shape[1]), level.shape)
    if end is None:
        return written, np.full(len(first), -np.inf)
    ended = np.exp(first[:, end]).clip(LEAST_DOUBT, 1 - LEAST_DOUBT)
    return written, np.log(ended / (1 - ended))


def _candidates(start: Start, logs: Mapping[str, np.ndarray], blocks: np.ndarray, *, num_blocks: int) -> np.ndarray:
    """Return the codes that the experts propose, indices of shape (n, K), some of them twice."""
    proposed = np.argsort(-np.sum([*logs.values()], axis=0), axis=1, kind="stable")[:, :NUM_CANDIDATES]
    size = blocks.shape[1]
    tokens, _ = greedy(start, len(proposed), num_blocks=num_blocks, block_size=size, blocks=blocks)
    same = (tokens.reshape(len(proposed), num_blocks, 1, size) == blocks).all(-1)  # (n, num_blocks, num_codes)
    own = np.where(same.any(-1), same.argmax(-1), proposed[:, :1])
    return np.hstack([proposed, own])


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)

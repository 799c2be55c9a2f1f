"""Estimate how many rows of a coded file are right, from a random sample among the cards that are
reviewed.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import BaseModel
from scipy.stats import binomtest

_EVERY, _DRAWS = (
    3,
    2000,
)  # every third card is from the random sample, which has at most so many draws
FEWEST = 30  # settled cards of the random sample before which no estimate is given


class Estimate(BaseModel):
    """A share, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Trust(BaseModel):
    """State of the review of a file."""

    rows: int
    rows_settled: int
    cards: int
    cards_settled: int
    cards_unsure: int
    random_cards: int  # settled cards of the random sample, up to the first that is not decided
    skipped: int | None = None  # that card, where later ones are decided
    random_cards_needed: int = FEWEST  # number of them before which there is no estimate
    right: (
        Estimate | None
    )  # share of the file's rows that are right as the model coded them, estimated
    share_right: float | None = (
        None  # that share among the settled rows, where everything is decided
    )


def order_of_review(times: np.ndarray, seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw a random sample of a file's rows, and put its cards among the others.

    Rows are drawn with replacement, so that cards are drawn with probabilities proportional to
    their frequency, `times` of shape (n,). Every third card of the review is the next one drawn
    that has no earlier place; the others stay in their order. Return the index of the card at each
    place of the review; and each draw, in order: the place from which it counts, and the index of
    its card.
    """
    cards: dict[int, None] = {}
    draws: list[tuple[int, int]] = []

    def draw() -> Iterator[int]:
        for card in (
            np.random.default_rng(seed).choice(len(times), _DRAWS, p=times / times.sum()).tolist()
        ):
            draws.append((len(cards), card))
            yield card

    sample, others = draw(), iter(range(len(times)))
    while len(cards) < len(times):
        turn = itertools.chain(sample, others) if len(cards) % _EVERY == _EVERY - 1 else others
        cards[next(card for card in turn if card not in cards)] = None
    return list(cards), draws


def share_right(sample: Sequence[bool]) -> Estimate:
    """Estimate the share of right rows from those drawn (see `order_of_review`), which are right or
    not.

    The share of rows drawn with replacement is an unbiased estimate (Hansen and Hurwitz 1943), and
    binomial, so that its interval is Wilson's (1927).
    """
    interval = binomtest(sum(sample), len(sample)).proportion_ci(method="wilson")
    return Estimate(mean=sum(sample) / len(sample), low=interval.low, high=interval.high)

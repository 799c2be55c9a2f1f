"""Estimate from a random sample how many rows of a coded file are right."""

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel

_FEWEST = 30  # decided cards of the random sample before which no estimate is given
_EVERY = 3  # every third card is from the random sample
_DRAWS = 2000


class Estimate(BaseModel):
    """A share, with its 95 % interval."""

    mean: float
    low: float
    high: float


class Trust(BaseModel):
    """State of the review of a file."""

    rows: int
    rows_settled: int
    rows_open: int
    cards: int
    cards_settled: int
    cards_unsure: int
    random_cards: int  # settled cards of the random sample
    random_cards_needed: int | None  # number of them before which there is no estimate; None in files that have too few
    rest: Estimate | None = None  # share of the open rows that are right


def order_of_review(times: np.ndarray, seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw a random sample of a file's rows, and put its cards among the others.

    Rows are drawn with replacement, so that cards are drawn with probabilities proportional to their frequency. Every
    third card of the review is the next one drawn that has no earlier place; the others stay in their order.

    Parameters
    ----------
    times : array of shape (n,)
        Number of rows of each card.

    Returns
    -------
    cards : list of n int
        Index of the card at each place of the review.
    draws : list of (due, card)
        Each draw, in order: the place of the review from which it counts, and the card.
    """
    drawn = iter(np.random.default_rng(seed).choice(len(times), _DRAWS, p=times / times.sum()).tolist())
    others = iter(range(len(times)))
    cards: dict[int, None] = {}
    draws: list[tuple[int, int]] = []
    for place in range(len(times)):
        card = None
        if place % _EVERY == _EVERY - 1:
            for card in drawn:
                draws.append((place, card))
                if card not in cards:
                    break
        if card is None or card in cards:  # no draw is left
            card = next(card for card in others if card not in cards)
        cards[card] = None
    return list(cards), draws


def estimate(
    times: np.ndarray, worth: np.ndarray, draws: np.ndarray, *, right: Mapping[int, bool], unsure: Sequence[int]
) -> Trust:
    """Estimate the share of the open rows that are right.

    The share right of rows drawn with replacement is an unbiased estimate (Hansen and Hurwitz 1943), and binomial, so
    that its interval is Wilson's (1927) for the number of draws. What is known of the settled rows is then subtracted:
    the open ones have the other right rows. Cards that are worth more than each open one are all decided; neither they
    nor draws of them are counted, so that reviewing the doubtful ones first narrows the interval.

    Parameters
    ----------
    times, worth : array of shape (n,)
        Number of rows of each card, and what its check is worth (see `in_order_of_worth`), in the order of review.
    draws : array of shape (m, 2)
        Place from which each draw counts, and place of its card; see `order_of_review`.
    right : mapping of int to bool
        Place of each settled card, and whether its predicted codes are right.
    unsure : sequence of int
        Places of the cards that reviewers left open. They are neither settled nor open here.
    """
    is_settled, is_right, is_open = np.zeros((3, len(times)), dtype=bool)
    is_settled[[*right]] = True
    is_right[[*right]] = [*right.values()]
    is_open[:] = ~is_settled
    is_open[[*unsure]] = False
    last = np.flatnonzero(~is_open).max(initial=-1)
    drawn = draws[draws[:, 0] <= last, 1]
    drawn = drawn[is_settled[drawn]]
    num_open = int(times[is_open].sum())
    trust = Trust(
        rows=int(times.sum()),
        rows_settled=int(times[is_settled].sum()),
        rows_open=num_open,
        cards=len(times),
        cards_settled=len(right),
        cards_unsure=len(unsure),
        random_cards=len(set(drawn.tolist())),
        random_cards_needed=_FEWEST if len(set(draws[:, 1].tolist())) >= _FEWEST else None,
    )
    if trust.random_cards >= _FEWEST and num_open:
        is_counted = worth <= worth[is_open].max()
        sample = is_right[drawn[is_counted[drawn]]]
        num_settled, num_right = (int(times[mask & is_counted].sum()) for mask in (is_settled, is_right))
        if len(sample):
            trust.rest = _of_the_rest(sample, num_open, num_settled, num_right)
    return trust


def _of_the_rest(sample: np.ndarray, num_open: int, num_settled: int, num_right: int) -> Estimate:
    """Return the share of the open rows, of a sample of them and of settled rows, so many of which are right."""
    from scipy.stats import binomtest

    interval = binomtest(int(sample.sum()), len(sample)).proportion_ci(method="wilson")
    shares = np.array([sample.mean(), interval.low, interval.high])
    mean, low, high = np.clip((shares * (num_settled + num_open) - num_right) / num_open, 0, 1).tolist()
    return Estimate(mean=mean, low=low, high=high)

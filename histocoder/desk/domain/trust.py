"""Estimate how many rows of a coded file are right, from a random sample among the cards that are
reviewed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel
from scipy.stats import binomtest

from histocoder.desk.domain.card import Card

_SAMPLE_EVERY = 3  # every third card of the review is one of the random sample
_MAX_DRAWS = 2000
MIN_CARDS_FOR_ESTIMATE = 30  # settled ones of the random sample


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
    random_cards_needed: int = MIN_CARDS_FOR_ESTIMATE
    right: Estimate | None  # share of the file's rows that are right as the model coded them
    share_right: float | None = None  # that among the settled rows, where everything is decided


@dataclass(frozen=True)
class Draw:
    """A row of a file's random sample: the place of the review from which it counts, and its
    card.
    """

    due: int
    card: Card


def order_of_review(times: np.ndarray, seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Draw a random sample of a file's rows, and put its cards among the others.

    Rows are drawn with replacement, so that cards are drawn with probabilities proportional to
    their frequency, `times` of shape (n,). Every third card of the review is the next one drawn
    that has no earlier place; the others stay in their order. Return the index of the card at each
    place of the review; and each draw, in order: the place from which it counts, and the index of
    its card.
    """
    rng = np.random.default_rng(seed)
    sample = iter(rng.choice(len(times), _MAX_DRAWS, p=times / times.sum()).tolist())
    in_order = iter(range(len(times)))

    # card -> its place; dictionaries keep their order
    places: dict[int, int] = {}
    draws: list[tuple[int, int]] = []
    for place in range(len(times)):
        card = None
        if place % _SAMPLE_EVERY == _SAMPLE_EVERY - 1:
            # rows of cards that have a place already count, too, and the next row is drawn
            for card in sample:
                draws.append((place, card))
                if card not in places:
                    break
        while card is None or card in places:
            card = next(in_order)
        places[card] = place
    return list(places), draws


def trust_of(progress: Mapping[str, float], draws: Sequence[Draw]) -> Trust:
    """Return the state of a review: how far it is, and the estimate from the rows drawn, in order.

    The sample ends before the first card drawn that is not decided. Cards for two, which were drawn
    at random as well and take longer, are a sample of their own.
    """
    # where each of the two samples ends
    first_undecided: dict[bool, Draw] = {}
    for draw in draws:
        if draw.card.is_undecided:
            first_undecided.setdefault(draw.card.double, draw)

    # unsure cards do not end it, and say nothing
    sample = []
    for draw in draws:
        end = first_undecided.get(draw.card.double)
        if draw.card.status == "settled" and (end is None or draw.due < end.due):
            sample.append(draw.card)

    # later cards were decided before it, which would leave the sample small
    skipped = None
    end = first_undecided.get(False)
    if end is not None and end.card.place < progress["last_place_decided"]:
        skipped = end.card.id

    # a row that was drawn twice counts twice in the estimate, and once among the cards
    num_cards = len({card.id for card in sample})
    share_right = None
    if progress["rows_right"] is not None and progress["rows_settled"]:
        share_right = progress["rows_right"] / progress["rows_settled"]
    estimate = None
    if num_cards >= MIN_CARDS_FOR_ESTIMATE:
        estimate = estimate_share([set(card.codes or ()) == set(card.predicted) for card in sample])
    return Trust(
        rows=int(progress["rows"]),
        rows_settled=int(progress["rows_settled"]),
        cards=int(progress["cards"]),
        cards_settled=int(progress["cards_settled"]),
        cards_unsure=int(progress["cards_unsure"]),
        random_cards=num_cards,
        skipped=skipped,
        right=estimate,
        share_right=share_right,
    )


def estimate_share(sample: Sequence[bool]) -> Estimate:
    """Estimate the share of right rows from those drawn (see `order_of_review`), which are right or
    not.

    The share of rows drawn with replacement is an unbiased estimate (Hansen and Hurwitz 1943), and
    binomial, so that its interval is Wilson's (1927).
    """
    interval = binomtest(sum(sample), len(sample)).proportion_ci(method="wilson")
    return Estimate(mean=sum(sample) / len(sample), low=interval.low, high=interval.high)

"""How far two coders agree, and what they have to settle."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from histocoder.evaluation.scores import agreement, share_interval, to_settle


def test_agreement_by_hand():
    first = [["61110"], ["77610"], ["77610", None], ["-1"], ["61110", "77610"]]
    second = [["61110"], ["77120"], ["80110"], ["-1"], ["77610", "61110"]]
    one, two, whole = agreement(first, second, ["a", "b", "c", "d", "e"], digits=2)
    assert (one["digits"], two["digits"], whole["digits"]) == (1, 2, None)
    assert (one["share"], two["share"], whole["share"]) == (0.8, 0.8, 0.6)
    # by chance: 61110 1 x 1, 77610 2 x 0, 77120 and 80110 0 x 1, -1 1 x 1, both 1 x 1 of 25
    assert whole["kappa"] == pytest.approx((0.6 - 3 / 25) / (1 - 3 / 25))
    # pairs of the ten values that differ: 100 - (4 * 2 + 2 * 1 + ...) of 90
    assert whole["alpha"] == pytest.approx(1 - 0.4 / (1 - (2 + 2 + 0 + 0 + 2 + 2) / 90))


def test_alpha_is_as_published():
    # section B of Krippendorff (2011): two observers of twelve articles
    (found,) = agreement("aabbdcccedda", "babbbccceddd", list("abcdefghijkl"))
    assert round(found["alpha"], 3) == 0.692


def test_agreement_of_one_code_has_no_kappa():
    (found,) = agreement([["1"]] * 3, [["1"]] * 3, ["a", "b", "c"])
    assert found["share"] == 1 and found["kappa"] is None and found["alpha"] is None


def test_interval_is_wilsons_of_distinct_descriptions():
    right = np.array([True, True, True, False, True])
    interval = binomtest(4, 5).proportion_ci(method="wilson")
    found = share_interval(right, list("abcde"))
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
    wider = share_interval(np.repeat(right, 9), np.repeat([*"abcde"], 9).tolist())
    assert (wider["low"], wider["high"]) == pytest.approx((interval.low, interval.high))


def test_differences_in_the_first_digit_come_first():
    rows = [("baker", ("77610",), ("77120",)), ("smith", ("83110",), ("61110",)), ("farmer", ("61110",), ("61110",))]
    rows += [("baker", ("77610",), ("77610",))] * 2
    found = to_settle(pd.DataFrame(rows, columns=["text", "first", "second"]).assign(lang="en"), digits=5)
    assert found["text"].tolist() == ["smith", "baker"]
    assert found["digits"].tolist() == [0, 2] and found["times"].tolist() == [1, 1]


def test_order_of_codes_is_no_difference():
    rows = pd.DataFrame({"text": ["a"], "lang": ["en"], "first": [("1", "2")], "second": [("2", "1")]})
    assert len(to_settle(rows, digits=1)) == 0

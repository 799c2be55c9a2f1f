"""Measure how far two coders of the same descriptions agree, and list what they have to settle."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from histocoder.evaluation.scores import code_sets, cut_codes, share_interval

Codes = Iterable[Iterable[str | None]]


def agreement(
    first: Codes, second: Codes, texts: Sequence[str], *, digits: int = 0, separator: str = ""
) -> list[dict[str, Any]]:
    """Compare the sets of codes that two coders gave n descriptions, `texts`.

    Return plain values, for JSON, by numbers of first digits (see `cut_codes`) and, None, by whole codes: `digits`,
    `n`, the `share` that agree with its interval (see `share_interval`), Cohen's (1960) `kappa` and Krippendorff's
    (2011) nominal `alpha`, both None where there is one set of codes alone.

    Examples
    --------
    >>> found = agreement([["61110"], ["77610"]], [["61110"], ["77120"]], ["farmer", "baker"], digits=2)
    >>> [(one["digits"], one["share"]) for one in found]
    [(1, 1.0), (2, 1.0), (None, 0.5)]
    """
    from sklearn.metrics import cohen_kappa_score  # here, since it takes a second to import

    sets, found = (code_sets(first), code_sets(second)), []
    for number in (*range(1, digits + 1), None):
        cut = [one if number is None else cut_codes(one, number, separator=separator) for one in sets]
        values, index = np.unique([" ".join(sorted(codes)) for one in cut for codes in one], return_inverse=True)
        one, other = index.reshape(2, -1)
        score = {"digits": number, "n": len(one), **share_interval(one == other, texts), "kappa": None, "alpha": None}
        if len(values) > 1:
            times = np.bincount(index)
            expected = 1 - (times * (times - 1)).sum() / (len(index) * (len(index) - 1))
            alpha = 1 - float((one != other).mean() / expected)
            score |= {"kappa": float(cohen_kappa_score(one, other)), "alpha": alpha}
        found.append(score)
    return found


def to_settle(rows: pd.DataFrame, *, digits: int = 0) -> pd.DataFrame:
    """Return the descriptions on which two coders differ, those that differ in the first digit first.

    `rows` has `text`, `lang`, and sets of codes `first` and `second` (see `code_sets`). Equal rows are one, with
    `times`, their number, and `digits`, how many first digits, up to those given, both coders have in common.
    """
    names = ["first", "second"]
    found = rows.groupby(["text", "lang", *names], sort=False).size().rename("times").reset_index()
    found = found[found["first"].map(frozenset) != found["second"].map(frozenset)]
    cut = [[pd.Series(cut_codes(found[name], n)).map(frozenset) for name in names] for n in range(1, digits + 1)]
    found["digits"] = np.sum([one == other for one, other in cut], axis=0, dtype=int)
    return found.sort_values(["digits", "times"], ascending=[True, False], kind="stable", ignore_index=True)

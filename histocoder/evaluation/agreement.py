"""Measure how far two coders of the same descriptions agree, and list what they have to settle."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from histocoder.evaluation.scores import code_sets, cut_codes, share_interval


def agreement(
    first: Iterable[Iterable[str | None]],
    second: Iterable[Iterable[str | None]],
    texts: Sequence[str],
    *,
    digits: int = 0,
    separator: str = "",
) -> list[dict[str, Any]]:
    """Compare the codes that two coders gave the same n rows, by the first digits and as a whole.

    Parameters
    ----------
    first, second : iterable of iterable of str
        Codes of each row; their order does not matter.
    texts : sequence of str
        Descriptions of the rows: rows of one description count as one decision in the interval.
    digits : int
        Number of first digits up to which codes are compared before they are as a whole.
    separator : str
        Text that separates the digits of codes, if there is one.

    Returns
    -------
    list of dict
        Plain values, for JSON: `digits` (None: whole codes), `n`, the `share` of rows with the same set of codes and
        its 95 % interval from `low` to `high`, and what is left of it without chance, `kappa` (Cohen 1960) and `alpha`
        (Krippendorff's of nominal values); these are None where all rows have one set of codes.

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
        is_same = one == other
        score = {"digits": number, "n": len(is_same), **share_interval(is_same, texts), "kappa": None, "alpha": None}
        if len(values) > 1:
            score |= {"kappa": float(cohen_kappa_score(one, other)), "alpha": krippendorff(one, other)}
        found.append(score)
    return found


def krippendorff(one: np.ndarray, other: np.ndarray) -> float:
    """Return Krippendorff's alpha of two coders' nominal values, without missing ones: each an index, of shape (n,).

    Krippendorff (2011), Computing Krippendorff's Alpha-Reliability. There are two different values at least.
    """
    times = np.bincount(np.concatenate([one, other])).astype(float)
    total = times.sum()
    expected = 1 - (times * (times - 1)).sum() / (total * (total - 1))
    return float(1 - (one != other).mean() / expected)


def to_settle(rows: pd.DataFrame, *, digits: int = 0, separator: str = "") -> pd.DataFrame:
    """Return the descriptions on which two coders differ, those that differ in the first digit first.

    `rows` has columns `text`, `lang`, and sets of codes `first` and `second` (see `code_sets`). Equal rows are one,
    with `times`, their number; `digits`, how many first digits, up to those given, both coders have in common; and
    `conf`, the share of the coders' decisions on the description that are the first codes.
    """
    by = ["text", "lang"]
    found = rows.groupby([*by, "first", "second"], sort=False).size().rename("times").reset_index()
    found = found[[set(one) != set(other) for one, other in found[["first", "second"]].to_numpy()]]
    pairs = [
        [cut_codes(found[name], number, separator=separator) for name in ("first", "second")]
        for number in range(1, digits + 1)
    ]
    same = [[set(one) == set(other) for one, other in zip(*cut, strict=True)] for cut in pairs]
    found["digits"] = np.sum(same, axis=0, dtype=int)
    decisions = pd.concat([rows[[*by, name]].set_axis([*by, "first"], axis=1) for name in ("first", "second")])
    share = (decisions.groupby([*by, "first"]).size() / decisions.groupby(by).size()).rename("conf")
    found = found.join(share, on=[*by, "first"])
    return found.sort_values(["digits", "times"], ascending=[True, False], kind="stable", ignore_index=True)

"""Score predicted codes, as sets, against true ones, and the codes of two coders against each
other.

A row's set of codes is a tuple of distinct codes in the order in which they were written; see
`code_sets`.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from histocoder.formatters import MISSING
from histocoder.text.normalize import description_keys

Sets = Sequence[tuple[str, ...]]
Rows = Iterable[Iterable[str | None]]  # the codes of each row, as they are written
_NUM_BINS = 10  # number of bins of confidence, of equal width
_SEEN_GROUPS = ("0", "1", "2-5", "6-20", "21-100", ">100")
_SEEN_EDGES = (-1, 0, 1, 5, 20, 100, np.inf)


def code_sets(codes: pd.DataFrame | Rows) -> list[tuple[str, ...]]:
    """Return the sets of codes of n rows: a missing code counts as none, and a repeated one once.

    Examples
    --------
    >>> code_sets([["b", "a"], ["a", None]])
    [('b', 'a'), ('a',)]
    """
    rows = codes.to_numpy(dtype=object) if isinstance(codes, pd.DataFrame) else codes
    return [
        tuple(dict.fromkeys(code for code in row if isinstance(code, str) and code != MISSING))
        for row in rows
    ]


def score_sets(truth: Sets, predicted: Sets) -> pd.DataFrame:
    """Return the scores of each row, of shape (n, 4).

    `accuracy`, whether the sets are equal; `precision`, the share of predicted codes that are true;
    `recall`, the share of true codes that are predicted; `f1`, their harmonic mean. A row without
    codes is right where none are predicted (all 1), else wrong (all 0).
    """
    sizes = [
        (len(set(true) & set(codes)), len(true), len(codes))
        for true, codes in zip(truth, predicted, strict=True)
    ]
    hits, num_true, num_predicted = np.array(sizes, dtype=int).reshape(-1, 3).T
    neither = num_true + num_predicted == 0
    return pd.DataFrame(
        {
            "accuracy": (hits == num_true) & (hits == num_predicted),
            "precision": np.where(neither, 1.0, hits / np.maximum(num_predicted, 1)),
            "recall": np.where(neither, 1.0, hits / np.maximum(num_true, 1)),
            "f1": np.where(neither, 1.0, 2 * hits / np.maximum(num_true + num_predicted, 1)),
        }
    )


def attribute_scores(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return the accuracy of categories, of shape (n,), and the mean F1 of those that are true of
    some row.

    Examples
    --------
    >>> attribute_scores(np.array(["", "", "", "21"]), np.array(["", "", "", ""]))["accuracy"]
    0.75
    """
    from sklearn.metrics import f1_score  # here, since it takes a second to import

    f1 = f1_score(truth, predicted, labels=np.unique(truth), average="macro", zero_division=0)
    return {"accuracy": float((truth == predicted).mean()), "macro_f1": float(f1)}


def cut_codes(sets: Sets, digits: int, *, separator: str = "") -> list[tuple[str, ...]]:
    """Cut codes to their first digits, which `separator` separates; special codes, such as -1, stay
    whole.
    """

    def cut(code: str) -> str:
        if code.startswith("-"):
            return code
        return separator.join(code.split(separator)[:digits]) if separator else code[:digits]

    return [tuple(dict.fromkeys(map(cut, codes))) for codes in sets]


def named_groups(cells: Sequence[str | None]) -> np.ndarray:
    """Return the name of each row's group, of shape (n,): its cell, or, of many numbers, one of
    five ranges of them.

    Beyond the 40 with the most rows, groups are "others".
    """
    names = pd.Series(cells, dtype=object)
    numbers = pd.to_numeric(names, errors="coerce")
    if numbers.nunique() > 12 and numbers.count() == names.count():
        ranges = numbers.groupby(pd.qcut(numbers, 5, duplicates="drop"), observed=True)
        low, high = (ranges.transform(end).map("{:g}".format) for end in ("min", "max"))
        names = (low + "-" + high).where(numbers.notna())
    names = names.fillna("(blank)")
    return names.where(names.isin(names.value_counts().index[:40]), "others").to_numpy(dtype=object)


def seen_groups(times: Sequence[float]) -> pd.Series:
    """Group numbers of times: 0, 1, 2-5, 6-20, 21-100, >100."""
    return pd.cut(pd.Series(times, dtype=float), _SEEN_EDGES, labels=_SEEN_GROUPS)


def first_true_rank(truth: Sets, ranked: np.ndarray) -> np.ndarray:
    """Return the rank, from 1, of the first true code among ranked codes of shape (n, k), the most
    probable first.

    Of shape (n,): inf where no true code is among them; NaN for rows without true codes.
    """

    def rank(true: tuple[str, ...], codes: list[str | None]) -> float:
        found = (number for number, code in enumerate(codes, start=1) if code in true)
        return next(found, np.inf) if true else np.nan

    return np.array([rank(true, codes) for true, codes in zip(truth, ranked.tolist(), strict=True)])


def top_k_accuracy(ranks: np.ndarray, *, k: int) -> dict[str, float]:
    """Return, for i from 1 to k, the share of rows with a true code among the first i, of those
    with true codes.
    """
    ranks = ranks[~np.isnan(ranks)]
    return {str(i): float((ranks <= i).mean()) if len(ranks) else 0.0 for i in range(1, k + 1)}


def calibration(conf: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Return how far confidence is from accuracy: Guo et al. (2017), On Calibration of Modern
    Neural Networks.

    `conf`, from 0 to 1, and `right` are of shape (n,). Return `ece`, the mean distance of
    confidence and accuracy over bins weighted by their rows; and `bins`, each with its edges `low`
    and `high`, `count`, and the means `conf` and `accuracy` (None where it is empty).
    """
    edges = np.arange(_NUM_BINS + 1) / _NUM_BINS
    bin_of_row = np.searchsorted(edges[1:-1], conf)
    found = (
        pd.DataFrame({"count": 1, "conf": conf, "accuracy": right})
        .astype(float)
        .groupby(bin_of_row)
        .sum()
    )
    means = (
        found.div(found["count"], axis=0).assign(count=found["count"].astype(int)).to_dict("index")
    )
    empty = {"count": 0, "conf": None, "accuracy": None}
    bins = [
        {"low": edges[i], "high": edges[i + 1], **means.get(i, empty)} for i in range(_NUM_BINS)
    ]
    return {"ece": float((found["conf"] - found["accuracy"]).abs().sum() / len(conf)), "bins": bins}


def share_interval(right: np.ndarray, texts: Sequence[str]) -> dict[str, float]:
    """Return the `share` of n rows that are right, and its 95 % interval, Wilson's (1927), from
    `low` to `high`.

    Rows of one description tell as much as one: the number of rows is Kish's (1965) effective one.
    """
    share, times = (
        float(np.mean(right)),
        pd.Series(description_keys(texts)).value_counts().to_numpy(dtype=float),
    )
    z_squared = 3.841459 * (times**2).sum() / times.sum() ** 2
    half = np.sqrt(z_squared * (share * (1 - share) + z_squared / 4))
    low, high = ((share + z_squared / 2 + end) / (1 + z_squared) for end in (-half, half))
    return {"share": share, "low": max(float(low), 0.0), "high": min(float(high), 1.0)}


@dataclass(frozen=True)
class CodeAgreement:
    """Agreement of two coders in the first digits of their codes, or in whole codes."""

    digits: int | None  # number of first digits; None: whole codes
    n: int  # number of descriptions
    share: float  # share that agree, and its 95 % interval; see `share_interval`
    low: float
    high: float
    kappa: float | None  # Cohen's (1960); None where there is one set of codes alone
    alpha: float | None  # Krippendorff's (2011), nominal; None as kappa


def agreement(
    first: Rows, second: Rows, texts: Sequence[str], *, digits: int = 0, separator: str = ""
) -> list[CodeAgreement]:
    """Compare the sets of codes that two coders gave n descriptions, `texts`: by each number of
    first digits up to `digits` (see `cut_codes`), and by whole codes.

    Examples
    --------
    >>> found = agreement([["61110"], ["77610"]], [["61110"], ["77120"]], ["farmer", "baker"], digits=2)
    >>> [(level.digits, level.share) for level in found]
    [(1, 1.0), (2, 1.0), (None, 0.5)]
    """
    from sklearn.metrics import cohen_kappa_score  # here, since it takes a second to import

    all_sets = code_sets(first) + code_sets(second)
    levels = []
    for num_digits in (*range(1, digits + 1), None):
        sets = all_sets
        if num_digits is not None:
            sets = cut_codes(all_sets, num_digits, separator=separator)
        values, index = np.unique([" ".join(sorted(codes)) for codes in sets], return_inverse=True)
        first_index, second_index = index.reshape(2, -1)
        is_same = first_index == second_index
        kappa = None
        alpha = None
        if len(values) > 1:
            kappa = float(cohen_kappa_score(first_index, second_index))
            times = np.bincount(index)
            expected = 1 - (times * (times - 1)).sum() / (len(index) * (len(index) - 1))
            alpha = 1 - float((~is_same).mean() / expected)
        interval = share_interval(is_same, texts)
        levels.append(CodeAgreement(num_digits, len(is_same), **interval, kappa=kappa, alpha=alpha))
    return levels


def to_settle(rows: pd.DataFrame, *, digits: int = 0) -> pd.DataFrame:
    """Return the descriptions on which two coders differ, those that differ in the first digit
    first.

    `rows` has `text`, `lang`, and sets of codes `first` and `second` (see `code_sets`). Equal rows
    are one, with `times`, their number, and `digits`, how many first digits, up to those given,
    both coders have in common.
    """
    names = ["first", "second"]
    found = rows.groupby(["text", "lang", *names], sort=False).size().rename("times").reset_index()
    found = found[found["first"].map(frozenset) != found["second"].map(frozenset)]
    cut = [
        [pd.Series(cut_codes(found[name], n)).map(frozenset) for name in names]
        for n in range(1, digits + 1)
    ]
    found["digits"] = np.sum([one == other for one, other in cut], axis=0, dtype=int)
    return found.sort_values(
        ["digits", "times"], ascending=[True, False], kind="stable", ignore_index=True
    )


def scores_by_group(
    right: np.ndarray, conf: np.ndarray, texts: Sequence[str], groups: np.ndarray
) -> list[Any]:
    """Return the `n`, `share_interval`, mean `conf` and `ece` (see `calibration`) of each `group`
    of n rows.
    """
    found = []
    for group, rows in pd.Series(np.arange(len(right))).groupby(groups):
        interval = share_interval(right[rows], [texts[row] for row in rows])
        sure = {
            "conf": float(conf[rows].mean()),
            "ece": calibration(conf[rows], right[rows])["ece"],
        }
        found.append({"group": str(group), "n": len(rows), **interval, **sure})
    return found


def production_curve(
    conf: np.ndarray, right: np.ndarray, *, num_shares: int = 101
) -> dict[str, list[float | None]]:
    """Return the accuracy of what is coded automatically when the least certain rows are left to a
    person.

    `conf` and `right` are of shape (n,). Return lists of `num_shares` values: the `share` that is
    coded automatically, from 0 to 1, its `accuracy` (that to be expected where equally certain rows
    stand on both sides of the line), and the `conf` of its least certain row. The last two are None
    where no row is coded automatically.
    """
    order = np.argsort(-conf, kind="stable")
    expected = pd.Series(right.astype(float)).groupby(conf).transform("mean").to_numpy()
    cumulative = expected[order].cumsum()
    shares = np.arange(num_shares) / (num_shares - 1)
    counts = np.rint(shares * len(conf)).astype(int)
    return {
        "share": shares.tolist(),
        "accuracy": [float(cumulative[n - 1] / n) if n else None for n in counts],
        "conf": [float(conf[order[n - 1]]) if n else None for n in counts],
    }


def confusions(
    truth: Sets, predicted: Sets, texts: Sequence[str], *, limit: int = 50
) -> list[dict[str, Any]]:
    """Return the pairs of a true and a predicted code that cost most rows, at most `limit`.

    The first missed code of a row is paired with its first wrong one, and so on; `texts` are the
    rows' descriptions. A pair has `true` and `predicted` codes, None where one has no counterpart;
    `count` of rows; `of`, the rows that have the true code (None without one); and an `example`,
    the commonest description among them.
    """
    pairs: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for true, codes, text in zip(truth, predicted, texts, strict=True):
        missed, extra = (
            [code for code in one if code not in other]
            for one, other in ((true, codes), (codes, true))
        )
        for pair in itertools.zip_longest(missed, extra, fillvalue=""):
            pairs[pair][text] += 1
    totals = Counter(itertools.chain.from_iterable(truth))
    return [
        {
            "true": pair[0] or None,
            "predicted": pair[1] or None,
            "count": found.total(),
            "of": totals[pair[0]] if pair[0] else None,
            "example": next(_commonest(found))[0],
        }
        for pair, found in sorted(pairs.items(), key=lambda item: (-item[1].total(), item[0]))[
            :limit
        ]
    ]


def scores_by_code(truth: Sets, predicted: Sets) -> list[dict[str, Any]]:
    """Return how well each true code is found, the commonest first.

    Each has `code`; `n` and `predicted`, the rows that have it and those that are given it;
    `precision` (None where it is given to none), `recall` and `f1`.
    """
    both = [set(true) & set(codes) for true, codes in zip(truth, predicted, strict=True)]
    counts, given, hits = (
        Counter(itertools.chain.from_iterable(sets)) for sets in (truth, predicted, both)
    )
    return [
        {
            "code": code,
            "n": n,
            "predicted": given[code],
            "precision": hits[code] / given[code] if given[code] else None,
            "recall": hits[code] / n,
            "f1": 2 * hits[code] / (n + given[code]),
        }
        for code, n in _commonest(counts)
    ]


def mean_scores_by(scores: pd.DataFrame, groups: Any) -> dict[str, dict[str, float]]:
    """Return `mean_scores` of each group that has rows, in the groups' order."""
    return {str(name): mean_scores(part) for name, part in scores.groupby(groups, observed=True)}


def mean_scores(scores: pd.DataFrame) -> dict[str, float]:
    """Return the means of `score_sets`, and `n`, the number of rows."""
    return {"n": len(scores), **{name: float(mean) for name, mean in scores.mean().items()}}


def _commonest(counts: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield what was counted, the commonest first, equally common ones by their names."""
    yield from sorted(counts.items(), key=lambda item: (-item[1], item[0]))

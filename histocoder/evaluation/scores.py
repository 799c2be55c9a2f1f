"""Score predicted codes, as sets, against true ones.

Sets of codes are a DataFrame with the columns `row`, from 0, and `code`, and a line for each code of a row's set; see
`code_sets`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from histocoder.formatters import MISSING

_NUM_BINS = 10  # number of bins of confidence, of equal width
_SEEN_GROUPS = ("0", "1", "2-5", "6-20", "21-100", ">100")
_SEEN_EDGES = (-1, 0, 1, 5, 20, 100, np.inf)


def code_sets(codes: pd.DataFrame | np.ndarray) -> pd.DataFrame:
    """Return the sets of codes (str) of shape (n, k): a missing code counts as none, and a repeated one once.

    Examples
    --------
    >>> code_sets(np.array([["b", "a"], ["a", None]], dtype=object)).to_numpy().tolist()
    [[0, 'b'], [0, 'a'], [1, 'a']]
    """
    values = np.asarray(codes, dtype=object)
    flat = values.ravel()
    real = pd.notna(flat) & (flat != MISSING)
    rows = np.repeat(np.arange(len(values)), values.shape[1])[real]
    return pd.DataFrame({"row": rows, "code": pd.Series(flat[real], dtype=object)}).drop_duplicates(ignore_index=True)


def score_sets(truth: pd.DataFrame, predicted: pd.DataFrame, num_rows: int) -> pd.DataFrame:
    """Return the scores of each row, of shape (num_rows, 4).

    `accuracy`, whether the sets are equal; `precision`, the share of predicted codes that are true; `recall`, the share
    of true codes that are predicted; `f1`, their harmonic mean. A row without codes is right where none are predicted
    (all 1), else wrong (all 0).
    """
    hits = _count(truth.merge(predicted, on=["row", "code"]), num_rows)
    num_true, num_predicted = _count(truth, num_rows), _count(predicted, num_rows)
    neither = num_true + num_predicted == 0
    return pd.DataFrame(
        {
            "accuracy": (hits == num_true) & (hits == num_predicted),
            "precision": np.where(neither, 1.0, hits / np.maximum(num_predicted, 1)),
            "recall": np.where(neither, 1.0, hits / np.maximum(num_true, 1)),
            "f1": _f1(hits, num_true, num_predicted),
        }
    )


def cut_codes(sets: pd.DataFrame, digits: int, *, separator: str = "") -> pd.DataFrame:
    """Cut codes to their first digits, which `separator` separates; special codes, such as -1, stay whole."""

    def cut(code: str) -> str:
        if code.startswith("-"):
            return code
        return separator.join(code.split(separator)[:digits]) if separator else code[:digits]

    short = {code: cut(code) for code in sets["code"].unique()}
    return sets[["row"]].assign(code=sets["code"].map(short).astype(object)).drop_duplicates(ignore_index=True)


def seen_groups(times: pd.Series) -> pd.Series:
    """Group numbers of times: 0, 1, 2-5, 6-20, 21-100, >100."""
    return pd.cut(times, _SEEN_EDGES, labels=_SEEN_GROUPS)


def first_true_rank(truth: pd.DataFrame, ranked: np.ndarray) -> np.ndarray:
    """Return the rank, from 1, of the first true code among ranked codes of shape (n, k), the most probable first.

    Of shape (n,): inf where no true code is among them; NaN for rows without true codes.
    """
    found = code_sets(ranked)
    found["rank"] = found.groupby("row").cumcount() + 1
    first = found.merge(truth, on=["row", "code"]).groupby("row")["rank"].min()
    ranks = np.full(len(ranked), np.nan)
    ranks[truth["row"]] = np.inf
    ranks[first.index] = first
    return ranks


def top_k_accuracy(ranks: np.ndarray, *, k: int) -> dict[str, float]:
    """Return, for i from 1 to k, the share of rows with a true code among the first i, of those with true codes."""
    ranks = ranks[~np.isnan(ranks)]
    return {str(i): float((ranks <= i).mean()) if len(ranks) else 0.0 for i in range(1, k + 1)}


def calibration(conf: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Return how far confidence is from accuracy: Guo et al. (2017), On Calibration of Modern Neural Networks.

    `conf`, from 0 to 1, and `right` are of shape (n,). Return `ece`, the mean distance of confidence and accuracy over
    bins weighted by their rows; and `bins`, each with its edges `low` and `high`, `count`, and the means `conf` and
    `accuracy` (None where it is empty).
    """
    edges = np.arange(_NUM_BINS + 1) / _NUM_BINS
    bin_of_row = np.searchsorted(edges[1:-1], conf)
    found = pd.DataFrame({"count": 1, "conf": conf, "accuracy": right}).astype(float).groupby(bin_of_row).sum()
    means = found.div(found["count"], axis=0).assign(count=found["count"].astype(int)).to_dict("index")
    empty = {"count": 0, "conf": None, "accuracy": None}
    bins = [{"low": edges[i], "high": edges[i + 1], **means.get(i, empty)} for i in range(_NUM_BINS)]
    return {"ece": float((found["conf"] - found["accuracy"]).abs().sum() / len(conf)), "bins": bins}


def production_curve(conf: np.ndarray, right: np.ndarray, *, num_shares: int = 101) -> dict[str, list[float | None]]:
    """Return the accuracy of what is coded automatically when the least certain rows are left to a person.

    `conf` and `right` are of shape (n,). Return lists of `num_shares` values: the `share` that is coded automatically,
    from 0 to 1, its `accuracy` (that to be expected where equally certain rows stand on both sides of the line), and
    the `conf` of its least certain row. The last two are None where no row is coded automatically.
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
    truth: pd.DataFrame, predicted: pd.DataFrame, texts: Sequence[str], *, limit: int = 50
) -> list[dict[str, Any]]:
    """Return the pairs of a true and a predicted code that cost most rows, at most `limit`.

    The first missed code of a row is paired with its first wrong one, and so on; `texts` are the rows' descriptions. A
    pair has `true` and `predicted` codes, None where one has no counterpart; `count` of rows; `of`, the rows that have
    the true code (None without one); and an `example`, the commonest description among them.
    """
    missed, extra = _without(truth, predicted), _without(predicted, truth)
    pairs = missed.merge(extra, on=["row", "index"], how="outer", suffixes=("_true", "_predicted")).fillna("")
    pairs["example"] = np.asarray(texts, dtype=object)[pairs["row"]]
    by = ["code_true", "code_predicted"]
    counts = pairs.groupby(by)["row"].nunique().rename("count").reset_index()
    worst = counts.sort_values(["count", *by], ascending=[False, True, True]).head(limit)
    examples = worst.merge(pairs, on=by).groupby(by)["example"].agg(lambda texts: texts.mode()[0])
    totals = truth["code"].value_counts().to_dict()
    return [
        {
            "true": true or None,
            "predicted": predicted or None,
            "count": count,
            "of": totals.get(true),
            "example": examples[true, predicted],
        }
        for true, predicted, count in worst.itertuples(index=False)
    ]


def scores_by_code(truth: pd.DataFrame, predicted: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how well each true code is found, the commonest first.

    Each has `code`; `n` and `predicted`, the rows that have it and those that are given it; `precision` (None where it
    is given to none), `recall` and `f1`.
    """
    both = truth.merge(predicted, on=["row", "code"])
    counts, given, hits = (sets["code"].value_counts().to_dict() for sets in (truth, predicted, both))
    found = []
    for code, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        hit, num_given = hits.get(code, 0), given.get(code, 0)
        precision = hit / num_given if num_given else None
        scores = {"precision": precision, "recall": hit / n, "f1": 2 * hit / (n + num_given)}
        found.append({"code": code, "n": n, "predicted": num_given, **scores})
    return found


def mean_scores(scores: pd.DataFrame) -> dict[str, float]:
    """Return the means of `score_sets`, and `n`, the number of rows."""
    return {"n": len(scores), **{name: float(mean) for name, mean in scores.mean().items()}}


def mean_scores_by(scores: pd.DataFrame, groups: pd.Series) -> dict[str, dict[str, float]]:
    """Return `mean_scores` of each group that has rows, in the groups' order."""
    return {str(name): mean_scores(part) for name, part in scores.groupby(groups, observed=True)}


def _without(sets: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `sets` that are not in `others`, with their index in their row."""
    joined = sets[["row", "code"]].merge(others[["row", "code"]], how="left", indicator=True)
    left = joined.loc[joined["_merge"] == "left_only", ["row", "code"]]
    return left.assign(index=left.groupby("row").cumcount())


def _count(sets: pd.DataFrame, num_rows: int) -> np.ndarray:
    return np.bincount(sets["row"], minlength=num_rows)


def _f1(hits: np.ndarray, num_true: np.ndarray, num_predicted: np.ndarray) -> np.ndarray:
    """Return 2pr / (p + r), which with p = hits / predicted and r = hits / true is 2 hits / (predicted + true)."""
    total = num_true + num_predicted
    return np.where(total == 0, 1.0, 2 * hits / np.maximum(total, 1))

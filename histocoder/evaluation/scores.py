"""Score predicted codes, as sets, against true ones, and the codes of two coders against each
other.

A row's set of codes is a tuple of distinct codes in the order in which they were written; see
`code_sets`.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from histocoder.evaluation.metrics import (
    AttributeScores,
    Bin,
    Calibration,
    CodeAgreement,
    CodeScores,
    Confusion,
    GroupScores,
    MeanScores,
    ProductionCurve,
    ShareInterval,
)
from histocoder.formatters import MISSING
from histocoder.text.normalize import description_keys

Sets = Sequence[tuple[str, ...]]
Rows = Iterable[Iterable[str | None]]  # the codes of each row, as they are written
_NUM_BINS = 10  # of confidence, of equal width
_Z_SQUARED = 3.841459  # of a 95 % interval
_Item = TypeVar("_Item", str, tuple[str, str])


def code_sets(codes: pd.DataFrame | Rows) -> list[tuple[str, ...]]:
    """Return the sets of codes of n rows: a missing code counts as none, and a repeated one once.

    Examples
    --------
    >>> code_sets([["b", "a"], ["a", None]])
    [('b', 'a'), ('a',)]
    """
    if isinstance(codes, pd.DataFrame):
        codes = codes.to_numpy(dtype=object)
    sets = []
    for row in codes:
        present = [code for code in row if isinstance(code, str) and code != MISSING]
        sets.append(tuple(dict.fromkeys(present)))
    return sets


def score_sets(truth: Sets, predicted: Sets) -> pd.DataFrame:
    """Return the scores of each row, of shape (n, 4).

    `accuracy`, whether the sets are equal; `precision`, the share of predicted codes that are true;
    `recall`, the share of true codes that are predicted; `f1`, their harmonic mean. A row without
    codes is right where none are predicted (all 1), else wrong (all 0).
    """
    num_true = np.array(list(map(len, truth)), dtype=int)
    num_predicted = np.array(list(map(len, predicted)), dtype=int)
    hits = np.array(list(map(len, _hits(truth, predicted))), dtype=int)

    # a row without true and predicted codes misses nothing
    num_both = num_true + num_predicted
    is_blank = num_both == 0
    return pd.DataFrame(
        {
            "accuracy": (hits == num_true) & (hits == num_predicted),
            "precision": np.where(is_blank, 1.0, hits / np.maximum(num_predicted, 1)),
            "recall": np.where(is_blank, 1.0, hits / np.maximum(num_true, 1)),
            "f1": np.where(is_blank, 1.0, 2 * hits / np.maximum(num_both, 1)),
        }
    )


def _hits(truth: Sets, predicted: Sets) -> list[set[str]]:
    """Return the predicted codes of each row that are true."""
    return [set(true) & set(codes) for true, codes in zip(truth, predicted, strict=True)]


def mean_scores(scores: pd.DataFrame) -> MeanScores:
    """Return the means of `score_sets`."""
    return MeanScores(len(scores), **scores.astype(float).mean().to_dict())


def mean_scores_by(scores: pd.DataFrame, groups: Any) -> dict[str, MeanScores]:
    """Return `mean_scores` of each group that has rows, in the groups' order."""
    return {str(name): mean_scores(part) for name, part in scores.groupby(groups, observed=True)}


def attribute_scores(truth: np.ndarray, predicted: np.ndarray) -> AttributeScores:
    """Return the accuracy of categories, of shape (n,), and the mean F1 of those that are true of
    some row.

    Examples
    --------
    >>> attribute_scores(np.array(["", "", "", "21"]), np.array(["", "", "", ""])).accuracy
    0.75
    """
    from sklearn.metrics import f1_score  # here, since it takes a second to import

    f1 = f1_score(truth, predicted, labels=np.unique(truth), average="macro", zero_division=0)
    return AttributeScores(accuracy=float((truth == predicted).mean()), macro_f1=float(f1))


def cut_codes(sets: Sets, digits: int, *, separator: str = "") -> list[tuple[str, ...]]:
    """Cut codes to their first digits, which `separator` separates; special codes, such as -1, stay
    whole.
    """

    def cut(code: str) -> str:
        if code.startswith("-"):
            return code
        if not separator:
            return code[:digits]
        return separator.join(code.split(separator)[:digits])

    return [tuple(dict.fromkeys(map(cut, codes))) for codes in sets]


def first_true_rank(truth: Sets, ranked: np.ndarray) -> np.ndarray:
    """Return the rank, from 1, of the first true code among ranked codes of shape (n, k), the most
    probable first.

    Of shape (n,): inf where no true code is among them; NaN for rows without true codes.
    """
    ranks = np.full(len(truth), np.inf)
    for row, true in enumerate(truth):
        if not true:
            ranks[row] = np.nan
        for rank, code in enumerate(ranked[row], start=1):
            if code in true:
                ranks[row] = rank
                break
    return ranks


def top_k_accuracy(ranks: np.ndarray, *, k: int) -> dict[str, float]:
    """Return, for i from 1 to k, the share of rows with a true code among the first i, of those
    with true codes.
    """
    ranks = ranks[~np.isnan(ranks)]
    return {str(i): float((ranks <= i).sum() / max(len(ranks), 1)) for i in range(1, k + 1)}


def calibration(conf: np.ndarray, right: np.ndarray) -> Calibration:
    """Return how far confidence is from accuracy: Guo et al. (2017), On Calibration of Modern
    Neural Networks.

    `conf`, from 0 to 1, and `right` are of shape (n,). The expected calibration error is the mean
    distance of confidence and accuracy over bins weighted by their rows.
    """
    edges = np.arange(_NUM_BINS + 1) / _NUM_BINS
    bin_of_row = np.searchsorted(edges[1:-1], conf)
    counts = np.bincount(bin_of_row, minlength=_NUM_BINS)
    conf_sums = np.bincount(bin_of_row, weights=conf, minlength=_NUM_BINS)
    right_sums = np.bincount(bin_of_row, weights=right, minlength=_NUM_BINS)

    # a bin without rows has no means
    bins = []
    for i, count in enumerate(counts.tolist()):
        row = Bin(float(edges[i]), float(edges[i + 1]), count, conf=None, accuracy=None)
        if count:
            row.conf = float(conf_sums[i] / count)
            row.accuracy = float(right_sums[i] / count)
        bins.append(row)
    return Calibration(float(np.abs(conf_sums - right_sums).sum() / len(conf)), bins)


def share_interval(right: np.ndarray, texts: Sequence[str]) -> ShareInterval:
    """Return the share of n rows that are right, and its 95 % interval, Wilson's (1927).

    Rows of one description tell as much as one: the number of rows is Kish's (1965) effective one.
    """
    share = float(np.mean(right))
    counts = pd.Series(description_keys(texts)).value_counts().to_numpy(dtype=float)

    # z squared divided by the effective number of rows, sum(counts)^2 / sum(counts^2)
    z2_by_n = _Z_SQUARED * (counts**2).sum() / counts.sum() ** 2
    half_width = np.sqrt(z2_by_n * (share * (1 - share) + z2_by_n / 4))
    low = (share + z2_by_n / 2 - half_width) / (1 + z2_by_n)
    high = (share + z2_by_n / 2 + half_width) / (1 + z2_by_n)
    return ShareInterval(share, low=max(float(low), 0.0), high=min(float(high), 1.0))


def agreement(
    first: Rows, second: Rows, texts: Sequence[str], *, digits: int = 0, separator: str = ""
) -> list[CodeAgreement]:
    """Compare the sets of codes that two coders gave n descriptions, `texts`: by each number of
    first digits up to `digits` (see `cut_codes`), and by whole codes.

    Examples
    --------
    >>> levels = agreement([["61110"], ["77610"]], [["61110"], ["77120"]], ["farmer", "baker"], digits=2)
    >>> [(level.digits, level.share) for level in levels]
    [(1, 1.0), (2, 1.0), (None, 0.5)]
    """
    from sklearn.metrics import cohen_kappa_score  # here, since it takes a second to import

    # the first coder's sets, then the second's
    all_sets = code_sets(first) + code_sets(second)
    levels = []
    depths = (*range(1, digits + 1), None)  # None: whole codes
    for num_digits in depths:
        sets = all_sets
        if num_digits is not None:
            sets = cut_codes(all_sets, num_digits, separator=separator)
        values, index = np.unique(["\0".join(sorted(codes)) for codes in sets], return_inverse=True)

        # each set is a category of its own
        first_index, second_index = index.reshape(2, -1)
        is_same = first_index == second_index
        interval = share_interval(is_same, texts)
        level = CodeAgreement(num_digits, len(is_same), **vars(interval), kappa=None, alpha=None)
        if len(values) > 1:
            level.kappa = float(cohen_kappa_score(first_index, second_index))

            # how often two sets that are drawn from those of both coders are equal
            counts = np.bincount(index)
            chance = (counts * (counts - 1)).sum() / (len(index) * (len(index) - 1))
            level.alpha = 1 - float((~is_same).mean() / (1 - chance))
        levels.append(level)
    return levels


def to_settle(rows: pd.DataFrame, *, digits: int = 0) -> pd.DataFrame:
    """Return the descriptions on which two coders differ, those that differ in the first digit
    first.

    `rows` has `text`, `lang`, and sets of codes `first` and `second` (see `code_sets`). Equal rows
    are one, with `times`, their number, and `digits`, how many first digits, up to those given,
    both coders have in common.
    """
    groups = rows.groupby(["text", "lang", "first", "second"], sort=False)
    table = groups.size().rename("times").reset_index()
    table = table[table["first"].map(frozenset) != table["second"].map(frozenset)]

    # the more digits they have in common, the less the difference matters
    table["digits"] = 0
    for number in range(1, digits + 1):
        first = cut_codes(table["first"], number)
        second = cut_codes(table["second"], number)
        table["digits"] += [set(a) == set(b) for a, b in zip(first, second, strict=True)]
    return table.sort_values(
        ["digits", "times"], ascending=[True, False], kind="stable", ignore_index=True
    )


def scores_by_group(
    right: np.ndarray, conf: np.ndarray, texts: Sequence[str], groups: np.ndarray
) -> list[GroupScores]:
    """Return the scores of each group of n rows."""
    texts_array = np.array(texts, dtype=object)
    scores = []
    for group, rows in pd.Series(np.arange(len(right))).groupby(groups):
        interval = share_interval(right[rows], texts_array[rows].tolist())
        mean_conf = float(conf[rows].mean())
        ece = calibration(conf[rows], right[rows]).ece
        scores.append(GroupScores(str(group), len(rows), **vars(interval), conf=mean_conf, ece=ece))
    return scores


def production_curve(
    conf: np.ndarray, right: np.ndarray, *, num_shares: int = 101
) -> ProductionCurve:
    """Return the accuracy of what is coded automatically when the least certain rows are left to a
    person.

    `conf` and `right` are of shape (n,). Each field has `num_shares` values: the share that is
    coded automatically, from 0 to 1, its accuracy (that to be expected where equally certain rows
    stand on both sides of the line), and the confidence of its least certain row. The last two are
    None where no row is coded automatically.
    """
    # equally certain rows have no order: each is as right as they are on average
    order = np.argsort(-conf, kind="stable")
    expected_right = pd.Series(right.astype(float)).groupby(conf).transform("mean").to_numpy()
    num_right = expected_right[order].cumsum()  # among the rows up to each, the most certain first
    curve = ProductionCurve(share=[], accuracy=[], conf=[])
    for share in np.arange(num_shares) / (num_shares - 1):
        num_coded = int(np.rint(share * len(conf)))
        curve.share.append(float(share))
        if num_coded:
            curve.accuracy.append(float(num_right[num_coded - 1] / num_coded))
            curve.conf.append(float(conf[order[num_coded - 1]]))
        else:
            curve.accuracy.append(None)
            curve.conf.append(None)
    return curve


def confusions(
    truth: Sets, predicted: Sets, texts: Sequence[str], *, limit: int = 50
) -> list[Confusion]:
    """Return the pairs of a true and a predicted code that cost most rows, at most `limit`.

    The first missed code of a row is paired with its first wrong one, and so on; `texts` are the
    rows' descriptions.
    """
    counts: Counter[tuple[str, str]] = Counter()
    texts_of: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for true, codes, text in zip(truth, predicted, texts, strict=True):
        missed = [code for code in true if code not in codes]
        wrong = [code for code in codes if code not in true]
        for pair in itertools.zip_longest(missed, wrong, fillvalue=""):
            counts[pair] += 1
            texts_of[pair][text] += 1

    # the pairs that cost most, each with the commonest of its descriptions
    num_true = Counter(itertools.chain.from_iterable(truth))
    worst = []
    for pair, count in _commonest(counts)[:limit]:
        true_code, predicted_code = pair
        example, _ = _commonest(texts_of[pair])[0]
        num_rows = num_true[true_code] or None
        worst.append(Confusion(true_code or None, predicted_code or None, count, num_rows, example))
    return worst


def scores_by_code(truth: Sets, predicted: Sets) -> list[CodeScores]:
    """Return how well each true code is found, the commonest first."""
    num_true = Counter(itertools.chain.from_iterable(truth))
    num_predicted = Counter(itertools.chain.from_iterable(predicted))
    num_hits = Counter(itertools.chain.from_iterable(_hits(truth, predicted)))
    scores = []
    for code, n in _commonest(num_true):
        hits = num_hits[code]
        times_predicted = num_predicted[code]
        precision = None
        if times_predicted:
            precision = hits / times_predicted
        f1 = 2 * hits / (n + times_predicted)
        scores.append(CodeScores(code, n, times_predicted, precision, recall=hits / n, f1=f1))
    return scores


def _commonest(counts: Counter[_Item]) -> list[tuple[_Item, int]]:
    """Return what was counted, the commonest first, equally common ones by their names."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

"""The figures of an evaluation, as `metrics.json` has them.

Fields that are None by default are not in the file while they are.
"""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any


@dataclass
class MeanScores:
    """Means of `scores.score_sets` over n rows."""

    n: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    conf: float | None = None


@dataclass
class Bin:
    """Rows whose confidence lies in an interval."""

    low: float
    high: float
    count: int
    # mean; None where there are no rows
    conf: float | None
    accuracy: float | None


@dataclass
class Calibration:
    """Distance of confidence from accuracy; see `scores.calibration`."""

    # expected calibration error
    ece: float
    bins: list[Bin]


@dataclass
class ProductionCurve:
    """Accuracy of what is coded automatically; see `scores.production_curve`."""

    # that is coded automatically
    share: list[float]
    accuracy: list[float | None]
    # of the least certain row
    conf: list[float | None]


@dataclass
class AnswerMetrics:
    """Scores of a model's answers in its own mode, of all rows and of groups by their names."""

    overall: MeanScores
    by_language: dict[str, MeanScores]
    by_num_codes: dict[str, MeanScores]
    # number of first digits that are compared -> scores
    by_digits: dict[str, MeanScores]
    calibration: Calibration
    # with each description once
    production: ProductionCurve
    # by how often the rarest code, and the description, occur in the training data
    by_code_seen: dict[str, MeanScores] | None = None
    by_text_seen: dict[str, MeanScores] | None = None


@dataclass
class TopK:
    """Shares of rows with a true code among the k most probable, by k."""

    overall: dict[str, float]
    by_language: dict[str, dict[str, float]]


@dataclass
class Confusion:
    """A true and a predicted code, None where one has no counterpart."""

    true: str | None
    predicted: str | None
    # number of rows
    count: int
    # number of rows that have the true code
    of: int | None
    # commonest description among them
    example: str


@dataclass
class CodeScores:
    """Scores of one code."""

    code: str
    # number of rows that have it
    n: int
    # number of rows that are given it
    predicted: int
    # None where it is given to none
    precision: float | None
    recall: float
    f1: float


@dataclass
class ShareInterval:
    """A share, and its 95 % interval."""

    share: float
    low: float
    high: float


@dataclass
class GroupScores:
    """Share of n rows of a group that are right with its 95 % interval, and their confidence."""

    group: str
    n: int
    share: float
    low: float
    high: float
    # mean
    conf: float
    ece: float


@dataclass
class CodeAgreement:
    """Agreement of two coders in the first digits of their codes, or in whole codes."""

    # number of first digits; None: whole codes
    digits: int | None
    # number of descriptions
    n: int
    # share that agree, and its 95 % interval
    share: float
    low: float
    high: float
    # Cohen's (1960); None where there is one set of codes alone
    kappa: float | None
    # Krippendorff's (2011), nominal; None as kappa
    alpha: float | None


@dataclass
class AttributeScores:
    """Accuracy of the categories of an attribute, and their mean F1."""

    accuracy: float
    macro_f1: float


@dataclass
class AttributeMetrics:
    """Scores of n rows that state an attribute: of the model, of always none, of a linear model."""

    n: int
    categories: int
    model: AttributeScores
    none: AttributeScores
    svc: AttributeScores | None = None


@dataclass
class Shares:
    """Shares of rows and of distinct descriptions that are right."""

    rows: float
    texts: float


@dataclass
class Difference:
    """Difference of two shares with its 95 % interval, None where there are too few
    descriptions.
    """

    mean: float
    low: float | None
    high: float | None


@dataclass
class Differences:
    """Differences of shares of rows and of distinct descriptions."""

    rows: Difference
    texts: Difference


@dataclass
class MethodScores(Shares):
    """Shares of a simple method that are right, and the model's lead over it."""

    difference: Differences


@dataclass
class ExactMatchScores(MethodScores):
    """Scores of exact match."""

    # share of rows that it answers
    answered: float
    # share of these that are right
    answered_right: float | None


@dataclass
class BaselineMetrics:
    """Comparison of the model with simple methods."""

    model: Shares
    exact_match: ExactMatchScores
    svc: MethodScores | None = None
    # why there is no linear model
    notice: str | None = None


@dataclass
class ModelComparison:
    """Comparison of two models on the same rows."""

    first: Shares
    second: Shares
    # second - first
    difference: Differences


@dataclass
class Gain:
    """Comparison of a model before and after it was trained on corrections."""

    num_rows: int
    before: Shares
    after: Shares
    difference: Differences


@dataclass
class CorrectionMetrics:
    """Gain from corrections, on validation data and on corrections that were held out."""

    # whether the model before was trained on validation data
    before_has_seen: bool
    validation: Gain
    held_out: Gain | None = None


@dataclass
class SeenMetrics:
    """Accuracy on validation rows whose descriptions the model was trained on."""

    num_rows: int
    accuracy: float
    # whether the other figures are without them
    left_out: bool


@dataclass
class EvaluationMetrics:
    """All figures of an evaluation."""

    num_rows: int
    # number of distinct descriptions
    num_texts: int
    # number of rows with a true code that the model does not know
    num_true_outside_key: int
    # number of rows for which the decoder wrote a code outside its key
    num_outside_key: int
    mode: str
    answer: AnswerMetrics
    topk: TopK
    confusions: list[Confusion]
    attributes: dict[str, AttributeMetrics]
    by_code: list[CodeScores]
    # name of a column -> groups
    by_group: dict[str, list[GroupScores]]
    baselines: BaselineMetrics | None = None
    corrections: CorrectionMetrics | None = None
    seen: SeenMetrics | None = None


def as_json(value: Any) -> Any:
    """Return metrics, or a part of them, as plain values for JSON."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if not is_dataclass(value):
        return value
    plain = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if content is not None or field.default is MISSING:
            plain[field.name] = as_json(content)
    return plain

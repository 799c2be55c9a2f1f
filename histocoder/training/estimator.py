"""An estimator with scikit-learn's conventions, for its pipelines, searches and
cross-validation.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, column_or_1d

from histocoder.config import AUTO, FinetuneConfig
from histocoder.data.key import Key, write_key
from histocoder.formatters import MISSING
from histocoder.inference.coder import Coder
from histocoder.log import sending_lines
from histocoder.text.characters import is_blank
from histocoder.training.train import train


class OccupationClassifier(ClassifierMixin, BaseEstimator):
    """Give each description one of the codes that it was fitted on; `finetune.py` learns several
    codes a row.

    X holds descriptions, none of them blank, of shape (n,), or with their languages, or None for
    unknown, (n, 2).

    Parameters
    ----------
    encoder, language : str
        As `--encoder` and `--language` in docs/configuration.md; a column of languages overrides
        `language`.
    settings : mapping, optional
        Further fields of `FinetuneConfig`, such as ``{"num_epochs": 10, "device": "cpu"}``.
    random_state : int, RandomState or None
        Determines the seed; an int makes results reproducible.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The distinct codes, sorted, of the type of y.
    coder_ : Coder
        The fitted model; `coder_.save_pretrained(folder)` writes it for the `histocoder` commands.
    """

    def __init__(
        self,
        encoder: str = AUTO,
        *,
        language: str = "unk",
        settings: Any = None,
        random_state: Any = None,
    ) -> None:
        self.encoder, self.language, self.settings, self.random_state = (
            encoder,
            language,
            settings,
            random_state,
        )

    def fit(self, X: Any, y: Any) -> "OccupationClassifier":
        """Train on descriptions and their codes y (n,); raise a ValueError that says why if they
        can't be used.
        """
        columns, codes = _columns(X), column_or_1d(y, warn=True)
        if pd.isna(codes).any():
            raise ValueError(
                f"y has no code in row {pd.isna(codes).argmax()}; leave such rows out."
            )
        check_classification_targets(codes)
        self.classes_, classes = np.unique(codes, return_inverse=True)
        labels = tuple(map(str, self.classes_.tolist()))
        if len(labels) < 2 or {"", MISSING} & {*map(str.strip, labels)}:
            raise ValueError(
                "y holds one class alone, or blank codes; it needs two codes or more, and "
                "no '' or '?'."
            )
        settings = {
            "no_report": True,
            "allow_codes_shorter_than_block_size": True,
            **(self.settings or {}),
        }
        settings |= {"language_col": "lang"} if "lang" in columns else {"language": self.language}
        settings["seed"] = int(check_random_state(self.random_state).randint(2**31))
        with TemporaryDirectory() as folder:
            table, key, run = (
                str(Path(folder, name)) for name in ("table.parquet", "key.csv", "run")
            )
            pq.write_table(pa.table({**columns, "code": [labels[i] for i in classes]}), table)
            write_key(Path(key), Key(labels))  # the model's classes have the order of classes_
            with sending_lines(lambda _: None):
                train(
                    FinetuneConfig(
                        table, ("code",), key=key, save_path=run, encoder=self.encoder, **settings
                    )
                )
            self.coder_ = Coder.from_pretrained(f"{run}/best", self._device())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities of shape (n, n_classes); 0 except of the nine codes or fewer that
        were weighed.
        """
        check_is_fitted(self)
        columns = _columns(X)
        ranked = self.coder_.predict_ranked(columns["occ1"], columns.get("lang", self.language))[1]
        places = {code: i for i, code in enumerate(self.coder_.codes)}
        rows, ranks = ranked.codes.nonzero()
        probabilities = np.zeros((len(ranked.codes), len(self.classes_)))
        probabilities[rows, [places[code] for code in ranked.codes[rows, ranks]]] = ranked.probs[
            rows, ranks
        ]
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable code of each description, of shape (n,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "coder_" in state:  # as files, which open on machines without this one's devices, too
            with TemporaryDirectory() as folder:
                self.coder_.save_pretrained(model := Path(folder, "model"))
                state["coder_"] = {
                    p.relative_to(model).as_posix(): p.read_bytes() for p in model.rglob("*.*")
                }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "coder_" in state:
            with TemporaryDirectory() as folder:
                for name, content in state["coder_"].items():
                    Path(folder, name).parent.mkdir(exist_ok=True)
                    Path(folder, name).write_bytes(content)
                self.coder_ = Coder.from_pretrained(folder, self._device())

    def _device(self) -> str | None:
        """Return the CPU if the settings name it; else None, which is a GPU where there is one."""
        return "cpu" if (self.settings or {}).get("device") == "cpu" else None


def _columns(X: Any) -> dict[str, list[str]]:
    """Return the descriptions of X, and their languages if it has them."""
    cells = np.column_stack([np.asarray(X, dtype=object)])
    if cells.ndim != 2 or cells.shape[1] not in (1, 2):
        raise ValueError(
            "X must hold descriptions, of shape (n,), or with their languages, of shape (n, 2)."
        )
    for row, text in enumerate(cells[:, 0]):
        if not isinstance(text, str) or is_blank(text):
            raise ValueError(
                f"X has no description in row {row}, but {text!r}; leave such rows out."
            )
    cells[pd.isna(cells)] = "unk"
    return dict(zip(("occ1", "lang"), cells.T.tolist(), strict=False))

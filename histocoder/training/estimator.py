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
from histocoder.text.normalize import is_blank_description
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
        self.encoder = encoder
        self.language = language
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "OccupationClassifier":
        """Train on descriptions and their codes y (n,); raise a ValueError that says why if they
        can't be used.
        """
        columns = _columns(X)
        codes = column_or_1d(y, warn=True)
        if pd.isna(codes).any():
            raise ValueError(
                f"y has no code in row {pd.isna(codes).argmax()}; leave such rows out."
            )
        check_classification_targets(codes)

        # the model's codes are texts, whatever the type of y
        self.classes_, class_ids = np.unique(codes, return_inverse=True)
        labels = tuple(map(str, self.classes_.tolist()))
        if len(labels) < 2 or any(label.strip() in ("", MISSING) for label in labels):
            raise ValueError(
                "y holds one class alone, or blank codes; it needs two codes or more, and "
                "no '' or '?'."
            )

        # what the constructor's own parameters say wins over `settings`
        settings: dict[str, Any] = {"no_report": True, "allow_codes_shorter_than_block_size": True}
        settings.update(self.settings or {})
        if "lang" in columns:
            settings["language_col"] = "lang"
        else:
            settings["language"] = self.language
        settings["seed"] = int(check_random_state(self.random_state).randint(2**31))

        # a run on files, of which only the best model is kept
        with TemporaryDirectory() as name:
            folder = Path(name)
            columns["code"] = [labels[i] for i in class_ids]
            pq.write_table(pa.table(columns), folder / "table.parquet")
            # the model's classes have the order of classes_
            write_key(folder / "key.csv", Key(labels))
            config = FinetuneConfig(
                str(folder / "table.parquet"),
                ("code",),
                key=str(folder / "key.csv"),
                save_path=str(folder / "run"),
                encoder=self.encoder,
                **settings,
            )
            with sending_lines(lambda _: None):
                train(config)
            self.coder_ = Coder.from_pretrained(folder / "run" / "best", self._device())
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities of shape (n, n_classes); 0 except of the nine codes or fewer that
        were weighed.
        """
        check_is_fitted(self)
        columns = _columns(X)

        # the codes that were weighed, in the order of their probabilities
        langs = columns.get("lang", self.language)
        _, ranked = self.coder_.predict_ranked(columns["occ1"], langs)

        # classes_ has the order of the model's codes
        column_of_code = {code: i for i, code in enumerate(self.coder_.codes)}
        rows, ranks = ranked.codes.nonzero()
        class_ids = [column_of_code[code] for code in ranked.codes[rows, ranks]]
        probabilities = np.zeros((len(ranked.codes), len(self.classes_)))
        probabilities[rows, class_ids] = ranked.probs[rows, ranks]
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable code of each description, of shape (n,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "coder_" not in state:
            return state
        # as files, which open on machines without this one's devices, too
        content = {}
        with TemporaryDirectory() as name:
            folder = Path(name, "model")
            self.coder_.save_pretrained(folder)
            for path in folder.rglob("*.*"):
                content[path.relative_to(folder).as_posix()] = path.read_bytes()
        state["coder_"] = content
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "coder_" not in state:
            return
        with TemporaryDirectory() as folder:
            for name, content in state["coder_"].items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            self.coder_ = Coder.from_pretrained(folder, self._device())

    def _device(self) -> str | None:
        """Return the CPU if the settings name it; else None, which is a GPU where there is one."""
        return "cpu" if (self.settings or {}).get("device") == "cpu" else None


def _columns(X: Any) -> dict[str, list[str]]:
    """Return the descriptions of X, and their languages if it has them."""
    # arrays of one dimension become one column
    cells = np.column_stack([np.asarray(X, dtype=object)])
    if cells.ndim != 2 or cells.shape[1] not in (1, 2):
        raise ValueError(
            "X must hold descriptions, of shape (n,), or with their languages, of shape (n, 2)."
        )
    for row, text in enumerate(cells[:, 0]):
        if not isinstance(text, str) or is_blank_description(text):
            raise ValueError(
                f"X has no description in row {row}, but {text!r}; leave such rows out."
            )

    # languages alone may be missing
    cells[pd.isna(cells)] = "unk"
    return dict(zip(("occ1", "lang"), cells.T.tolist(), strict=False))

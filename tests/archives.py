"""Tables, and files of descriptions that are to be coded."""

from pathlib import Path
from typing import Any

import pandas as pd

from histocoder.checkpoints.model_files import load_model
from histocoder.config import PredictConfig
from histocoder.inference.coder import Coder
from histocoder.inference.predict_file import predict_file
from histocoder.tables.table import Table, open_table

TEXTS = [
    "farmer",
    "baker, retired",
    'the "old" smith',
    "",
    "væver\nog husmand",
    "shoe maker",
    "nan",
]


def read_table(path: Path, columns: list[str]) -> Table:
    """Some columns of a table, at once."""
    return open_table(path, columns).read(columns)


def write_archive(path: Path, rows: int) -> pd.DataFrame:
    """A file of `rows` rows, most of their descriptions distinct, every seventh missing."""
    texts = [TEXTS[i % 7] and f"{TEXTS[i % 7]} {i % (rows // 3 + 1)}" for i in range(rows)]
    cells = [
        (f"{i:05}", text, ("da", "en")[i % 2], ("", "x")[i % 2]) for i, text in enumerate(texts)
    ]
    frame = pd.DataFrame(cells, columns=["id", "occ1", "lang", "prob_note"])
    frame.to_csv(path, index=False)
    return frame


def config(source: Path, output: Path, /, **changes: Any) -> PredictConfig:
    return PredictConfig(
        **{"input": str(source), "output": str(output), "language_col": "lang", **changes}
    )


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def code(
    model: Path, source: Path, output: Path, /, *, block_rows: int = 40, **changes: Any
) -> None:
    coder = Coder(load_model(model), "cpu")
    predict_file(
        coder,
        config(source, output, **changes),
        model_id="m",
        block_rows=block_rows,
        say=lambda _: None,
    )

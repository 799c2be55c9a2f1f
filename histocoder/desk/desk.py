"""Puts a desk together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
from histocoder.checkpoints.run_folder import METRICS_FILE
from histocoder.data.prepare import TRAIN_FILE
from histocoder.desk.cards import add_cards
from histocoder.desk.coding import CodingDesk
from histocoder.desk.files import Files
from histocoder.desk.improve import Improve
from histocoder.desk.routes import Desk
from histocoder.desk.store import Store
from histocoder.desk.turns import Turns
from histocoder.files import make_folder, sha256
from histocoder.inference.coder import Coder


def open_desk(
    coder: Coder,
    folder: Path,
    *,
    model: str,
    model_folder: Path,
    run: Path,
    may_train: bool = False,
    data: Path | None = None,
    input_col: str | None = None,
    language_col: str | None = None,
    say: Callable[[str], None] = print,
) -> Desk:
    """Open a desk, with what was kept in its folder.

    Parameters
    ----------
    coder : Coder
    folder : Path
        The desk's own.
    model : str
        As the user named it.
    model_folder, run : Path
        Of the model's files, and of the run that it comes from.
    may_train : bool
        See `Improve`.
    data : Path, optional
        A coded file to review.
    input_col, language_col : str, optional
        Its columns of descriptions and languages.
    say : callable
        Receives each notice to the user.

    Raises
    ------
    UserError
        If the coded file can't be used.
    """
    make_folder(folder / "files")
    model_id = f"{sha256(model_folder / WEIGHTS_FILE)} {sha256(model_folder / CONFIG_FILE)} {coder.precision}"
    coding = CodingDesk(
        coder, Turns(), training_data=run / TRAIN_FILE, cache=folder / "neighbours.npz", model_id=model_id
    )
    store = Store(folder / "desk.sqlite", calibration=_calibration(run))
    target_cols = coder.model.config.target_cols
    improve = Improve(store, folder, model=model, run=run, target_cols=target_cols, may_train=may_train)
    text_col = input_col or improve.settings.get("input_col")
    lang_col = language_col or improve.settings.get("language_col")
    files = Files(folder / "files", store, coding, input_col=text_col, language_col=lang_col)
    source = None
    if data is not None:
        source = add_cards(
            data, data.name, store, coding, input_col=text_col or "occ1", language_col=language_col, say=say
        )
    return Desk(model, coding, store, files, improve, source)


def _calibration(run: Path) -> list[dict[str, Any]]:
    """Return what a run's report says of confidence and accuracy; nothing where there is no report."""
    try:
        return json.loads((run / METRICS_FILE).read_text(encoding="utf-8"))["answer"]["calibration"]["bins"]
    except (OSError, ValueError, KeyError):
        return []

"""Put a desk together."""

from dataclasses import dataclass
from pathlib import Path

from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE
from histocoder.data.prepare import TRAIN_FILE
from histocoder.desk.coding import CodingDesk
from histocoder.desk.files import Files
from histocoder.desk.improve import Improve
from histocoder.desk.store import Store
from histocoder.evaluation.review import Columns
from histocoder.files import make_folder, sha256
from histocoder.inference.coder import Coder


@dataclass(frozen=True)
class Desk:
    """Parts of a desk."""

    name: str  # of the model, as the page shows it
    coding: CodingDesk
    store: Store
    files: Files
    improve: Improve
    source: int | None  # source of the cards that the server was started with


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
) -> Desk:
    """Open a desk, with the decisions and files that its folder holds.

    Parameters
    ----------
    model : str
        Name of the model as the user gave it.
    model_folder, run : Path
        Folders of the model's files, and of the run that it comes from.
    may_train : bool
        Whether the server may start a training.
    data : Path, optional
        Coded file to review, with the columns `input_col` and `language_col`.
    """
    make_folder(folder / "files")
    model_id = f"{sha256(model_folder / WEIGHTS_FILE)} {sha256(model_folder / CONFIG_FILE)} {coder.precision}"
    coding = CodingDesk(coder, training_data=run / TRAIN_FILE, folder=folder, model_id=model_id)
    store = Store(folder / "desk.sqlite")
    target_cols = coder.model.config.target_cols
    improve = Improve(store, folder, model=model, run=run, target_cols=target_cols, may_train=may_train)
    text_col = input_col or improve.settings.get("input_col")
    lang_col = language_col or improve.settings.get("language_col")
    files = Files(folder / "files", store, coding, input_col=text_col, language_col=lang_col)
    source = None
    if data is not None:
        source = store.add_source(data, data.name, Columns(text_col or "occ1", language_col, target_cols))
    name = run.name if Path(model).exists() else model
    return Desk(name, coding, store, files, improve, source)

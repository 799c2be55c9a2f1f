"""The parts of a desk, put together."""

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


class Desk:
    """A desk, with the decisions and files that its folder holds.

    Parameters
    ----------
    coder : Coder
    folder : Path
    model : str
        Name of the model as the user gave it.
    model_folder, run : Path
        Folders of the model's files, and of the run that it comes from.
    may_train : bool
        Whether the server may start a training.
    data : Path, optional
        Coded file to review, with the columns `input_col` and `language_col`.
    """

    def __init__(
        self,
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
    ) -> None:
        make_folder(folder / "files")
        self.name = run.name if Path(model).exists() else model  # as the page shows it
        model_id = f"{sha256(model_folder / WEIGHTS_FILE)} {sha256(model_folder / CONFIG_FILE)} {coder.precision}"
        self.coding = CodingDesk(coder, training_data=run / TRAIN_FILE, folder=folder, model_id=model_id)
        self.store = Store(folder / "desk.sqlite")
        columns = coder.model.config.target_cols
        self.improve = Improve(self.store, folder, model=model, run=run, target_cols=columns, may_train=may_train)
        text_col = input_col or self.improve.settings.get("input_col")
        lang_col = language_col or self.improve.settings.get("language_col")
        self.files = Files(folder / "files", self.store, self.coding, input_col=text_col, language_col=lang_col)
        self.source = None  # source of the cards that the server was started with
        if data is not None:
            self.source = self.store.add_source(data, data.name, Columns(text_col or "occ1", language_col, columns))

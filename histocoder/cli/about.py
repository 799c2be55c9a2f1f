"""`histocoder about`: what a model has learned from, and how right it is."""

from histocoder.checkpoints.model_files import CARD_FILE, local_folder
from histocoder.cli.flags import AboutFlags
from histocoder.errors import UserError
from histocoder.log import log


def run_about(config: AboutFlags) -> None:
    """Print a model's card, without what is for the hub alone."""
    folder = local_folder(config.model)
    path = folder / CARD_FILE
    if not path.is_file():
        raise UserError(f"{folder} has no model card ({CARD_FILE}).")
    card = path.read_text(encoding="utf-8")
    _, _, text = card.removeprefix("---\n").partition("\n---\n")
    log.info((text or card).strip())

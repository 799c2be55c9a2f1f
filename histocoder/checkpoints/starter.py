"""The model in the box, which the wheel contains: it codes where no model is named."""

import json
from functools import cache
from pathlib import Path

from histocoder.errors import UserError
from histocoder.log import log

BOX = "box"
"""The name of the model in the box, as `--model` takes it."""
STARTER_COLUMNS = ("hisco_1", "hisco_2")
"""The columns of its codes."""
STARTER = Path(__file__).parents[1] / "starter"
ABOUT_FILE = "about.json"


def starter_folder() -> Path:
    """Return the folder of the model in the box, and say once in a process which model that is."""
    _announce(in_the_box())
    return STARTER


def in_the_box() -> str:
    """Return the version of the model in the box, and when it was made, in words.

    Raises a UserError if this installation has none.
    """
    try:
        about = json.loads((STARTER / ABOUT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            "This installation has no model in the box. Install histocoder again, or name a model "
            "with --model."
        ) from error
    return f"the model in the box, version {about['version']}, made {about['made']}"


@cache
def _announce(name: str) -> None:
    log.warning(f"This is {name}; see `histocoder about`.")

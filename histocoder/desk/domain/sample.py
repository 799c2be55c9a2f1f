"""Tables to begin with, of the titles that histocoder has."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pandas as pd

from histocoder.formatters.classifications import HISCO_TITLES

_LANGUAGES = ("en", "da", "nl", "se")
_PLACES = ("Northfield", "Westwick", "Southbury", "Easton")
_YEARS = (1851, 1861, 1871, 1881)
_NUM_ROWS_TO_CODE = 600
_SHARE_TO_CODE = 0.1  # of the titles
TITLES = "hisco_titles.csv"  # the table of all titles


def titles() -> pd.DataFrame:
    """Return all titles of codes, with their languages, as a coded table."""
    return pd.read_csv(HISCO_TITLES, dtype=str).rename(
        columns={"title": "occ1", "hisco": "hisco_1"}
    )


def sample_tables() -> Iterator[tuple[str, Literal["train", "code"], pd.DataFrame]]:
    """Yield name, use and rows of two tables: coded titles to train on; and other titles, as in a
    census, to code.
    """
    table = titles()
    table = table[table["lang"].isin(_LANGUAGES)]
    rng = np.random.default_rng(0)
    is_to_code = rng.random(len(table)) < _SHARE_TO_CODE
    yield "sample_coded.csv", "train", table[~is_to_code].sample(frac=1, random_state=0)

    # few titles are frequent and many are rare, as in a census
    english = table[is_to_code & (table["lang"] == "en")].sample(frac=1, random_state=0)
    shares = 1 / np.arange(2, len(english) + 2)
    drawn = rng.choice(len(english), _NUM_ROWS_TO_CODE, p=shares / shares.sum())
    rows = pd.DataFrame({"id": np.arange(1, _NUM_ROWS_TO_CODE + 1)})
    rows["occ1"] = english["occ1"].to_numpy()[drawn]
    rows["age"] = rng.integers(14, 80, len(rows))
    rows["year"] = rng.choice(_YEARS, len(rows))
    rows["place"] = rng.choice(_PLACES, len(rows))
    yield "sample_census.csv", "code", rows

"""Tables to begin with, of the titles that histocoder has."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pandas as pd

from histocoder.formatters.classifications import HISCO_TITLES

_LANGUAGES = ("en", "da", "nl", "se")
_ROWS, _SHARE_TO_CODE, _PLACES = 600, 0.1, ("Northfield", "Westwick", "Southbury", "Easton")
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
    coded = titles()
    coded = coded[coded["lang"].isin(_LANGUAGES)]
    rng = np.random.default_rng(0)
    is_kept = rng.random(len(coded)) < _SHARE_TO_CODE
    yield "sample_coded.csv", "train", coded[~is_kept].sample(frac=1, random_state=0)
    others = coded[is_kept & (coded["lang"] == "en")].sample(frac=1, random_state=0)
    shares = 1 / np.arange(2, len(others) + 2)
    chosen = others.iloc[rng.choice(len(others), _ROWS, p=shares / shares.sum())]
    rows = {
        "id": np.arange(1, _ROWS + 1),
        "occ1": chosen["occ1"].to_numpy(),
        "age": rng.integers(14, 80, _ROWS),
    }
    rows |= {
        "year": rng.choice([1851, 1861, 1871, 1881], _ROWS),
        "place": rng.choice(_PLACES, _ROWS),
    }
    yield "sample_census.csv", "code", pd.DataFrame(rows)

"""Cards to review, from coded files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from histocoder.data.corrections import CHECKED_COL
from histocoder.desk.coding import CodingDesk
from histocoder.desk.store import Store
from histocoder.evaluation.review import Columns, in_order_of_worth
from histocoder.files import sha256


def add_cards(
    path: Path,
    name: str,
    store: Store,
    coding: CodingDesk,
    *,
    input_col: str,
    language_col: str | None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Make cards of what `histocoder predict` wrote, in the order of `histocoder review`; return their source."""
    digest = sha256(path)
    known = store.source_of(digest)
    if known is not None:
        return known
    targets = coding.coder.model.config.target_cols
    cards = in_order_of_worth(path, Columns(input_col, language_col, targets), say=say)
    lang_col = cards.columns[1] if cards.columns[1] != CHECKED_COL else None
    codes = cards[list(targets)].to_numpy(dtype=object)
    frame = pd.DataFrame(
        {
            "text": cards[input_col].fillna("").astype(str),
            "lang": cards[lang_col].fillna("unk").astype(str) if lang_col else "unk",
            "predicted": [[code for code in row if not pd.isna(code) and code] for row in codes],
            "conf": cards["conf"],
            "times": cards["times"],
        }
    )
    return store.add_source(name, digest, frame)

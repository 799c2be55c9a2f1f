"""Cards to review, from coded files."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from histocoder.desk.coding import CodingDesk
from histocoder.desk.store import Store
from histocoder.evaluation.review import Columns, review
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
    chosen = path.with_name(f".{path.name}.{secrets.token_hex(4)}.cards")

    def tell(text: str) -> None:
        """Pass on notices, but not what `review` says of its own file."""
        if str(chosen) not in text:
            say(text)

    try:
        cards = review(path, chosen, budget=1 << 62, columns=Columns(input_col, language_col, targets), say=tell)
    finally:
        chosen.unlink(missing_ok=True)
    lang_col = language_col or next((column for column in cards.columns[1:2] if column.endswith("lang")), None)
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

"""`prepared.json`: what the data of a folder were prepared from."""

import json
from pathlib import Path
from typing import Any

from histocoder.config import PrepareConfig, settings_of
from histocoder.data.store import PREPARED_VERSION
from histocoder.data.table import fingerprint
from histocoder.errors import UserError, counted

_OLDEST_VERSION = 2  # see `PREPARED_VERSION`
_NOT_OF_THE_DATA = {"dataset", "corrections", "save_path", "prepare_only", "cache_dir"}
_NAMES = {"allow_codes_shorter_than_block_size": "allow_short_codes"}
"""Setting -> its name in `prepared.json`, if it differs."""


def record_of(config: PrepareConfig) -> dict[str, Any]:
    """Return what `prepared.json` records of the source and the settings, before the data are prepared."""
    names = [one.name for one in settings_of(PrepareConfig) if one.name not in _NOT_OF_THE_DATA]
    settings = {_NAMES.get(name, name): getattr(config, name) for name in names}
    settings |= {"target_cols": list(config.target_cols), "key": fingerprint(config.key) if config.key else None}
    if config.corrections:
        settings["corrections"] = [fingerprint(path) for path in config.corrections]
    dataset = Path(config.dataset)
    source = {"file": dataset.name, "sha256": fingerprint(dataset), "bytes": dataset.stat().st_size}
    return {"format_version": PREPARED_VERSION, "source": source, "settings": settings}


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the content of `prepared.json`; None if it is missing, or the data are not all there yet."""
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["format_version"]
        newer, older = version > PREPARED_VERSION, version < _OLDEST_VERSION and "settings" in record
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; prepare the data again with --overwrite.") from error
    if newer:
        raise UserError(f"{path} was written by a newer histocoder; update, or prepare again with --overwrite.")
    if older:
        raise UserError(
            f"{path.parent} holds data that an earlier histocoder prepared, by other rules (rows without any "
            "code are kept, and variants of a description may be in both files). Choose another folder, or add "
            "--overwrite to prepare them again."
        )
    return record if "settings" in record else None


def refuse_other(existing: dict[str, Any], wanted: dict[str, Any], config: PrepareConfig, folder: Path) -> None:
    """Raise a UserError that names the settings in which the records of a folder and of a run differ."""
    old, new = ({**r["settings"], "dataset": r["source"]["sha256"]} for r in (existing, wanted))
    if new["block_size"] is None:  # which fits any data
        new["block_size"] = old["block_size"]
    changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if not changed:
        return
    old["dataset"], new["dataset"] = (
        f"{r['source']['file']} (SHA-256 {r['source']['sha256'][:8]}…)" for r in (existing, wanted)
    )
    files = {"key": [config.key] if config.key else [], "corrections": [*(config.corrections or ())]}

    def difference(name: str) -> str:
        if name not in files:
            return f"{name}: {old.get(name)!r} there, {new.get(name)!r} now"
        then, now = ([one] if isinstance(one, str) else one or [] for one in (old.get(name), new.get(name)))  # SHA-256
        others = [path for path, digest in zip(files[name], now, strict=True) if digest not in then]
        if others and len(then) == len(now):
            return "; ".join(f"{path} has changed" for path in others)
        return f"{name}: {len(then) or 'no'} files there, {', '.join(files[name]) or 'none'} now"

    differences = "; ".join(map(difference, changed))
    raise UserError(
        f"{folder} holds data prepared with other settings ({differences}). Choose another folder, or add "
        "--overwrite to replace them."
    )


def describe(record: dict[str, Any]) -> str:
    rows = record["rows"]
    val = counted(rows["val"], "validation row", "validation rows")
    return f"{counted(rows['train'], 'training row', 'training rows')}, {val}, {record['codes']:,} codes."

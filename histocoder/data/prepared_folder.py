"""`prepared.json`, what the data in a folder were prepared from, and data that a run replaces."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from histocoder.config import PrepareConfig, settings_of
from histocoder.errors import UserError
from histocoder.files import temporary_folder, write_text
from histocoder.tables.table import fingerprint

PREPARED_FILE = "prepared.json"
_EARLIER_FOLDER = ".earlier"  # prepared data that are set aside until a run begins with new ones
_ABSENT_FILE = ".absent.json"  # in that folder: names of files that the new data added
PREPARED_VERSION = 4
"""Version of the rules; since 2, rows without any code are dropped; since 3, the split is by
`description_keys`; since 4, these ignore punctuation.
"""
_OLDEST_VERSION = 2
_FILE_SETTINGS = {"dataset", "key", "corrections"}  # their files are compared by content
_NOT_COPIED = {"dataset", "corrections", "save_path", "prepare_only"}
"""Settings that `prepared.json` lacks, since they don't change the data, or has in another form."""
_RECORDED_NAMES = {"allow_codes_shorter_than_block_size": "allow_short_codes"}
"""Setting -> its name in `prepared.json`, if it differs."""


def set_aside(folder: Path, names: Sequence[str]) -> None:
    """Move prepared data that are about to be replaced into a folder, from which a run that fails
    puts them back.

    `names` are the files that will be replaced or deleted. What an earlier call has set aside
    stays.
    """
    earlier = folder / _EARLIER_FOLDER
    present = [name for name in names if (folder / name).exists()]
    if earlier.exists() or not present:
        return

    # the folder is complete before it has the name that `put_back_earlier` looks for
    absent = [name for name in names if name not in present]
    with temporary_folder(earlier) as temporary:
        write_text(temporary / _ABSENT_FILE, json.dumps(absent))
        os.replace(temporary, earlier)
    for name in present:
        os.replace(folder / name, earlier / name)


def put_back_earlier(folder: Path) -> None:
    """Undo the replacement of prepared data by a run that has failed or was killed, if there was
    one.
    """
    earlier = folder / _EARLIER_FOLDER
    if not earlier.exists():
        return
    try:
        for name in json.loads((earlier / _ABSENT_FILE).read_text(encoding="utf-8")):
            (folder / name).unlink(missing_ok=True)
        for path in earlier.iterdir():
            if path.name != _ABSENT_FILE:
                os.replace(path, folder / path.name)
    except OSError:
        # On Windows a file that is still mapped into memory can't be replaced; the next run tries
        # again
        return
    shutil.rmtree(earlier)


def forget_earlier(folder: Path) -> None:
    """Delete prepared data that were replaced, once a run has begun with the new ones."""
    shutil.rmtree(folder / _EARLIER_FOLDER, ignore_errors=True)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `prepared.json`."""
    write_text(folder / PREPARED_FILE, json.dumps(record, indent=2) + "\n")


def read_prepared(folder: Path) -> dict[str, Any]:
    """Return the content of `prepared.json`; an empty dict if it is missing or damaged."""
    try:
        record = json.loads((folder / PREPARED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    return record


def record_of(config: PrepareConfig) -> dict[str, Any]:
    """Return what `prepared.json` records of the source and the settings, before the data are
    prepared.
    """
    settings: dict[str, Any] = {}
    for setting in settings_of(PrepareConfig):
        if setting.name not in _NOT_COPIED:
            name = _RECORDED_NAMES.get(setting.name, setting.name)
            settings[name] = getattr(config, setting.name)

    # a tuple becomes a list, as JSON reads it; none is the same as no columns
    settings["language_col"] = config.column_of_languages
    for name in ("target_cols", "attribute_cols"):
        columns = getattr(config, name)
        settings[name] = list(columns) if columns else None

    # files are recorded by their content, since they may be moved or edited
    settings["key"] = fingerprint(config.key) if config.key else None
    if config.titles not in ("auto", "none"):
        settings["titles"] = fingerprint(config.titles)
    if config.corrections:
        settings["corrections"] = [fingerprint(path) for path in config.corrections]
    dataset = Path(config.dataset)
    source = {"file": dataset.name, "sha256": fingerprint(dataset), "bytes": dataset.stat().st_size}
    return {"format_version": PREPARED_VERSION, "source": source, "settings": settings}


def prepared_before(folder: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of data that were prepared in a folder; None if there are none, or not all
    of them yet.

    Raises UserError if they were prepared from other data, with settings other than the `wanted`
    ones, by a newer histocoder or one with other rules.
    """
    if not (folder / PREPARED_FILE).is_file():
        return None
    record = read_prepared(folder)
    version = record.get("format_version", 0)
    if version and "settings" not in record:
        return None
    advice = "Choose another folder, or add --overwrite to prepare them again."
    if not _OLDEST_VERSION <= version <= PREPARED_VERSION:
        raise UserError(
            f"{folder / PREPARED_FILE} is damaged, or of another version of histocoder. {advice}"
        )

    # settings that an earlier version lacked, or that are not given now, are those of the data
    old = record["settings"] | {"dataset": record["source"]["sha256"]}
    new = wanted["settings"] | {"dataset": wanted["source"]["sha256"]}
    if "titles" not in old:
        new.pop("titles")
    for name in ("block_size", "share_val"):
        if new[name] is None:
            new[name] = old[name]

    differences = []
    for name in new | old:
        if old.get(name) == new.get(name):
            continue
        if name in _FILE_SETTINGS:
            differences.append(f"{name} has changed")
        else:
            differences.append(f"{name}: {old.get(name)!r} there, {new.get(name)!r} now")
    if differences:
        raise UserError(
            f"{folder} holds data prepared with other settings ({', '.join(differences)}). {advice}"
        )
    return record

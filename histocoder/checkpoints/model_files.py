"""Models on disk: written aside and renamed, checked when read; other programs' weights."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from histocoder.config import MODEL_TYPE, ModelConfig
from histocoder.errors import DamagedError, UserError, misfit
from histocoder.files import replacing, sha256
from histocoder.formatters import formatter_from_config
from histocoder.model import CHARACTERS, MixerModel, PretrainedTokenizer, Tokenizer, reads_characters
from histocoder.model.canine import POSITIONS, CanineConfig

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FOLDER = "config.json", "model.safetensors", "tokenizer"
MANIFEST_FILE = "manifest.json"
"""Of a model's or a checkpoint's folder: the SHA-256 of each file that belongs to it, by its path there."""
SHARDS_FOLDER = "shards"
"""Of a checkpoint: weights and optimizer state, each process's part in a file; see `histocoder.checkpoints.sharded`."""


def save_model(folder: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Tokenizer) -> None:
    """Write `config.json`, `model.safetensors`, `manifest.json`, and `tokenizer/` where the encoder has one of its own,
    into a folder; each whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _save_sums(folder, {})  # a save that is killed leaves no sums of other files
    save_model_files(folder, config, weights, tokenizer=tokenizer)
    written = sorted(path for path in (folder / TOKENIZER_FOLDER).rglob("*") if path.is_file())
    save_manifest(folder, [folder / CONFIG_FILE, folder / WEIGHTS_FILE, *written])


def save_model_files(folder: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Tokenizer) -> None:
    """Write a model's files as `save_model` does, without the manifest."""
    tokenizer.save(folder / TOKENIZER_FOLDER)
    with replacing(folder / WEIGHTS_FILE) as temporary:
        try:
            write_tensors({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
        except SafetensorError as error:
            raise UserError(f"Could not write {folder / WEIGHTS_FILE}: {error}.") from error
    save_config(folder, config)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors into a file that others may read as the umask says; `save_file` leaves one for its owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)


def save_config(folder: Path, config: ModelConfig) -> None:
    """Write `config.json` into a folder, whole or not at all."""
    with replacing(folder / CONFIG_FILE) as temporary:
        text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def change_config(folder: Path, config: ModelConfig) -> None:
    """Write another `config.json` into a model's folder, and its sum into the manifest, where there is one."""
    sums = _read_sums(folder)
    if sums:
        _save_sums(folder, {name: digest for name, digest in sums.items() if name != CONFIG_FILE})
    save_config(folder, config)
    if sums:
        _save_sums(folder, {**sums, CONFIG_FILE: sha256(folder / CONFIG_FILE)})


def save_manifest(folder: Path, files: Iterable[Path]) -> None:
    """Write `manifest.json`, the sums of some files of a folder, whole or not at all."""
    _save_sums(folder, {path.relative_to(folder).as_posix(): sha256(path) for path in files})


def _save_sums(folder: Path, sums: dict[str, str]) -> None:
    with replacing(folder / MANIFEST_FILE) as temporary:
        temporary.write_text(json.dumps(sums, indent=2), encoding="utf-8")


def _read_sums(folder: Path) -> dict[str, str]:
    """Return the manifest of a folder; empty where there is none, as of models from elsewhere."""
    path = folder / MANIFEST_FILE
    return read_json(path) if path.is_file() else {}


def verify_manifest(folder: Path, *, model_only: bool = False) -> None:
    """Compare the files of a folder with their sums, about a second for each GB; nothing where it has no manifest.

    Parameters
    ----------
    folder : Path
    model_only : bool
        Whether to leave out what a checkpoint holds beside the model.

    Raises
    ------
    DamagedError
        Where a file is missing or damaged; it is named.
    """
    try:
        for name, digest in _read_sums(folder).items():
            if model_only and name not in (CONFIG_FILE, WEIGHTS_FILE) and not name.startswith(f"{TOKENIZER_FOLDER}/"):
                continue
            if not (folder / name).is_file() or sha256(folder / name) != digest:
                raise DamagedError(f"The file {folder / name} is missing or damaged: it is not as it was written.")
    except OSError as error:
        raise DamagedError(f"{folder} can't be read ({error}).") from error


def _verify_model(folder: Path) -> None:
    try:
        verify_manifest(folder, model_only=True)
    except DamagedError as error:
        raise DamagedError(
            f"{error} Take another copy of the model; if you changed the file yourself, delete {MANIFEST_FILE} there."
        ) from error


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a model's folder; raises UserError where it is none."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no model: it has no {CONFIG_FILE}.")
    return ModelConfig.from_dict(read_json(path))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder; raises UserError where it is missing or damaged."""
    if reads_characters(read_model_config(folder).encoder):
        return CHARACTERS
    return PretrainedTokenizer.from_folder(folder / TOKENIZER_FOLDER)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read `model.safetensors` of a model's folder; raises UserError where it is missing or can't be read."""
    path = folder / WEIGHTS_FILE
    if (folder / SHARDS_FOLDER).is_dir():
        raise UserError(
            f"{folder} holds a sharded model. Combine the shards: histocoder convert --from-shards {folder} "
            "--output DIR."
        )
    if not path.is_file():
        raise UserError(f"{folder} holds no model: it has no {WEIGHTS_FILE}.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}).") from error


def load_model(folder: Path, *, verify: bool = True) -> MixerModel:
    """Load a model, on the CPU and in evaluation mode.

    Parameters
    ----------
    folder : Path
        What `save_model` wrote: a run's, a checkpoint's, or one's own copy of its files.
    verify : bool
        Whether to compare its files with the manifest first, where it has one.

    Raises
    ------
    UserError
        Where it holds no model, a damaged one, or one of a newer format version.
    """
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}.")
    if verify:
        _verify_model(folder)
    config, tokenizer, weights = read_model_config(folder), read_tokenizer(folder), read_weights(folder)
    try:
        formatter_from_config(config.formatter)
        model = MixerModel.of_weights(config, weights, tokenizer=tokenizer)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of whatever a library makes of settings that are none
        reason = misfit(error) if isinstance(error, RuntimeError) else str(error)
        raise DamagedError(f"{folder / CONFIG_FILE} does not describe the model beside it ({reason}).") from error
    return model.eval()


def is_own_model(path: Path) -> bool:
    """Return whether a path is a folder with a model of this program's."""
    return (path / CONFIG_FILE).is_file() and read_json(path / CONFIG_FILE).get("model_type") == MODEL_TYPE


def initial_weights(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """Weights to begin with, and the code of each of their classes where it is known.

    Parameters
    ----------
    path : Path
        A run's or a model's folder, a checkpoint's, or what OccCANINE's own scripts save: see `published_weights`.

    Raises
    ------
    UserError
        Where there are no weights, or anything but tensors is in the file.
    """
    if is_own_model(path):
        _verify_model(path)
        return read_weights(path), read_model_config(path).codes
    return published_weights(path)


def published_weights(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """Weights and codes of `read_published`."""
    return read_published(path)[:2]


class Published(NamedTuple):
    """What there is of an OccCANINE model."""

    weights: dict[str, Tensor]
    """Under this program's names."""
    codes: tuple[str, ...] | None
    """Of its key, where it has one; empty for the class of blank cells."""
    chars: list[str] | None
    """What its codes are made of, where it says so."""


def read_published(path: Path) -> Published:
    """Read an OccCANINE model.

    Parameters
    ----------
    path : Path
        A file `last.bin` (a dict with `model`, `key` and perhaps `chars`), or a folder as on the Hugging Face hub, with
        `model.safetensors` or `pytorch_model.bin`, and perhaps `key.json` and `chars.json`. Of OccCANINE's first
        version, which has no decoder, encoder and flat head are found.

    Raises
    ------
    UserError
        Where there are no weights, or anything but tensors is in the file.
    """
    if not path.exists():
        raise UserError(f"There is no {path} to take weights from.")
    key, chars = None, None
    if path.is_dir():
        key, chars = (_json_beside(path, name, kind) for name, kind in (("key.json", dict), ("chars.json", list)))
        found = [path / name for name in (WEIGHTS_FILE, "pytorch_model.bin") if (path / name).is_file()]
        if not found:
            raise UserError(f"{path} holds no model: it has neither {WEIGHTS_FILE} nor pytorch_model.bin.")
        if found[0].name == WEIGHTS_FILE:
            return Published(_own_names(read_weights(path)), _codes_of(key), _strings(chars))
        path = found[0]
    saved = load_tensors(path)
    weights = saved.get("model", saved) if isinstance(saved, dict) else {}
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path} holds no weights that can be read: they belong to no known model.")
    return Published(_own_names(weights), _codes_of(saved.get("key", key)), _strings(saved.get("chars", chars)))


def _json_beside(folder: Path, name: str, kind: type) -> Any:
    """Return the content of a file of a published model's folder; None where it has no such file."""
    if not (folder / name).is_file():
        return None
    content = _parsed(folder / name)
    if not isinstance(content, kind):
        raise UserError(f"{folder / name} is not as OccCANINE writes it: it holds no {kind.__name__}.")
    return content


def _strings(chars: Any) -> list[str] | None:
    return list(map(str, chars)) if isinstance(chars, list | tuple | str) else None


def _codes_of(key: Any) -> tuple[str, ...] | None:
    """Return codes in the order of their classes. OccCANINE has a class for blank cells, NaN, with several columns."""
    if not isinstance(key, dict):
        return None
    return tuple("" if str(code) == "nan" else str(code) for code in sorted(key, key=key.__getitem__))


def save_published(path: Path, config: ModelConfig, weights: dict[str, Tensor], *, step: int, **state: Any) -> None:
    """Write a model as OccCANINE's own scripts do, whole or not at all.

    Parameters
    ----------
    path : Path
        The file, such as `last.bin`.
    config : ModelConfig
    weights : dict
    step : int
        Optimizer steps done.
    **state
        What else the file holds: `optimizer` and `scheduler`, for those scripts to train on.

    Raises
    ------
    UserError
        Where the file can't be written.
    """
    key = {code or math.nan: i for i, code in enumerate(config.codes)}
    weights = {name: with_all_positions(name, weight, config) for name, weight in weights.items()}
    with replacing(path) as temporary:
        try:
            torch.save({"model": weights, "step": step, "key": key, **state}, temporary)
        except RuntimeError as error:  # a full disk, among others
            raise UserError(f"Could not write {path}: {str(error).splitlines()[0]}") from error


def with_all_positions(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return a weight, or its optimizer state, in its published shape: CANINE's table of positions with all rows.

    Rows beyond `config.max_len`, which this model neither reads nor trains, are 0.
    """
    if name != f"encoder.{POSITIONS}" or tensor.dim() == 0:
        return tensor
    return F.pad(tensor, (0, 0, 0, CanineConfig.of(config.encoder).num_hash_buckets - len(tensor)))


def _own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the names of OccCANINE's first version in this one's; without buffers that old transformers saved."""
    renamed = {}
    for name, tensor in weights.items():
        for theirs, ours in (("basemodel.", "encoder."), ("out.", "linear_decoder.")):
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)  # noqa: PLW2901
        if not name.endswith("position_ids"):
            renamed[name] = tensor
    return renamed


def load_tensors(path: Path) -> Any:
    """Read what `torch.save` wrote; nothing in the file is executed."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = (
            "it contains objects other than tensors"
            if "unsupported" in str(error).lower()
            else "it is not a PyTorch file"
        )
        raise UserError(f"{path} holds no weights that can be read: {reason}.") from error


def read_json(path: Path) -> dict[str, Any]:
    found = _parsed(path)
    if not isinstance(found, dict):
        raise DamagedError(f"{path} can't be read (it holds no JSON object).")
    return found


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedError(f"{path} can't be read ({error}).") from error

"""Models on disk: each file is written aside and renamed, and checked by its SHA-256 when it is read."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from histocoder.config import MODEL_TYPE, ModelConfig
from histocoder.errors import DamagedError, UserError, misfit
from histocoder.files import replacing, sha256, write_text
from histocoder.formatters import build_formatter
from histocoder.model import CHARACTERS, MixerModel, PretrainedTokenizer, Tokenizer, reads_characters

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FOLDER, CARD_FILE = "config.json", "model.safetensors", "tokenizer", "README.md"
MANIFEST_FILE = "manifest.json"  # SHA-256 of each file of a model or a checkpoint, by its path in the folder


def save_model(
    folder: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Tokenizer, card: str | None = None
) -> None:
    """Write a model's files, their manifest and its card, if given, into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_sums(folder, {})  # a save that is killed must not leave the sums of the files before
    save_model_files(folder, config, weights, tokenizer=tokenizer)
    written = sorted(path for path in (folder / TOKENIZER_FOLDER).rglob("*") if path.is_file())
    save_manifest(folder, [folder / CONFIG_FILE, folder / WEIGHTS_FILE, *written])
    if card is not None:
        write_text(folder / CARD_FILE, card)


def save_model_files(folder: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Tokenizer) -> None:
    """Write config, tokenizer (unless the encoder reads characters) and weights (unless there are none)."""
    tokenizer.save(folder / TOKENIZER_FOLDER)
    if weights:
        with replacing(folder / WEIGHTS_FILE) as temporary:
            try:
                write_tensors({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
            except SafetensorError as error:
                raise UserError(f"Could not write {folder / WEIGHTS_FILE}: {error}.") from error
    save_config(folder, config)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors into a file with the permissions of the umask; `save_file` alone makes it private."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)


def save_config(folder: Path, config: ModelConfig) -> None:
    """Write `config.json` into a folder, whole or not at all."""
    write_text(folder / CONFIG_FILE, json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n")


def change_config(folder: Path, config: ModelConfig) -> None:
    """Replace `config.json` in a model's folder, and its sum in the manifest if there is one."""
    sums = _read_sums(folder)
    if sums:
        _write_sums(folder, {name: digest for name, digest in sums.items() if name != CONFIG_FILE})
    save_config(folder, config)
    if sums:
        _write_sums(folder, {**sums, CONFIG_FILE: sha256(folder / CONFIG_FILE)})


def save_manifest(folder: Path, files: Iterable[Path]) -> None:
    """Write `manifest.json` with the sums of some files of a folder."""
    _write_sums(folder, {path.relative_to(folder).as_posix(): sha256(path) for path in files})


def _write_sums(folder: Path, sums: dict[str, str]) -> None:
    write_text(folder / MANIFEST_FILE, json.dumps(sums, indent=2))


def _read_sums(folder: Path) -> dict[str, str]:
    """Return the manifest of a folder; empty if there is none, as with models from elsewhere."""
    path = folder / MANIFEST_FILE
    return read_json(path) if path.is_file() else {}


def verify_manifest(folder: Path, *, model_only: bool = False) -> None:
    """Raise a DamagedError if a file of a folder, or of its model, differs from the manifest; takes 1 s per GB."""
    try:
        for name, digest in _read_sums(folder).items():
            if model_only and name not in (CONFIG_FILE, WEIGHTS_FILE) and not name.startswith(f"{TOKENIZER_FOLDER}/"):
                continue
            if not (folder / name).is_file() or sha256(folder / name) != digest:
                raise DamagedError(f"The file {folder / name} is missing or damaged: its checksum differs.")
    except OSError as error:
        raise DamagedError(f"{folder} can't be read ({error}).") from error


def verify_model(folder: Path) -> None:
    """Raise a DamagedError, which says what to do, if a file of a model differs from the manifest."""
    try:
        verify_manifest(folder, model_only=True)
    except DamagedError as error:
        raise DamagedError(
            f"{error} Get another copy of the model; if you changed the file yourself, delete {MANIFEST_FILE} there."
        ) from error


def read_model_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no model: it has no {CONFIG_FILE}.")
    return ModelConfig.from_dict(read_json(path))


def read_tokenizer(folder: Path) -> Tokenizer:
    if reads_characters(read_model_config(folder).encoder):
        return CHARACTERS
    return PretrainedTokenizer.from_folder(folder / TOKENIZER_FOLDER)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read `model.safetensors` of a model's folder."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no model: it has no {WEIGHTS_FILE}.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}).") from error


def load_model(folder: Path, *, verify: bool = True) -> MixerModel:
    """Load a model in evaluation mode, on the CPU, from the folder of a model, a run or a checkpoint."""
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}.")
    if verify:
        verify_model(folder)
    config, tokenizer, weights = read_model_config(folder), read_tokenizer(folder), read_weights(folder)
    try:
        build_formatter(**config.formatter)
        model = MixerModel.from_weights(config, weights, tokenizer=tokenizer)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries raise errors of many kinds for malformed settings
        reason = misfit(error) if isinstance(error, RuntimeError) else str(error)
        raise DamagedError(f"{folder / CONFIG_FILE} does not match the model's weights ({reason}).") from error
    return model.eval()


def is_own_model(path: Path) -> bool:
    """Return whether a path is the folder of a histocoder model."""
    return (path / CONFIG_FILE).is_file() and read_json(path / CONFIG_FILE).get("model_type") == MODEL_TYPE


def load_tensors(path: Path) -> Any:
    """Load a file of `torch.save` without executing anything in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        is_refused = "unsupported" in str(error).lower()
        reason = "it contains objects other than tensors" if is_refused else "it is not a PyTorch file"
        raise UserError(f"{path} contains no weights that can be read: {reason}.") from error


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file that holds an object, or a list; raise a DamagedError if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedError(f"{path} can't be read ({error}).") from error
    if not isinstance(content, kind):
        raise DamagedError(f"{path} can't be read (it holds no JSON {'object' if kind is dict else 'list'}).")
    return content

"""Models on disk: written aside and renamed, checked when read; other programs' weights."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from histocoder.config import MODEL_TYPE, ModelConfig
from histocoder.errors import DamagedError, UserError
from histocoder.files import replacing, sha256
from histocoder.model import CHARACTERS, MixerModel, PretrainedTokenizer, Tokenizer, Unfilled, reads_characters

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FOLDER = "config.json", "model.safetensors", "tokenizer"
MANIFEST_FILE = "manifest.json"
"""Of a checkpoint's folder: checksums."""
SHARDS_FOLDER = "shards"
"""Of a checkpoint: weights and optimizer state, each process's part in a file; see `histocoder.shards`."""


def save_model(folder: Path, config: ModelConfig, weights: dict[str, Tensor], *, tokenizer: Tokenizer) -> None:
    """Write `config.json` and `model.safetensors` into a folder, and `tokenizer/` where the encoder has one of its own;
    each whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / TOKENIZER_FOLDER)
    with replacing(folder / WEIGHTS_FILE) as temporary:
        try:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
        except SafetensorError as error:
            raise UserError(f"Could not write {folder / WEIGHTS_FILE}: {error}.") from error
    save_config(folder, config)


def save_config(folder: Path, config: ModelConfig) -> None:
    """Write `config.json` into a folder, whole or not at all."""
    with replacing(folder / CONFIG_FILE) as temporary:
        text = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a model's folder; raises UserError where it is none."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no model: it has no {CONFIG_FILE}.")
    return ModelConfig.from_dict(read_json(path))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder; raises UserError where it is missing or damaged."""
    if reads_characters(read_model_config(folder).encoder):
        return CHARACTERS
    return PretrainedTokenizer.from_folder(folder / TOKENIZER_FOLDER)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read `model.safetensors` of a model's folder; raises UserError where it is missing or damaged.

    In a checkpoint's folder it is compared with its checksum.
    """
    path = folder / WEIGHTS_FILE
    if (folder / SHARDS_FOLDER).is_dir():
        raise UserError(
            f"{folder} holds a model in shares. Put it together: histocoder convert --from-shards {folder} "
            "--output DIR."
        )
    if not path.is_file():
        raise UserError(f"{folder} holds no model: it has no {WEIGHTS_FILE}.")
    if (folder / MANIFEST_FILE).is_file() and read_json(folder / MANIFEST_FILE).get(WEIGHTS_FILE) != sha256(path):
        raise DamagedError(f"{path} is damaged: it is not as it was written. Take another checkpoint.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}).") from error


def load_model(folder: Path) -> MixerModel:
    """Load a model, on the CPU and in evaluation mode.

    Parameters
    ----------
    folder : Path
        What `save_model` wrote: a run's, a checkpoint's, or one's own copy of its files.

    Raises
    ------
    UserError
        Where it holds no model, a damaged one, or one of a newer format version.
    """
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}.")
    with Unfilled():
        model = MixerModel(read_model_config(folder), tokenizer=read_tokenizer(folder))
    model.load_state_dict(read_weights(folder))
    return model.eval()


def is_own_model(path: Path) -> bool:
    """Whether a path is a folder with a model of this program's."""
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
        raise UserError(f"{path} holds no weights that can be read: it is no model's.")
    return Published(_own_names(weights), _codes_of(saved.get("key", key)), _strings(saved.get("chars", chars)))


def _json_beside(folder: Path, name: str, kind: type) -> Any:
    """The content of a file of a published model's folder; None where it has no such file."""
    if not (folder / name).is_file():
        return None
    content: object = read_json(folder / name)
    if not isinstance(content, kind):
        raise UserError(f"{folder / name} is not as OccCANINE writes it: it holds no {kind.__name__}.")
    return content


def _strings(chars: Any) -> list[str] | None:
    return list(map(str, chars)) if isinstance(chars, list | tuple | str) else None


def _codes_of(key: Any) -> tuple[str, ...] | None:
    """In the order of their classes. OccCANINE makes a class of blank cells, NaN, where there are several columns."""
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
    with replacing(path) as temporary:
        try:
            torch.save({"model": weights, "step": step, "key": key, **state}, temporary)
        except RuntimeError as error:  # a full disk, among others
            raise UserError(f"Could not write {path}: {str(error).splitlines()[0]}") from error


def _own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of OccCANINE's first version in this one's; without buffers that old transformers saved."""
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
            "it holds other things than tensors" if "unsupported" in str(error).lower() else "it is no file of torch's"
        )
        raise UserError(f"{path} holds no weights that can be read: {reason}.") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DamagedError(f"{path} can't be read ({error}).") from error

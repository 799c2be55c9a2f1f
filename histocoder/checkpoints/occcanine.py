"""Weights to begin with, and models in OccCANINE's form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.checkpoints.model_files import (
    WEIGHTS_FILE,
    is_own_model,
    load_tensors,
    parsed_json,
    read_model_config,
    read_weights,
    verify_model,
)
from histocoder.config import ModelConfig
from histocoder.errors import UserError
from histocoder.files import replacing
from histocoder.model.canine import POSITIONS, CanineConfig


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
        verify_model(path)
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
    content = parsed_json(folder / name)
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
    return F.pad(tensor, (0, 0, 0, CanineConfig.from_dict(config.encoder).num_hash_buckets - len(tensor)))


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

"""Weights that a run starts from, and models in OccCANINE's format."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.checkpoints.model_files import (
    WEIGHTS_FILE,
    is_own_model,
    load_tensors,
    read_json,
    read_model_config,
    read_weights,
    verify_model,
)
from histocoder.config import ModelConfig
from histocoder.errors import UserError
from histocoder.files import replacing
from histocoder.model import is_canine
from histocoder.model.canine import POSITIONS, CanineConfig

Codes = tuple[str, ...] | None


def initial_weights(path: Path) -> tuple[dict[str, Tensor], Codes]:
    """Read weights to start from, and the code of each class where it is known.

    `path` is the folder of a model, a run or a checkpoint, or a model that `read_published` reads.
    """
    if is_own_model(path):
        verify_model(path)
        return read_weights(path), read_model_config(path).codes
    return read_published(path)[:2]


def read_published(path: Path) -> tuple[dict[str, Tensor], Codes, list[str] | None]:
    """Read an OccCANINE model.

    Parameters
    ----------
    path : Path
        A file `last.bin` (a dict with `model`, `key` and perhaps `chars`), or a folder as on the Hugging Face hub, with
        `model.safetensors` or `pytorch_model.bin`, and perhaps `key.json` and `chars.json`. OccCANINE's first version
        has an encoder and a flat head, but no decoder.

    Returns
    -------
    Weights by histocoder's names; the code of each class ("" for that of blank cells), and the characters that codes
    consist of, each None if the model doesn't record them.

    Raises
    ------
    UserError
        If there are no weights, or the file contains objects other than tensors.
    """
    if not path.exists():
        raise UserError(f"There is no {path} to load weights from.")
    saved: dict[str, Any] = {}
    if path.is_dir():
        for name, kind in (("key", dict), ("chars", list)):
            if (path / f"{name}.json").is_file():
                saved[name] = read_json(path / f"{name}.json", kind)
        found = [path / name for name in (WEIGHTS_FILE, "pytorch_model.bin") if (path / name).is_file()]
        if not found:
            raise UserError(f"{path} holds no model: it has neither {WEIGHTS_FILE} nor pytorch_model.bin.")
        path = found[0]
        loaded = read_weights(path.parent) if path.name == WEIGHTS_FILE else load_tensors(path)
    else:
        loaded = load_tensors(path)
    if isinstance(loaded, dict):
        saved |= loaded if "model" in loaded else {"model": loaded}
    weights = saved.get("model")
    if not isinstance(weights, dict) or not weights or not all(isinstance(one, Tensor) for one in weights.values()):
        raise UserError(f"{path} contains no weights that can be read: they are not of a known model.")
    key, chars = saved.get("key"), saved.get("chars")
    codes = None
    if isinstance(key, dict):  # code to class; NaN is the class of blank cells, with several columns
        codes = tuple("" if str(code) == "nan" else str(code) for code in sorted(key, key=key.__getitem__))
    return _own_names(weights), codes, list(map(str, chars)) if isinstance(chars, list | tuple | str) else None


def unpublishable(config: ModelConfig) -> str:
    """Return why OccCANINE has no format for a model; an empty text if it has one."""
    if not is_canine(config.encoder):
        return "its encoder is not CANINE"
    if "labels" in config.formatter:
        return "its codes are labels, which the decoder writes as numbers"
    return "its decoder uses the flat head's probabilities as a prior" if config.decoder_prior else ""


def save_published(path: Path, config: ModelConfig, weights: dict[str, Tensor], *, step: int, **state: Any) -> None:
    """Write a model as OccCANINE's own scripts do, whole or not at all.

    `state` is saved beside the model: `optimizer` and `scheduler`, from which those scripts can resume training.
    """
    key = {code or math.nan: i for i, code in enumerate(config.codes)}
    weights = {name: with_all_positions(name, weight, config) for name, weight in weights.items()}
    with replacing(path) as temporary:
        try:
            torch.save({"model": weights, "step": step, "key": key, **state}, temporary)
        except RuntimeError as error:  # such as a full disk
            raise UserError(f"Could not write {path}: {str(error).splitlines()[0]}") from error


def with_all_positions(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return a weight, or its optimizer state, in its published shape: CANINE's position table with all rows.

    Rows beyond `config.max_len`, which this model neither reads nor trains, are 0.
    """
    if name != f"encoder.{POSITIONS}" or tensor.dim() == 0:
        return tensor
    return F.pad(tensor, (0, 0, 0, CanineConfig.from_dict(config.encoder).num_hash_buckets - len(tensor)))


def _own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights of OccCANINE's first version, and drop buffers that earlier transformers saved."""
    renamed = {}
    for name, tensor in weights.items():
        for theirs, ours in (("basemodel.", "encoder."), ("out.", "linear_decoder.")):
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)  # noqa: PLW2901
        if not name.endswith("position_ids"):
            renamed[name] = tensor
    return renamed

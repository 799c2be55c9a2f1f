"""Weights that a run starts from, and models from and to OccCANINE's own files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.checkpoints.model_files import (
    WEIGHTS_FILE,
    is_own_model,
    load_model,
    load_tensors,
    read_json,
    read_model_config,
    read_weights,
    verify_model,
)
from histocoder.config import NUM_CODES, ModelConfig
from histocoder.data.key import Key, read_key
from histocoder.errors import UserError, misfit
from histocoder.files import replacing
from histocoder.formatters import Formatter, build_formatter
from histocoder.model import MixerModel, is_canine
from histocoder.model.canine import POSITIONS, CanineConfig

Codes = tuple[str, ...] | None
PAD_TO = 128  # positions that inputs of published models were padded to; their decoders saw the padding


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


def model_from_occcanine(
    path: Path,
    *,
    formatter: str,
    key: str | Path | None = None,
    target_cols: Sequence[str] | None = None,
    block_size: int | None = None,
    encoder_config: dict[str, Any] | None = None,
    text_normalization: str = "lower_ascii",
) -> MixerModel:
    """Build a model that OccCANINE has published; it gives the outputs that OccCANINE gives.

    Parameters
    ----------
    path : Path
        A file `last.bin`, or a folder as on the Hugging Face hub. Only tensors are read from it.
    formatter : {"hisco", "occ1950", "general"}
        Kind of code that it was trained on.
    key : path, optional
        Key file (see `data.key.read_key`); by default the key in the file.
    target_cols : sequence of str, optional
        Columns of codes that it was trained on; needed for "general", which has a block for each.
    block_size : int, optional
        Number of tokens of a code, for "general"; by default 5.
    encoder_config : dict, optional
        Fields of `CanineConfig`, if the encoder does not have CANINE-s's sizes.
    text_normalization : {"lower_ascii", "none"}
        Normalization of its training texts; published models have the former.

    Raises
    ------
    UserError
        If the file holds no such model, or the key or the formatter does not fit it.
    """
    if formatter not in NUM_CODES and not target_cols:
        raise UserError(f"A model of the formatter {formatter!r} needs the columns of codes that it was trained on.")
    weights, own_codes, chars = read_published(path)
    target_cols = tuple(target_cols or (f"{formatter}_{i + 1}" for i in range(NUM_CODES[formatter])))
    system = build_formatter(formatter, num_blocks=len(target_cols), block_size=block_size or 5, symbols=chars)
    _check_decoder(path, weights, system)
    found, sizes = _key_of(path, key, own_codes, len(weights["linear_decoder.weight"])), encoder_config or {}
    config = ModelConfig(
        encoder=sizes.get("encoder", sizes),  # a model's own config.json has it within
        formatter=system.to_config(),
        vocab_size=len(weights["decoder.head.weight"]),
        codes=found.codes,
        target_cols=target_cols,
        descriptions=found.descriptions,
        decoder_num_layers=1 + max(int(name.split(".")[3]) for name in weights if name.startswith("decoder.decoder.")),
        decoder_dim_feedforward=len(weights["decoder.decoder.layers.0.linear1.weight"]),
        mask_memory=False,
        pad_to=PAD_TO,
        text_normalization=text_normalization,
    )
    try:
        return MixerModel.from_weights(config, weights)
    except RuntimeError as error:
        sizes_differ = f"The weights in {path} have other sizes ({misfit(error)})"
        raise UserError(f"{sizes_differ}; give the sizes of its encoder with --encoder-config JSON.") from error


def _check_decoder(path: Path, weights: dict[str, Tensor], system: Formatter) -> None:
    """Raise a UserError if a model has no decoder, or one of fewer tokens than its codes need."""
    if "decoder.head.weight" not in weights:
        raise UserError(
            f"{path} has no sequence decoder; train one on its encoder: --initial-checkpoint {path} --only-encoder."
        )
    if (num_tokens := len(weights["decoder.head.weight"])) < system.vocab_size:
        raise UserError(
            f"{path} has {num_tokens} tokens, and the formatter {system.name!r} {system.vocab_size}. Either its codes "
            "are of another kind (--formatter), or of characters that chars.json in its folder must list."
        )


def _key_of(path: Path, key: str | Path | None, own_codes: Codes, num_classes: int) -> Key:
    """Return the key from a file or from the model; raise a UserError if it does not fit, or they differ."""
    if key is None and own_codes is None:
        raise UserError(f"{path} contains no key; name its key file with --key.")
    found = Key(own_codes or ()) if key is None else read_key(key)
    if own_codes not in (None, found.codes):
        pairs = [
            f"class {i} is {ours!r} in the key and {theirs!r} in the model"
            for i, (ours, theirs) in enumerate(zip(found.codes, own_codes or (), strict=False))
            if ours != theirs
        ]
        sizes = f"it has {len(found.codes):,} codes, the model {len(own_codes or ()):,}"
        raise UserError(f"The key {key} does not match {path}: {'; '.join(pairs[:3]) or sizes}.")
    if len(found.codes) != num_classes:
        raise UserError(f"{path} has {num_classes:,} classes, but its key has {len(found.codes):,} codes.")
    return found


def unpublishable(config: ModelConfig) -> str:
    """Return why OccCANINE has no format for a model; an empty text if it has one."""
    if not is_canine(config.encoder):
        return "its encoder is not CANINE"
    if "labels" in config.formatter:
        return "its codes are labels, which the decoder writes as numbers"
    if config.flat_head != "linear":
        return "its flat head is not linear"
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


def save_occcanine(folder: str | Path, path: str | Path) -> None:
    """Write the model in a folder as a file in OccCANINE's form, with `model`, `step` and `key`.

    Raises
    ------
    UserError
        If the folder holds no model, or one that OccCANINE has no format for, or the file can't be written.
    """
    model = load_model(Path(folder))
    if reason := unpublishable(model.config):
        raise UserError(
            f"OccCANINE has no format for the model in {folder}: {reason}. Train a CANINE encoder with --save-format "
            "occcanine or --recipe reference for a model in its format."
        )
    save_published(Path(path), model.config, model.state_dict(), step=0)

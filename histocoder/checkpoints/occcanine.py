"""Weights that a run starts from, and models from and to OccCANINE's own files."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from histocoder.checkpoints import model_files
from histocoder.checkpoints.compact import expand
from histocoder.checkpoints.manifest import verify_manifest
from histocoder.config import NUM_CODES, ModelConfig
from histocoder.data.key import Key, read_key
from histocoder.errors import UserError, misfit
from histocoder.files import replacing
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel, encoder_type
from histocoder.model.canine import POSITIONS, CanineConfig

Codes = tuple[str, ...] | None
PAD_TO = (
    128  # positions that inputs of published models were padded to; their decoders saw the padding
)


def initial_weights(path: Path) -> tuple[dict[str, Tensor], Codes]:
    """Read weights to start from, and the code of each class where it is known.

    `path` is the folder of a model, a run or a checkpoint, or a model that `read_published` reads.
    Raises a DamagedError if a file differs from the manifest, or can't be read.
    """
    if model_files.is_own_model(path):
        verify_manifest(path)
        config = model_files.read_model_config(path)
        parts = model_files.read_tensors(path / model_files.WEIGHTS_FILE)
        return expand(parts, config), config.codes
    return read_published(path)[:2]


def read_published(path: Path) -> tuple[dict[str, Tensor], Codes, list[str] | None]:
    """Read an OccCANINE model; raise a UserError if there are no weights, or a file has objects
    other than tensors.

    `path` is a file `last.bin` (a dict with `model`, `key` and perhaps `chars`), or a folder as on
    the Hugging Face hub, with `model.safetensors` or `pytorch_model.bin`, and perhaps `key.json`
    and `chars.json`. OccCANINE's first version has an encoder and a flat head, but no decoder.

    Returns weights by histocoder's names; the code of each class ("" for that of blank cells), and
    the characters that codes consist of, each None if the model doesn't record them.
    """
    saved: dict[str, Any] = {}
    if path.is_dir():
        for name, kind in (("key", dict), ("chars", list)):
            if (path / f"{name}.json").is_file():
                saved[name] = model_files.read_json(path / f"{name}.json", kind)
        is_old = (path / "pytorch_model.bin").is_file() and not (
            path / model_files.WEIGHTS_FILE
        ).is_file()
        path = path / ("pytorch_model.bin" if is_old else model_files.WEIGHTS_FILE)
    if not path.exists():
        raise UserError(f"There is no {path} to load weights from.")
    loaded = (
        model_files.read_tensors(path)
        if path.name == model_files.WEIGHTS_FILE
        else model_files.load_tensors(path)
    )
    if isinstance(loaded, dict):
        saved |= loaded if "model" in loaded else {"model": loaded}
    weights = saved.get("model")
    if (
        not isinstance(weights, dict)
        or not weights
        or not all(isinstance(one, Tensor) for one in weights.values())
    ):
        raise UserError(
            f"{path} contains no weights that can be read: they are not of a known model."
        )
    own = {}
    for name, tensor in weights.items():
        name = re.sub(r"^basemodel\.", "encoder.", re.sub(r"^out\.", "linear_decoder.", name))  # noqa: PLW2901
        if not name.endswith("position_ids"):  # buffers that earlier transformers saved
            own[name] = tensor
    key, chars, codes = saved.get("key"), saved.get("chars"), None
    if isinstance(
        key, dict
    ):  # code to class; NaN is the class of blank cells, with several columns
        codes = tuple(
            "" if str(code) == "nan" else str(code) for code in sorted(key, key=key.__getitem__)
        )
    return own, codes, list(map(str, chars)) if isinstance(chars, list | tuple | str) else None


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
    """Build a model that OccCANINE has published (see `read_published`); it gives the outputs that
    OccCANINE gives.

    `formatter` ("hisco", "occ1950" or "general") is the kind of code that it was trained on, and
    "general" needs its `target_cols` and its `block_size` (by default 5 tokens). `key` is a key
    file (see `data.key.read_key`), by default the model's own; `encoder_config` has fields of
    `CanineConfig` that differ from CANINE-s's, and `text_normalization` is that of its training
    texts. Raises a UserError if the file holds no such model, or one that these do not fit.
    """
    if formatter not in NUM_CODES and not target_cols:
        raise UserError(
            f"A model of the formatter {formatter!r} needs the columns of codes that it "
            "was trained on."
        )
    weights, own_codes, chars = read_published(path)
    target_cols = tuple(
        target_cols or (f"{formatter}_{i + 1}" for i in range(NUM_CODES[formatter]))
    )
    system = build_formatter(
        formatter, num_blocks=len(target_cols), block_size=block_size or 5, symbols=chars
    )
    if "decoder.head.weight" not in weights:
        raise UserError(
            f"{path} has no decoder; train one on its encoder: --initial-checkpoint {path} "
            "--only-encoder."
        )
    if (num_tokens := len(weights["decoder.head.weight"])) < system.vocab_size:
        raise UserError(
            f"{path} has {num_tokens} tokens, and the formatter {system.name!r} "
            f"{system.vocab_size}. Either its codes "
            "are of another kind (--formatter), or of characters that chars.json in its "
            "folder must list."
        )
    if key is None and own_codes is None:
        raise UserError(f"{path} contains no key; name its key file with --key.")
    found, sizes = Key(own_codes or ()) if key is None else read_key(key), encoder_config or {}
    if len(found.codes) != (num_classes := len(weights["linear_decoder.weight"])):
        raise UserError(
            f"{path} has {num_classes:,} classes, but its key has {len(found.codes):,} codes."
        )
    for i, (ours, theirs) in enumerate(zip(found.codes, own_codes or (), strict=False)):
        if ours != theirs:
            differ = f"class {i} is {ours!r} in the key and {theirs!r} in the model"
            raise UserError(f"The key {key} does not match {path}: {differ}.")
    config = ModelConfig(
        encoder=sizes.get("encoder", sizes),  # a model's own config.json has it within
        formatter=system.to_config(),
        vocab_size=num_tokens,
        codes=found.codes,
        target_cols=target_cols,
        descriptions=found.descriptions,
        decoder_num_layers=1
        + max(int(name.split(".")[3]) for name in weights if name.startswith("decoder.decoder.")),
        decoder_dim_feedforward=len(weights["decoder.decoder.layers.0.linear1.weight"]),
        mask_memory=False,
        pad_to=PAD_TO,
        text_normalization=text_normalization,
    )
    try:
        return MixerModel.from_weights(config, weights)
    except RuntimeError as error:
        sizes_differ = f"The weights in {path} have other sizes ({misfit(error)})"
        raise UserError(
            f"{sizes_differ}; give the sizes of its encoder with --encoder-config JSON."
        ) from error


def unpublishable(config: ModelConfig) -> str:
    """Return why OccCANINE has no format for a model; an empty text if it has one."""
    if encoder_type(config.encoder) != "canine":
        return "its encoder is not CANINE"
    if "labels" in config.formatter:
        return "its codes are labels, which the decoder writes as numbers"
    if config.attributes:
        return "it has attributes"
    if config.flat_head != "linear":
        return "its flat head is not linear"
    return (
        "its decoder uses the flat head's probabilities as a prior" if config.decoder_prior else ""
    )


def save_published(
    path: Path, config: ModelConfig, weights: dict[str, Tensor], *, step: int, **state: Any
) -> None:
    """Write a model as OccCANINE's own scripts do, whole or not at all.

    `state` is saved beside the model: `optimizer` and `scheduler`, from which those scripts can
    resume training.
    """
    key = {code or math.nan: i for i, code in enumerate(config.codes)}
    own = {name: weight for name, weight in weights.items() if name != "trained_on"}
    weights = {name: with_all_positions(name, weight, config) for name, weight in own.items()}
    with replacing(path) as temporary:
        model_files.save_tensors({"model": weights, "step": step, "key": key, **state}, temporary)


def with_all_positions(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return a weight, or its optimizer state, in its published shape: CANINE's position table with
    all rows.

    Rows beyond `config.max_len`, which this model neither reads nor trains, are 0.
    """
    if name != f"encoder.{POSITIONS}" or tensor.dim() == 0:
        return tensor
    return F.pad(
        tensor, (0, 0, 0, CanineConfig.from_dict(config.encoder).num_hash_buckets - len(tensor))
    )


def save_occcanine(folder: str | Path, path: str | Path) -> None:
    """Write the model in a folder as a file in OccCANINE's form; raise a UserError if there is none
    for it.
    """
    model = model_files.load_model(Path(folder))
    if reason := unpublishable(model.config):
        raise UserError(
            f"OccCANINE has no format for the model in {folder}: {reason}. Train a CANINE "
            "encoder with --save-format "
            "occcanine or --recipe reference for a model in its format."
        )
    save_published(Path(path), model.config, model.state_dict(), step=0)

"""Weights that a run starts from, and models from and to OccCANINE's own files."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from histocoder.formatters import Formatter, build_formatter
from histocoder.model import MixerModel, encoder_type
from histocoder.model.canine import POSITIONS, CanineConfig

_HUB_WEIGHTS_FILE = "pytorch_model.bin"  # of transformers' earlier versions
_DECODER_HEAD = "decoder.head.weight"
PAD_TO = 128
"""Positions that inputs of published models were padded to; their decoders saw the padding."""


@dataclass(frozen=True)
class PublishedModel:
    """Content of a model that OccCANINE has published."""

    weights: dict[str, Tensor]  # by histocoder's names
    codes: tuple[str, ...] | None  # of each class, "" for that of blank cells; None if unknown
    symbols: list[str] | None  # characters that codes consist of; None if unknown


def initial_weights(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...] | None]:
    """Read weights to start from, and the code of each class where it is known.

    `path` is the folder of a model, a run or a checkpoint, or a model that `read_published` reads.
    Raises a DamagedError if a file differs from the manifest, or can't be read.
    """
    if model_files.is_own_model(path):
        verify_manifest(path)
        config = model_files.read_model_config(path)
        parts = model_files.read_tensors(path / model_files.WEIGHTS_FILE)
        return expand(parts, config), config.codes
    published = read_published(path)
    return published.weights, published.codes


def read_published(path: Path) -> PublishedModel:
    """Read an OccCANINE model; raise a UserError if there are no weights, or a file has objects
    other than tensors.

    `path` is a file `last.bin` (a dict with `model`, `key` and perhaps `chars`), or a folder as on
    the Hugging Face hub, with `model.safetensors` or `pytorch_model.bin`, and perhaps `key.json`
    and `chars.json`. OccCANINE's first version has an encoder and a flat head, but no decoder.
    """
    # A folder has the key and the characters in files of their own.
    saved: dict[str, Any] = {}
    if path.is_dir():
        for name, kind in (("key", dict), ("chars", list)):
            if (path / f"{name}.json").is_file():
                saved[name] = model_files.read_json(path / f"{name}.json", kind)
        folder = path
        path = folder / model_files.WEIGHTS_FILE
        if not path.is_file() and (folder / _HUB_WEIGHTS_FILE).is_file():
            path = folder / _HUB_WEIGHTS_FILE

    if not path.exists():
        raise UserError(f"There is no {path} to load weights from.")
    if path.name == model_files.WEIGHTS_FILE:
        saved["model"] = model_files.read_tensors(path)
    else:
        content = model_files.load_tensors(path)
        if isinstance(content, dict):
            saved |= content if "model" in content else {"model": content}

    weights: Any = saved.get("model")
    if not _is_state_dict(weights):
        raise UserError(
            f"{path} contains no weights that can be read: they are not of a known model."
        )

    # The characters are a list, or a text of all of them.
    symbols = None
    if isinstance(saved.get("chars"), list | tuple | str):
        symbols = [str(symbol) for symbol in saved["chars"]]
    return PublishedModel(_renamed(weights), _codes_of_key(saved.get("key")), symbols)


def _is_state_dict(content: Any) -> bool:
    """Return whether the content of a file is a dict of tensors, of one at least."""
    if not isinstance(content, dict) or not content:
        return False
    return all(isinstance(weight, Tensor) for weight in content.values())


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of OccCANINE's versions by histocoder's names."""
    result = {}
    for name, weight in weights.items():
        # buffers that earlier versions of transformers saved
        if name.endswith("position_ids"):
            continue
        # the first version called its flat head `out`, and its encoder `basemodel`
        own_name = re.sub(r"^out\.", "linear_decoder.", name)
        own_name = re.sub(r"^basemodel\.", "encoder.", own_name)
        result[own_name] = weight
    return result


def _codes_of_key(key: Any) -> tuple[str, ...] | None:
    """Return the code of each class from a dict of the class of each code; None if it is not a
    dict.
    """
    if not isinstance(key, dict):
        return None
    codes = [str(code) for code in sorted(key, key=key.__getitem__)]
    # with several columns of codes, blank cells have a class, whose code is NaN
    return tuple("" if code == "nan" else code for code in codes)


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
    if not target_cols:
        if formatter not in NUM_CODES:
            raise UserError(
                f"A model of the formatter {formatter!r} needs the columns of codes that it "
                "was trained on."
            )
        target_cols = [f"{formatter}_{i + 1}" for i in range(NUM_CODES[formatter])]

    published = read_published(path)
    weights = published.weights
    system = build_formatter(
        formatter,
        num_blocks=len(target_cols),
        block_size=block_size or 5,
        symbols=published.symbols,
    )
    _check_decoder(weights, system, path)
    key_of_model = _matching_key(published, key, path)

    # The weights, such as decoder.decoder.layers.0.linear1.weight, tell the sizes of the decoder;
    # those of CANINE need to be given.
    layers = [int(name.split(".")[3]) for name in weights if name.startswith("decoder.decoder.")]
    encoder = encoder_config or {}
    encoder = encoder.get("encoder", encoder)  # a model's own config.json has it within
    config = ModelConfig(
        encoder=encoder,
        formatter=system.to_config(),
        vocab_size=len(weights[_DECODER_HEAD]),
        codes=key_of_model.codes,
        target_cols=tuple(target_cols),
        descriptions=key_of_model.descriptions,
        decoder_num_layers=1 + max(layers),
        decoder_dim_feedforward=len(weights["decoder.decoder.layers.0.linear1.weight"]),
        mask_memory=False,
        pad_to=PAD_TO,
        text_normalization=text_normalization,
    )
    try:
        return MixerModel.from_weights(config, weights)
    except RuntimeError as error:
        raise UserError(
            f"The weights in {path} have other sizes ({misfit(error)}); give the sizes of its "
            "encoder with --encoder-config JSON."
        ) from error


def _check_decoder(weights: Mapping[str, Tensor], system: Formatter, path: Path) -> None:
    """Raise a UserError unless there is a decoder of the tokens of a system of codes."""
    if _DECODER_HEAD not in weights:
        raise UserError(
            f"{path} has no decoder; train one on its encoder: --initial-checkpoint {path} "
            "--only-encoder."
        )
    num_tokens = len(weights[_DECODER_HEAD])
    if num_tokens < system.vocab_size:
        raise UserError(
            f"{path} has {num_tokens} tokens, and the formatter {system.name!r} "
            f"{system.vocab_size}. Either its codes "
            "are of another kind (--formatter), or of characters that chars.json in its "
            "folder must list."
        )


def _matching_key(published: PublishedModel, key_path: str | Path | None, path: Path) -> Key:
    """Return the key in a file, by default that of the model; raise a UserError if it does not fit
    the model in `path`.
    """
    if key_path is not None:
        key = read_key(key_path)
    elif published.codes is not None:
        key = Key(published.codes)
    else:
        raise UserError(f"{path} contains no key; name its key file with --key.")

    num_classes = len(published.weights["linear_decoder.weight"])
    if len(key.codes) != num_classes:
        raise UserError(
            f"{path} has {num_classes:,} classes, but its key has {len(key.codes):,} codes."
        )
    # a model without a key of its own has nothing to compare
    pairs = zip(key.codes, published.codes or (), strict=False)
    for i, (code, code_of_model) in enumerate(pairs):
        if code != code_of_model:
            raise UserError(
                f"The key {key_path} does not match {path}: class {i} is {code!r} in the key and "
                f"{code_of_model!r} in the model."
            )
    return key


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
    if config.decoder_prior:
        return "its decoder uses the flat head's probabilities as a prior"
    return ""


def save_published(
    path: Path, config: ModelConfig, weights: dict[str, Tensor], *, step: int, **state: Any
) -> None:
    """Write a model as OccCANINE's own scripts do, whole or not at all.

    `state` is saved beside the model: `optimizer` and `scheduler`, from which those scripts can
    resume training.
    """
    key = {code or math.nan: i for i, code in enumerate(config.codes)}
    published = {
        name: with_all_positions(name, weight, config)
        for name, weight in weights.items()
        if name != "trained_on"
    }
    content = {"model": published, "step": step, "key": key} | state
    with replacing(path) as temporary:
        model_files.save_tensors(content, temporary)


def with_all_positions(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return a weight, or its optimizer state, in its published shape: CANINE's position table with
    all rows.

    Rows beyond `config.max_len`, which this model neither reads nor trains, are 0.
    """
    if name != f"encoder.{POSITIONS}" or tensor.dim() == 0:
        return tensor
    num_positions = CanineConfig.from_dict(config.encoder).num_hash_buckets
    return F.pad(tensor, (0, 0, 0, num_positions - len(tensor)))


def save_occcanine(folder: str | Path, path: str | Path) -> None:
    """Write the model in a folder as a file in OccCANINE's form; raise a UserError if there is none
    for it.
    """
    model = model_files.load_model(Path(folder))
    if reason := unpublishable(model.config):
        raise UserError(
            f"OccCANINE has no format for the model in {folder}: {reason}. Train a CANINE "
            "encoder with --save-format occcanine or --recipe reference for a model in its format."
        )
    save_published(Path(path), model.config, model.state_dict(), step=0)

"""Models to and from OccCANINE's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from histocoder.checkpoints.model_files import load_model
from histocoder.checkpoints.occcanine import read_published, save_published
from histocoder.config import NUM_CODES, ModelConfig
from histocoder.data.key import Key, read_key
from histocoder.errors import UserError, misfit
from histocoder.formatters import Formatter, build_formatter
from histocoder.inference.coder import Coder
from histocoder.model import MixerModel, is_canine

PAD_TO = 128
"""Published models were trained on inputs padded to so many positions, with a decoder that saw the padding."""


def load_occcanine(
    path: str | Path,
    *,
    formatter: str,
    key: str | Path | None = None,
    target_cols: Sequence[str] | None = None,
    block_size: int | None = None,
    encoder_config: dict[str, Any] | None = None,
    text_normalization: str = "lower_ascii",
) -> Coder:
    """Open a model in OccCANINE's form; it gives the outputs that OccCANINE gives.

    Parameters
    ----------
    path : path
        A file `last.bin`, or a folder as on the Hugging Face hub. Only tensors are read from it.
    formatter : {"hisco", "occ1950", "general"}
        The kind of code that it was trained on.
    key : path, optional
        A key file (see `data.key.read_key`); by default the key in the file.
    target_cols : sequence of str, optional
        The columns of codes that it was trained on; needed for "general", which has a block for each.
    block_size : int, optional
        For "general": tokens of a code; by default 5.
    encoder_config : dict, optional
        Fields of `CanineConfig`, where the encoder is not of CANINE-s's sizes.
    text_normalization : {"lower_ascii", "none"}
        What was done to its training texts; to published models' the former.

    Raises
    ------
    UserError
        Where the file holds no such model, or key or formatter and model do not fit.
    """
    config, weights = _read(
        Path(path),
        formatter=formatter,
        key=key,
        target_cols=tuple(target_cols or ()),
        block_size=block_size or 5,
        encoder_config=encoder_config or {},
        text_normalization=text_normalization,
    )
    try:
        model = MixerModel.from_weights(config, weights)
    except RuntimeError as error:
        raise UserError(
            f"The weights in {path} are of other sizes ({misfit(error)}); give the sizes of its encoder, "
            "with --encoder-config JSON."
        ) from error
    return Coder(model)


def _read(
    path: Path,
    *,
    formatter: str,
    key: str | Path | None,
    target_cols: tuple[str, ...],
    block_size: int,
    encoder_config: dict[str, Any],
    text_normalization: str,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return what a published model is, and its weights."""
    if formatter not in NUM_CODES and not target_cols:
        raise UserError(f"A model of the formatter {formatter!r} needs the columns of codes that it was trained on.")
    weights, own_codes, chars = read_published(path)
    if "decoder.head.weight" not in weights:
        raise UserError(
            f"{path} has no sequence decoder; train one on its encoder: --initial-checkpoint {path} --only-encoder."
        )
    num_blocks, num_tokens = len(target_cols) or NUM_CODES[formatter], len(weights["decoder.head.weight"])
    system = build_formatter(formatter, num_blocks=num_blocks, block_size=block_size, symbols=chars)
    _check_tokens(path, num_tokens, system)
    config = ModelConfig(
        encoder=encoder_config.get("encoder", encoder_config),  # a model's own config.json has it within
        formatter=system.to_config(),
        vocab_size=num_tokens,
        codes=(found := _key_of(path, key, own_codes)).codes,
        target_cols=target_cols or tuple(f"{formatter}_{i + 1}" for i in range(num_blocks)),
        descriptions=found.descriptions,
        decoder_num_layers=1 + max(int(name.split(".")[3]) for name in weights if name.startswith("decoder.decoder.")),
        decoder_dim_feedforward=len(weights["decoder.decoder.layers.0.linear1.weight"]),
        mask_memory=False,
        pad_to=PAD_TO,
        text_normalization=text_normalization,
    )
    num_classes = len(weights["linear_decoder.weight"])
    if num_classes != config.num_classes:
        raise UserError(f"{path} has {num_classes:,} classes, but its key has {config.num_classes:,} codes.")
    return config, weights


def _check_tokens(path: Path, num_tokens: int, system: Formatter) -> None:
    """Raise a UserError where a model knows fewer tokens than its codes would need."""
    if num_tokens < system.vocab_size:
        raise UserError(
            f"{path} knows {num_tokens} tokens, and the formatter {system.name!r} has {system.vocab_size}: its codes "
            "are of another kind (--formatter), or of characters of its own, which chars.json in its folder would list."
        )


def _key_of(path: Path, key: str | Path | None, own_codes: tuple[str, ...] | None) -> Key:
    """Return the key of a model: the file's, or that in the model, or both where they agree."""
    if key is None:
        if own_codes is None:
            raise UserError(f"{path} holds no key; name its key file (--key).")
        return Key(own_codes)
    given = read_key(key)
    if own_codes is not None and own_codes != given.codes:
        pairs = [
            f"class {i} is {ours!r} there and {theirs!r} in the model"
            for i, (ours, theirs) in enumerate(zip(given.codes, own_codes, strict=False))
            if ours != theirs
        ]
        sizes = f"it has {len(given.codes):,} codes, the model {len(own_codes):,}"
        raise UserError(f"The key {key} is not that of {path}: {'; '.join(pairs[:3]) or sizes}.")
    return given


def save_occcanine(folder: str | Path, path: str | Path) -> None:
    """Write the model in a folder as a file in OccCANINE's form, with `model`, `step` and `key`.

    Raises
    ------
    UserError
        Where the folder holds no model, or one that OccCANINE has no form for, or the file can't be written.
    """
    model = load_model(Path(folder))
    if not is_canine(model.config.encoder):
        raise UserError(f"OccCANINE has no form for the model in {folder}, whose encoder is no CANINE.")
    if model.config.decoder_prior:
        raise UserError(
            f"The decoder in {folder} starts from the flat head's beliefs, which OccCANINE's does not. Train with "
            "--save-format occcanine or --recipe reference for a model in its form."
        )
    save_published(Path(path), model.config, model.state_dict(), step=0)

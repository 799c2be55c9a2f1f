"""Models to and from OccCANINE's own files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from histocoder.checkpoints.model_files import load_model
from histocoder.checkpoints.occcanine import read_published, save_published, unpublishable
from histocoder.config import NUM_CODES, ModelConfig
from histocoder.data.key import Key, read_key
from histocoder.errors import UserError, misfit
from histocoder.formatters import Formatter, build_formatter
from histocoder.inference.coder import Coder
from histocoder.model import MixerModel

PAD_TO = 128  # positions that inputs of published models were padded to; their decoders saw the padding


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
    path = Path(path)
    if formatter not in NUM_CODES and not target_cols:
        raise UserError(f"A model of the formatter {formatter!r} needs the columns of codes that it was trained on.")
    weights, own_codes, chars = read_published(path)
    num_blocks = len(target_cols or ()) or NUM_CODES[formatter]
    system = build_formatter(formatter, num_blocks=num_blocks, block_size=block_size or 5, symbols=chars)
    _check_decoder(path, weights, system)
    sizes = encoder_config or {}
    config = _config_of(
        weights,
        system,
        _key_of(path, key, own_codes),
        encoder=sizes.get("encoder", sizes),  # a model's own config.json has it within
        target_cols=tuple(target_cols or (f"{formatter}_{i + 1}" for i in range(num_blocks))),
        text_normalization=text_normalization,
    )
    if (num_classes := len(weights["linear_decoder.weight"])) != config.num_classes:
        raise UserError(f"{path} has {num_classes:,} classes, but its key has {config.num_classes:,} codes.")
    try:
        model = MixerModel.from_weights(config, weights)
    except RuntimeError as error:
        raise UserError(
            f"The weights in {path} have other sizes ({misfit(error)}); give the sizes of its encoder with "
            "--encoder-config JSON."
        ) from error
    return Coder(model)


def _config_of(weights: dict[str, Tensor], system: Formatter, key: Key, **fields: Any) -> ModelConfig:
    """Return the config of a published model, with the sizes of its weights; `fields` are other fields of it."""
    return ModelConfig(
        formatter=system.to_config(),
        vocab_size=len(weights["decoder.head.weight"]),
        codes=key.codes,
        descriptions=key.descriptions,
        decoder_num_layers=1 + max(int(name.split(".")[3]) for name in weights if name.startswith("decoder.decoder.")),
        decoder_dim_feedforward=len(weights["decoder.decoder.layers.0.linear1.weight"]),
        mask_memory=False,
        pad_to=PAD_TO,
        **fields,
    )


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


def _key_of(path: Path, key: str | Path | None, own_codes: tuple[str, ...] | None) -> Key:
    """Return the key from a file or from the model; raise a UserError if both have one and they differ."""
    if key is None:
        if own_codes is None:
            raise UserError(f"{path} contains no key; name its key file with --key.")
        return Key(own_codes)
    given = read_key(key)
    if own_codes is not None and own_codes != given.codes:
        pairs = [
            f"class {i} is {ours!r} in the key and {theirs!r} in the model"
            for i, (ours, theirs) in enumerate(zip(given.codes, own_codes, strict=False))
            if ours != theirs
        ]
        sizes = f"it has {len(given.codes):,} codes, the model {len(own_codes):,}"
        raise UserError(f"The key {key} does not match {path}: {'; '.join(pairs[:3]) or sizes}.")
    return given


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

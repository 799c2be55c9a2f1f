"""Models on disk and on the Hugging Face hub, with their cards."""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from histocoder.checkpoints.compact import compact, expand
from histocoder.checkpoints.manifest import (
    MANIFEST_FILE,
    manifest_names,
    verify_manifest,
    write_manifest,
)
from histocoder.checkpoints.starter import BOX, starter_folder
from histocoder.config import NUM_GREEDY, ModelConfig
from histocoder.config.model import MODEL_TYPE
from histocoder.errors import DamagedError, UserError, misfit
from histocoder.files import file_names, replacing_folder, sync, temporary_folder, write_text
from histocoder.formatters import build_formatter
from histocoder.model import (
    CHARACTERS,
    MixerModel,
    PretrainedTokenizer,
    Tokenizer,
    reads_characters,
)
from histocoder.model.encoder import hub_answers
from histocoder.text.languages import Language

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FOLDER = "tokenizer"
CARD_FILE = "README.md"
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, MANIFEST_FILE)
HUB_PREFIX = "hf://"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Names of the files of tokenizers in models without checksums."""
_CARD = Path(__file__).with_name("card.md.jinja")


def write_model(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    *,
    tokenizer: Tokenizer,
    card: str | None = None,
) -> None:
    """Write a model's files into a new folder, the manifest of all files there, and the model's
    card, if given.

    The weights are written as they are given. The manifest leaves out the card, which people edit.
    Raises an OSError if the disk is full.
    """
    tokenizer.save(folder / TOKENIZER_FOLDER)
    write_tensors(weights, folder / WEIGHTS_FILE)
    save_config(folder, config)
    write_manifest(folder)
    if card is not None:
        write_text(folder / CARD_FILE, card)


def model_names(folder: Path) -> tuple[str, ...]:
    """Return the paths that the files of a model have in its folder."""
    names = MODEL_FILES + manifest_names(folder)
    names += tuple(f"{TOKENIZER_FOLDER}/{name}" for name in _TOKENIZER_FILES)
    return tuple(dict.fromkeys(names))


def save_model(
    folder: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    *,
    tokenizer: Tokenizer,
    card: str | None = None,
) -> None:
    """Write a model in its compact form, to a temporary folder first; then replace its folder, or
    move its files into a folder that holds other files, such as a run's.

    Other files stay, and `config.json`, without which there is no model, is deleted first
    and moved last: wherever the process is killed, the folder holds the files of one model, or none
    that can be loaded.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    weights = compact(weights)
    names = file_names(folder)
    if not folder.exists() or {CONFIG_FILE} <= names <= set(model_names(folder)):
        with replacing_folder(folder) as new:
            write_model(new, config, weights, tokenizer=tokenizer, card=card)
        return

    # All files have to be on the disk before the first replaces one of the old model.
    with temporary_folder(folder / WEIGHTS_FILE) as new:
        write_model(new, config, weights, tokenizer=tokenizer, card=card)
        for path in (*new.rglob("*"), new):
            sync(path)
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for name in sorted(file_names(new), key=lambda name: name == CONFIG_FILE):
            target = folder / name
            target.parent.mkdir(exist_ok=True)
            os.replace(new / name, target)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors into a file with the permissions of the umask; `save_file` alone makes it
    private.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def save_config(folder: Path, config: ModelConfig) -> None:
    """Write `config.json` into a folder, whole or not at all; in that of a model, the manifest is
    written again.
    """
    content = json.dumps(config.to_dict(), indent=2, ensure_ascii=False)
    write_text(folder / CONFIG_FILE, content + "\n")
    if (folder / MANIFEST_FILE).is_file():
        write_manifest(folder, manifest_names(folder))


def read_model_config(folder: Path) -> ModelConfig:
    if not (folder / CONFIG_FILE).is_file():
        raise DamagedError(f"{folder} holds no model: it has no {CONFIG_FILE}.")
    return ModelConfig.from_dict(read_json(folder / CONFIG_FILE))


def read_tokenizer(folder: Path) -> Tokenizer:
    if reads_characters(read_model_config(folder).encoder):
        return CHARACTERS
    return PretrainedTokenizer.from_folder(folder / TOKENIZER_FOLDER)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise a DamagedError if it is truncated or not one."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error}).") from error


def load_model(folder: Path) -> MixerModel:
    """Load a model in evaluation mode, on the CPU, from the folder of a model, a run or a
    checkpoint.

    Raises a DamagedError if a file differs from the manifest, or can't be read.
    """
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}.")
    config = read_model_config(folder)  # without one, it is no model, rather than a damaged one
    verify_manifest(folder)
    tokenizer = read_tokenizer(folder)
    parts = read_tensors(folder / WEIGHTS_FILE)
    try:
        build_formatter(**config.formatter)
        weights = expand(parts, config)
        model = MixerModel.from_weights(config, weights, tokenizer=tokenizer)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries raise errors of many kinds for malformed settings
        reason = misfit(error) if isinstance(error, RuntimeError) else str(error)
        raise DamagedError(
            f"{folder / CONFIG_FILE} does not match the model's weights ({reason})."
        ) from error
    return model.eval()


def as_saved(model: MixerModel) -> MixerModel:
    """Return a model as `load_model` returns it once it is saved, in evaluation mode."""
    weights = expand(compact(model.state_dict()), model.config)
    return MixerModel.from_weights(model.config, weights, tokenizer=model.tokenizer).eval()


def is_own_model(path: Path) -> bool:
    """Return whether a path is the folder of a histocoder model."""
    config = path / CONFIG_FILE
    return config.is_file() and read_json(config).get("model_type") == MODEL_TYPE


def save_tensors(content: Any, path: Path) -> None:
    """Write a file by `torch.save`; raise an OSError if the disk is full, which a path would make a
    RuntimeError.
    """
    with path.open("wb") as file:
        torch.save(content, file)


def load_tensors(path: Path) -> Any:
    """Load a file of `torch.save` without executing anything in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = "it is not a PyTorch file"
        if "unsupported" in str(error).lower():
            reason = "it contains objects other than tensors"
        raise DamagedError(f"{path} contains no weights that can be read: {reason}.") from error


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file that holds an object, or a list; raise a DamagedError if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedError(f"{path} can't be read ({error}).") from error
    if not isinstance(content, kind):
        kind_name = "object" if kind is dict else "list"
        raise DamagedError(f"{path} can't be read (it holds no JSON {kind_name}).")
    return content


def model_card(
    config: ModelConfig,
    *,
    num_train: int | None = None,
    num_val: int = 0,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Return the text of a model's README.md, with the results of `training.validation.validate` if
    they are known.
    """
    from jinja2 import Environment  # here, since a model's own card is read without it

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["iso_code"] = lambda lang: Language(lang).iso
    return environment.from_string(_CARD.read_text(encoding="utf-8")).render(
        config=config,
        num_train=num_train,
        num_val=num_val,
        num_greedy=NUM_GREEDY,
        metrics=metrics,
        system=config.system,
        languages=[lang for lang in config.languages if lang != "unk"],
        encoder=config.encoder.get("model_type", "canine"),
        unit="characters" if reads_characters(config.encoder) else "tokens",
    )


def local_folder(path_or_url: str | Path) -> Path:
    """Return a model's folder: `box` is the one in the box, `hf://owner/name` is downloaded from
    the hub.

    A name without the prefix is never looked up there: a misspelt path could be a repository of
    somebody else's.
    """
    name = str(path_or_url)
    if name == BOX:
        return starter_folder()
    if not name.startswith(HUB_PREFIX):
        if Path(name).is_dir():
            return Path(name)
        message = f"There is no model folder {name}."
        if name.count("/") == 1:
            message += f" For a repository on the Hugging Face hub, write {HUB_PREFIX}{name}."
        raise UserError(message)

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository = name.removeprefix(HUB_PREFIX)
    is_reached = hub_answers()
    try:
        return Path(snapshot_download(repository, local_files_only=not is_reached))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = "can't be reached, and there is no cached copy"
        if is_reached:
            reason = "has no such repository"
        raise UserError(
            f"Could not open the model {name}: the Hugging Face hub {reason}."
        ) from error

"""Training on the outputs of a frozen encoder, which are computed once."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from histocoder import distributed
from histocoder.checkpoints.run_folder import check_shared
from histocoder.data.dataset import OccupationDataset
from histocoder.data.encoder_outputs import (
    OUTPUTS_FILE,
    DistinctTexts,
    EncoderOutput,
    StoredOutputs,
    distinct_texts,
    has_outputs,
    write_outputs,
)
from histocoder.files import make_folder, sha256
from histocoder.formatters.tokenizers import tokenize
from histocoder.log import log
from histocoder.model import MixerModel, NgramEncoder

_VERSION = 1
_SHARE_OF_DISK = 0.8  # share of the free disk to use at most, so that checkpoints have room


def use_encodings(model: MixerModel, datasets: Sequence[OccupationDataset], *, folder: Path) -> None:
    """Give each dataset without noise the outputs of the model's frozen encoder; a collective call.

    Rank 0 computes them, once for each distinct text, into files in `cache_dir`, unless an earlier run has.
    If the disk has no room for them, the run warns and computes them in each step. Encodings by other encoders in the
    run's `folder` are deleted.
    """
    if not (model.encoder_is_frozen and model.config.mask_memory) or isinstance(model.encoder, NgramEncoder):
        return  # an n-gram encoder's outputs take longer to read than to compute
    fixed = [data for data in datasets if data.augmenter is None]

    def build() -> list[str]:
        encoder_id = _encoder_id(model)
        return [path.name if (path := _built(model, data, encoder_id, folder)) else "" for data in fixed]

    found = distributed.broadcast_from_primary(build, doing="encoding the descriptions")
    for data, name in zip(fixed, found, strict=True):
        if name:
            check_shared(data.cache_dir / name / OUTPUTS_FILE)
            data.outputs = StoredOutputs(data.cache_dir / name)


def _encoder_id(model: MixerModel) -> str:
    """Return a hash of all that the encoder's outputs depend on."""
    config = json.dumps(model.encoder.config.to_diff_dict(), sort_keys=True, default=str)
    reads = f"{model.config.max_len} {model.tokenizer.fingerprint()}"
    digest = hashlib.sha256(f"{_VERSION} {reads} {model.dtype} {model.config.pooling} {config}".encode())
    for name, weight in model.encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def _built(model: MixerModel, data: OccupationDataset, encoder_id: str, folder: Path) -> Path | None:
    """Return the folder of a dataset's encodings, computed if needed; None if there is no room for them."""
    make_folder(data.cache_dir)
    rows = f"{'+'.join(data.examples.splits)}-{sha256(Path(data.examples.path or ''))[:16]}"
    path = data.cache_dir / f"{rows}-{encoder_id}"
    _delete_others(path, folder)
    if has_outputs(path):
        return path
    distinct = distinct_texts(data.examples, data.lengths())
    num_vectors = int(distinct.offsets[-1]) + len(distinct.rows)  # of tokens, and of texts
    num_bytes = num_vectors * model.encoder.config.hidden_size * model.dtype.itemsize
    free = shutil.disk_usage(path.parent).free
    what = f"The frozen encoder's outputs for {len(distinct.rows):,} distinct descriptions"
    if num_bytes > _SHARE_OF_DISK * free:
        log.info(
            f"Warning: {what} would take {num_bytes / 1e9:,.3g} GB; {path.parent} has {free / 1e9:,.3g} GB free. "
            "They are not stored but computed in every step; set --cache-dir to a folder with more room."
        )
        return None
    log.info(f"{what} are computed once and stored: {num_bytes / 1e9:,.3g} GB in {path}.")
    write_outputs(path, distinct, _encode(model, data, distinct))
    return path


def _delete_others(path: Path, folder: Path) -> None:
    """Delete encodings of the same split's earlier texts, or by other encoders, if they are in the run's own folder."""
    if folder in path.parents:
        for other in set(path.parent.glob(f"{path.name.partition('-')[0]}-*")) - {path}:
            shutil.rmtree(other, ignore_errors=True)


@torch.no_grad()
def _encode(model: MixerModel, data: OccupationDataset, distinct: DistinctTexts) -> Iterator[EncoderOutput]:
    device = next(model.parameters()).device
    step = 64 if device.type == "cpu" else 1024
    for start in tqdm(range(0, len(distinct.rows), step), unit="batch", disable=None, leave=False):
        texts = data.examples.inputs(distinct.rows[start : start + step])
        tokens = tokenize(texts, max_len=model.config.max_len, tokenizer=model.tokenizer)
        ids = tokens.pad(np.arange(len(texts)), max_len=model.config.max_len)
        memory, pooled, _ = model.encode(torch.from_numpy(ids).to(device))
        yield EncoderOutput(memory, pooled)

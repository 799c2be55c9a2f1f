"""A model as ONNX graphs, which `OnnxCoder` runs without torch."""

import copy
import importlib.util
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from histocoder.checkpoints.compact import MAX_LEVEL, compact, quantize
from histocoder.checkpoints.model_files import CARD_FILE, as_saved, save_config
from histocoder.errors import UserError
from histocoder.files import make_folder, temporary_folder, write_text
from histocoder.inference.coder import Coder
from histocoder.inference.onnx_coder import (
    ENCODER_FILE,
    EXPERT_FILES,
    NGRAMS_FILE,
    TOKENIZER_FOLDER,
    OnnxCoder,
)
from histocoder.model import MixerModel
from histocoder.model.linear_expert import linear_ngrams
from histocoder.model.ngram import NgramEncoder, Ngrams
from histocoder.text.tokenizers import join_language, lower_characters, tokenize

_OPSET = 20
_SAMPLE = ("wine and spirit merchant", "farmer", "boot & shoe maker (retired)")
"""Descriptions to record the graphs with."""
_TOLERANCE = 1e-4  # largest difference of probabilities


def check_installed() -> None:
    """Raise a UserError if a library that exporting needs is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"Exporting a model needs {name}. Install it: pip install 'histocoder[onnx]'."
            )


def export(coder: Coder, folder: Path, texts: list[str], langs: list[str]) -> None:
    """Write a model in fp32 on the CPU as ONNX graphs, whole or not at all; `OnnxCoder` runs them.

    The graphs have the weights in the compact form that models are saved in. `folder` must not
    exist. The graphs are compared with the model on descriptions in some languages, (n,) each.
    """
    make_folder(folder.absolute().parent)
    card = coder.card
    coder = Coder(as_saved(coder.model), "cpu")
    with temporary_folder(folder) as temporary:
        export_graphs(coder.model, temporary)
        save_config(temporary, coder.model.config)
        coder.model.tokenizer.save(temporary / TOKENIZER_FOLDER)
        write_text(temporary / CARD_FILE, card)

        # The graphs have to say what the model says before anybody gets them.
        by_model = coder.predict(texts, langs, mode="flat")
        by_graphs = OnnxCoder(temporary).predict(texts, langs, mode="flat")
        difference = float((by_model["conf"] - by_graphs["conf"]).abs().max())
        if difference > _TOLERANCE:
            raise UserError(
                "The graphs do not match the model: probabilities differ by up to "
                f"{difference:.0e}."
            )
        os.replace(temporary, folder)


def export_graphs(model: MixerModel, folder: Path) -> None:
    """Write the graphs of a model in fp32 on the CPU into a folder."""
    # Inputs to record the graphs with, and which of their sizes may vary.
    config = model.config
    tokenizer = model.tokenizer
    texts = join_language(_SAMPLE, ["en"] * len(_SAMPLE))
    tokens = tokenize(texts, max_len=config.max_len, tokenizer=tokenizer)
    ids = tokens.pad(np.arange(len(texts)), max_len=config.max_len, num_positions=config.pad_to)
    num_positions = Dim("tokens")
    if tokenizer.reads_characters:
        num_positions = 4 * Dim("quarters", max=config.max_len // 4)

    outputs = ["flat_logits"]
    if model.attribute_head is not None:
        outputs.append("attribute_logits")
    if model.nearest_expert is not None:
        outputs.append("projected")
    graph = EncoderGraph(model)
    _write(graph, torch.from_numpy(ids).long(), num_positions, folder / ENCODER_FILE, outputs)

    if model.linear_expert is not None or model.attribute_expert is not None:
        characters = torch.from_numpy(lower_characters(texts)).long()
        _write(NgramsGraph(), characters, Dim("characters"), folder / NGRAMS_FILE, ["buckets"])

    # numpy has no bf16
    for name, file in EXPERT_FILES.items():
        expert = getattr(model, name)
        if expert is None:
            continue
        arrays: dict[str, Any] = dict(expert.constants)
        for part, tensor in compact(expert.state_dict(prefix=f"{name}.")).items():
            in_fp32 = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            arrays[part.removeprefix(f"{name}.")] = in_fp32.numpy()
        np.savez(folder / file, **arrays)


class EncoderGraph(nn.Module):
    """Encoder, flat head and that on attributes, as torch can export them."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        if isinstance(model.encoder, NgramEncoder):
            self.model.encoder = _DenseNgrams(model.encoder)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """Return flat logits (B, num_classes), and if the model has them those of attributes, (B,
        num_labels).

        The last are encodings as the nearest-neighbour expert compares them, if there is one.
        """
        pooled = self.model.encode(input_ids)[1]
        outputs = [self.model.classify(pooled)]
        attribute_logits = self.model.classify_attributes(pooled)
        if attribute_logits is not None:
            outputs.append(attribute_logits)
        if self.model.nearest_expert is not None:
            outputs.append(self.model.nearest_expert.project(pooled))
        return tuple(outputs)


class _DenseNgrams(NgramEncoder):
    """An n-gram encoder of operators whose output sizes follow from input sizes.

    Its table is in the compact form of model files; n-grams without a row have the last one, zeros.
    """

    place: Tensor  # index of each n-gram among the rows, and of none, of shape (num_buckets + 1,)
    levels: Tensor  # see `quantize`, of shape (num_rows + 1, dim / 2)
    scales: Tensor  # in fp32, of shape (num_rows + 1, num_groups)

    def __init__(self, encoder: NgramEncoder) -> None:
        super().__init__(encoder.config)
        self.load_state_dict(encoder.state_dict())
        is_row = encoder.table.any(1)
        levels, scales = quantize(encoder.table[is_row])
        num_rows = len(scales)
        place = torch.full((len(is_row) + 1,), num_rows, dtype=torch.int32)
        place[:-1][is_row] = torch.arange(num_rows, dtype=torch.int32)
        self.register_buffer("place", place)
        self.register_buffer("levels", F.pad(levels, (0, 0, 0, 1)))
        self.register_buffer("scales", F.pad(scales.float(), (0, 0, 0, 1)))
        del self.table

    def _words(self, ngrams: Ngrams, num_words: int) -> tuple[Tensor, Tensor]:
        torch._check(num_words >= 1)
        torch._check(num_words <= self.config.max_words + 1)
        number = torch.arange(num_words)
        real = ngrams.buckets >= 0
        buckets = torch.where(real, ngrams.buckets, self.config.num_buckets)

        # `dequantize`, with operators that every runtime has.
        place = self.place[buckets].long()
        pairs = F.embedding(place, self.levels).float()  # (B, S, K, dim / 2)
        second = torch.floor(pairs / 16)
        levels = torch.cat([pairs - 16 * second, second], dim=-1) - MAX_LEVEL
        groups = levels.unflatten(-1, (self.scales.shape[1], -1)) * self.scales[place][..., None]
        total = groups.sum(2).flatten(2)  # (B, S, dim)

        in_word = (ngrams.words[:, None] == number[:, None]).float()  # (B, W, S)
        counts = torch.matmul(in_word, real.sum(-1, keepdim=True).float())  # (B, W, 1)
        has_ngrams = (counts[..., 0] > 0) | (number == 0)
        return torch.matmul(in_word, total) / counts.clamp(min=1), has_ngrams


class NgramsGraph(nn.Module):
    """Buckets of the n-grams that the linear expert reads."""

    def forward(self, characters: Tensor) -> Tensor:
        return linear_ngrams(characters)


@torch.no_grad()
def _write(module: nn.Module, example: Tensor, length: Any, path: Path, outputs: list[str]) -> None:
    """Export a module of one input (B, length), by an example of it, with the names of its
    outputs.
    """
    module.eval()(example)  # fill caches, which would otherwise keep tensors of the export
    before = logging.root.manager.disable
    try:
        logging.disable(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (example,),
                dynamic_shapes=({0: Dim("batch"), 1: length},),
                opset_version=_OPSET,
                dynamo=True,
                verbose=False,
                output_names=outputs,
            )
            assert program is not None
            program.save(path, external_data=False)
    except Exception as error:  # torch raises errors of any kind here
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"torch can't write this encoder as an ONNX graph ({reason}). Nothing was written."
        ) from error
    finally:
        logging.disable(before)

"""A model as ONNX graphs, which `OnnxCoder` runs without torch."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from histocoder.checkpoints.model_files import CARD_FILE, save_config
from histocoder.data.examples import Examples
from histocoder.data.tokens import lower_characters, tokenize
from histocoder.errors import UserError
from histocoder.files import make_folder, temporary_folder, write_text
from histocoder.formatters.tokenizers import join_language
from histocoder.inference.coder import Coder
from histocoder.inference.onnx_coder import (
    ENCODER_FILE,
    LINEAR_FILE,
    MODES,
    NGRAMS_FILE,
    START_FILE,
    STEP_FILE,
    TOKENIZER_FOLDER,
    OnnxCoder,
)
from histocoder.inference.onnx_graphs import EncoderGraph, NgramsGraph, StartGraph, StepGraph
from histocoder.inference.predictions import code_columns
from histocoder.log import log
from histocoder.model import MixerModel
from histocoder.model.linear_expert import SHARPNESS

_OPSET = 20
_SAMPLE = ("wine and spirit merchant", "farmer", "boot & shoe maker (retired)")  # to record graphs with
_NUM_COMPARED = 1000
_TOLERANCE = 1e-4  # largest difference of probabilities


def check_installed() -> None:
    """Raise a UserError if a library that exporting needs is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"Exporting a model needs {', '.join(missing)}. Install what is missing: pip install 'histocoder[onnx]'."
        )


def export(coder: Coder, folder: Path, examples: Examples, *, max_loss: float | None = None) -> None:
    """Write a model as ONNX graphs, whole or not at all; `OnnxCoder` runs them.

    Parameters
    ----------
    coder : Coder
        Model in fp32, on the CPU.
    folder : Path
        Folder that does not exist yet.
    examples : Examples
        Descriptions on which the graphs are compared with the model.
    max_loss : float, optional
        Points of accuracy that may be lost by keeping weights in 8 bits; by default they stay in fp32.
    """
    make_folder(folder.absolute().parent)
    with temporary_folder(folder) as temporary:
        export_graphs(coder.model, temporary)
        save_config(temporary, coder.model.config)
        coder.model.tokenizer.save(temporary / TOKENIZER_FOLDER)
        write_text(temporary / CARD_FILE, coder.card)
        exported = OnnxCoder(temporary)
        log.info(_comparison(coder, exported, examples.take(np.arange(min(_NUM_COMPARED, len(examples))))))
        if max_loss is not None:
            before = _accuracy(exported, examples)
            quantize(temporary)
            after = _accuracy(OnnxCoder(temporary), examples)
            said = f"{before:.1f} % in fp32, {after:.1f} % in int8"
            log.info(f"Accuracy in the mode {_mode(coder)} on {len(examples):,} rows: {said}.")
            if before - after > max_loss:
                raise UserError(
                    f"In int8 the model loses {before - after:.1f} points of accuracy, more than --max-loss "
                    f"{max_loss:g}; nothing was written. Export it without --int8."
                )
        os.replace(temporary, folder)


def _mode(coder: Coder | OnnxCoder) -> str:
    """Return the model's mode, or flat if exported models do not have it."""
    return coder.mode if coder.mode in MODES else "flat"


def _comparison(coder: Coder, exported: OnnxCoder, examples: Examples) -> str:
    """Return how graphs compare with their model on examples; raise a UserError if they give other codes."""
    most = 0.0
    for mode in MODES:
        ours = coder.predict(examples.texts, examples.langs, mode=mode, progress=False)
        theirs = exported.predict(examples.texts, examples.langs, mode=mode)
        codes = list(code_columns(ours))
        probs = [name for name in ours if name.startswith("prob_") or name == "conf"]
        num_others = int((ours[codes].fillna("") != theirs[codes].fillna("")).any(axis=1).sum())
        difference = float((ours[probs] - theirs[probs]).abs().max().max())
        if num_others or difference > _TOLERANCE:
            raise UserError(
                f"The graphs do not match the model: in the mode {mode}, codes differ for {num_others:,} of "
                f"{len(examples):,} descriptions, and probabilities by up to {difference:.0e}. Nothing was written."
            )
        most = max(most, difference)
    return f"Same codes as the model for {len(examples):,} descriptions; probabilities differ by {most:.0e} at most."


def _accuracy(exported: OnnxCoder, examples: Examples) -> float:
    """Return the percentage of rows that get exactly their codes."""
    table = exported.predict(examples.texts, examples.langs, mode=_mode(exported))
    codes = table[list(code_columns(table))]
    ours, true = (
        [{code for code in row if isinstance(code, str)} for row in rows.to_numpy(dtype=object)]
        for rows in (codes, examples.codes)
    )
    return 100 * float(np.mean([a == b for a, b in zip(ours, true, strict=True)]))


def quantize(folder: Path) -> None:
    """Replace the graphs that hold weights by graphs with weights in 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in (ENCODER_FILE, START_FILE, STEP_FILE):
        small = folder / f"small-{name}"
        with _quiet():
            # unsigned: CPUs without VNNI add up products of signed with unsigned numbers in too few bits
            quantize_dynamic(folder / name, small, weight_type=QuantType.QUInt8)
        os.replace(small, folder / name)


def export_graphs(model: MixerModel, folder: Path) -> None:
    """Write the graphs of a model in fp32 on the CPU into a folder."""
    config = model.config
    texts = join_language(_SAMPLE, ["en"] * len(_SAMPLE))
    tokens = tokenize(texts, max_len=config.max_len, tokenizer=model.tokenizer)
    rows = np.arange(len(texts))
    ids = torch.from_numpy(tokens.pad(rows, max_len=config.max_len, num_positions=config.pad_to)).long()
    batch, words = Dim("batch"), Dim("words")
    num_positions = 4 * Dim("quarters", max=config.max_len // 4) if model.tokenizer.reads_characters else Dim("tokens")
    with torch.no_grad(), _quiet():
        encoder, start = EncoderGraph(model), StartGraph(model)
        logits, memory, mask = encoder(ids)
        of_memory, *prior = start(memory, logits)
        _write(
            encoder,
            {"input_ids": (ids, {0: batch, 1: num_positions})},
            ("flat_logits", "memory", "memory_mask"),
            folder / ENCODER_FILE,
        )
        _write(
            start,
            {"memory": (memory, {0: batch, 1: words}), "flat_logits": (logits, {0: batch})},
            ("of_memory", "shares", "blocks")[: 1 + len(prior)],
            folder / START_FILE,
        )
        outputs = _STEP_OUTPUTS[: 3 + 3 * bool(prior)]
        _write(StepGraph(model), _step_inputs(of_memory, mask, prior), outputs, folder / STEP_FILE)
        if model.linear_expert is not None:
            characters = torch.from_numpy(lower_characters(texts)).long()
            shape = {0: batch, 1: Dim("characters")}
            _write(NgramsGraph(), {"characters": (characters, shape)}, ("buckets",), folder / NGRAMS_FILE)
            expert = {name: value.numpy() for name, value in model.linear_expert.state_dict().items()}
            np.savez(folder / LINEAR_FILE, sharpness=SHARPNESS, **expert)


_STEP_WITHOUT_PRIOR = 7  # number of inputs of the decoder's step, without those of the prior
_STEP_OUTPUTS = ("log_probs", "next.own", "next.visible", "next.left", "next.fits", "next.ended")


def _step_inputs(of_memory: Tensor, mask: Tensor, prior: list[Tensor]) -> dict[str, tuple[Tensor, dict[int, Any]]]:
    """Return examples of the decoder step's inputs, with their dynamic axes."""
    batch, width, parents, words, nodes = map(Dim, ("batch", "width", "parents", "words", "nodes"))
    num_rows, of_parents, of_nodes = len(mask), 4, 5
    tokens = torch.full((num_rows, 6), 7)
    own = of_memory[..., :1, :].expand(*of_memory.shape[:4], of_nodes, -1).contiguous()
    visible = torch.ones(num_rows, of_parents, of_nodes, dtype=torch.bool)
    inputs: dict[str, tuple[Tensor, dict[int, Any]]] = {
        "tokens": (tokens, {0: batch, 1: width}),
        "parents": (tokens % of_parents, {0: batch, 1: width}),
        "depth": (torch.tensor([2]), {}),
        "of_memory": (of_memory, {0: batch, 4: words}),
        "memory_mask": (mask, {0: batch, 1: words}),
        "own": (own, {0: batch, 4: nodes}),
        "visible": (visible, {0: batch, 1: parents, 2: nodes}),
    }
    if prior:
        shares, blocks = prior
        known = torch.ones(num_rows, of_parents, shares.shape[1], dtype=torch.bool)
        of_level = {0: batch, 1: parents}
        inputs |= {"shares": (shares, {0: batch}), "blocks": (blocks, {0: batch})}
        # torch.export takes the same tensor twice for one input
        inputs |= {"left": (known, of_level), "fits": (known.clone(), of_level), "ended": (~known[..., 0], of_level)}
    return inputs


def _write(
    module: nn.Module, inputs: dict[str, tuple[Tensor, dict[int, Any]]], outputs: tuple[str, ...], path: Path
) -> None:
    """Export a module; `inputs` are examples by name, each with its dynamic axes."""
    examples, axes = zip(*inputs.values(), strict=True)
    if len(inputs) > _STEP_WITHOUT_PRIOR:  # inputs of the prior are one argument
        examples, axes = ((*x[:_STEP_WITHOUT_PRIOR], tuple(x[_STEP_WITHOUT_PRIOR:])) for x in (examples, axes))
    module.eval()(*examples)  # fill caches, which would otherwise keep tensors of the export
    try:
        program = torch.onnx.export(
            module,
            examples,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=axes,
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=False)
    except Exception as error:  # torch raises errors of any kind here
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"torch can't write this encoder as an ONNX graph ({reason}). Nothing was written.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

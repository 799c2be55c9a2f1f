"""A model as ONNX graphs, which `OnnxCoder` runs without torch."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from histocoder.checkpoints.hub import write_card
from histocoder.checkpoints.model_files import save_config
from histocoder.data.examples import Examples
from histocoder.data.tokens import join_language, lower_characters, tokenize
from histocoder.errors import UserError
from histocoder.files import make_folder, temporary_folder
from histocoder.formatters.tokens import PAD
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
from histocoder.model import MixerModel
from histocoder.model.linear_expert import linear_ngrams
from histocoder.model.ngram import NgramEncoder, Ngrams
from histocoder.model.prior import log_shares

_OPSET = 20
_SAMPLE = ("wine and spirit merchant", "farmer", "boot & shoe maker (retired)")
"""What graphs are recorded with."""
_NUM_COMPARED = 1000
_TOLERANCE = 1e-4
"""Of probabilities."""


class _Encoder(nn.Module):
    """Encoder and flat head."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        if isinstance(model.encoder, NgramEncoder):
            self.model.encoder = _DenseNgrams.of(model.encoder)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat logits (B, num_classes), memory (B, S, dim) and its mask (B, S)."""
        memory, pooled, mask = self.model.encode(input_ids)
        if mask is None:
            mask = torch.ones_like(memory[..., 0], dtype=torch.bool)
        return self.model.classify(pooled), memory, mask


class _DenseNgrams(NgramEncoder):
    """An n-gram encoder by operators of which the sizes of all results are known from those of their inputs.

    Its table has a row more than it has n-grams: of zeros, for those that are missing.
    """

    @classmethod
    def of(cls, encoder: NgramEncoder) -> NgramEncoder:
        """Return one with the weights of another."""
        dense = copy.deepcopy(encoder)
        dense.__class__ = cls
        dense.table = nn.Parameter(F.pad(encoder.table, (0, 0, 0, 1)))
        return dense

    def _words(self, ngrams: Ngrams, num_words: int) -> tuple[Tensor, Tensor]:
        torch._check(num_words >= 1)
        torch._check(num_words <= self.config.max_words + 1)
        real, number = ngrams.buckets >= 0, torch.arange(num_words)
        buckets = torch.where(real, ngrams.buckets, self.config.num_buckets)
        total = F.embedding(buckets, self.table).sum(2)  # (B, S, dim)
        in_word = (ngrams.words[:, None] == number[:, None]).float()  # (B, W, S)
        counts = torch.matmul(in_word, real.sum(-1, keepdim=True).float())  # (B, W, 1)
        return torch.matmul(in_word, total) / counts.clamp(min=1), (counts[..., 0] > 0) | (number == 0)


class _Start(nn.Module):
    """What the decoder computes once for each row."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, memory: Tensor, flat_logits: Tensor) -> tuple[Tensor, ...]:
        """Return memory's keys and values (B, layers, 2, heads, S, dim / heads); the prior's shares (B, K) and blocks
        (B, K, block_size), if there is one.
        """
        layers: Any = self.model.decoder.decoder.layers
        of_memory = [torch.stack(layer.multihead_attn.keys_values(memory), dim=1) for layer in layers]
        prior = self.model.prior(flat_logits)
        return torch.stack(of_memory, dim=1), *(() if prior is None else (prior.shares, prior.blocks))


class _Step(nn.Module):
    """The next level of trees of tokens, as `Stepper.step_tree` computes it."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        depth: Tensor,
        of_memory: Tensor,
        memory_mask: Tensor,
        own: Tensor,
        visible: Tensor,
        shares: Tensor | None = None,
        blocks: Tensor | None = None,
        left: Tensor | None = None,
        fits: Tensor | None = None,
        ended: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Predict what follows each node.

        Parameters
        ----------
        tokens, parents : Tensor of int, of shape (B, W)
        depth : Tensor of int, of shape (1,)
            Of the tokens in their sequences, BOS at 0.
        of_memory : Tensor of shape (B, layers, 2, heads, S, dim / heads)
        memory_mask : Tensor of bool, of shape (B, S)
        own : Tensor of shape (B, layers, 2, heads, N, dim / heads)
            Keys and values of the nodes so far.
        visible : Tensor of bool, of shape (B, P, N)
            Which of these each of the previous level's nodes attends to.
        shares, blocks : Tensor, optional
            See `_Start`.
        left, fits, ended : Tensor of bool, of shape (B, P, K), (B, P, K) and (B, P), optional
            See `PriorSteps`.

        Returns
        -------
        log_probs : Tensor of shape (B, W, vocab_size)
        own, visible, left, fits, ended
            Of the next step, the last three if there is a prior.
        """
        decoder, width = self.decoder, tokens.shape[1]
        places = torch.arange(width, device=tokens.device)
        itself = (places[:, None] == places).expand(tokens.shape[0], -1, -1)  # len would be a constant
        inherited = visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[2]))
        visible = torch.cat([inherited, itself], dim=2)
        x = decoder.token_emb(tokens) + decoder.positional_encoding.pos_embedding[depth, 0]
        kept = []
        layers: Any = decoder.decoder.layers
        for i, layer in enumerate(layers):
            attention = layer.self_attn
            queries, keys, values = map(
                attention.heads, F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
            )
            keys, values = torch.cat([own[:, i, 0], keys], dim=2), torch.cat([own[:, i, 1], values], dim=2)
            kept.append(torch.stack([keys, values], dim=1))
            mixed = attention.mix(queries, keys, values, attn_mask=visible[:, None])
            x = layer.norm1(x + attention.out_proj(mixed))
            attention = layer.multihead_attn
            queries = attention.heads(F.linear(x, *attention.query_projection))
            mixed = attention.mix(queries, of_memory[:, i, 0], of_memory[:, i, 1], attn_mask=memory_mask[:, None, None])
            x = layer.norm2(x + attention.out_proj(mixed))
            x = layer.norm3(x + layer.linear2(layer.linear1(x).relu()))
        logits = decoder.head(x)
        if shares is None or blocks is None or left is None or fits is None or ended is None:
            return logits.log_softmax(-1), torch.stack(kept, dim=1), visible
        expected, *known = self._prior(tokens, parents, depth, shares, blocks, left, fits, ended)
        return (logits + expected).log_softmax(-1), torch.stack(kept, dim=1), visible, *known

    def _prior(
        self,
        tokens: Tensor,
        parents: Tensor,
        depth: Tensor,
        shares: Tensor,
        blocks: Tensor,
        left: Tensor,
        fits: Tensor,
        ended: Tensor,
    ) -> tuple[Tensor, ...]:
        """Compute what `PriorSteps.step_tree` does, at a depth that is not known before.

        Returns
        -------
        Tensor of shape (B, W, vocab_size)
        left, fits, ended
        """
        size = blocks.shape[2]
        index = parents[..., None].expand(-1, -1, left.shape[2])
        left, fits = left.gather(1, index), fits.gather(1, index)
        ended = ended.gather(1, parents) | tokens.eq(PAD)
        last = blocks.index_select(2, (depth - 1) % size).transpose(1, 2)  # (B, 1, K)
        fits = fits & ((last == tokens[..., None]) | depth.eq(0))
        is_behind_code = depth.gt(0) & (depth % size).eq(0)
        left = left & ~(fits & is_behind_code)
        fits = (left & is_behind_code) | (fits & ~is_behind_code)  # onnxruntime has no where of bool
        following = blocks.index_select(2, depth % size).transpose(1, 2).expand(fits.shape)
        masses = torch.zeros(*tokens.shape, self.decoder.head.out_features, device=tokens.device)
        masses = masses.scatter_add(2, following, shares[:, None] * fits)
        written = (shares[:, None] * ~left).sum(-1) * is_behind_code
        is_pad = torch.arange(masses.shape[2], device=tokens.device) == PAD
        masses = torch.where(is_pad, torch.where(ended, 1.0, masses[..., PAD] + written)[..., None], masses)
        return log_shares(masses), left, fits, ended


class _LinearNgrams(nn.Module):
    """The n-grams that the linear expert reads."""

    def forward(self, characters: Tensor) -> Tensor:
        return linear_ngrams(characters)


def check_installed() -> None:
    """Raise a UserError where a library that exporting needs is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"Exporting a model needs {', '.join(missing)}. Install what is missing: pip install 'histocoder[onnx]'."
        )


def export(
    coder: Coder, folder: Path, examples: Examples, *, max_loss: float | None = None, say: Callable[[str], None]
) -> None:
    """Write a model as ONNX graphs, whole or not at all; `OnnxCoder` runs them.

    Parameters
    ----------
    coder : Coder
        In fp32, on the CPU.
    folder : Path
        Must not exist.
    examples : Examples
        Of n descriptions that the graphs are checked on.
    max_loss : float, optional
        Points of accuracy that may be lost by keeping weights in 8 bits; by default they stay in fp32.
    say : callable
        Is told how the graphs compare with the model.

    Raises
    ------
    UserError
        Where torch can't turn the model into graphs, these give other codes than the model, or too much is lost.
    """
    make_folder(folder.absolute().parent)
    with temporary_folder(folder) as temporary:
        export_graphs(coder.model, temporary)
        save_config(temporary, coder.model.config)
        coder.model.tokenizer.save(temporary / TOKENIZER_FOLDER)
        write_card(temporary, coder.card)
        exported = OnnxCoder(temporary)
        say(_comparison(coder, exported, examples.take(np.arange(min(_NUM_COMPARED, len(examples))))))
        if max_loss is not None:
            before = _accuracy(exported, examples)
            quantize(temporary)
            after = _accuracy(OnnxCoder(temporary), examples)
            said = f"{before:.1f} % in fp32, {after:.1f} % in int8"
            say(f"Exactly right in the mode {_mode(coder)}, of {len(examples):,} rows: {said}.")
            if before - after > max_loss:
                raise UserError(
                    f"In int8 the model loses {before - after:.1f} points of accuracy, more than --max-loss "
                    f"{max_loss:g}; nothing was written. Export it without --int8."
                )
        os.replace(temporary, folder)


def _mode(coder: Coder | OnnxCoder) -> str:
    """Return the mode that validated best among those of exported models."""
    return coder.mode if coder.mode in MODES else "flat"


def _comparison(coder: Coder, exported: OnnxCoder, examples: Examples) -> str:
    """Return how graphs compare with their model on examples; raise a UserError where they give other codes."""
    most = 0.0
    for mode in MODES:
        ours = coder.predict(examples.texts, examples.langs, mode=mode, progress=False)
        theirs = exported.predict(examples.texts, examples.langs, mode=mode)
        codes = [name for name in ours if name.startswith(f"{coder.system}_")]
        probs = [name for name in ours if name.startswith("prob_") or name == "conf"]
        num_others = int((ours[codes].fillna("") != theirs[codes].fillna("")).any(axis=1).sum())
        difference = float((ours[probs] - theirs[probs]).abs().max().max())
        # the linear expert's sums are rounded to fp16, and torch and numpy may round one of them apart
        if num_others or difference > (10 * _TOLERANCE if mode == "combined" else _TOLERANCE):
            raise UserError(
                f"The graphs do not give what the model gives: in the mode {mode} other codes for {num_others:,} of "
                f"{len(examples):,} descriptions, and probabilities up to {difference:.0e} apart. Nothing was written."
            )
        most = max(most, difference)
    return f"Same codes as the model for {len(examples):,} descriptions; probabilities differ by {most:.0e} at most."


def _accuracy(exported: OnnxCoder, examples: Examples) -> float:
    """Return the percentage of rows that get exactly their codes."""
    table = exported.predict(examples.texts, examples.langs, mode=_mode(exported))
    codes = table[[name for name in table if name.startswith(f"{exported.system}_")]]
    pairs = zip(codes.to_numpy(dtype=object), examples.codes.to_numpy(dtype=object), strict=True)
    return 100 * float(np.mean([_codes(ours) == _codes(true) for ours, true in pairs]))


def _codes(row: np.ndarray) -> set[str]:
    return {code for code in row if isinstance(code, str)}


def quantize(folder: Path) -> None:
    """Replace the graphs that hold weights by ones with weights in 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in (ENCODER_FILE, START_FILE, STEP_FILE):
        small = folder / f"small-{name}"
        with _quiet():
            # unsigned: CPUs without VNNI add up products of signed with unsigned numbers in too few bits
            quantize_dynamic(folder / name, small, weight_type=QuantType.QUInt8)
        os.replace(small, folder / name)


def export_graphs(model: MixerModel, folder: Path) -> None:
    """Write the graphs of a model into a folder.

    Parameters
    ----------
    model : MixerModel
        In fp32, on the CPU.
    folder : Path

    Raises
    ------
    UserError
        Where torch can't turn the model into a graph.
    """
    config = model.config
    texts = join_language(_SAMPLE, ["en"] * len(_SAMPLE))
    tokens = tokenize(texts, max_len=config.max_len, tokenizer=model.tokenizer)
    rows = np.arange(len(texts))
    ids = torch.from_numpy(tokens.pad(rows, max_len=config.max_len, num_positions=config.pad_to)).long()
    batch, words = Dim("batch"), Dim("words")
    num_positions = 4 * Dim("quarters", max=config.max_len // 4) if model.tokenizer.reads_characters else Dim("tokens")
    with torch.no_grad(), _quiet():
        logits, memory, mask = _Encoder(model)(ids)  # and fills caches, which must not be filled while recording
        of_memory, *prior = _Start(model)(memory, logits)
        _write(
            _Encoder(model),
            {"input_ids": (ids, {0: batch, 1: num_positions})},
            ("flat_logits", "memory", "memory_mask"),
            folder / ENCODER_FILE,
        )
        _write(
            _Start(model),
            {"memory": (memory, {0: batch, 1: words}), "flat_logits": (logits, {0: batch})},
            ("of_memory", "shares", "blocks")[: 1 + len(prior)],
            folder / START_FILE,
        )
        outputs = _STEP_OUTPUTS[: 3 + 3 * bool(prior)]
        _write(_Step(model), _step_inputs(of_memory, mask, prior), outputs, folder / STEP_FILE)
        if model.linear_expert is not None:
            characters = torch.from_numpy(lower_characters(texts)).long()
            shape = {0: batch, 1: Dim("characters")}
            _write(_LinearNgrams(), {"characters": (characters, shape)}, ("buckets",), folder / NGRAMS_FILE)
            expert = {name: value.numpy() for name, value in model.linear_expert.state_dict().items()}
            np.savez(folder / LINEAR_FILE, **expert)


_STEP_OUTPUTS = ("log_probs", "next.own", "next.visible", "next.left", "next.fits", "next.ended")


def _step_inputs(of_memory: Tensor, mask: Tensor, prior: list[Tensor]) -> dict[str, tuple[Tensor, dict[int, Any]]]:
    """Examples of what the decoder's step reads, with the axes that vary."""
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
    """Export a module; `inputs` are examples by name, each with its axes that vary."""
    examples = tuple(example for example, _ in inputs.values())
    axes = tuple(shape for _, shape in inputs.values())
    try:
        program = torch.onnx.export(
            module.eval(),
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
    except Exception as error:  # of any kind, from torch for what a model does
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"torch can't write this encoder as an ONNX graph ({reason}). Nothing was written.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the terminal what the libraries say of themselves."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

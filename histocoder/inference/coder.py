"""The public prediction API: descriptions in, a table of codes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from histocoder.checkpoints.model_files import CARD_FILE, load_model, local_folder, model_card, save_model
from histocoder.checkpoints.occcanine import model_from_occcanine
from histocoder.config import PredictOptions
from histocoder.errors import Cancelled
from histocoder.inference.decoding import Decoding, Encoded, encode
from histocoder.inference.descriptions import Descriptions, readings, thresholds_of
from histocoder.inference.onnx_coder import OnnxCoder
from histocoder.inference.predictions import Prediction
from histocoder.model import MixerModel
from histocoder.model.devices import computing_dtype

_ENCODED_AT_ONCE = 64
"""Number of descriptions that fits a CPU's caches. Decoding reads all weights at each step, and prefers more."""
_ENCODED_AT_ONCE_ELSEWHERE = 4096

Result = TypeVar("Result")
Texts: TypeAlias = str | Sequence[str | None] | pd.Series
Langs: TypeAlias = str | Sequence[str] | pd.Series
ShowProgress: TypeAlias = bool | Callable[[int], object]


class Ranked(NamedTuple):
    """Codes, other codes and encodings of n descriptions."""

    codes: Prediction  # result of `Coder.code` in the model's own mode
    ranked: Prediction  # codes that all experts propose as the first, by their combined probability
    encodings: np.ndarray  # result of `Coder.embed`, of shape (n, hidden)


class Coder:
    """Codes occupational descriptions with a trained model.

    Parameters
    ----------
    model : MixerModel
    device : str, optional
        By default a GPU if there is one.
    precision : {"auto", "fp32", "bf16", "fp16"}
        auto uses bf16 if the hardware supports it, which is several times as fast as fp32; probabilities then differ in
        the third digit, some in the second.

    Attributes
    ----------
    system : str
        Name of the classification; see `ModelConfig.system`.
    codes : tuple of str
        Codes of the model's key.
    precision : str
        Name of the torch dtype that it computes in.
    card : str
        Model card, the README.md that is saved beside the model.
    turn : context manager
        Entered for each batch: a lock lets several threads share the model. By default, none.

    Examples
    --------
    coder = Coder.from_pretrained("out")
    coder.predict(["wine and spirit merchant", "husmand"], ["en", "da"])
    """

    def __init__(self, model: MixerModel, device: str | None = None, *, precision: str = "fp32") -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = computing_dtype(precision, self.device)
        self.model = model.to(self.device).eval()
        # in another precision, a copy: weights are saved as they were trained
        self.computing = self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype)
        self.computing.dtype = dtype
        self.precision = str(dtype).removeprefix("torch.")
        self.decoding = Decoding(self.model, self.computing)
        self.formatter, self.codes = self.decoding.formatter, self.decoding.codes
        self.system = model.config.system
        self.card = model_card(model.config)
        self.turn: AbstractContextManager[object] = nullcontext()
        self._encoded_at_once = _ENCODED_AT_ONCE if self.device.type == "cpu" else _ENCODED_AT_ONCE_ELSEWHERE

    @classmethod
    def from_pretrained(cls, path_or_url: str | Path, device: str | None = None, **computing: Any) -> Coder:
        """Open a model.

        Parameters
        ----------
        path_or_url : path
            Folder of a run or a checkpoint, any other folder with `config.json` and `model.safetensors`, or a Hugging
            Face hub repository with these files, as `hf://owner/name`.
        device, **computing
            See `Coder`.

        Raises
        ------
        UserError
            If there is no model, or it is damaged or of a newer format version.
        """
        folder = local_folder(path_or_url)
        coder = cls(load_model(folder), device, **computing)
        if (folder / CARD_FILE).is_file():
            coder.card = (folder / CARD_FILE).read_text(encoding="utf-8")
        return coder

    @staticmethod
    def from_onnx(folder: str | Path, *, num_threads: int | None = None) -> OnnxCoder:
        """Open a model that `histocoder export` wrote; see `OnnxCoder`, which runs without torch."""
        return OnnxCoder(folder, num_threads=num_threads)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `save_model` writes, and the model card; `from_pretrained` reads them."""
        model = self.model
        save_model(Path(folder), model.config, model.state_dict(), tokenizer=model.tokenizer, card=self.card)

    @property
    def mode(self) -> str:
        """The mode chosen in validation, the default of `predict`."""
        return self.model.config.mode

    def describe(self, code: str) -> str | None:
        """Return what a code means, if the key says so."""
        return self.model.config.descriptions.get(code)

    def column_names(self, options: PredictOptions) -> list[str]:
        """Return the columns of `predict`."""
        return list(self.code_distinct([], [], options).frame(self.model.config))

    def predict(
        self,
        texts: Texts,
        lang: Langs = "unk",
        *,
        progress: ShowProgress = True,
        cancel: Callable[[], bool] | None = None,
        **options: Any,
    ) -> pd.DataFrame:
        """Code descriptions.

        Parameters
        ----------
        texts : str, or sequence or Series of str, of n descriptions
            Missing or blank descriptions get missing codes.
        lang : str, or sequence or Series of n
            Language of all descriptions, or of each.
        progress : bool or callable
            Whether to show a progress bar on a terminal; or a function that is called after each batch with its number
            of distinct descriptions.
        cancel : callable, optional
            Asked before each batch; if it returns True, `Cancelled` is raised.
        **options
            Fields of `PredictOptions`: `mode` (combined, greedy, flat, topk or full; by default the one chosen in
            validation), `k`, `threshold`, `constrain`, `min_confidence` and `batch_size`.

        Returns
        -------
        DataFrame
            With the input's index and order. For each code a column named as in the training data, such as `hisco_1`,
            `prob_1`, and `desc_1` where the key has descriptions; a missing code is None. `conf` is the probability of
            the set of codes in combined and greedy, of the best code in the other modes. For full, a column for each
            code of the key.

        Raises
        ------
        UserError
            If the mode is unknown, or the options do not fit it.
        """
        found = self.code(texts, lang, PredictOptions(**options), progress=progress, cancel=cancel)
        frame = found.frame(self.model.config)
        return frame.set_axis(texts.index) if isinstance(texts, pd.Series) else frame

    def code(
        self,
        texts: Texts,
        lang: Langs,
        options: PredictOptions,
        *,
        progress: ShowProgress = True,
        cancel: Callable[[], bool] | None = None,
    ) -> Prediction:
        """Return the codes of `predict` as arrays."""
        distinct = Descriptions.of(texts, lang, languages=self.model.config.languages)
        found = self.code_distinct(distinct.texts, distinct.langs, options, progress=progress, cancel=cancel)
        return found.take(distinct.rows)

    def code_distinct(
        self,
        texts: Sequence[str],
        langs: Sequence[str],
        options: PredictOptions,
        *,
        progress: ShowProgress = True,
        cancel: Callable[[], bool] | None = None,
    ) -> Prediction:
        """Code distinct descriptions, none of them missing, whose languages are given by their codes."""
        mode = options.mode or self.mode
        options = replace(options, mode=mode)  # which is checked with it
        work = partial(self.predict_batch, mode=mode, k=options.k, constrain=bool(options.constrain))
        hidden = None if progress is True and len(texts) > options.batch_size else True  # None: without a terminal
        widths = {"full": len(self.codes), "topk": min(options.k, len(self.codes))}
        empty = Prediction.empty(widths.get(mode, self.formatter.num_blocks), has_codes=mode != "full")
        parts = []
        with tqdm(total=len(texts), unit="text", disable=hidden, leave=False) as bar:
            tell = progress if callable(progress) else bar.update
            for rows, part in self.each_batch(work, texts, langs, options, cancel=cancel):
                parts.append((rows, part))
                tell(len(rows))
        prediction = Prediction.join(parts, empty)
        prediction.drop_unsure(0.0 if mode == "full" else options.min_confidence)
        return prediction

    @torch.inference_mode()
    def predict_batch(
        self,
        input_ids: Tensor,
        thresholds: Tensor | None = None,
        characters: Tensor | None = None,
        *,
        mode: str,
        k: int = 5,
        constrain: bool = False,
    ) -> Prediction:
        """Code a batch of tokenised descriptions; see `predict`.

        Parameters
        ----------
        input_ids : Tensor of int, of shape (B, S)
            See `MixerModel.encode`.
        thresholds : Tensor of shape (B,), optional
            Thresholds of the flat head, for flat; by default the model's own default.
        characters : Tensor of int, of shape (B, L), optional
            See `LinearExpert`; for combined, if the model has one.
        """
        batch = self.encode(input_ids, characters)
        return self.decoding.decode(batch, mode, thresholds=thresholds, k=k, constrain=constrain)

    @torch.inference_mode()
    def embed(self, texts: Texts, lang: Langs = "unk", *, batch_size: int = 256) -> np.ndarray:
        """Return pooled encodings of descriptions, an array of shape (n, hidden); NaN for missing descriptions."""
        distinct = Descriptions.of(texts, lang, languages=self.model.config.languages)
        pooled, options = self._no_encodings(distinct), PredictOptions(batch_size=batch_size)
        for rows, batch in self.each_batch(lambda ids, *_: self.encode(ids), distinct.texts, distinct.langs, options):
            pooled[rows] = batch.pooled.float().cpu().numpy()
        return pooled[distinct.rows]

    def predict_ranked(self, texts: Texts, lang: Langs = "unk", *, batch_size: int = 256) -> Ranked:
        """Code descriptions in the model's own mode and rank other codes, encoding each once; see `predict`."""

        @torch.inference_mode()
        def work(ids: Tensor, thresholds: Tensor, characters: Tensor | None) -> Ranked:
            batch = self.encode(ids, characters)
            chosen, others = self.decoding.ranked(batch)
            if self.mode != "combined":
                chosen = self.decoding.decode(batch, self.mode, thresholds=thresholds)
            return Ranked(chosen, others, batch.pooled.float().cpu().numpy())

        distinct = Descriptions.of(texts, lang, languages=self.model.config.languages)
        codes, ranked, encodings = [], [], self._no_encodings(distinct)
        options = PredictOptions(batch_size=batch_size)
        for rows, found in self.each_batch(work, distinct.texts, distinct.langs, options):
            codes.append((rows, found.codes))
            ranked.append((rows, found.ranked))
            encodings[rows] = found.encodings
        empty = Prediction.empty(self.formatter.num_blocks)
        chosen, others = (Prediction.join(parts, empty).take(distinct.rows) for parts in (codes, ranked))
        return Ranked(chosen, others, encodings[distinct.rows])

    def _no_encodings(self, distinct: Descriptions) -> np.ndarray:
        """Return an array for the encodings of descriptions; its last row, for a missing one, stays NaN."""
        size = len(distinct.texts) + 1, self.model.encoder.config.hidden_size
        return np.full(size, np.nan, dtype=np.float32)

    def encode(self, input_ids: Tensor, characters: Tensor | None = None) -> Encoded:
        """Return a batch encoded as by `MixerModel.encode`, with characters for the linear expert."""
        return encode(self.computing, input_ids, characters, at_once=self._encoded_at_once)

    def each_batch(
        self,
        work: Callable[..., Result],
        texts: Sequence[str],
        langs: Sequence[str],
        options: PredictOptions,
        *,
        cancel: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[np.ndarray, Result]]:
        """Yield the indices (B,) of each batch of descriptions of similar lengths, and the result of `work` on it.

        `work` takes token ids, thresholds of the flat head, and characters for the linear expert; see `predict_batch`.
        `cancel` is asked before each batch; see `predict`.
        """
        config = self.model.config
        thresholds = torch.from_numpy(thresholds_of(config, langs, options.threshold))
        sizes = {"at_least": self._encoded_at_once, "at_most": options.batch_size}
        for rows, ids, characters in readings(texts, langs, config, self.model.tokenizer, **sizes):
            if cancel is not None and cancel():
                raise Cancelled
            of_linear = None if characters is None else torch.from_numpy(characters).to(self.device)
            given = torch.from_numpy(ids).to(self.device), thresholds[rows].to(self.device), of_linear
            with self.turn:
                result = work(*given)
            yield rows, result


def load_occcanine(path: str | Path, **settings: Any) -> Coder:
    """Open a model in OccCANINE's form, which gives the outputs that OccCANINE gives; see `model_from_occcanine`."""
    return Coder(model_from_occcanine(Path(path), **settings))

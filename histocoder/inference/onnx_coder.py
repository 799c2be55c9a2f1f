"""Coding with an exported model, with numpy and onnxruntime, without torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from histocoder.config import ModelConfig, PredictOptions
from histocoder.errors import DamagedError, UserError
from histocoder.formatters import build_formatter
from histocoder.formatters.tokenizers import CHARACTERS, PretrainedTokenizer
from histocoder.inference.onnx_search import OnnxStepper, Start, combined, greedy, set_probability, softmax
from histocoder.inference.predictions import Prediction
from histocoder.inference.reading import readings, thresholds_of

if TYPE_CHECKING:
    import pandas as pd

CONFIG_FILE, TOKENIZER_FOLDER = "config.json", "tokenizer"
ENCODER_FILE, START_FILE, STEP_FILE = "encoder.onnx", "decoder_start.onnx", "decoder_step.onnx"
NGRAMS_FILE, LINEAR_FILE = "linear_ngrams.onnx", "linear.npz"
MODES = ("combined", "greedy", "flat")
_AT_LEAST = 64  # number of descriptions of a batch, even if their lengths differ


class OnnxCoder:
    """Codes occupational descriptions with a model that `histocoder export` wrote.

    It gives the codes that `Coder` gives, in the modes combined, greedy and flat.

    Parameters
    ----------
    folder : path
        Folder that `histocoder export --onnx` wrote.
    num_threads : int, optional
        Number of threads; by default as many as there are cores.

    Attributes
    ----------
    system : str
        Name of the classification, with which the codes' columns begin.
    codes : tuple of str
        The codes of the model's key.
    mode : str
        The mode chosen in validation, the default of `predict`.

    Raises
    ------
    UserError
        If onnxruntime is not installed, or the folder holds no exported model, or a damaged one.

    Examples
    --------
    coder = OnnxCoder.from_onnx("exported")
    coder.predict(["wine and spirit merchant", "husmand"], ["en", "da"])
    """

    def __init__(self, folder: str | Path, *, num_threads: int | None = None) -> None:
        self._folder, self._num_threads = Path(folder), num_threads
        self._session = cache(self._open_session)
        if not (self._folder / ENCODER_FILE).is_file():
            raise UserError(
                f"{folder} holds no exported model: it has no {ENCODER_FILE}. Write one with histocoder export --model "
                f"MODEL --onnx {folder}."
            )
        try:
            values = json.loads((self._folder / CONFIG_FILE).read_text(encoding="utf-8"))
            self._config = ModelConfig.from_dict(values)
        except (OSError, ValueError, AttributeError) as error:
            raise DamagedError(f"{self._folder / CONFIG_FILE} can't be read ({error}).") from error
        self._session(ENCODER_FILE)  # raises an error now if it is damaged
        tokenizer = self._folder / TOKENIZER_FOLDER
        self._tokenizer = PretrainedTokenizer.from_folder(tokenizer) if tokenizer.is_dir() else CHARACTERS
        self.formatter = build_formatter(**self._config.formatter)
        self._is_code = np.array([bool(code) for code in self._config.codes])
        self.codes = tuple(filter(None, self._config.codes))
        self.system, self.mode = self._config.system, self._config.mode
        self._blocks = np.array([self.formatter.system.to_block(code) for code in self.codes])

    @classmethod
    def from_onnx(cls, folder: str | Path, *, num_threads: int | None = None) -> OnnxCoder:
        """Open an exported model; see `OnnxCoder`."""
        return cls(folder, num_threads=num_threads)

    def describe(self, code: str) -> str | None:
        """Return what a code means, where the key says so."""
        return self._config.descriptions.get(code)

    def predict(
        self,
        texts: str | Sequence[str | None] | pd.Series,
        lang: str | Sequence[str] | pd.Series = "unk",
        *,
        mode: str | None = None,
        threshold: float | None = None,
        constrain: bool | None = None,
        min_confidence: float = 0.0,
        batch_size: int = 64,
    ) -> pd.DataFrame:
        """Code descriptions, and return a DataFrame; needs pandas.

        Parameters and result are those of `Coder.predict`.
        """
        try:
            import pandas as pd

            from histocoder.inference.descriptions import Descriptions  # which needs pandas
        except ImportError as error:
            raise UserError(
                "predict returns a table, which needs pandas. Install it, or use predict_arrays."
            ) from error

        distinct = Descriptions.of(texts, lang, languages=self._config.languages)
        options = PredictOptions(mode=mode, threshold=threshold, constrain=constrain, batch_size=batch_size)
        prediction = self._code(distinct.texts, distinct.langs, options).take(distinct.rows)
        prediction.drop_unsure(min_confidence)
        frame = prediction.frame(self._config)
        return frame.set_axis(texts.index) if isinstance(texts, pd.Series) else frame

    def predict_arrays(
        self,
        texts: Sequence[str],
        langs: Sequence[str],
        *,
        mode: str | None = None,
        threshold: float | None = None,
        constrain: bool | None = None,
        batch_size: int = 64,
    ) -> Prediction:
        """Code descriptions, one at a time, with numpy and onnxruntime alone.

        Parameters
        ----------
        texts : sequence of str, of n descriptions
        langs : sequence of str, of n
            Codes of languages as the model knows them; "unk" is unknown.
        mode, threshold, constrain, batch_size
            See `Coder.predict`.

        Returns
        -------
        Prediction
            Codes (n, width), their probabilities and the confidence (n,), as arrays.
        """
        options = PredictOptions(mode=mode, threshold=threshold, constrain=constrain, batch_size=batch_size)
        return self._code(texts, langs, options)

    def _code(self, texts: Sequence[str], langs: Sequence[str], options: PredictOptions) -> Prediction:
        """Return the codes of n descriptions, none of them missing."""
        mode = options.mode or self.mode
        options = replace(options, mode=mode)  # which is checked with it
        if mode not in MODES:
            raise UserError(
                f"An exported model codes in the modes {', '.join(MODES)}; for {mode} open the model itself."
            )
        parts, thresholds = [], thresholds_of(self._config, langs, options.threshold)
        for rows, ids, characters in readings(
            texts, langs, self._config, self._tokenizer, at_least=_AT_LEAST, at_most=options.batch_size
        ):
            flat_logits, memory, memory_mask = self._session(ENCODER_FILE).run(
                None, {"input_ids": ids.astype(np.int64)}
            )
            if mode == "flat":
                part = self._flat(flat_logits, thresholds[rows])
            else:
                start = self._start(memory, memory_mask, flat_logits)
                if mode == "combined":
                    part = self._combined(start, flat_logits, characters)
                else:
                    part = self._greedy(start, len(rows), constrain=bool(options.constrain))
            parts.append((rows, part))
        return Prediction.join(parts, len(texts), width=self.formatter.num_blocks)

    def _start(self, memory: np.ndarray, memory_mask: np.ndarray, flat_logits: np.ndarray) -> Start:
        session, step = self._session(START_FILE), self._session(STEP_FILE)
        given = {"memory": memory, "flat_logits": flat_logits}  # the graph reads logits only where there is a prior
        values = session.run(None, {one.name: given[one.name] for one in session.get_inputs()})
        started = dict(zip((output.name for output in session.get_outputs()), values, strict=True))
        started["memory_mask"] = memory_mask
        return lambda rows: OnnxStepper(step, {name: array[rows] for name, array in started.items()})

    def _flat(self, flat_logits: np.ndarray, thresholds: np.ndarray) -> Prediction:
        probabilities = self._class_probabilities(flat_logits)
        order = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.formatter.num_blocks]
        probs = np.take_along_axis(probabilities, order, 1).astype(np.float64)
        codes, conf = self._named(order), probs[:, 0].copy()
        left_out = probs <= thresholds[:, None]
        left_out[:, 0] = False
        codes[left_out], probs[left_out] = None, np.nan
        width = int((~left_out).sum(1).max())
        return Prediction(codes[:, :width], probs[:, :width], conf)

    def _greedy(self, start: Start, num_rows: int, *, constrain: bool) -> Prediction:
        num_blocks, block_size = self.formatter.num_blocks, self.formatter.block_size
        blocks = self._blocks if constrain else None
        tokens, of_tokens = greedy(start, num_rows, num_blocks=num_blocks, block_size=block_size, blocks=blocks)
        codes = self.formatter.decode(np.hstack([np.zeros_like(tokens[:, :1]), tokens]))
        is_code = codes.astype(bool)  # not of None
        probs = np.where(is_code, of_tokens.reshape(num_rows, num_blocks, -1).prod(-1), np.nan)
        return Prediction(codes, probs, set_probability(start, tokens, of_tokens, is_code))

    def _combined(self, start: Start, flat_logits: np.ndarray, characters: np.ndarray | None) -> Prediction:
        beliefs = {"flat": self._class_probabilities(flat_logits)}
        if characters is not None:
            beliefs["linear"] = softmax(self._linear(characters)[:, self._is_code])
        names = ("decoder", *beliefs)
        weights = self._config.experts or dict.fromkeys(names, 1 / len(names))
        num_blocks, missing = self.formatter.num_blocks, self.formatter.missing_token(self.codes)
        places, probs, conf = combined(start, beliefs, weights, self._blocks, num_blocks=num_blocks, missing=missing)
        return Prediction(self._named(places), probs, conf)

    def _class_probabilities(self, flat_logits: np.ndarray) -> np.ndarray:
        to_probabilities = softmax if self._config.flat_loss == "softmax" else _sigmoid
        return to_probabilities(flat_logits)[:, self._is_code]

    def _named(self, places: np.ndarray) -> np.ndarray:
        return np.array([*self.codes, None], dtype=object)[places]

    def _linear(self, characters: np.ndarray) -> np.ndarray:
        """Return the log-odds of `LinearExpert` for characters (B, S), of shape (B, num_classes)."""
        known, idf, weight, bias = (self._expert[name] for name in ("buckets", "idf", "weight", "bias"))
        buckets = (
            self._session(NGRAMS_FILE)
            .run(None, {"characters": characters.astype(np.int64)})[0]
            .reshape(len(characters), -1)
        )
        row, at = (buckets >= 0).nonzero()
        bucket = buckets[row, at]
        place = np.searchsorted(known, bucket).clip(max=len(known) - 1)
        found = known[place] == bucket
        pairs, counts = np.unique(row[found] * len(known) + place[found], return_counts=True)
        row, place = np.divmod(pairs, len(known))
        tfidf = (1 + np.log(counts.astype(np.float32))) * idf[place]
        norm = np.sqrt(np.bincount(row, tfidf**2, minlength=len(characters)).astype(np.float32))
        shares, starts = tfidf / norm[row], np.searchsorted(row, np.arange(len(characters) + 1))
        sums = [shares[a:b] @ weight[place[a:b]].astype(np.float32) for a, b in itertools.pairwise(starts)]
        return float(self._expert["sharpness"]) * (np.stack(sums) + bias)

    @cached_property
    def _expert(self) -> dict[str, np.ndarray]:
        try:
            with np.load(self._folder / LINEAR_FILE) as file:
                return dict(file)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedError(f"{self._folder / LINEAR_FILE} can't be read ({error}).") from error

    def _open_session(self, name: str) -> Any:
        try:
            import onnxruntime
        except ImportError as error:
            raise UserError("Exported models need onnxruntime. Install it: pip install 'histocoder[onnx]'.") from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if self._num_threads is not None:
            options.intra_op_num_threads = self._num_threads
        try:
            return onnxruntime.InferenceSession(self._folder / name, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no class of its own for all of them
            raise DamagedError(f"{self._folder / name} can't be read ({str(error).splitlines()[0]}).") from error


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))

"""Coding with an exported model, with numpy, pandas and onnxruntime, without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from histocoder.config import ModelConfig, PredictOptions
from histocoder.errors import DamagedError, UserError
from histocoder.formatters import build_formatter
from histocoder.inference.confidence import with_other_sources
from histocoder.inference.descriptions import Descriptions, Inputs, Langs, Texts, make_batches
from histocoder.inference.predictions import LEAST, NUM_CANDIDATES, Attribute, Prediction
from histocoder.text.tokenizers import CHARACTERS, PretrainedTokenizer, Tokenizer

CONFIG_FILE = "config.json"
TOKENIZER_FOLDER = "tokenizer"
ENCODER_FILE = "encoder.onnx"
NGRAMS_FILE = "linear_ngrams.onnx"
EXPERT_FILES = {
    "linear_expert": "linear.npz",
    "attribute_expert": "linear_attributes.npz",
    "nearest_expert": "nearest.npz",
}
MODES = ("combined", "flat")
_MAX_LEVEL = 7  # see `checkpoints.compact.quantize`, which needs torch
_AT_LEAST = 64  # number of descriptions of a batch, even if their lengths differ


class OnnxCoder:
    """Codes occupational descriptions with a model that `histocoder export` wrote, which has no
    decoder.

    Parameters
    ----------
    folder : path
        Folder that `histocoder export --onnx` wrote.
    num_threads : int
        Number of threads; 0 means as many as there are cores.

    Attributes
    ----------
    codes : tuple of str
        The codes of the model's key.
    mode : str
        The default of `predict`: flat if it was best in validation, else combined.

    Raises
    ------
    UserError
        If onnxruntime is not installed, or the folder holds no exported model, or a damaged one.
    """

    def __init__(self, folder: str | Path, *, num_threads: int = 0) -> None:
        folder = Path(folder)
        if not (folder / ENCODER_FILE).is_file():
            raise UserError(
                f"{folder} holds no exported model: it has no {ENCODER_FILE}. See "
                "histocoder export."
            )
        try:
            import onnxruntime
        except ImportError as error:
            raise UserError(
                "Exported models need onnxruntime. Install it: pip install 'histocoder[onnx]'."
            ) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = num_threads

        def session(name: str) -> Any:
            path = folder / name
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        # The config says which experts there are; the n-grams are those of the linear ones.
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            self._config = ModelConfig.from_dict(config)
            self._encoder = session(ENCODER_FILE)
            sizes = {
                "linear_expert": self._config.num_linear_features,
                "attribute_expert": self._config.num_attribute_features,
                "nearest_expert": self._config.num_nearest_rows,
            }
            self._experts = {}
            for name, size in sizes.items():
                if size:
                    self._experts[name] = _read_expert(folder / EXPERT_FILES[name])
            if self._experts.keys() - {"nearest_expert"}:
                self._ngrams = session(NGRAMS_FILE)
        except Exception as error:  # onnxruntime has no class of its own for all of them
            first_line = str(error).splitlines()[0]
            raise DamagedError(f"The model in {folder} can't be read ({first_line}).") from error

        self._tokenizer: Tokenizer = CHARACTERS
        tokenizer_folder = folder / TOKENIZER_FOLDER
        if tokenizer_folder.is_dir():
            self._tokenizer = PretrainedTokenizer.from_folder(
                tokenizer_folder, reads_language=self._config.reads_language
            )
        self._num_blocks = build_formatter(**self._config.formatter).num_blocks
        # Indices of the flat head's classes that are codes: OccCANINE has one for blank cells, too.
        self._classes_of_codes = np.flatnonzero(list(map(bool, self._config.codes)))
        self.codes = tuple(filter(None, self._config.codes))
        self.mode = "flat" if self._config.mode == "flat" else "combined"

    def predict(
        self,
        texts: Texts,
        lang: Langs = "unk",
        *,
        mode: str | None = None,
        threshold: float | None = None,
        min_confidence: float = 0.0,
        batch_size: int = 64,
    ) -> pd.DataFrame:
        """Code descriptions. Other parameters, and the result, are those of `Coder.predict`.

        Parameters
        ----------
        mode : {"combined", "flat"}, optional
            combined: the one code that classifier and word parts, weighted as with the decoder,
            find most probable. flat: the classifier's codes, the same as those of `Coder.predict`.
        """
        config = self._config
        mode = mode or self.mode
        options = PredictOptions(mode=mode, threshold=threshold, batch_size=batch_size)
        if mode not in MODES:
            raise UserError(
                f"The mode {mode} needs the decoder, which an exported model lacks; open "
                "the model itself."
            )

        # The last row is that of a missing description, whose index is -1.
        descriptions = Descriptions.of(texts, lang, languages=config.languages)
        width = min(self._num_blocks, len(self.codes)) if mode == "flat" else 1
        prediction = Prediction.missing(len(descriptions.texts) + 1, width, config.attributes)
        for inputs in make_batches(
            descriptions, config, self._tokenizer, options, at_least=_AT_LEAST
        ):
            prediction.write(inputs.rows, self._code(inputs, mode))
        prediction = prediction.take(descriptions.rows)

        # A model has measured its confidence in its own mode alone, which may need the decoder.
        if config.confidence and mode == config.mode and descriptions.texts:
            prediction = with_other_sources(prediction, descriptions, config.confidence)
        prediction.drop_unsure(min_confidence)
        frame = prediction.frame(config)
        if isinstance(texts, pd.Series):
            frame = frame.set_axis(texts.index)
        return frame

    def _code(self, inputs: Inputs, mode: str) -> Prediction:
        """Return the codes and attributes of a batch."""
        # By their order, since earlier exports gave the outputs no names.
        outputs = _run(self._encoder, inputs.input_ids)
        logits = outputs[0]
        is_softmax = self._config.flat_loss == "softmax"
        flat = _softmax(logits) if is_softmax else 1 / (1 + np.exp(-logits))
        probs = {"flat": flat[:, self._classes_of_codes]}

        if mode == "flat":
            prediction = self._flat(probs["flat"], inputs.thresholds)
        else:
            if "linear_expert" in self._experts:
                linear = self._linear("linear_expert", inputs.characters)
                probs["linear"] = _softmax(linear[:, self._classes_of_codes])
            weights = self._config.experts_by_language.get(inputs.language, self._config.experts)
            prediction = self._combined(
                probs, weights=weights, queries=outputs[-1], ends=inputs.ends
            )
        if not self._config.attributes:
            return prediction
        return prediction._replace(attributes=self._attributes(outputs[1], inputs.characters))

    def _flat(self, probs: np.ndarray, thresholds: np.ndarray) -> Prediction:
        """Return the classifier's codes, further ones above the thresholds (B,) of their rows, by
        its probabilities (B, num_codes).
        """
        order = np.argsort(-probs, axis=1, kind="stable")[:, : self._num_blocks]
        best = np.take_along_axis(probs, order, 1).astype(np.float64)
        return Prediction.above(np.array(self.codes, dtype=object)[order], best, thresholds)

    def _combined(
        self,
        probs: dict[str, np.ndarray],
        *,
        weights: Mapping[str, float],
        queries: np.ndarray,
        ends: np.ndarray | None,
    ) -> Prediction:
        """Return each row's first code by the experts other than the decoder, whose weight is
        divided among them.

        `probs` are the experts' probabilities of the codes, each of shape (B, num_codes). The
        expert of nearest rows, if there is one, reads projected encodings (B, num_components) and
        `ends` (B, 2).
        """
        # The candidates are the codes that these experts find most probable together.
        log_probs = {name: np.log(values.clip(min=LEAST)) for name, values in probs.items()}
        totals = np.sum(list(log_probs.values()), axis=0)
        best = np.argsort(-totals, axis=1, kind="stable")[:, :NUM_CANDIDATES]
        votes = {name: np.take_along_axis(values, best, 1) for name, values in log_probs.items()}
        if ends is not None:
            votes |= self._nearest(queries, ends, best)

        # The weight of the decoder, which is missing, is divided among the other experts.
        if not any(weights.get(name) for name in votes):
            weights = dict.fromkeys(["decoder", *votes], 1 / (1 + len(votes)))
        scale = 1 + weights.get("decoder", 0.0) / sum(map(weights.__getitem__, votes))
        scores = scale * np.sum([weights[name] * vote for name, vote in votes.items()], axis=0)
        order = np.argsort(-scores, axis=1, kind="stable")
        best = np.take_along_axis(best, order, 1)
        scores = np.take_along_axis(scores, order, 1)

        # A share of the probability is for all codes that are no candidates.
        of_others = np.full((len(best), 1), weights.get("other", -np.inf), scores.dtype)
        first = _softmax(np.hstack([scores, of_others]))[:, :1].astype(np.float64)
        codes = np.array(self.codes, dtype=object)[best[:, :1]]
        return Prediction(codes, first, first[:, 0].copy())

    def _attributes(
        self, logits: np.ndarray, characters: np.ndarray | None
    ) -> dict[str, Attribute]:
        """Return the attributes of a batch, as `BatchPredictor.attributes` does."""
        votes = {"flat": logits}
        if "attribute_expert" in self._experts:
            votes["linear"] = self._linear("attribute_expert", characters)

        # The columns of an expert's log-odds are the categories of one attribute after another.
        attributes = {}
        start = 0
        for name, labels in self._config.attributes.items():
            end = start + 1 + len(labels)
            weights = self._config.attribute_experts.get(name, {})
            weighted = [
                weights.get(expert, 1.0) * vote[:, start:end] for expert, vote in votes.items()
            ]
            probs = _softmax(np.sum(weighted, axis=0)).astype(np.float64)
            attributes[name] = Attribute.of(labels, probs)
            start = end
        return attributes

    def _linear(self, name: str, characters: np.ndarray | None) -> np.ndarray:
        """Return the log-odds of a `LinearExpert` for characters (B, S), of shape (B, number of
        classes).
        """
        assert characters is not None
        expert = self._experts[name]
        known = expert["buckets"]
        bias = expert["bias"]

        # How often each text has each known n-gram; text and n-gram are one number, to be counted.
        buckets = _run(self._ngrams, characters)[0].reshape(len(characters), -1)
        row, position = (buckets >= 0).nonzero()
        bucket = buckets[row, position]
        index = np.searchsorted(known, bucket).clip(max=len(known) - 1)
        is_known = known[index] == bucket
        pairs = row[is_known] * len(known) + index[is_known]
        pairs, counts = np.unique(pairs, return_counts=True)
        row, index = np.divmod(pairs, len(known))

        # TF-IDF of each text, with a norm of 1.
        tfidf = (1 + np.log(counts.astype(np.float32))) * expert["idf"][index]
        norm = np.sqrt(np.bincount(row, tfidf**2, minlength=len(characters)).astype(np.float32))
        shares = tfidf / norm[row]

        # Each n-gram of a text has several weights, which lie side by side: a product of TF-IDF and
        # weight has the index of the n-gram, and that of the weight.
        num_weights = expert["counts"][index]
        pair = np.repeat(np.arange(len(index)), num_weights)
        first_product = num_weights.cumsum() - num_weights
        skipped = expert["starts"][index] - first_product
        weight = skipped[pair] + np.arange(len(pair))

        # Each weight is added to the cell of its text and its class.
        cell = row[pair] * len(bias) + expert["classes"][weight]
        products = shares[pair] * expert["values"][weight].astype(np.float32)
        sums = np.bincount(cell, products, minlength=len(characters) * len(bias))
        log_odds = sums.astype(np.float32).reshape(len(characters), len(bias)) + bias
        return float(expert["sharpness"]) * log_odds

    def _nearest(
        self, queries: np.ndarray, ends: np.ndarray, codes: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the votes of a `NearestExpert` on projected encodings (B, num_components), for
        codes (B, K).
        """
        expert = self._experts["nearest_expert"]
        classes = self._classes_of_codes[codes]

        # Class by class: a class's rows are compared with all descriptions that it is proposed for.
        cosine = np.full(codes.shape, -1.0, np.float32)
        row = np.full(codes.shape, -1)
        for class_id in np.unique(classes):
            start, stop = expert["first"][class_id : class_id + 2]
            if start < stop:
                query, candidate = (classes == class_id).nonzero()
                products = queries[query] @ expert["rows"][start:stop].astype(np.float32).T
                cosine[query, candidate] = products.max(1)
                row[query, candidate] = start + products.argmax(1)

        # Where a class has no row, row -1 is compared, which does not count.
        is_same = (expert["ends"][row] == ends[:, None]) & (row >= 0)[..., None]
        similarity = np.exp(float(expert["sharpness"]) * (cosine - 1))
        return {
            "nearest": np.log(similarity + float(expert["least"])),
            "begins": is_same[..., 0],
            "ends": is_same[..., 1],
        }


def _read_expert(path: Path) -> dict[str, np.ndarray]:
    """Return the parts of an expert by their names; those of earlier exports become today's."""
    parts = dict(np.load(path))
    # two levels a byte, and a scale for each group of them
    if "rows.levels" in parts:
        pairs = parts.pop("rows.levels")
        levels = np.hstack([pairs & 15, pairs >> 4]).astype(np.float32) - _MAX_LEVEL
        scales = parts.pop("rows.scales")
        parts["rows"] = levels * scales.repeat(levels.shape[1] // scales.shape[1], axis=1)

    # Earlier exports have a matrix with its zeros.
    if "weight" in parts:
        matrix = parts.pop("weight")
        parts["counts"] = (matrix != 0).sum(1)
        parts["classes"] = matrix.nonzero()[1]
        parts["values"] = matrix[matrix != 0]
    if "counts" in parts:
        parts["counts"] = parts["counts"].astype(np.int64)
        parts["starts"] = parts["counts"].cumsum() - parts["counts"]
    return parts


def _run(session: Any, values: np.ndarray) -> list[np.ndarray]:
    """Run a graph of one input, integers, and return its outputs."""
    name = session.get_inputs()[0].name
    outputs: list[np.ndarray] = session.run(None, {name: values.astype(np.int64)})
    return outputs


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)

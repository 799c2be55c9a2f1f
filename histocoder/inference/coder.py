"""The public prediction API: descriptions in, a table of codes out."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from histocoder.checkpoints.model_files import (
    CARD_FILE,
    load_model,
    local_folder,
    model_card,
    save_model,
)
from histocoder.checkpoints.occcanine import model_from_occcanine
from histocoder.checkpoints.starter import BOX
from histocoder.config import PredictOptions
from histocoder.config.model import ALL_LANGUAGES
from histocoder.inference.confidence import elsewhere, say_little_known
from histocoder.inference.decoding import Decoding, Inputs
from histocoder.inference.descriptions import Descriptions, Langs, Texts, readings
from histocoder.inference.predictions import Prediction, join_rows
from histocoder.model import MixerModel
from histocoder.model.devices import computing_dtype, rows_at_once
from histocoder.model.ngram import NgramEncoder

Item = TypeVar("Item")
Result = TypeVar("Result")
ShowProgress: TypeAlias = bool | Callable[[int], object]


class Coder:
    """Codes occupational descriptions with a trained model.

    Parameters
    ----------
    model : MixerModel
    device : str, optional
        By default a GPU if there is one.
    precision : {"auto", "fp32", "bf16", "fp16"}
        auto uses bf16 if the hardware supports it, which is several times as fast as fp32;
        probabilities then differ in the third digit, some in the second.

    Attributes
    ----------
    system : str
        Name of the classification; see `ModelConfig.system`.
    mode : str
        The mode chosen in validation, the default of `predict`.
    codes : tuple of str
        Codes of the model's key.
    attributes : mapping
        Columns of attributes, such as status -> their categories, beside none.
    precision : str
        Name of the torch dtype that it computes in.
    batch_size : int
        Default number of descriptions in a batch: 256, and on a GPU as many as its free memory has
        room for, up to 4,096.
    turn : context manager
        Entered for each batch: a lock lets several threads share the model. By default, none.
    is_fast : bool
        Whether a batch takes milliseconds, as it does with an n-gram encoder.
    num_workers : int
        Number of threads that compute batches: two for a fast model on a CPU, so that one computes
        while the other runs Python.

    Examples
    --------
    ```python
    coder = Coder.from_pretrained("out")
    coder.predict(["wine and spirit merchant", "husmand"], ["en", "da"])
    ```
    """

    def __init__(
        self, model: MixerModel, device: str | None = None, *, precision: str = "fp32"
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = computing_dtype(precision, self.device)
        self.model = model.to(self.device).eval()
        # in another precision, a copy: weights are saved as they were trained, and experts compute
        # in their own
        own = (model.linear_expert, model.nearest_expert, model.attribute_expert)
        experts: dict[int, Any] = dict.fromkeys(map(id, own))
        self.computing = (
            self.model if dtype == torch.float32 else copy.deepcopy(self.model, experts).to(dtype)
        )
        self.computing.dtype = dtype
        self.precision = str(dtype).removeprefix("torch.")
        self.decoding = Decoding(self.model, self.computing)
        self.formatter, self.codes = self.decoding.formatter, self.decoding.codes
        self.attributes = model.config.attributes
        self.system, self.mode = model.config.system, model.config.mode
        self.card = model_card(model.config)
        self.batch_size = rows_at_once(self.device)
        self.turn: AbstractContextManager[object] = nullcontext()
        self.is_fast = isinstance(self.model.encoder, NgramEncoder)
        self.num_workers = (
            min(2, torch.get_num_threads()) if self.is_fast and self.device.type == "cpu" else 1
        )

    @classmethod
    def from_pretrained(
        cls, path_or_url: str | Path = BOX, device: str | None = None, **computing: Any
    ) -> "Coder":
        """Open a model.

        Parameters
        ----------
        path_or_url : path
            Folder of a run or a checkpoint, any other folder with `config.json` and
            `model.safetensors`, or a Hugging Face hub repository with these files, as
            `hf://owner/name`. By default the model in the box, which codes into HISCO.
        device, **computing
            See `Coder`: `precision`.

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

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `save_model` writes, and the model card; `from_pretrained` reads them."""
        model = self.model
        save_model(
            Path(folder),
            model.config,
            model.state_dict(),
            tokenizer=model.tokenizer,
            card=self.card,
        )

    def distinct(self, texts: Texts, lang: Langs = "unk") -> Descriptions:
        """Return the distinct descriptions of n rows; texts and languages are those of
        `predict`.
        """
        return Descriptions.of(texts, lang, languages=self.model.config.languages)

    def predict(
        self, texts: Texts, lang: Langs = "unk", *, progress: ShowProgress = True, **options: Any
    ) -> pd.DataFrame:
        """Code descriptions.

        Parameters
        ----------
        texts : str, or sequence, Series or Arrow array of str, of n descriptions
            Missing or blank descriptions get missing codes.
        lang : str, or sequence, Series or Arrow array of n
            Language of all descriptions, or of each; None where it is not known.
        progress : bool or callable
            Whether to show a progress bar on a terminal; or a function that is called after each
            batch with its number of distinct descriptions. It may raise an error to stop.
        **options
            Fields of `PredictOptions`: `mode` (combined, greedy, flat, topk or full; by default the
            one chosen in validation), `k`, `threshold`, `constrain`, `min_confidence` and
            `batch_size`.

        Returns
        -------
        DataFrame
            With the input's index and order. For each code a column named as in the training data,
            such as `hisco_1`, `prob_1`, and `desc_1` where the key has descriptions; a missing code
            is None. `conf` is the probability of the set of codes in combined and greedy, of the
            best code in the other modes. For full, a column for each code of the key.

        Raises
        ------
        UserError
            If the mode is unknown, or the options do not fit it.
        """
        found = self.code(self.distinct(texts, lang), PredictOptions(**options), progress=progress)
        frame = found.frame(self.model.config)
        return frame.set_axis(texts.index) if isinstance(texts, pd.Series) else frame

    def code(
        self, given: Descriptions, options: PredictOptions, *, progress: ShowProgress = True
    ) -> Prediction:
        """Return the codes of `predict` as arrays, those of each row of `given`."""
        options = replace(options, mode=options.mode or self.mode)  # which is checked with it
        parts = self.each_batch(
            lambda inputs: self.predict_batch(inputs, options).arrays,
            given,
            options,
            progress=progress,
        )
        found = Prediction.of(join_rows(parts, given.rows), self.model.config)
        found = self._calibrated(found, given, options)
        found.drop_unsure(options.min_confidence)
        return found

    @torch.inference_mode()
    def predict_batch(self, inputs: Inputs, options: PredictOptions) -> Prediction:
        """Code a batch of tokenised descriptions; see `predict`."""
        batch = self.decoding.encode(inputs)
        arrays = [*self.decoding.decode(batch, options)[:3], *self.decoding.attributes(batch)]
        return Prediction.of(arrays, self.model.config)

    @torch.inference_mode()
    def embed(
        self, texts: Texts, lang: Langs = "unk", *, batch_size: int | None = None
    ) -> np.ndarray:
        """Return pooled encodings of descriptions, an array of shape (n, hidden); NaN for missing
        descriptions.
        """
        given, options = self.distinct(texts, lang), PredictOptions(batch_size=batch_size)
        parts = self.each_batch(
            lambda inputs: [self.decoding.encode(inputs).pooled.float().cpu().numpy()],
            given,
            options,
        )
        return join_rows(parts, given.rows)[0]

    def predict_ranked(
        self, texts: Texts, lang: Langs = "unk", *, batch_size: int | None = None
    ) -> tuple[Prediction, Prediction]:
        """Code n descriptions in the model's own mode, and rank first codes; see `code_ranked`."""
        return self.code_ranked(
            self.distinct(texts, lang), PredictOptions(batch_size=batch_size), progress=False
        )

    @torch.inference_mode()
    def code_ranked(
        self, given: Descriptions, options: PredictOptions, *, progress: ShowProgress = True
    ) -> tuple[Prediction, Prediction]:
        """Return the codes of `code`, and those that all experts propose as the first, by their
        combined probability.

        Each description is encoded once.
        """
        options = replace(options, mode=options.mode or self.mode)

        def work(inputs: Inputs) -> list[np.ndarray]:
            batch = self.decoding.encode(inputs)
            chosen, others = self.decoding.ranked(batch)
            if options.mode != "combined":
                chosen = self.decoding.decode(batch, options)
            return [*others[:3], *chosen[:3], *self.decoding.attributes(batch)]

        arrays = self.each_batch(work, given, options, progress=progress)
        codes, probs, conf, *of_answer = join_rows(arrays, given.rows)
        found = Prediction.of(of_answer, self.model.config)
        found = self._calibrated(found, given, options)
        found.drop_unsure(options.min_confidence)
        return found, Prediction(codes, probs, conf)

    def _calibrated(
        self, found: Prediction, given: Descriptions, options: PredictOptions
    ) -> Prediction:
        """Return a prediction with the confidence that holds in other sources, if the model has
        that of its mode.
        """
        scales = self.model.config.confidence
        if not scales or options.mode != self.mode or not given.texts:
            return found
        say_little_known(given.langs, scales)
        langs = np.array([*given.langs, ALL_LANGUAGES], dtype=object)[given.rows]
        return found._replace(conf=elsewhere(found.conf, langs, scales))

    def each_batch(
        self,
        work: Callable[[Inputs], Result],
        given: Descriptions,
        options: PredictOptions,
        *,
        progress: ShowProgress = False,
    ) -> Iterator[tuple[np.ndarray, Result]]:
        """Yield the indices (B,) of each batch of distinct descriptions of similar lengths, and
        `work`'s result on it.

        `progress` is that of `predict`.
        """
        num_texts = len(given.texts)
        batch_size = options.batch_size or self.batch_size
        options = replace(options, batch_size=batch_size)
        hidden = (
            None if progress is True and num_texts > batch_size else True
        )  # None: without a terminal
        batches = readings(
            given,
            self.model.config,
            self.model.tokenizer,
            options,
            at_least=self.decoding.num_at_once,
        )

        def compute(batch: tuple[Any, ...]) -> tuple[np.ndarray, Result]:
            rows, *arrays, language = batch
            tensors: list[Any] = [a if a is None else torch.from_numpy(a) for a in arrays]
            with self.turn, torch.inference_mode():
                return rows, work(Inputs(language, *tensors))

        num_workers = self.num_workers if num_texts > batch_size else 1
        with tqdm(total=num_texts, unit="text", disable=hidden, leave=False) as bar:
            tell = progress if callable(progress) else bar.update
            for rows, result in _in_order(compute, batches, num_workers=num_workers):
                yield rows, result
                tell(min(len(rows), num_texts))


def _in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Iterator[Result]:
    """Yield the results of `work`, in threads that share PyTorch's if there are several, few items
    ahead.
    """
    if num_workers == 1:
        yield from map(work, items)
        return
    num_threads, ahead = torch.get_num_threads(), deque[Future[Result]]()
    share = -(-num_threads // num_workers)
    pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(share,))
    try:
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)  # new threads begin with the number that was set last


def load_occcanine(path: str | Path, **settings: Any) -> Coder:
    """Open a model in OccCANINE's form, which gives the outputs that OccCANINE gives; see
    `model_from_occcanine`.
    """
    return Coder(model_from_occcanine(Path(path), **settings))

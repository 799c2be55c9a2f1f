"""The public prediction API: descriptions in, a table of codes out."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from histocoder.checkpoints.model_files import (
    CARD_FILE,
    HUB_PREFIX,
    load_model,
    local_folder,
    model_card,
    save_model,
)
from histocoder.checkpoints.occcanine import model_from_occcanine
from histocoder.checkpoints.starter import BOX
from histocoder.config import PredictOptions
from histocoder.errors import UserError
from histocoder.inference.confidence import with_other_sources
from histocoder.inference.decoding import BatchPredictor
from histocoder.inference.descriptions import Descriptions, Inputs, Langs, Texts, make_batches
from histocoder.inference.predictions import Prediction, RankedPrediction
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
        self.model = model.to(self.device).eval()
        dtype = computing_dtype(precision, self.device)
        self.computing = self.model
        if dtype != torch.float32:
            # A copy, since weights are saved as they were trained. It is without the experts, which
            # compute in their own precision.
            experts = (model.linear_expert, model.nearest_expert, model.attribute_expert)
            left_out: dict[int, Any] = dict.fromkeys(map(id, experts))
            self.computing = copy.deepcopy(self.model, left_out).to(dtype)
        self.computing.dtype = dtype
        self.precision = str(dtype).removeprefix("torch.")

        self.decoding = BatchPredictor(self.model, self.computing)
        self.formatter = self.decoding.formatter
        self.codes = self.decoding.codes
        self.attributes = model.config.attributes
        self.system = model.config.system
        self.mode = model.config.mode
        self._card: str | None = None

        self.batch_size = rows_at_once(self.device)
        self.turn: AbstractContextManager[object] = nullcontext()
        self.is_fast = isinstance(self.model.encoder, NgramEncoder)
        self.num_workers = 1
        if self.is_fast and self.device.type == "cpu":
            self.num_workers = min(2, torch.get_num_threads())

    @classmethod
    def from_pretrained(
        cls,
        path_or_url: str | Path = BOX,
        device: str | None = None,
        *,
        precision: str = "fp32",
    ) -> "Coder":
        """Open a model.

        Parameters
        ----------
        path_or_url : path
            Folder of a run or a checkpoint, any other folder with `config.json` and
            `model.safetensors`, or a Hugging Face hub repository with these files, as
            `hf://owner/name`. By default the model in the box, which codes into HISCO.
        device, precision
            See `Coder`.

        Raises
        ------
        UserError
            If there is no model, or it is damaged or of a newer format version.
        """
        folder = local_folder(path_or_url)
        coder = cls(load_model(folder), device, precision=precision)
        if (folder / CARD_FILE).is_file():
            coder._card = (folder / CARD_FILE).read_text(encoding="utf-8")
        return coder

    @property
    def card(self) -> str:
        """The text of the model's README.md: its folder's, or what its config says."""
        if self._card is None:
            self._card = model_card(self.model.config)
        return self._card

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `save_model` writes, and the model card; `from_pretrained` reads them."""
        model = self.model
        weights = model.state_dict()
        save_model(Path(folder), model.config, weights, tokenizer=model.tokenizer, card=self.card)

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub, with the token that
        `hf auth login` or the variable HF_TOKEN has set.

        Parameters
        ----------
        repo_id : str
            The repository, as "owner/name"; it is created if there is none.
        private : bool
            Whether a new repository is visible to its owner alone.

        Returns
        -------
        str
            The name that `from_pretrained` opens: "hf://owner/name".

        Raises
        ------
        UserError
            If the hub refuses it or can't be reached.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        api = HfApi()
        with TemporaryDirectory() as name:
            folder = Path(name) / "model"
            self.save_pretrained(folder)
            try:
                api.create_repo(repo_id, private=private, exist_ok=True)
                api.upload_folder(repo_id=repo_id, folder_path=folder)
            # An OSError is a network that can't be reached, a ValueError a malformed repo_id.
            except (HfHubHTTPError, OSError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise UserError(
                    f"Could not upload the model to {repo_id}: {reason} Sign in with hf auth login."
                ) from error
        return HUB_PREFIX + repo_id

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
        descriptions = self.distinct(texts, lang)
        prediction = self.code(descriptions, PredictOptions(**options), progress=progress)
        frame = prediction.frame(self.model.config)
        if isinstance(texts, pd.Series):
            frame = frame.set_axis(texts.index)
        return frame

    def code(
        self,
        descriptions: Descriptions,
        options: PredictOptions,
        *,
        progress: ShowProgress = True,
    ) -> Prediction:
        """Return the codes of `predict` as arrays, those of each row of the descriptions."""
        options = replace(options, mode=options.mode or self.mode)  # which is checked with it

        def work(inputs: Inputs) -> Prediction:
            return self.predict_batch(inputs, options)

        # The last row is that of a missing description, whose index is -1.
        prediction = self.decoding.missing(len(descriptions.texts) + 1, options)
        for indices, batch in self.each_batch(work, descriptions, options, progress=progress):
            prediction.write(indices, batch)
        return self._answer(prediction, descriptions, options)

    @torch.inference_mode()
    def predict_batch(self, inputs: Inputs, options: PredictOptions) -> Prediction:
        """Code a batch of tokenised descriptions; see `predict`."""
        batch = self.decoding.encode(inputs)
        prediction = self.decoding.decode(batch, options)
        return prediction._replace(attributes=self.decoding.attributes(batch))

    @torch.inference_mode()
    def embed(
        self, texts: Texts, lang: Langs = "unk", *, batch_size: int | None = None
    ) -> np.ndarray:
        """Return pooled encodings of descriptions, an array of shape (n, hidden); NaN for missing
        descriptions.
        """
        descriptions = self.distinct(texts, lang)

        def work(inputs: Inputs) -> np.ndarray:
            pooled: np.ndarray = self.decoding.encode(inputs).pooled.float().cpu().numpy()
            return pooled

        # The last row is that of a missing description, whose index is -1.
        size = self.model.linear_decoder.in_features
        pooled = np.full((len(descriptions.texts) + 1, size), np.nan, dtype=np.float32)
        options = PredictOptions(batch_size=batch_size)
        for indices, batch in self.each_batch(work, descriptions, options):
            pooled[indices] = batch
        return pooled[descriptions.rows]

    def predict_ranked(
        self, texts: Texts, lang: Langs = "unk", *, batch_size: int | None = None
    ) -> RankedPrediction:
        """Code n descriptions in the model's own mode, and rank first codes; see `code_ranked`."""
        options = PredictOptions(batch_size=batch_size)
        return self.code_ranked(self.distinct(texts, lang), options, progress=False)

    def code_ranked(
        self,
        descriptions: Descriptions,
        options: PredictOptions,
        *,
        progress: ShowProgress = True,
    ) -> RankedPrediction:
        """Return the codes of `code`, and those that all experts propose as the first, by their
        combined probability, which like `conf` is that in other sources.

        Each description is encoded once.
        """
        options = replace(options, mode=options.mode or self.mode)

        def work(inputs: Inputs) -> RankedPrediction:
            batch = self.decoding.encode(inputs)
            answer, ranked = self.decoding.ranked(batch)
            if options.mode != "combined":
                answer = self.decoding.decode(batch, options)
            attributes = self.decoding.attributes(batch)
            return RankedPrediction(answer._replace(attributes=attributes), ranked)

        num_texts = len(descriptions.texts)
        answer = self.decoding.missing(num_texts + 1, options)
        ranked = Prediction.missing(num_texts + 1, self.decoding.num_ranked)
        for indices, batch in self.each_batch(work, descriptions, options, progress=progress):
            answer.write(indices, batch.answer)
            ranked.write(indices, batch.ranked)

        # in other sources codes are less probable by the share by which the answer is
        conf = answer.conf[descriptions.rows]
        answer = self._answer(answer, descriptions, options)
        ranked = ranked.take(descriptions.rows)
        shares = np.divide(answer.conf, conf, out=np.ones_like(conf), where=conf > 0)
        ranked = ranked._replace(probs=ranked.probs * np.minimum(shares, 1)[:, None])
        return RankedPrediction(answer, ranked)

    def _answer(
        self, prediction: Prediction, descriptions: Descriptions, options: PredictOptions
    ) -> Prediction:
        """Return the prediction of each row, by that of each distinct description and a missing one.

        Its confidence is that in other sources, if the model has measured that of its mode, and
        codes of rows with less than the least confidence are left out.
        """
        prediction = prediction.take(descriptions.rows)
        scales = self.model.config.confidence
        if scales and options.mode == self.mode and descriptions.texts:
            prediction = with_other_sources(prediction, descriptions, scales)
        prediction.drop_unsure(options.min_confidence)
        return prediction

    def each_batch(
        self,
        work: Callable[[Inputs], Result],
        descriptions: Descriptions,
        options: PredictOptions,
        *,
        progress: ShowProgress = False,
    ) -> Iterator[tuple[np.ndarray, Result]]:
        """Yield the indices (B,) of each batch of distinct descriptions of similar lengths, and
        `work`'s result on it.

        `progress` is that of `predict`.
        """
        num_texts = len(descriptions.texts)
        batch_size = options.batch_size or self.batch_size
        batches = make_batches(
            descriptions,
            self.model.config,
            self.model.tokenizer,
            replace(options, batch_size=batch_size),
            at_least=self.decoding.num_at_once,
        )

        def compute(inputs: Inputs) -> tuple[np.ndarray, Result]:
            with self.turn, torch.inference_mode():
                return inputs.rows, work(inputs)

        # A single batch needs no bar and no threads. None shows the bar on a terminal alone.
        is_hidden: bool | None = True
        num_workers = 1
        if num_texts > batch_size:
            num_workers = self.num_workers
            if progress is True:
                is_hidden = None
        with tqdm(total=num_texts, unit="text", disable=is_hidden, leave=False) as bar:
            # A batch counts once the caller has used it.
            on_progress = progress if callable(progress) else bar.update
            for rows, result in _in_order(compute, batches, num_workers=num_workers):
                yield rows, result
                on_progress(len(rows))


def _in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, num_workers: int
) -> Iterator[Result]:
    """Yield the results of `work`, in threads that share PyTorch's if there are several, few items
    ahead.
    """
    if num_workers == 1:
        yield from map(work, items)
        return

    num_threads = torch.get_num_threads()
    threads_each = -(-num_threads // num_workers)
    pool = ThreadPoolExecutor(
        num_workers, initializer=torch.set_num_threads, initargs=(threads_each,)
    )

    # One item more than there are workers waits, so that no worker does; more would take memory.
    results = deque[Future[Result]]()
    try:
        for item in items:
            results.append(pool.submit(work, item))
            if len(results) > num_workers:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)  # new threads begin with the number that was set last


def load_occcanine(path: str | Path, **settings: Any) -> Coder:
    """Open a model in OccCANINE's form, which gives the outputs that OccCANINE gives; see
    `model_from_occcanine`.
    """
    return Coder(model_from_occcanine(Path(path), **settings))

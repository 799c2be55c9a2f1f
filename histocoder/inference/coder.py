"""The public prediction API: descriptions in, a table of codes out."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from histocoder.checkpoints.hub import CARD_FILE, local_folder, model_card, push_folder, write_card
from histocoder.checkpoints.model_files import load_model, save_model
from histocoder.data.normalize import normalize
from histocoder.data.tokens import join_language, lower_characters, tokenize
from histocoder.errors import Notice, UserError
from histocoder.formatters import formatter_from_config
from histocoder.inference.combined import Belief, CombinedSearch
from histocoder.inference.confidence import set_probability
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.flat import chosen_classes, threshold_of
from histocoder.inference.greedy import greedy
from histocoder.inference.predictions import Part, Prediction
from histocoder.inference.search import TrieSearch
from histocoder.inference.trie import CodeTrie
from histocoder.model import MixerModel
from histocoder.model.devices import check_compiler
from histocoder.model.precision import choose_tf32, computing_dtype
from histocoder.ops.memory import RowsAtOnce

MODES = ("combined", "greedy", "flat", "topk", "full")
_ENCODED_AT_ONCE = {"cpu": 64}
"""Descriptions at most: what fits a CPU's caches. Decoding reads all weights at each step, and likes more."""
_ENCODED_AT_ONCE_ELSEWHERE = 4096
_LIKE = 1.25
"""Of a batch the longest description is at most so many times as long as the shortest, where there are enough."""


class TextCutWarning(Notice):
    """Some descriptions are longer than the model reads."""

    def __init__(self, count: int, max_len: int, unit: str = "characters") -> None:
        super().__init__(f"{count:,} descriptions are cut: with the language they are longer than {max_len} {unit}.")
        self.count, self.max_len, self.unit = count, max_len, unit


class Coder:
    """Codes occupational descriptions with a trained model.

    Parameters
    ----------
    model : MixerModel
    device : str, optional
        By default a GPU if there is one.
    precision : {"auto", "fp32", "bf16", "fp16"}
        auto is bf16 where the hardware has it, several times as fast as fp32; probabilities then differ in their third
        digit, some in their second.
    compile : bool
        Whether torch compiles the encoder's layers first, which takes a minute.

    Attributes
    ----------
    system : str
        What the codes' columns are called; see `ModelConfig.system`.
    codes : tuple of str
        The codes of the model's key.
    precision : str
        What it computes in, the name of a torch dtype.
    card : str
        The model card, the README.md that is saved beside the model.

    Examples
    --------
    coder = Coder.from_pretrained("out")
    coder.predict(["wine and spirit merchant", "husmand"], ["en", "da"])
    """

    def __init__(
        self, model: MixerModel, device: str | None = None, *, precision: str = "fp32", compile: bool = False
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = computing_dtype(precision, self.device)
        choose_tf32(dtype, self.device)
        self.model = model.to(self.device).eval()
        # in another precision, a copy: what is saved stays as it was trained
        self._computing = self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype)
        self._computing.dtype = dtype
        if compile:
            check_compiler(self.device)
            self._computing.compile_layers()
        self.precision = str(dtype).removeprefix("torch.")
        self.formatter = formatter_from_config(model.config.formatter)
        self.codes = tuple(filter(None, model.config.codes))  # without OccCANINE's class for blank cells
        self.system = model.config.system
        self.card = model_card(model.config)
        self._trie: CodeTrie | None = None
        self._search: TrieSearch | None = None
        self._encoded_at_once = _ENCODED_AT_ONCE.get(self.device.type, _ENCODED_AT_ONCE_ELSEWHERE)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        device: str | None = None,
        *,
        precision: str = "fp32",
        compile: bool = False,
        verify: bool = True,
    ) -> Coder:
        """Open a model.

        Parameters
        ----------
        path_or_hub_id : path
            A run's folder, one of its checkpoints', any other with `config.json` and `model.safetensors`, or the name
            of a Hugging Face hub repo of the same form.
        device, precision, compile
            See `Coder`.
        verify : bool
            Whether to compare the model's files with the sums in its `manifest.json`, where it has one.

        Raises
        ------
        UserError
            Where there is no model, one of a newer format version, or a damaged one.
        """
        folder = local_folder(path_or_hub_id)
        coder = cls(load_model(folder, verify=verify), device, precision=precision, compile=compile)
        if (folder / CARD_FILE).is_file():
            coder.card = (folder / CARD_FILE).read_text(encoding="utf-8")
        return coder

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `save_model` writes, and the model card; `from_pretrained` reads them."""
        save_model(Path(folder), self.model.config, self.model.state_dict(), tokenizer=self.model.tokenizer)
        write_card(Path(folder), self.card)

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> str:
        """Upload the model to a Hugging Face hub repo, model card included; return the address.

        Raises
        ------
        UserError
            Where the hub can't be reached, or refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), repo_id, private=private)

    @property
    def mode(self) -> str:
        """The mode that validated best, the default of `predict`."""
        return self.model.config.mode

    def describe(self, code: str) -> str | None:
        """Return what a code means, where the key says so."""
        return self.model.config.descriptions.get(code)

    def predict(
        self,
        texts: str | Sequence[str | None] | pd.Series,
        lang: str | Sequence[str] | pd.Series = "unk",
        *,
        mode: str | None = None,
        k: int = 5,
        threshold: float | None = None,
        constrain: bool | None = None,
        min_confidence: float = 0.0,
        batch_size: int = 256,
        progress: bool | Callable[[int], object] = True,
        parts: list[Part] | None = None,
    ) -> pd.DataFrame:
        """Code descriptions.

        Parameters
        ----------
        texts : str, or sequence or Series of str, of n descriptions
            A missing or blank one gets missing codes.
        lang : str, or sequence or Series of n
            Language of all, or of each.
        mode : {"combined", "greedy", "flat", "topk", "full"}, optional
            By default the one that validated best. combined: decoder, flat head and, where the model has one, its
            linear expert together, codes of the key only. greedy: the sequence decoder, all its blocks. flat: the
            linear head. topk: the `k` most probable codes of the decoder's first block, exactly. full: the probability
            there of every code of the key.
        k : int
            Codes of topk.
        threshold : float, optional
            flat gives the best class, and others above this; by default above the model's own of the language.
        constrain : bool, optional
            Whether to restrict predictions to codes of the key; topk and full always do, greedy does not by default.
        min_confidence : float
            Rows with less `conf` get missing codes; `conf` stays.
        batch_size : int
            Maximum number of descriptions per forward pass; reduced when memory runs out.
        progress : bool or callable
            Whether to show a progress bar on a terminal; or a function that is called after each batch with its number
            of distinct descriptions.
        parts : list, optional
            Results of an interrupted call with the same arguments, which are not computed again; this call appends to
            them.

        Returns
        -------
        DataFrame
            With the input's index and order. For each code `{system}_1`, `prob_1`, and `desc_1` where the key has
            descriptions; a missing code is None. `conf` is the probability of the set of codes, in combined, and in
            greedy in whatever order they are written; elsewhere the best code's. Of full, a column for each code of the
            key instead.

        Raises
        ------
        UserError
            For a mode that there is not, or that the arguments do not fit.
        """
        mode = mode or self.mode
        if mode not in MODES:
            raise UserError(f"Unknown mode {mode!r}; choose one of {', '.join(MODES)}.")
        if constrain is False and mode in ("combined", "topk", "full"):
            raise UserError(f"The mode {mode!r} gives codes of the key only; omit constrain.")
        if k < 1:
            raise UserError(f"k is {k}; it must be 1 or more.")
        check_threshold(threshold)
        rows = Descriptions.of(texts, lang, languages=self.model.config.languages)
        table = rows.distinct
        self._search = None
        parts = [] if parts is None else parts
        coded = {place for places, _ in parts for place in places.tolist()}
        code = partial(self.predict_batch, mode=mode, k=k, constrain=bool(constrain))
        at_once = RowsAtOnce(self.device)
        hidden = None if progress is True and len(table) > batch_size else True  # None: where there is no terminal
        with tqdm(total=len(table), unit="text", disable=hidden, leave=False) as bar:
            tell = progress if callable(progress) else bar.update
            for places, ids, characters in self._batches(table, batch_size):
                if coded.issuperset(places.tolist()):
                    tell(len(places))
                    continue
                limits = self._thresholds(table["lang"].to_numpy()[places], threshold) if mode == "flat" else None
                for some, part in at_once.each(code, ids, limits, characters):
                    parts.append((places[some], part))
                    tell(some.stop - some.start)
        prediction = Prediction.join(parts, len(table), width=self._width(mode, k))
        if mode == "full":
            frame = pd.DataFrame(prediction.probs, columns=list(self.codes))
        else:
            if min_confidence:
                unsure = prediction.conf < min_confidence
                prediction.codes[unsure], prediction.probs[unsure] = None, np.nan
            frame = prediction.frame(self.system, self.model.config.descriptions)
        frame = frame.iloc[rows.place]
        frame.index = rows.index
        return frame

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
            Of the flat head, for flat; by default the model's own default.
        characters : Tensor of int, of shape (B, L), optional
            See `LinearExpert`; for combined, where the model has one.
        """
        memory, pooled, memory_mask = self._encode(input_ids)
        decoder, flat_logits = self._computing.decoder, self._computing.classify(pooled)
        if mode == "flat":
            return self._flat(flat_logits, thresholds)
        if mode == "combined":
            found = self._combined_search(memory, memory_mask, flat_logits, characters).decode(self._weights())
            codes = np.array([*self.codes, None], dtype=object)[found.codes.cpu().numpy()]
            return Prediction(codes, _numpy(found.probabilities), _numpy(found.conf))
        prior = self._computing.prior(flat_logits)
        if mode == "topk":
            places, best = self._trie_search().top_k(memory, memory_mask, prior, k=k)
            codes = np.array(self.codes, dtype=object)[places.cpu().numpy()]
            return Prediction(codes, _numpy(best), _numpy(best[:, 0]))
        if mode == "full":
            full = _numpy(self._trie_search().full(memory, memory_mask, prior))
            return Prediction(np.empty((len(full), 0), dtype=object), full, full.max(1))
        num_blocks, block_size = self.formatter.num_blocks, self.formatter.block_size
        tokens, token_probs = greedy(
            decoder,
            memory,
            memory_mask,
            prior,
            num_tokens=num_blocks * block_size,
            block_size=block_size,
            trie=self._code_trie() if constrain else None,
        )
        codes = self.formatter.decode(tokens.cpu().numpy())
        probs = _numpy(token_probs.unflatten(1, (num_blocks, -1)).prod(-1))
        is_code = torch.from_numpy(~pd.isna(codes)).to(tokens.device)
        conf = set_probability(decoder, memory, memory_mask, tokens[:, 1:], token_probs, prior, is_code=is_code)
        return Prediction(codes, np.where(pd.isna(codes), np.nan, probs), _numpy(conf))

    @torch.inference_mode()
    def embed(
        self,
        texts: str | Sequence[str | None] | pd.Series,
        lang: str | Sequence[str] | pd.Series = "unk",
        *,
        batch_size: int = 256,
    ) -> np.ndarray:
        """Return pooled encodings of descriptions, an array of shape (n, hidden); NaN for missing descriptions."""
        rows = Descriptions.of(texts, lang, languages=self.model.config.languages)
        pooled = np.full((len(rows.distinct) + 1, self.model.encoder.config.hidden_size), np.nan, dtype=np.float32)
        at_once = RowsAtOnce(self.device)
        for places, ids, _ in self._batches(rows.distinct, batch_size):
            for some, found in at_once.each(self._pooled, ids):
                pooled[places[some]] = found
        return pooled[rows.place]

    def _pooled(self, input_ids: Tensor) -> np.ndarray:
        return self._encode(input_ids)[1].float().cpu().numpy()

    def _real_classes(self, probabilities: Tensor) -> Tensor:
        """Return the classes that are codes, out of all: the key of a published model may have a blank one."""
        if len(self.codes) == self.model.config.num_classes:
            return probabilities
        return probabilities[:, [place for place, code in enumerate(self.model.config.codes) if code]]

    def _flat(self, flat_logits: Tensor, thresholds: Tensor | None) -> Prediction:
        probabilities = self._real_classes(self._computing.class_probabilities(flat_logits))
        if thresholds is None:
            thresholds = probabilities.new_full((len(probabilities),), self.model.config.default_threshold)
        chosen = chosen_classes(probabilities, thresholds[:, None], most=self.formatter.num_blocks)
        best = probabilities.topk(int(chosen.sum(1).max()))
        codes, probs = np.array(self.codes, dtype=object)[best.indices.cpu().numpy()], _numpy(best.values)
        conf = probs[:, 0].copy()
        left_out = ~chosen.gather(1, best.indices).cpu().numpy()
        codes[left_out], probs[left_out] = None, np.nan
        return Prediction(codes, probs, conf)

    def _thresholds(self, langs: np.ndarray, threshold: float | None) -> Tensor:
        """Return each row's threshold of the flat head."""
        values = [threshold_of(self.model.config, lang) if threshold is None else threshold for lang in langs]
        return torch.tensor(values, device=self.device)

    def _weights(self) -> dict[str, float]:
        """Return the weights of the experts, all equal if none were fitted."""
        names = ["decoder", "flat", *(["linear"] if self.model.linear_expert is not None else [])]
        return self.model.config.experts or dict.fromkeys(names, 1 / len(names))

    def _combined_search(
        self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor, characters: Tensor | None
    ) -> CombinedSearch:
        beliefs = {"flat": Belief(self._real_classes(self._computing.class_probabilities(flat_logits)))}
        if self.model.linear_expert is not None:
            log_odds = self._real_classes(self.model.linear_expert(characters))
            beliefs["linear"] = Belief(log_odds.softmax(-1), log_odds.sigmoid())
        trie, prior, num_blocks = self._code_trie(), self._computing.prior(flat_logits), self.formatter.num_blocks
        return CombinedSearch(self._computing.decoder, trie, memory, memory_mask, prior, beliefs, num_blocks=num_blocks)

    @torch.inference_mode()
    def votes(
        self, texts: Sequence[str], langs: Sequence[str], codes: pd.DataFrame, *, batch_size: int = 256
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield what the experts think of each description's first code, and of its second one, batch by batch.

        Parameters
        ----------
        texts, langs : sequence of str, of n
        codes : DataFrame of str, of shape (n, k)
            The true ones.

        Yields
        ------
        votes : dict of str to Tensor of shape (B, K + 1)
            By expert, the logarithms of the candidates' probabilities; the last candidate is that there is no further
            code.
        is_true : Tensor of bool, of shape (B, K + 1)
            Which candidates are true. Of second codes, only those of rows whose first one is among the candidates.
        """
        place = {code: i for i, code in enumerate(self.codes)}
        true = np.array([[place.get(code, -1) for code in column] for column in codes.to_numpy(dtype=object)])
        table = pd.DataFrame({"text": list(texts), "lang": _known_langs(langs, self.model.config.languages)})
        for rows, ids, characters in self._batches(table, batch_size):
            memory, pooled, memory_mask = self._encode(ids)
            search = self._combined_search(memory, memory_mask, self._computing.classify(pooled), characters)
            votes = search.votes(0)
            of_rows = torch.from_numpy(true[rows]).to(votes.candidates.device)
            is_true = (votes.candidates[:, :, None] == of_rows[:, None]).any(-1)
            names = list(votes.by_expert)
            yield (
                {name: F.pad(votes.by_expert[name], (0, 1), value=-torch.inf) for name in names},
                F.pad(is_true, (0, 1)),
            )
            if self.formatter.num_blocks == 1:
                continue
            first, has_true = is_true.int().argmax(1), is_true.any(1)
            search.choose(first, has_true)
            votes = search.votes(1)
            rest = (is_true & votes.by_expert[names[0]].isfinite()).masked_fill(~has_true[:, None], value=False)
            is_last = has_true & (of_rows >= 0).sum(1).eq(1)
            stop = {name: votes.stop[name][:, None] for name in names}
            yield (
                {name: torch.cat([votes.by_expert[name], stop[name]], 1) for name in names},
                torch.cat([rest, is_last[:, None]], 1),
            )

    def _code_trie(self) -> CodeTrie:
        if self._trie is None:
            self._trie = CodeTrie(self.codes, self.formatter).to(self.device)
        return self._trie

    def _trie_search(self) -> TrieSearch:
        """Return the search; each table gets a new one, since its cached results depend on the current weights."""
        if self._search is None:
            self._search = TrieSearch(self._computing.decoder, self._code_trie())
        return self._search

    def column_names(self, mode: str, *, k: int = 5) -> list[str]:
        """Return the columns of `predict`."""
        if mode == "full":
            return list(self.codes)
        stems = [self.system, "prob", *(["desc"] if self.model.config.descriptions else [])]
        return [*(f"{stem}_{i + 1}" for i in range(self._width(mode, k)) for stem in stems), "conf"]

    def _width(self, mode: str, k: int) -> int:
        """Codes of a row at least, where there is no row to tell."""
        num_blocks = self.formatter.num_blocks
        widths = {"combined": num_blocks, "greedy": num_blocks, "flat": num_blocks, "full": len(self.codes)}
        return widths.get(mode, min(k, len(self.codes)))

    def _encode(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Encode as `MixerModel.encode` does, so many descriptions at a time as the device is fast with."""
        if len(input_ids) <= self._encoded_at_once:
            return self._computing.encode(input_ids)
        config, tokenizer, num_positions = self.model.config, self.model.tokenizer, input_ids.shape[1]
        parts = []
        for ids in input_ids.split(self._encoded_at_once):
            # what is cut off is padding that nobody looks at; where the decoder does, it stays
            longest = int(ids.ne(tokenizer.pad_id).sum(1).max())
            needed = tokenizer.num_positions(longest, config.max_len) if config.mask_memory else num_positions
            needed = min(num_positions, needed)
            parts.append(self._computing.encode(ids[:, :needed]))
        memories, pooled, masks = zip(*parts, strict=True)
        width = max(memory.shape[1] for memory in memories)
        memory = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in memories])
        if not config.mask_memory:
            return memory, torch.cat(pooled), None
        return memory, torch.cat(pooled), torch.cat([F.pad(part, (0, width - part.shape[1])) for part in masks])

    def _batches(self, distinct: pd.DataFrame, batch_size: int) -> Iterator[tuple[np.ndarray, Tensor, Tensor | None]]:
        """Batches of like lengths: their places, token ids of shape (B, S), and characters for the linear expert."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be 1 or more.")
        config = self.model.config
        normal = normalize(distinct["text"].tolist(), config.text_normalization)
        joined = join_language(normal, distinct["lang"].tolist())
        texts = tokenize(joined, max_len=config.max_len, tokenizer=self.model.tokenizer)
        if texts.num_cut:
            warnings.warn(TextCutWarning(texts.num_cut, config.max_len, self.model.tokenizer.unit), stacklevel=3)
        order = np.argsort(texts.lengths, kind="stable")
        for start, end in _runs(texts.lengths[order], at_least=self._encoded_at_once, at_most=batch_size):
            rows = order[start:end]
            ids = texts.pad(rows, max_len=config.max_len, num_positions=config.pad_to)
            characters = None
            if self.model.linear_expert is not None:
                characters = torch.from_numpy(lower_characters([joined[row] for row in rows])).to(self.device)
            yield rows, torch.from_numpy(ids).to(self.device), characters


def check_threshold(threshold: float | None) -> None:
    """Raise a UserError where no probability, or none but 1, could be above a threshold of the flat head."""
    if threshold is not None and not 0 <= threshold < 1:
        raise UserError(f"The threshold is {threshold:g}; it must be 0 or more and less than 1.")


def _runs(lengths: np.ndarray, *, at_least: int, at_most: int) -> Iterator[tuple[int, int]]:
    """Runs of like lengths, from the first to behind the last, in sorted lengths; of so many, where there are."""
    start = 0
    while start < len(lengths):
        alike = int(np.searchsorted(lengths, _LIKE * lengths[start], side="right"))
        end = min(max(alike, start + at_least), start + at_most, len(lengths))
        yield start, end
        start = end


def _known_langs(langs: Sequence[str], known: tuple[str, ...]) -> list[str]:
    return [lang if not known or lang in known else "unk" for lang in langs]


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().double().numpy()  # GPUs of Macs have no doubles

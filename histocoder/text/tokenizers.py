"""Texts as token ids: the tokenizers of encoders, and the number of positions that a batch
needs.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from histocoder.config import LANG_SEP
from histocoder.errors import DamagedError, Interrupted, UserError
from histocoder.files import replacing_folder
from histocoder.text.packed_texts import ragged

CLS_ID = 0xE000
"""CANINE's own, as is `SEP_ID`, in Unicode's private use area."""
SEP_ID = 0xE001
PAD_ID = 0
UNKNOWN = "unk"
"""Language of descriptions whose language is unknown or withheld."""
MAX_LINEAR_CHARACTERS = 256
"""Maximum number of characters that a linear expert reads."""
POSITIONS_MULTIPLE = 2
"""Divisor of the number of positions of Hugging Face's encoders; multiples of 8 pad short texts by
half.
"""


def trimmed_length(length: int, max_len: int) -> int:
    """Return the number of positions that a batch needs whose longest row has `length` tokens, CLS
    and SEP included.

    CANINE reads characters in molecules of 4, drops the last molecule when it samples down, and
    looks two characters ahead when it samples up: with one molecule to spare behind that, the
    encoding of real characters and the pooled output are those of a row padded to any length.

    Examples
    --------
    >>> [trimmed_length(n, 128) for n in (2, 3, 6, 7, 128)]
    [8, 12, 12, 16, 128]
    """
    return min(max_len, 4 * (math.ceil((length + 2) / 4) + 1))


def join_language(descriptions: Sequence[str], langs: Sequence[str]) -> list[str]:
    """Return the inputs of a model: language, separator, description."""
    pairs = zip(langs, descriptions, strict=True)
    return [f"{lang}{LANG_SEP}{description}" for lang, description in pairs]


class CharacterTokenizer:
    """CANINE's tokenizer: one id for each Unicode code point, CLS in front, SEP behind; without
    files.

    Texts are `{lang}[SEP]{description}`, with [SEP] as these five characters.
    """

    pad_id = PAD_ID  # at the end of rows; it occurs nowhere else
    unit = "characters"  # what a token is, in the plural
    reads_characters = True  # so that the tokens of a text are known without tokenising it
    begins_with_cls = True  # whether the first token stands for the whole text

    def token_ids(
        self, texts: Sequence[str], *, max_len: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokenise n texts, and cut off what is behind `max_len` tokens, special ones included.

        Returns token ids, int of shape (total,), text after text; the number of tokens of each
        text, int64 of shape (n,); and the number of texts that were cut.
        """
        lengths = 2 + np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        num_cut = int((lengths > max_len).sum())
        if num_cut:
            texts = [text[: max_len - 2] for text in texts]

        # in UTF-32, each four bytes of a string are a code point, which is CANINE's token id
        cls = chr(CLS_ID)
        sep = chr(SEP_ID)
        marked = "".join(f"{cls}{text}{sep}" for text in texts)
        ids = np.frombuffer(marked.encode("utf-32-le", "surrogatepass"), dtype="<i4")
        return ids, np.minimum(lengths, max_len), num_cut

    num_positions = staticmethod(trimmed_length)

    def num_encoded(self, num_positions: int, max_len: int) -> int:
        """Return how many of a batch's positions are encoded; the rest is context.

        Examples
        --------
        >>> CHARACTERS.num_encoded(28, 128), CHARACTERS.num_encoded(128, 128)
        (22, 128)
        """
        # `trimmed_length` adds two characters and a molecule, but not to rows of full length
        if num_positions == max_len:
            return num_positions
        return num_positions - 6

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, if it has any, into a folder of their own, whole or not at
        all.
        """

    def __reduce__(self) -> str:
        return "CHARACTERS"


CHARACTERS = CharacterTokenizer()


class PretrainedTokenizer:
    """A tokenizer of Hugging Face's, from the names and contents of the files that its
    `save_pretrained` writes.

    It joins language and description as its encoder has learnt to read two texts: `[CLS] en [SEP]
    farmer [SEP]` for BERT, `<s> en </s></s> farmer </s>` for XLM-R, `en</s>farmer</s>` for ByT5.
    Special tokens in a description, such as a literal [PAD], are read as characters. Methods are
    those of `CharacterTokenizer`.

    If not `reads_language`, it reads descriptions alone. Raises ValueError if these are not all
    files of a tokenizer, UserError if it has no token for padding.
    """

    unit = "tokens"
    reads_characters = False

    def __init__(self, files: dict[str, bytes], reads_language: bool = True) -> None:
        # its threads would not exist in forked loader workers, of which it warns at each fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._files = dict(sorted(files.items()))
        self._reads_language = reads_language
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self._files.items():
                Path(folder, name).write_bytes(content)
            self._tokenizer = auto_tokenizer(folder, {"local_files_only": True})
        if self._tokenizer.pad_token_id is None:
            raise UserError(
                "The encoder's tokenizer has no padding token; choose another --encoder."
            )
        tokenizer = self._tokenizer
        special = set(tokenizer.all_special_ids)
        added = special | set(tokenizer.get_added_vocab().values())

        # without its files, a tokenizer may be built with one token besides special ones
        if len(tokenizer) - len(added) <= 1:
            raise ValueError("its tokenizer has no vocabulary; files are missing")
        tokenizer.model_max_length = 10**9  # texts are cut by `token_ids`

        # a literal padding token in a description is read as another special token
        self.pad_id = int(tokenizer.pad_token_id)
        self._instead_of_padding = int(self.pad_id == 0)
        for token_id in (tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id):
            if token_id is not None:
                self._instead_of_padding = token_id

        # a word shows which marks the tokenizer puts around texts
        first, *_, last = self._read(["a"], ["a"])[0]
        self._ends_with_sep = last in special
        self.begins_with_cls = first in special and first == tokenizer.cls_token_id

    @classmethod
    def from_folder(cls, folder: Path, *, reads_language: bool = True) -> "PretrainedTokenizer":
        """Read what `save` wrote; raise a UserError if it is missing or damaged."""
        if not folder.is_dir():
            raise UserError(
                f"The model's tokenizer is missing: there is no {folder}. Copy it from the "
                "original model."
            )
        try:
            return cls(contents(folder), reads_language=reads_language)
        except (OSError, ValueError) as error:
            raise DamagedError(f"The tokenizer in {folder} can't be read ({error}).") from error

    def token_ids(
        self, texts: Sequence[str], *, max_len: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokenise texts, and cut off the ends of long descriptions; see `CharacterTokenizer`."""
        if not texts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0
        langs, _, descriptions = zip(*(text.partition(LANG_SEP) for text in texts), strict=True)
        rows = self._read(list(langs), list(descriptions))

        # the mark at the end stays, since encoders have never read a text without it
        num_cut = 0
        for row in rows:
            if len(row) > max_len:
                num_cut += 1
                last = row[-1]
                del row[max_len:]
                if self._ends_with_sep:
                    row[-1] = last
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))

        # some read padding from the literal characters
        ids[ids == self.pad_id] = self._instead_of_padding
        return ids, lengths, num_cut

    def num_positions(self, length: int, max_len: int) -> int:
        return min(max_len, math.ceil(length / POSITIONS_MULTIPLE) * POSITIONS_MULTIPLE)

    def num_encoded(self, num_positions: int, max_len: int) -> int:
        return num_positions

    def save(self, folder: Path) -> None:
        if folder.is_dir() and contents(folder) == self._files:
            return
        with replacing_folder(folder) as temporary:
            for name, content in self._files.items():
                (temporary / name).write_bytes(content)

    def without_language(self) -> "PretrainedTokenizer":
        """Return the tokenizer that reads descriptions alone."""
        return PretrainedTokenizer(self._files, reads_language=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return PretrainedTokenizer, (self._files, self._reads_language)

    def __deepcopy__(self, _memo: Any) -> "PretrainedTokenizer":
        return self

    def _read(self, langs: list[str], descriptions: list[str]) -> list[list[int]]:
        texts = langs
        pairs: list[str] | None = descriptions
        if not self._reads_language:
            texts = descriptions
            pairs = None
        ids: list[list[int]] = self._tokenizer(
            texts,
            pairs,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        return ids


def auto_tokenizer(name: str, options: dict[str, Any]) -> Any:
    """Call `AutoTokenizer.from_pretrained`; raise a ValueError for whatever is wrong with its
    files.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Interrupted:
        raise
    except Exception as error:
        # of any type, depending on the damage
        raise ValueError(f"its tokenizer: {str(error).strip().splitlines()[0]}") from error


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


Tokenizer: TypeAlias = CharacterTokenizer | PretrainedTokenizer


@dataclass
class TokenizedTexts:
    """Token ids of texts, one behind the other in one array."""

    ids: np.ndarray
    """Token ids, of shape (total,); CANINE's are CLS, the Unicode code points, SEP."""
    offsets: np.ndarray
    """Index of each text's first token, of shape (n + 1,)."""
    lengths: np.ndarray
    """Number of tokens of each text, of shape (n,)."""
    tokenizer: Tokenizer
    num_cut: int
    """Number of texts that were longer than `max_len`."""

    def __len__(self) -> int:
        return len(self.lengths)

    def pad(
        self, rows: np.ndarray, *, max_len: int, num_positions: int | None = None
    ) -> np.ndarray:
        """Pad some texts to one array of shape (len(rows), S); S is by default the length of the
        longest.
        """
        lengths = self.lengths[rows]
        num_positions = num_positions or self.tokenizer.num_positions(int(lengths.max()), max_len)
        padded = np.full((len(rows), num_positions), self.tokenizer.pad_id, dtype=np.int32)

        # a mask takes its values row by row, as the tokens of texts lie
        index = ragged(self.offsets[rows], lengths)
        padded[np.arange(num_positions) < lengths[:, None]] = self.ids[index]
        return padded


def tokenize(
    texts: Sequence[str], *, max_len: int, tokenizer: Tokenizer = CHARACTERS
) -> TokenizedTexts:
    """Tokenise texts, cut to `max_len` tokens, special ones included.

    Examples
    --------
    >>> tokenize(["en[SEP]cook"], max_len=128).ids[:4].tolist()
    [57344, 101, 110, 91]
    """
    ids, lengths, num_cut = tokenizer.token_ids(texts, max_len=max_len)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenizedTexts(ids, offsets, lengths, tokenizer, num_cut)


def lower_characters(texts: Sequence[str]) -> np.ndarray:
    """Return the characters of texts in lower case, of shape (n, S), for `LinearExpert`."""
    tokens = tokenize(list(map(str.lower, texts)), max_len=MAX_LINEAR_CHARACTERS)
    return tokens.pad(np.arange(len(texts)), max_len=MAX_LINEAR_CHARACTERS)


def end_characters(texts: Sequence[str]) -> np.ndarray:
    """Return the first and the last character of descriptions in lower case, int32 of shape (n, 2).

    Examples
    --------
    >>> [chr(x) for x in end_characters(["en[SEP]Ship's cook"])[0]]
    ['s', 'k']
    """
    descriptions = (text.partition(LANG_SEP)[2].strip().lower() or " " for text in texts)
    return np.array([(ord(text[0]), ord(text[-1])) for text in descriptions], dtype=np.int32)

"""Text files of any encoding, read as UTF-8: what encoding they have, and whether they are text at
all.
"""

import codecs
import gzip
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from histocoder.errors import UserError, shown
from histocoder.tables.text_encodings import (
    ENCODINGS,
    Reading,
    TwiceEncoded,
    guess,
    readings,
    wide_encoding,
)

MAX_LINE_BYTES = 4 << 20  # largest size of a line, and of a row
_CHUNK_BYTES = 1 << 24
NUM_GUESS_WORDS = 5_000  # number of distinct words by which an encoding is guessed
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # as Python decodes such bytes
_WORD = re.compile(rb"[^\s,;|\"]*[\x80-\xff][^\s,;|\"]*")
# a quotation mark with a backslash before it, not doubled
_ESCAPED = re.compile(rb'[,;\t\n]"[^"\n]*\\"[^",;\t\r\n]')
_END_MARK = b"\x1a"  # Ctrl-Z, which ends files of DOS
_BREAKS = (b"", b"\r", b"\n")
_TAIL_BYTES = 4096
_HEAD_BYTES = 65_536


@dataclass
class _NonAscii:
    """Counts what is not ASCII in a text, to tell whether its bytes are UTF-8."""

    num_good: int = 0  # number of characters that are UTF-8
    num_bad: int = 0  # number of bytes that are not
    first_bad: str = ""  # which the first of these is, and where
    words: set[bytes] = field(default_factory=set)  # words with such bytes
    twice: TwiceEncoded = field(default_factory=TwiceEncoded)

    def add(self, chunk: bytes, num_lines: int) -> None:
        """Count a chunk of whole lines, behind a number of lines."""
        # strict decoding is much faster than a search for bytes that are not UTF-8
        bad: list[str] = []
        try:
            text = chunk.decode("utf-8")
        except UnicodeDecodeError:
            text = chunk.decode("utf-8", "surrogateescape")
            bad = _NOT_UTF8.findall(text)
            if not self.first_bad:
                line = num_lines + text.count("\n", 0, text.index(bad[0])) + 1
                self.first_bad = f"line {line}: the byte 0x{ord(bad[0]) - 0xDC00:02X}"
            if len(self.words) < NUM_GUESS_WORDS:
                self.words.update(_WORD.findall(chunk))
        else:
            self.twice.add(text)
        self.num_bad += len(bad)
        self.num_good += len(text) - len(text.encode("ascii", "ignore")) - len(bad)


class TextFile:
    """A text file, all of which was read once: its encoding, and what its lines have of other
    programs' habits.

    `encoding` is the one that the user names; otherwise it is UTF-8, UTF-16 by its mark or its NUL
    bytes, or, with a notice, the one that makes words.

    Raises UserError if the file is not text, is UTF-8 with damaged bytes, or has a line of more
    than 4 MiB.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self.path = path
        self.notices: list[str] = []
        self.readings: list[Reading] = []  # in encodings that it may have, if that is a guess
        self.first_lines: list[bytes] = []  # which are not blank
        # lines that are the first one again: a header, in files that were joined
        self.repeated_lines: list[int] = []
        self.has_escapes = False
        self.ends_with_quote = False
        self.line_break = "\n"  # that most lines end with; a return alone is written as "\n"
        self._returns_twice = False
        self._has_end_mark = False

        # the first bytes tell UTF-16, whose text needs to be decoded before anything else is known
        with opened(path) as file:
            head = file.read(4096)
        self._encoding = checked_encoding(encoding) if encoding else wide_encoding(head)
        self.has_mark = head.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        self._scan()

    @property
    def is_plain(self) -> bool:
        """Whether the file's bytes, unpacked, are those that `open` gives."""
        return self._encoding is None and not self._returns_twice and not self._has_end_mark

    def open(self) -> BinaryIO:
        """Open the file to read its text as UTF-8."""
        if self.is_plain:
            return opened(self.path)
        return io.BufferedReader(_Stream(self._chunks()), _CHUNK_BYTES)

    def _chunks(self) -> Iterator[bytes]:
        """Yield the text as UTF-8, with one return at the end of each line, to the mark that ends
        files of DOS.
        """
        end = b""
        for part in self._decoded():
            # what is at the end of a chunk may go on in the next, or be the end of the file
            chunk = end + part
            content = chunk.rstrip(b"\r\n \x1a")
            end = chunk[len(content) :]
            yield self._with_single_returns(content)
        if self._has_end_mark:
            end = end.partition(_END_MARK)[0]
        yield self._with_single_returns(end)

    def _with_single_returns(self, content: bytes) -> bytes:
        return content.replace(b"\r\r\n", b"\r\n") if self._returns_twice else content

    def _decoded(self) -> Iterator[bytes]:
        """Yield the text as UTF-8; as it is if its encoding is not known."""
        decode = codecs.getincrementaldecoder(self._encoding)().decode if self._encoding else None
        num_lines = 0
        with opened(self.path) as file:
            while content := file.read(_CHUNK_BYTES):
                if decode is None:
                    yield content
                    continue
                try:
                    chunk = decode(content).encode()
                except UnicodeDecodeError as error:
                    line = num_lines + error.object.count(b"\n", 0, error.start) + 1
                    raise UserError(
                        f"{self.path}, line {line}, is not text in the encoding "
                        f"{self._encoding}: {error.reason}. Name another one with "
                        "--file-encoding, or save it as UTF-8."
                    ) from error
                num_lines += chunk.count(b"\n")
                yield chunk

    def _lines(self) -> Iterator[bytes]:
        """Yield the text in chunks of whole lines, of which none is longer than
        `MAX_LINE_BYTES`.
        """
        num_lines = 0
        line = b""
        for content in self._decoded():
            chunk = line + content

            # a line that is too long may begin anywhere in a chunk
            start = 0
            while len(chunk) - start > MAX_LINE_BYTES:
                begin = start
                start = _last_break(chunk, begin, begin + MAX_LINE_BYTES)
                if not start:
                    line_number = num_lines + chunk.count(b"\n", 0, begin) + 1
                    raise UserError(
                        f"{self.path}, line {line_number:,}: {MAX_LINE_BYTES >> 20} MB without a "
                        "line break, which is no row of a table. Check the file."
                    )

            # the last line waits for its end, in the next chunk
            end = _last_break(chunk, 0, len(chunk))
            num_lines += chunk.count(b"\n")
            line = chunk[end:]
            if end:
                yield chunk[:end]
        if line:
            yield line

    def _scan(self) -> None:
        """Read all lines; raise a UserError unless they are text."""
        num_lines = 0
        num_breaks = 0
        num_returns = 0
        tail = b""
        non_ascii = _NonAscii()
        for chunk in self._lines():
            if b"\0" in chunk:
                line = num_lines + chunk.count(b"\n", 0, chunk.index(b"\0")) + 1
                raise UserError(
                    f"{self.path} has a NUL byte in line {line}: it is damaged, or a workbook. "
                    "Save it as UTF-8 CSV (in Excel: 'CSV UTF-8')."
                )
            if not chunk.isascii():
                non_ascii.add(chunk, num_lines)

            # the regular expression is slow, and most files have no backslash at all
            if not self.has_escapes and b'\\"' in chunk:
                self.has_escapes = _ESCAPED.search(chunk) is not None
            self._find_repeated(chunk, num_lines)
            num_breaks += chunk.count(b"\r\n")
            num_returns += chunk.count(b"\r\r\n")
            num_lines += chunk.count(b"\n")
            tail = chunk[-_TAIL_BYTES:]

        content = tail.rstrip(b"\r\n \x1a")
        self.ends_with_quote = content.endswith(b'"')
        self._has_end_mark = _END_MARK in tail[len(content) :]
        self._returns_twice = 2 * num_returns > num_lines
        if 2 * num_breaks > num_lines:
            self.line_break = "\r\n"
        self.notices += non_ascii.twice.notices(self.path)

        # a few bad bytes in UTF-8 are damage; many are another encoding
        if not non_ascii.num_bad:
            return
        if self.has_mark or non_ascii.num_good > non_ascii.num_bad:
            raise UserError(
                f"{self.path}, {non_ascii.first_bad} is not UTF-8, unlike most of the file. "
                "Fix it, or save as UTF-8."
            )
        self._guess(non_ascii.words)

    def _find_repeated(self, chunk: bytes, num_lines: int) -> None:
        """Find the lines that repeat the first one, in a chunk behind a number of lines."""
        if not self.first_lines:
            for line in chunk[:_HEAD_BYTES].splitlines():
                content = line.removeprefix(codecs.BOM_UTF8)
                if content.strip():
                    self.first_lines.append(content)

        # a single word may be a header, but is more likely to be a description, which may repeat
        first = b"".join(self.first_lines[:1])
        if not re.search(rb"[,;\t| ]", first):
            return
        start = 0
        while (start := chunk.find(first, start)) >= 0:
            end = start + len(first)
            before = chunk[max(start - 4, 0) : start].removesuffix(codecs.BOM_UTF8)[-1:]
            if before in _BREAKS and chunk[end : end + 1] in _BREAKS and (num_lines or start > 3):
                self.repeated_lines.append(num_lines + chunk.count(b"\n", 0, start) + 1)
            start = end

    def _guess(self, words: set[bytes]) -> None:
        encoding = guess(words)
        if encoding is None:
            raise UserError(
                f"{self.path} is not UTF-8 text, nor in another usual encoding. Name its encoding "
                "with --file-encoding, or save it as UTF-8."
            )
        self._encoding = encoding
        self.readings = readings(words, encoding)
        examples = ", ".join(map(shown, self.readings[0].examples))
        self.notices.append(
            f"{self.path} is not UTF-8; it is read as {ENCODINGS[encoding]} ({encoding}), for "
            f"example {examples}. If these are wrong, name its encoding with --file-encoding."
        )


class _Stream(io.RawIOBase):
    """Bytes of chunks, to be read as those of a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._unread = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._unread:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._unread = memoryview(chunk)
        size = min(len(buffer), len(self._unread))
        buffer[:size] = self._unread[:size]
        self._unread = self._unread[size:]
        return size


def readings_of(path: Path) -> list[Reading]:
    """Return how a text file that is not UTF-8 reads in the encodings that it may have, the likeliest
    first.
    """
    return TextFile(path).readings


def opened(path: Path) -> BinaryIO:
    """Open a file to read its bytes, unpacked if its name ends in .gz."""
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _last_break(chunk: bytes, start: int, end: int) -> int:
    """Return the index behind the last line break in a part of a chunk, 0 if there is none."""
    return max(chunk.rfind(b"\n", start, end), chunk.rfind(b"\r", start, end)) + 1


def checked_encoding(encoding: str) -> str:
    """Return the name of an encoding that the user names; raise a UserError if it is not one of
    texts.
    """
    try:
        "".encode(encoding)
        return codecs.lookup(encoding).name
    except LookupError as error:
        usual = ", ".join(("utf-8", "utf-16", *ENCODINGS))
        raise UserError(
            f"--file-encoding: there is no encoding {encoding!r}. Usual ones are {usual}."
        ) from error

"""Notices about a file that is coded in chunks, by one process or several: each once, not for each chunk."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from histocoder import distributed
from histocoder.errors import CountedNotice, Notice, counted
from histocoder.inference.descriptions import UnknownLanguageWarning


class FileNotices:
    """Collects notices over the chunks of a file; `say` receives each of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._counts: Counter[tuple[str, str]] = Counter()  # a description that was coded twice counts twice
        self._languages: set[str] = set()
        self._known: tuple[str, ...] = ()
        self._shown: set[str] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add up numbers, have rank 0 show new unknown languages, and show every other notice once."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", CountedNotice)
            warnings.simplefilter("always", UnknownLanguageWarning)
            warnings.showwarning = partial(self._take, warnings.showwarning)
            yield

    def _take(self, show: Callable[..., None], message: Warning | str, *where: Any, **more: Any) -> None:
        if isinstance(message, CountedNotice):
            self._counts[message.words] += message.count
        elif isinstance(message, UnknownLanguageWarning):
            new = sorted(set(message.languages) - self._languages)
            self._languages.update(new)
            self._known = message.known
            if new and distributed.is_primary():
                self._say(str(UnknownLanguageWarning(new, message.known)))
        elif str(message) not in self._shown:
            self._shown.add(str(message))
            if not isinstance(message, Notice):
                show(message, *where, **more)
            elif distributed.is_primary():
                self._say(str(message))

    def tell(self, *, may_repeat: bool) -> None:
        """Show the notices of all processes; `may_repeat`: whether one may have coded a description twice."""
        found = distributed.gather_objects((self._counts, self._languages, self._known))
        for _, languages, known in found[1:]:  # rank 0 has shown its own
            if new := sorted(languages - self._languages):
                self._languages.update(new)
                self._say(str(UnknownLanguageWarning(new, known)))
        up_to = "Up to " if may_repeat or len(found) > 1 else ""
        for words, count in sum((counts for counts, *_ in found), Counter[tuple[str, str]]()).items():
            self._say(f"{up_to}{counted(count, *words)}")

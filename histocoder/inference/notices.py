"""Notices about a file that is coded in chunks, by one process or several: each once, not for each chunk."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from histocoder import distributed
from histocoder.errors import Notice
from histocoder.inference.descriptions import UnknownLanguageWarning
from histocoder.inference.reading import TextCutWarning


class FileNotices:
    """Collects notices over the chunks of a file; `say` receives each of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._num_cut = 0  # descriptions; one that was coded twice counts twice
        self._limit: tuple[int, str] = (0, "")
        self._languages: set[str] = set()
        self._known: tuple[str, ...] = ()
        self._shown: set[str] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Count cut texts, have rank 0 show new unknown languages, and show every other notice once."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", TextCutWarning)
            warnings.simplefilter("always", UnknownLanguageWarning)
            warnings.showwarning = partial(self._take, warnings.showwarning)
            yield

    def _take(self, show: Callable[..., None], message: Warning | str, *where: Any, **more: Any) -> None:
        if isinstance(message, TextCutWarning):
            self._num_cut += message.count
            self._limit = message.max_len, message.unit
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
        own = {"num_cut": self._num_cut, "limit": self._limit, "languages": [*self._languages], "known": self._known}
        found = [json.loads(text) for text in distributed.gather_objects(json.dumps(own))]
        for part in found[1:]:  # rank 0 has shown its own
            if new := sorted(set(part["languages"]) - self._languages):
                self._languages.update(new)
                self._say(str(UnknownLanguageWarning(new, part["known"])))
        if num_cut := sum(part["num_cut"] for part in found):
            limit = next(part["limit"] for part in found if part["num_cut"])
            up_to = "Up to " if may_repeat or len(found) > 1 else ""
            self._say(f"{up_to}{TextCutWarning(num_cut, *limit)}")

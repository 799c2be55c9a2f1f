"""Notices about a file that is coded in parts, by one process or several: each once, not for each part."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from histocoder import distributed
from histocoder.errors import CountedNotice, Notice, counted


class FileNotices:
    """Collects notices over the parts of a file; `say` receives each of them, on rank 0."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._counts: Counter[tuple[str, str]] = Counter()
        self._shown: set[str] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add up numbers, and show every other notice once."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", Notice)
            warnings.showwarning = partial(self._take, warnings.showwarning)
            yield

    def _take(self, show: Callable[..., None], message: Warning | str, *where: Any, **more: Any) -> None:
        if isinstance(message, CountedNotice):
            self._counts[message.words] += message.count
        elif str(message) not in self._shown:
            self._shown.add(str(message))
            if not isinstance(message, Notice):
                show(message, *where, **more)
            elif distributed.is_primary():
                self._say(str(message))

    def tell(self) -> None:
        """Show the numbers of all processes."""
        for words, count in sum(distributed.gather_objects(self._counts), Counter[tuple[str, str]]()).items():
            self._say(counted(count, *words))

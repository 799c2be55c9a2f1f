"""Notices about a file that is coded in parts, by one process or several: each once, not for each part."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from histocoder import distributed
from histocoder.errors import CountedNotice, Notice, counted


@contextmanager
def notices_of_file(say: Callable[[str], None]) -> Iterator[None]:
    """Have rank 0 say each notice of all processes once, and at the end the sums of numbers."""
    counts: Counter[tuple[str, str]] = Counter()
    shown: set[str] = set()

    def take(show: Callable[..., None], message: Warning | str, *where: Any, **more: Any) -> None:
        if isinstance(message, CountedNotice):
            counts[message.words] += message.count
        elif str(message) not in shown:
            shown.add(str(message))
            if not isinstance(message, Notice):
                show(message, *where, **more)
            elif distributed.is_primary():
                say(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        warnings.showwarning = partial(take, warnings.showwarning)
        yield
    for words, count in sum(distributed.gather_objects(counts), Counter[tuple[str, str]]()).items():
        say(counted(count, *words))

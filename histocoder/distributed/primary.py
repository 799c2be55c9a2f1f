"""What rank 0 does while the others wait, outside any collective and without a deadline."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from histocoder.distributed.process_group import is_primary, rank, shared_group, world_size
from histocoder.errors import Interrupted, UserError

T = TypeVar("T")
_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 30.0
_GRACE_SECONDS = 8.0


def run_on_primary(work: Callable[[], T], *, doing: str) -> T | None:
    """Let rank 0 work while the others wait for it, outside any collective and without a deadline.

    Parameters
    ----------
    work : callable
    doing : str
        What the waiting processes wait for.

    Returns
    -------
    The result on rank 0; None on the others.

    Raises
    ------
    UserError
        On every process, with rank 0's message, where rank 0 failed.
    Interrupted
        On every process, where rank 0 was asked to stop.
    """
    if (group := shared_group()) is None:
        return work()
    group.calls += 1
    key = f"primary/{group.calls}"
    if is_primary():
        try:
            result = work()
        except UserError as error:
            _answer(group.store, key, f"!{error}")
            raise
        except Interrupted as error:
            _answer(group.store, key, f"~{error.signum} {error}")
            raise
        except BaseException as error:
            _answer(
                group.store, key, f"!rank 0 failed while {doing} ({type(error).__name__}); its own output says more."
            )
            raise
        _answer(group.store, key, "done")
        return result
    answer = _wait_for(group.store, key, doing)
    _acknowledge(group.store, key)
    if answer.startswith("!"):
        raise UserError(answer[1:])
    if answer.startswith("~"):
        signum, message = answer[1:].split(" ", 1)
        raise Interrupted(message, int(signum))
    return None


def from_primary(work: Callable[[], T], *, doing: str) -> T:
    """Let rank 0 work as in `run_on_primary`; return the result, which is not None, on every process."""
    values = [run_on_primary(work, doing=doing)]
    if (group := shared_group()) is not None:
        dist.broadcast_object_list(values, group=group.control)
    assert values[0] is not None
    return values[0]


def wait_for_all(*, doing: str) -> None:
    """Wait until every process has come here, outside any collective and without a deadline."""
    if (group := shared_group()) is None:
        return
    group.calls += 1
    key = f"all/{group.calls}"
    if group.store.add(f"{key}/count", 1) == world_size():
        group.store.set(key, "done")
    _wait_for(group.store, key, doing)
    _acknowledge(group.store, key)


def _answer(store: dist.Store, key: str, answer: str) -> None:
    """Say how it went, and give the others time to hear it: rank 0 may hold the store, and end right after this."""
    store.set(key, answer)
    _acknowledge(store, key)


def _acknowledge(store: dist.Store, key: str) -> None:
    """Rank 0 waits, for some seconds at most, until all others have called this too."""
    heard = store.add(f"{key}/heard", 1)
    deadline = time.monotonic() + _GRACE_SECONDS
    while is_primary() and heard < world_size() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
        heard = store.add(f"{key}/heard", 0)


def _wait_for(store: dist.Store, key: str, doing: str) -> str:
    started = noticed = time.monotonic()
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - noticed > _NOTICE_SECONDS:
            noticed = now
            text = f"rank {rank()} waits for rank 0 ({doing}), {now - started:.0f} s"
            print(text, file=sys.stderr, flush=True)
    return store.get(key).decode()

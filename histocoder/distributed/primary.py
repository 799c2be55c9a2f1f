"""Work of rank 0 alone. The others wait for it outside any collective, so that no collective times out."""

import json
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
    """Run `work` on rank 0 while the others wait, however long it takes; return the result on rank 0, else None.

    If it raises, every process raises: rank 0's UserError or Interrupted, or a UserError that says what it was `doing`.
    """
    if (group := shared_group()) is None:
        return work()
    group.num_calls += 1
    key = f"primary/{group.num_calls}"
    failure: list = []
    if is_primary():
        try:
            return work()
        except UserError as error:
            failure = [str(error)]
            raise
        except Interrupted as error:
            failure = [str(error), error.signum]
            raise
        except BaseException as error:
            failure = [f"rank 0 failed while {doing} ({type(error).__name__}); see its output for details."]
            raise
        finally:
            group.store.set(key, json.dumps(failure))
            _acknowledge(group.store, key)
    failure = json.loads(_wait_for(group.store, key, doing))
    _acknowledge(group.store, key)
    if len(failure) == 2:
        raise Interrupted(*failure)
    if failure:
        raise UserError(*failure)
    return None


def broadcast_from_primary(work: Callable[[], T], *, doing: str) -> T:
    """Run `work` on rank 0 as `run_on_primary` does; return the result, which is not None, on every process."""
    values = [run_on_primary(work, doing=doing)]
    if (group := shared_group()) is not None:
        dist.broadcast_object_list(values, group=group.control)
    assert values[0] is not None
    return values[0]


def wait_for_all(*, doing: str) -> None:
    """Wait until every process has called this, however long that takes."""
    if (group := shared_group()) is None:
        return
    group.num_calls += 1
    key = f"all/{group.num_calls}"
    if group.store.add(f"{key}/count", 1) == world_size():
        group.store.set(key, "done")
    _wait_for(group.store, key, doing)
    _acknowledge(group.store, key)


def _acknowledge(store: dist.Store, key: str) -> None:
    """Wait on rank 0, which may hold the store and end right after this, until all others have called this too."""
    heard = store.add(f"{key}/heard", 1)
    deadline = time.monotonic() + _GRACE_SECONDS
    while is_primary() and heard < world_size() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
        heard = store.add(f"{key}/heard", 0)


def _wait_for(store: dist.Store, key: str, doing: str) -> bytes:
    """Return the value of a key as soon as it is set; print a notice every 30 s."""
    started = noticed = time.monotonic()
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - noticed > _NOTICE_SECONDS:
            noticed = now
            waited = f"{now - started:.0f} s"
            print(f"rank {rank()} has waited {waited} for rank 0 ({doing})", file=sys.stderr, flush=True)
    return store.get(key)

"""A profile of some training steps: a trace to look at, and a table."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from histocoder import distributed
from histocoder.files import replacing_folder
from histocoder.log import log

SKIPPED_STEPS = 5  # steps before those that are profiled, which start workers, compile, and choose kernels
_WARM_UP_STEPS = 2  # of the profiler's own
_TABLE_ROWS = 30


@contextmanager
def profiling(
    num_steps: int | None, path: Path, *, device: torch.device, on_pause: Callable[[float], None]
) -> Iterator[Callable[[], None]]:
    """Profile some steps on rank 0, unless `num_steps` is None; yield a function to call after each step.

    Writes `trace.json.gz`, for chrome://tracing or ui.perfetto.dev, and `table.txt` to the new folder `path`.
    `on_pause` receives the time (`time.monotonic`) since which training has been paused.
    """
    if num_steps is None or not distributed.is_primary():
        yield lambda: None
        return
    recorded = 0

    def write(done: profile) -> None:
        """Write the profile, and say where it is."""
        nonlocal recorded
        started, recorded = time.monotonic(), done.step_num - SKIPPED_STEPS
        if recorded <= 0:
            return
        by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = done.key_averages().table(sort_by=by, row_limit=_TABLE_ROWS)
        with replacing_folder(path) as temporary:
            done.export_chrome_trace(str(temporary / "trace.json.gz"))
            (temporary / "table.txt").write_text(table, encoding="utf-8")
        log.info(f"{table}\nThe profile of {recorded} step{'s' * (recorded > 1)} is in {path}.")
        on_pause(started)

    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's own notices on standard error
    steps = schedule(wait=SKIPPED_STEPS - _WARM_UP_STEPS, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, *gpu], schedule=steps, on_trace_ready=write) as running:
        yield running.step
    if recorded <= 0:
        log.info(f"--profile: no step was profiled. The first {SKIPPED_STEPS} steps never are; train for more.")

"""Where the time of some steps goes: a trace to look at, and a table."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from histocoder import distributed
from histocoder.checkpoints.run_folder import PROFILE_FOLDER
from histocoder.files import temporary_folder

SKIPPED_STEPS = 5
"""Steps before those that are profiled, which start workers, compile, and choose kernels."""
_WARM_UP_STEPS = 2  # of the profiler's own
_TABLE_ROWS = 30


class Profiler:
    """Context manager that profiles some steps on rank 0, once; it costs nothing afterwards.

    Writes `profile/trace.json.gz`, for chrome://tracing or ui.perfetto.dev, and `profile/table.txt`.

    Parameters
    ----------
    num_steps : int or None
        None: it records nothing.
    folder : Path
        The run's.
    device : torch.device
    say : callable
        Receives the table.
    on_pause : callable
        Receives the time (`time.monotonic`) since which training has been paused.
    """

    def __init__(
        self,
        num_steps: int | None,
        folder: Path,
        *,
        device: torch.device,
        say: Callable[[str], None],
        on_pause: Callable[[float], None],
    ) -> None:
        self._folder = folder / PROFILE_FOLDER
        self._say, self._on_pause = say, on_pause
        self._by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        self._steps, self._last_step = 0, SKIPPED_STEPS + (num_steps or 0)
        self._profile = _profile_of(num_steps, device) if num_steps and distributed.is_primary() else None

    def __enter__(self) -> None:
        if self._profile is not None:
            self._profile.start()

    def step(self) -> None:
        """Count a step."""
        if self._profile is not None:
            self._steps += 1
            if self._steps == self._last_step:
                self._finish(self._profile)
            else:
                self._profile.step()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profile is None:
            return
        if kind is None:
            self._finish(self._profile)
        else:
            self._profile.stop()

    def _finish(self, done: profile) -> None:
        self._profile = None
        started = time.monotonic()
        done.stop()
        recorded = self._steps - SKIPPED_STEPS
        if recorded <= 0:
            self._say(f"--profile: no step was profiled; the first {SKIPPED_STEPS} never are.")
            return
        table = done.key_averages().table(sort_by=self._by, row_limit=_TABLE_ROWS)
        with temporary_folder(self._folder) as temporary:
            done.export_chrome_trace(str(temporary / "trace.json.gz"))
            (temporary / "table.txt").write_text(table, encoding="utf-8")
            shutil.rmtree(self._folder, ignore_errors=True)
            os.replace(temporary, self._folder)
        self._say(f"{table}\nThe profile of {recorded} step{'s' * (recorded > 1)} is in {self._folder}.")
        self._on_pause(started)


def _profile_of(num_steps: int, device: torch.device) -> profile:
    """Torch's own, of so many steps behind those that are skipped."""
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's own notices on standard error
    wait = SKIPPED_STEPS - _WARM_UP_STEPS
    return profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=schedule(wait=wait, warmup=_WARM_UP_STEPS, active=num_steps, repeat=1),
    )

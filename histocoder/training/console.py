"""Output of a run in the terminal while it trains."""

import sys
import time

from tqdm import tqdm

from histocoder.log import log

ESTIMATE_AFTER = 20  # steps after which a run estimates how long it will take
_FIRST_STEPS = 5  # steps left out of the estimate: they start workers, compile, and choose kernels


class Progress:
    """Shows the steps done: a bar on a terminal if `show`, and lines of numbers; `start` steps are done already."""

    def __init__(self, total: int, *, start: int = 0, show: bool = True) -> None:
        self._total = total
        self._started, self._start = time.monotonic(), start
        self._done = 0
        self._counted_since = self._started
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1)

    def advance(self, **values: float) -> None:
        """Advance by a step, and show `values` in the bar."""
        self._done += 1
        if self._done == _FIRST_STEPS:
            self._counted_since = time.monotonic()
        if self._done == ESTIMATE_AFTER:
            self._say_estimate()
        if self._bar is not None:
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update()

    def pause(self, seconds: float) -> None:
        """Leave time that was not spent on steps out of the estimate."""
        self._counted_since += seconds

    def _say_estimate(self) -> None:
        seconds = (time.monotonic() - self._counted_since) / (ESTIMATE_AFTER - _FIRST_STEPS)
        steps = self._total - self._start
        each = f"{_duration(seconds * steps)} ({seconds:.3g} s each)"
        log.info(f"estimated time for {steps:,} steps, without validation: {each}")

    def line(self, step: int, values: dict[str, float]) -> None:
        """Print a line with the step, some numbers, and the time left."""
        done = step - self._start
        left = (time.monotonic() - self._started) / done * (self._total - step) if done else 0
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        log.info(f"step {step}/{self._total}  {numbers}  {_duration(left)} left")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

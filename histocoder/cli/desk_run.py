"""Train for the desk, as `finetune.py` does, and stop when the desk's server has ended in whatever
way.
"""

import os
import signal
import threading

from histocoder.cli.finetune import main
from histocoder.cli.script import run_script


def _stop_with_the_server() -> None:
    """Wait until the server's end of this process's standard input is closed, then stop as at a
    signal.
    """
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_the_server, daemon=True).start()
    run_script(main)

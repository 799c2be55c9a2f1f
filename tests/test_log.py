"""Lines and notices go where their own thread sends them."""

import threading
from collections.abc import Callable

import pytest

from histocoder.errors import Notice, sending_notices, warn_user
from histocoder.log import log, sending_lines


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_lines_of_other_threads_are_printed(capsys: pytest.CaptureFixture[str]):
    lines: list[str] = []
    with sending_lines(lines.append):
        log.info("of this thread")
        in_another_thread(lambda: log.info("of another"))
        log.warning("a warning")
    log.info("afterwards")
    shown = capsys.readouterr()
    assert (
        lines == ["of this thread"]
        and shown.out == "of another\nafterwards\n"
        and shown.err == "a warning\n"
    )


def test_notices_of_other_threads_go_elsewhere():
    mine: list[str] = []
    others: list[str] = []

    def work() -> None:
        with sending_notices(others.append):
            warn_user(Notice("of another"))

    with sending_notices(mine.append):
        warn_user(Notice("of this thread"))
        in_another_thread(work)
    with pytest.warns(Notice, match="afterwards"):
        warn_user(Notice("afterwards"))
    assert mine == ["of this thread"] and others == ["of another"]

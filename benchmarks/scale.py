"""What grows with the rows: seconds and memory of each command, for tables of more and more rows.

Prints a line of JSON for each size, and with `--picture` draws all of them. The tables are
generated: titles of the project with places, of which 38 % are distinct, as in the parish registers
of a country. Each command is the one that people use, in a process of its own, its start included:
`finetune.py` with an n-gram encoder for an epoch, whose log tells its parts apart ("prepare", "train",
"finish" with the experts, the choice of how to predict, the refit and the report), then `histocoder
predict`, `evaluate` and `review` on all rows, and "desk", a file that is sent to the page and coded.
`mb` is the peak of anonymous memory of the command's processes.

Usage: python benchmarks/scale.py [--rows 10000 100000 1000000 3000000] [--picture FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
from train_step import ROOT

from histocoder.formatters.classifications import HISCO_TITLES

ROWS = (10_000, 100_000, 1_000_000, 3_000_000)
SHARE_DISTINCT = 0.38
GENERATED_AT_ONCE = 200_000
_POLL_SECONDS = 0.05  # between looks at the memory of a process
_PARTS_OF_TRAINING = {"Prepared": "prepare", "Training finished": "train"}
"""Words that the log of finetune.py has at the end of a part."""
_LAST_PART = "finish"


TABLE = "table.csv"  # with codes
DESCRIPTIONS = "descriptions.csv"  # the same rows without codes


def generate(folder: Path, num_rows: int) -> None:
    """Write a table of titles with places, with and without codes; a few descriptions have many rows,
    most have one.
    """
    titles = pd.read_csv(HISCO_TITLES, dtype=str)
    titles = titles[titles["hisco"].str.len() == 5]
    rng = np.random.default_rng(0)
    num_distinct = max(round(num_rows * SHARE_DISTINCT), 1)
    syllables = np.array([first + vowel for first in "bdfghklmnprstvw" for vowel in "aeiou"])
    for start in range(0, num_rows, GENERATED_AT_ONCE):
        numbers = np.arange(start, min(start + GENERATED_AT_ONCE, num_rows))

        # the first rows are all distinct, the others repeat them, the earlier ones more often
        repeated = (num_distinct * rng.random(len(numbers)) ** 2).astype(np.int64)
        numbers = np.where(numbers < num_distinct, numbers, repeated)
        title = titles.iloc[numbers % len(titles)]
        place = numbers // len(titles)
        words = syllables[place % 75] + syllables[place // 75 % 75] + "by"
        texts = title["title"].to_numpy() + " in " + words.astype(object)
        frame = pd.DataFrame({"occ1": texts, "hisco_1": title["hisco"].to_numpy()})
        for name, columns in ((TABLE, ["occ1", "hisco_1"]), (DESCRIPTIONS, ["occ1"])):
            frame[columns].to_csv(folder / name, mode="a", header=start == 0, index=False)


class Command:
    """A command that runs: when it prints a line, and how much memory it takes."""

    def __init__(self, *command: object) -> None:
        self.started = time.perf_counter()
        self.lines: list[tuple[float, str]] = []
        self.mb = 0.0
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._threads = [threading.Thread(target=work) for work in (self._read, self._watch)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((self.seconds, line))

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.mb = max(self.mb, anonymous_mb(self.process.pid))
            time.sleep(_POLL_SECONDS)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def wait(self) -> dict[str, float]:
        """Wait for the end; return the seconds and the memory."""
        status = self.process.wait()
        seconds = self.seconds
        for thread in self._threads:
            thread.join()
        if status:
            raise SystemExit("".join(line for _, line in self.lines))
        return {"s": round(seconds, 1), "mb": round(self.mb)}


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process and of those that it started, in MB."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0.0
    if "RssAnon:" not in status:
        return 0.0
    own = int(status[status.index("RssAnon:") + 1]) / 1024
    return own + sum(anonymous_mb(int(child)) for child in children)


def train(folder: Path) -> dict[str, dict[str, float]]:
    """Train for an epoch; return the figures of each part."""
    flags = ("--language", "en", "--target-cols", "hisco_1", "--titles", "none")
    command = Command(
        *("finetune.py", "--dataset", folder / TABLE, *flags, "--encoder", "ngram"),
        *("--num-epochs", 1, "--save-path", folder / "run"),
    )
    whole = command.wait()
    parts = {}
    begun = 0.0
    for beginning, part in _PARTS_OF_TRAINING.items():
        ended = next(seconds for seconds, line in command.lines if beginning in line)
        parts[part] = {"s": round(ended - begun, 1)}
        begun = ended
    parts[_LAST_PART] = {"s": round(whole["s"] - begun, 1)}
    return {**parts, "finetune": whole}


class Desk:
    """A server of the page, in a workspace of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.command = Command(
            *("-m", "histocoder", "serve", "--no-browser", "--port", 0, "--host", "127.0.0.1"),
            *("--workspace", folder / "desk", "--model", folder / "run" / "best"),
        )
        while not (address := self._address()):
            time.sleep(_POLL_SECONDS)
        self._port = urlsplit(address).port
        self._token = (folder / "desk" / "token").read_text()

    def _address(self) -> str:
        for _, line in list(self.command.lines):
            for word in line.split():
                if word.startswith("http://127.0.0.1"):
                    return word
        return ""

    def ask(self, path: str, body: Any = None) -> Any:
        """Return the answer to a request; a file is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)
        headers = {"Authorization": f"Bearer {self._token}"}
        if isinstance(body, Path):
            headers["Content-Length"] = str(body.stat().st_size)
            body = body.open("rb")
        elif body is not None:
            headers["Content-Type"] = "application/json"
            body = json.dumps(body)
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status >= 400:
            raise SystemExit(f"{path}: {answer}")
        return answer

    def code(self) -> dict[str, float]:
        """Send the table, code it and make its cards; return the seconds of each, and the memory."""
        started = time.perf_counter()
        table = self._folder / DESCRIPTIONS
        sent = self.ask(f"/api/files?name={table.name}", table)["id"]
        received = time.perf_counter()
        self.ask(f"/api/files/{sent}/code", {"input_col": "occ1", "language": "en"})
        while self.ask(f"/api/files/{sent}")["state"] in ("queued", "running"):
            time.sleep(_POLL_SECONDS)
        coded = time.perf_counter()
        self.ask(f"/api/files/{sent}/review", {})
        reviewed = time.perf_counter()
        return {
            "send_s": round(received - started, 1),
            "code_s": round(coded - received, 1),
            "cards_s": round(reviewed - coded, 1),
            "s": round(reviewed - started, 1),
            "mb": round(self.command.mb),
        }

    def close(self) -> None:
        """End the server."""
        self.command.process.terminate()
        self.command.process.wait()


def measure(num_rows: int, folder: Path, *, with_desk: bool) -> dict[str, dict[str, float]]:
    """Run all commands on a table of so many rows; return their figures."""
    generate(folder, num_rows)
    figures = train(folder)
    descriptions = folder / DESCRIPTIONS
    coded = folder / "coded.csv"
    model = ("--model", folder / "run" / "best")
    column = ("--input-col", "occ1", "--language", "en")
    commands: dict[str, tuple[object, ...]] = {
        "predict": (*model, "--input", descriptions, "--output", coded, *column),
        "evaluate": (*model, "--data", folder / TABLE, "--output", folder / "evaluation", *column),
        "review": (*model, "--predictions", coded, "--output", folder / "review.csv"),
    }
    for name, flags in commands.items():
        figures[name] = Command("-m", "histocoder", name, *flags).wait()
    if with_desk:
        desk = Desk(folder)
        try:
            figures["desk"] = desk.code()
        finally:
            desk.close()
    return figures


def draw(results: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw seconds against rows, a line for each command, and the slope of what grows as the rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = sorted(results)
    for name in [name for name in results[sizes[0]] if name != "finetune"]:
        measured = [size for size in sizes if name in results[size]]
        seconds = [results[size][name]["s"] for size in measured]
        axes.plot(measured, seconds, marker="o", label=name)
    last = max(results[sizes[-1]].values(), key=lambda part: part["s"])["s"]
    proportional = [last * size / sizes[-1] for size in sizes]
    axes.plot(sizes, proportional, color="0.6", linestyle=":", label="as the rows")
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="seconds, start included")
    axes.grid(color="0.9")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path)


def main() -> None:
    """Measure one size after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="sizes of the tables")
    parser.add_argument(
        "--desk-rows", type=int, default=1_000_000, help="largest table that is sent to the page"
    )
    parser.add_argument("--picture", type=Path, help="file to draw the figures into, .svg or .png")
    args = parser.parse_args()
    results = {}
    for num_rows in args.rows:
        with tempfile.TemporaryDirectory() as name:
            with_desk = num_rows <= args.desk_rows
            results[num_rows] = measure(num_rows, Path(name), with_desk=with_desk)
        print(json.dumps({"benchmark": "scale", "rows": num_rows, **results[num_rows]}), flush=True)
    if args.picture is not None:
        draw(results, args.picture)


if __name__ == "__main__":
    main()

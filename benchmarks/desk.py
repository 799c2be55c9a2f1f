"""The work cycle of `histocoder serve` in a browser: train, code, review, train again, compare.

A fifth of the distinct descriptions of a table is held out, as in accuracy.py. A script then uses
the page as a person would, from an empty workspace on: it trains on the others, uploads the
held-out descriptions, reviews the first cards by keyboard with the true codes, and trains again
with the decisions. Both models code the held-out rows that were not reviewed. At the end it counts
in how many of 2,000 random samples the page's interval contains the true share. Run `make
test-browser` first, which installs the browser.

python benchmarks/desk.py --data english --cards 100 --folder desk-walk
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from accuracy import CODE, ROOT, TABLES, TEXT, read, split
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from histocoder import Coder
from histocoder.desk.domain.trust import estimate_share, order_of_review
from histocoder.evaluation.baselines import difference_interval, shares
from histocoder.evaluation.summary import points

_PATIENCE = 900.0
_CARD = """const card = document.querySelector("#card");
    const codes = (where) => [...card.querySelectorAll(`${where} .code`)].map((one) => one.textContent);
    return {text: card.querySelector("h2.text")?.textContent, number: card.querySelector(".quiet")?.textContent,
            chosen: codes(".chosen"), others: codes(".columns > div:first-child")};"""


class Hands:
    """A browser, with a count of the keys and clicks that a person would need."""

    def __init__(self, address: str, downloads: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.driver = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
        )
        self.driver.implicitly_wait(60)
        self.keys = self.clicks = 0
        self.driver.get(address)

    def press(self, *keys: str) -> None:
        self.keys += len(keys)
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def click(self, selector: str) -> None:
        self.clicks += 1
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def choose(self, selector: str, value: str) -> None:
        self.clicks += 2
        Select(self.driver.find_element(By.CSS_SELECTOR, selector)).select_by_value(value)

    def card(self) -> dict[str, Any]:
        return self.driver.execute_script(_CARD)

    def sees(self, selector: str) -> bool:
        """Whether the page has such an element now; find_elements would wait a minute for one."""
        return self.driver.execute_script(
            "return document.querySelector(arguments[0]) !== null", selector
        )

    def text(self, selector: str) -> str:
        return self.driver.execute_script(
            "return document.querySelector(arguments[0])?.textContent || ''", selector
        )

    def wait(self, until: Any) -> None:
        WebDriverWait(self.driver, _PATIENCE, poll_frequency=0.05).until(lambda _: until())


def train(hands: Hands, path: Path, *, quick: bool) -> str:
    """Train a model on a table, with what the page guesses and offers to correct; return the
    model's figures.
    """
    hands.clicks += 2  # on the page and in the browser's file dialog
    hands.driver.find_element(By.CSS_SELECTOR, "#coded-table").send_keys(str(path))
    hands.wait(lambda: hands.text("#train-form .good, #train-form .notice"))
    if hands.sees("#apply"):
        hands.click("#apply")
    hands.wait(lambda: hands.text("#train-form .good"))
    if quick:
        hands.click("#quick")
        hands.wait(lambda: hands.sees("#train-form button.primary:enabled"))
    hands.click("#train-form button.primary")
    hands.wait(lambda: hands.text(".made .figures"))
    return hands.text(".made .figures")


def code_file(hands: Hands, path: Path, language: str) -> None:
    hands.click("nav a[href='#files']")
    hands.clicks += 2  # on the page and in the browser's file dialog
    hands.driver.find_element(By.CSS_SELECTOR, "#file").send_keys(str(path))
    hands.wait(lambda: hands.text("#file-form table"))
    if (
        hands.driver.execute_script("return document.querySelector('#file-language').value")
        != language
    ):
        hands.choose("#file-language", language)
    hands.wait(
        lambda: hands.driver.find_element(
            By.CSS_SELECTOR, "#file-form button.primary"
        ).is_displayed()
    )
    hands.click("#file-form button.primary")
    hands.wait(lambda: "Coded." in hands.text("#sent .file"))


def begin_review(hands: Hands) -> None:
    hands.click("#sent [aria-label^='Review']")
    hands.wait(lambda: hands.driver.switch_to.active_element.get_attribute("id") == "who")
    hands.press(*"Anna", Keys.ENTER)
    hands.wait(lambda: hands.card()["text"])


def review(hands: Hands, truth: dict[str, str], cards: int) -> tuple[list[str], Counter[str]]:
    """Review cards; return their descriptions, and the number of cards by kind of decision."""
    ways: Counter[str] = Counter()
    reviewed = []
    for _ in range(cards):
        shown = hands.card()
        true = truth[shown["text"]]
        reviewed.append(shown["text"])
        if shown["chosen"] == [true]:
            ways["accepted"] += 1
        elif true in shown["others"]:
            ways["alternative"] += 1
            hands.press(str(shown["others"].index(true) + 1))
        else:
            ways["searched"] += 1
            hands.press("/", *true)
            hands.wait(lambda code=true: hands.text("#found .choice .code") == code)
            hands.press(Keys.ENTER)
        hands.wait(lambda code=true: hands.card()["chosen"] == [code])
        hands.press(Keys.ENTER)
        hands.wait(lambda before=shown["number"]: hands.card()["number"] != before)
    return reviewed, ways


def improve(hands: Hands) -> str:
    """Train again, and return what the page says that it has brought."""
    hands.click("nav a[href='#models']")
    hands.click("#made [data-key*='Train again']")
    hands.wait(lambda: "Before → after" in hands.text("#made"))
    return hands.text("#made article:first-child .notices")


def _model(folder: Path, number: int) -> Path:
    return folder / "desk" / "models" / f"coded-{number}" / "best"


def compare(folder: Path, held_out: pd.DataFrame, reviewed: pd.Series, language: str) -> None:
    before = Coder.from_pretrained(_model(folder, 1), "cpu").predict(held_out[TEXT], language)[CODE]
    share = (before == held_out[CODE])[reviewed].mean()
    print(
        f"reviewed cards stand for {reviewed.sum():,} of {len(held_out):,} rows, right "
        f"before: {100 * share:.1f} %"
    )
    rest = held_out[~reviewed]
    texts, true = rest[TEXT].tolist(), rest[CODE].to_numpy()
    later = Coder.from_pretrained(_model(folder, 2), "cpu").predict(texts, language)[CODE]
    rights = [before[~reviewed].to_numpy() == true, later.to_numpy() == true]
    of_before, of_after = (shares(right, texts) for right in rights)
    for kind, number in (("rows", len(texts)), ("texts", len(set(texts)))):
        difference = getattr(difference_interval(rights[1], rights[0], texts), kind)
        print(
            f"not reviewed, {number} {kind}: {100 * getattr(of_before, kind):.1f} % -> "
            f"{100 * getattr(of_after, kind):.1f} % ({points(difference)})"
        )


def coverage(
    folder: Path, held_out: pd.DataFrame, language: str, *, num_samples: int = 2000
) -> None:
    """Print how good the page's estimate is after some cards, with the true codes, over many random
    samples.
    """
    coded = Coder.from_pretrained(_model(folder, 1), "cpu").predict(held_out[TEXT], language)
    coded = coded.assign(text=held_out[TEXT], times=1, right=coded[CODE] == held_out[CODE])
    cards = coded.groupby("text").agg(
        {"times": "sum", "conf": "first", "right": lambda right: right.mean() >= 0.5}
    )
    cards = cards.assign(worth=cards["times"] * (1 - cards["conf"])).sort_values(
        "worth", ascending=False
    )
    times, right = cards["times"].to_numpy(), cards["right"].to_numpy()
    true = times @ right / times.sum()
    for num_decided in (number for number in (100, 200, 400) if number < len(times)):
        found = []
        for seed in range(num_samples):
            _, draws = order_of_review(times, seed)
            share = estimate_share([bool(right[card]) for due, card in draws if due < num_decided])
            found.append(
                (share.low <= true <= share.high, abs(share.mean - true), share.high - share.low)
            )
        covered, error, width = 100 * np.mean(found, axis=0)
        print(
            f"{num_decided} cards: {covered:.1f} % contain the truth; mean error "
            f"{error:.1f}, width {width:.1f} points"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=TABLES, default="english")
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the tables"
    )
    parser.add_argument("--folder", type=Path, default=Path("desk-walk"))
    parser.add_argument("--cards", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="the page's quick trial: three epochs")
    args = parser.parse_args()
    folder, language = args.folder.resolve(), TABLES[args.data][1]
    folder.mkdir(parents=True, exist_ok=True)
    rows, held_out = split(read(args.data, args.shared), seed=0, size=None)
    held_out[[TEXT]].to_csv(folder / "archive.csv", index=False)
    truth = held_out.groupby(TEXT)[CODE].agg(lambda codes: codes.value_counts().index[0]).to_dict()

    times, moment = {}, time.monotonic()

    def passed(what: str) -> None:
        nonlocal moment
        times[what], moment = time.monotonic() - moment, time.monotonic()
        print(f"{what}: {times[what] / 60:.1f} min", flush=True)

    shutil.rmtree(folder / "desk", ignore_errors=True)
    rows.to_csv(folder / "coded.csv", index=False)
    command = [
        "-m",
        "histocoder",
        "serve",
        "--workspace",
        folder / "desk",
        "--no-browser",
        "--port",
        0,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert server.stdout is not None
        hands = Hands(
            next(line for line in server.stdout if line.startswith("Open ")).split()[1], folder
        )
        passed("start the server and the browser")
        print(train(hands, folder / "coded.csv", quick=args.quick))
        passed(f"train on {len(rows):,} rows, {hands.clicks} clicks")
        code_file(hands, folder / "archive.csv", language)
        passed(
            f"code {len(held_out):,} rows, {hands.clicks} clicks and {hands.keys} keys "
            "since the start"
        )
        begin_review(hands)
        keys, clicks = hands.keys, hands.clicks
        reviewed, ways = review(hands, truth, args.cards)
        passed(
            f"review {args.cards} cards, {(hands.keys - keys) / args.cards:.2f} keys and "
            f"{hands.clicks - clicks} clicks"
        )
        print(dict(ways), hands.text("#trust"))
        print(improve(hands))
        passed("train on the corrections")
        hands.driver.quit()
    finally:
        server.terminate()
        server.wait()
    compare(folder, held_out, held_out[TEXT].isin(reviewed), language)
    coverage(folder, held_out, language)
    print(f"total {sum(times.values()) / 60:.1f} min")


if __name__ == "__main__":
    main()

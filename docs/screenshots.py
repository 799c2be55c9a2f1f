"""Take the pictures of docs/pictures from the demo, in chromium: make screenshots.

The steps are those of docs/teamwork.md: a file is coded, two people review it, and the desk offers
to train on that.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pandas as pd
from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, SCALE, QUALITY = 1180, 1.5, 80
_DECISIONS = 120  # of the second reviewer


class Page:
    """A browser."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ):
            options.add_argument(flag)
        self.driver = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
        )
        self.driver.implicitly_wait(60)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def wait(self, selector: str, text: str) -> None:
        # the page may replace the element between finding and reading it
        waiting = WebDriverWait(
            self.driver, 120, ignored_exceptions=[StaleElementReferenceException]
        )
        waiting.until(lambda _: text in self.one(selector).text)

    def shoot(self, name: str, height: int, width: int = WIDTH) -> None:
        """Take a picture in light and one in dark mode."""
        size = {"width": width, "height": height, "deviceScaleFactor": SCALE, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_script("scrollTo(0, 0); document.activeElement.blur()")
        for theme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": theme}
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            time.sleep(0.5)  # bars move to their new length
            form = {"format": "webp", "quality": QUALITY}
            taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", form)["data"]
            (PICTURES / f"{name}-{theme}.webp").write_bytes(base64.b64decode(taken))


@contextmanager
def desk(folder: Path) -> Iterator[str]:
    """Serve a copy of the demo's model, so that no decision of its user is shown or changed; yield
    the address.
    """
    shutil.copytree(
        ROOT / "demo", folder / "demo", ignore=shutil.ignore_patterns("checkpoints", "desk")
    )
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [
        sys.executable,
        "-m",
        "histocoder",
        "serve",
        "--model",
        "demo/best",
        "--no-browser",
        "--port",
        "0",
    ]
    environment = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        yield next(line for line in server.stdout if line.startswith("Open ")).split()[1]
    finally:
        server.terminate()
        server.wait()


def review_as_second(address: str, truth: dict[str, list[str]]) -> None:
    """Decide on cards as another reviewer, who knows the true codes."""
    site, token = urlsplit(address), urlsplit(address).query.removeprefix("token=")

    def ask(path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{site.scheme}://{site.netloc}/api/{path}", data, headers)) as answer:
            return json.load(answer)

    source, who, done = ask("review")[0]["id"], "second reviewer", 0
    while done < _DECISIONS:
        for one in ask(f"review/{source}/cards?who={who.replace(' ', '%20')}&count=20"):
            card = one["card"]
            codes = truth.get(card["text"].strip(), card["predicted"])
            ask(
                f"review/cards/{card['id']}",
                {"who": who, "version": card["version"], "codes": codes},
            )
            done += 1


def main() -> None:
    val = pd.read_csv(ROOT / "data" / "val.csv", dtype=str)
    codes = val.filter(like="hisco_").apply(lambda row: row.dropna().tolist(), axis=1)
    truth = dict(zip(val["occ1"].str.strip(), codes, strict=True))
    page = Page()
    try:
        with tempfile.TemporaryDirectory() as name, desk(Path(name)) as address:
            census = Path(name) / "census.csv"
            val[["occ1", "lang"]].to_csv(census, index=False)
            page.driver.get(address)
            Select(page.one("#code-language")).select_by_value("en")
            page.one("#texts").send_keys("wine and spirit merchant\nfarmer and innkeeper")
            page.one("#code-form button").click()
            page.one(".answer")
            page.driver.execute_script("document.querySelector('.answer').open = true")
            page.shoot("desk-code", 860)

            page.one("nav a[href='#files']").click()
            page.one("#file").send_keys(str(census))
            page.one("#file-form button.primary").click()
            page.wait("#sent .file", "Coded.")
            page.shoot("desk-files", 560)
            page.one("#sent button[aria-label^='Review']").click()
            page.one("#who").send_keys("first reviewer", Keys.ENTER)
            page.wait("#card", "No. 1 of")
            review_as_second(address, truth)
            page.one("nav a[href='#files']").click()
            page.one("nav a[href='#review']").click()
            page.wait("#trust", "of the file's rows are right as")
            page.shoot("desk-review", 740)
            page.one("nav a[href='#models']").click()
            page.wait("#made", "Train again with")
            page.shoot("desk-models", 600)

        page.driver.get((ROOT / "demo" / "report.html").as_uri())
        page.shoot("report", 640, width=960)
    finally:
        page.driver.quit()
    for path in (ROOT / "demo" / "report").glob("*.png"):
        chart = Image.open(path).convert("RGB")
        chart.thumbnail((1200, 1200))
        chart.save(PICTURES / f"chart-{path.stem}.webp", quality=QUALITY)


if __name__ == "__main__":
    main()

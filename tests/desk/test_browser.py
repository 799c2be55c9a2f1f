"""The page in a real browser; make test-browser installs what it needs."""

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openpyxl
import pandas as pd
import pytest
from conftest import free_port, run, shared, write
from jobs import serving, wait_until
from models import save_tiny_model

pytest.importorskip("fastapi")
webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support import expected_conditions  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

from histocoder.desk.web.users import Users  # noqa: E402
from histocoder.formatters.classifications import HISCO_TITLES  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.browser]
CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
SHOTS = os.environ.get("SHOTS", "")  # folder for pictures of a walk
AXE = os.environ.get("AXE_CORE", "")
"""Path of axe.min.js, which make test-browser sets."""


class Page:
    def __init__(
        self, address: str, downloads: Path, width: int = 1280, dark: bool = False, first: str = ""
    ) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.driver.implicitly_wait(60)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        theme = {
            "features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        }
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", theme)
        self.driver.get(address)
        if width < 500:
            self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        self.one(first or "#code-language option")

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Read at once: an element may be replaced between finding and reading it."""
        return self.driver.execute_script(
            "return document.querySelector(arguments[0])?.textContent || ''", selector
        )

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def go(self, part: str) -> None:
        self.click(f"nav a[href='#{part}']")

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(
            *filter(None, keys)
        ).perform()  # to whatever has the focus

    def begin_review(self, who: str) -> None:
        self.go("review")
        self.one("#who").send_keys(who, Keys.ENTER)
        wait_until(lambda: bool(self.text("#trust .figure")))

    def shot(self, name: str) -> None:
        """Take a picture, to look at, if a folder is named for them."""
        if SHOTS:
            width = self.driver.execute_script("return window.innerWidth")
            self.driver.save_screenshot(f"{SHOTS}/{name}-{width}.png")

    def problems(self) -> list[str]:
        """What axe-core finds, of what is serious, and whether the page is wider than the
        screen.
        """
        page = "document.documentElement"
        self.driver.execute_script(Path(AXE).read_text(encoding="utf-8"))
        found = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")[
            "violations"
        ]
        wide = self.driver.execute_script(f"return {page}.scrollWidth > {page}.clientWidth")
        return [one["id"] for one in found if one["impact"] in ("serious", "critical")] + [
            "too wide"
        ] * wide


@contextmanager
def browsing(address: str, downloads: Path, **options: Any) -> Iterator[Page]:
    page = Page(address, downloads, **options)
    try:
        yield page
    finally:
        page.driver.quit()


BO_DECIDES = """
    const headers = {"Content-Type": "application/json"}, body = '{"who": "Bo", "version": 0, "codes": ["77610"]}';
    const decide = (_, i) => fetch(`/api/review/cards/${i + 1}`, {method: "POST", headers, body});
    Promise.all(Array.from({length: 40}, decide)).then(arguments[arguments.length - 1]);
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no chromium with its chromedriver; make test-browser installs them")
    out = save_tiny_model(tmp_path / "out")
    write(
        out / "data_train.csv", "occ1,lang,hisco_1,hisco_2", "farmer,en,61110,", "baker,en,77610,"
    )
    return out


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """Forty descriptions that are markup."""
    rows = [f"<script>alert({i})</script>,en,61110,0.{50 + i},0.{50 + i}" for i in range(40)]
    return write(tmp_path / "coded.csv", "occ1,lang,hisco_1,prob_1,conf", *rows)


def decisions(model: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(model / "desk" / "desk.sqlite") as db:
        found = db.execute("SELECT who, action FROM decisions ORDER BY id").fetchall()
    db.close()
    return found


def test_a_file_survives_a_reload(model: Path, tmp_path: Path):
    source = shared("data/english_occupations.csv")
    expected = tmp_path / "expected.csv"
    flags = ("--language", "en", "--columns", "pred_")  # since the file has a column hisco_1
    run(
        "-m",
        "histocoder",
        "predict",
        "--model",
        model,
        "--input",
        source,
        "--output",
        expected,
        *flags,
        fresh=True,
    )
    with serving(model, "--port", 0) as (_, address), browsing(address, tmp_path) as page:
        page.go("files")
        page.one("#file").send_keys(str(source))
        page.one("#file-form table")
        Select(page.one("#language-col")).select_by_value("")
        Select(page.one("#file-language")).select_by_value("en")
        page.click("#file-form button.primary")
        wait_until(lambda: "rows/s" in page.text(".file"))
        page.driver.refresh()
        wait_until(lambda: "Coded." in page.text(".file"))
        page.click(".file a.button")
        wait_until((tmp_path / "english_occupations_coded.csv").exists)
        assert (tmp_path / "english_occupations_coded.csv").read_bytes() == expected.read_bytes()


def test_reviews_survive_sigkill(model: Path, coded: Path, tmp_path: Path):
    port = free_port()
    with (
        serving(model, "--port", port, "--data", coded) as (server, address),
        browsing(address, tmp_path) as page,
    ):
        page.begin_review("Anna")

        def decide(*keys: str) -> None:
            before = len(decisions(model))
            shown = page.text("#card .text")
            page.press(*keys)
            wait_until(
                lambda: len(decisions(model)) == before + 1 and page.text("#card .text") != shown
            )

        for key in ("", "1", "0", "n", "") * 2:
            decide(*((key, Keys.ENTER) if key in ("", "1") else (key,)))
        page.press("u")
        wait_until(lambda: len(decisions(model)) == 11)
        server.send_signal(signal.SIGKILL)
        server.wait()
        page.press(Keys.ENTER)
        wait_until(lambda: "does not respond" in page.text("#status"))
        kept = decisions(model)
        with serving(model, "--port", port, "--data", coded):
            for _ in range(10):
                decide(Keys.ENTER)
            made = decisions(model)
            page.driver.execute_async_script(BO_DECIDES)
            page.press(Keys.ENTER)
            wait_until(lambda: "Bo has decided: 77610" in page.text("#card .notice"))
        actions = [action for _, action in made]
        assert made[:11] == kept
        assert len(actions) == 21
        each = ["accepted", "changed", "changed", "unsure", "accepted"]
        assert actions == [*each * 2, "undone", *["accepted"] * 10]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_no_part_is_inaccessible_or_too_wide(
    model: Path, coded: Path, tmp_path: Path, width: int, dark: bool
):
    if not Path(AXE).is_file():
        pytest.skip("AXE_CORE does not name axe.min.js; make test-browser does")
    flags = ("--port", 0, "--data", coded)
    with (
        serving(model, *flags) as (_, address),
        browsing(address, tmp_path, width=width, dark=dark) as page,
    ):
        page.one("#texts").send_keys("farmer")
        page.click("#code-form button")
        page.one(".answer")
        assert page.problems() == []
        page.go("files")
        page.one("#file").send_keys(str(write(tmp_path / "wide.csv", "column" * 12, "farmer" * 30)))
        page.one("#file-form table")
        assert page.problems() == []
        page.begin_review("Anna")
        assert page.problems() == []
        assert page.one("#card kbd").is_displayed() == (width > 500)
        page.click("#as-list")
        page.one("#list-rows li")
        assert page.problems() == []
        page.go("models")
        page.one("#made .name")
        assert page.problems() == []


def test_users_sign_in_and_out(model: Path, coded: Path, tmp_path: Path):
    (model / "desk").mkdir()
    Users(model / "desk" / "users.json", "").add("Anna", "a password")
    with serving(model, "--port", 0, "--data", coded) as (_, address):
        assert "token" not in address
        with browsing(address, tmp_path, first="#name") as page:
            page.one("#name").send_keys("Anna")
            page.one("#password").send_keys("a password", Keys.ENTER)
            page.one("#code-language option")
            page.go("review")
            wait_until(lambda: bool(page.text("#trust .figure")))
            page.press(Keys.ENTER)
            wait_until(lambda: decisions(model) == [("Anna", "accepted")])
            page.click("#signed-in button")
            page.one("#password")


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_an_empty_workspace_leads_to_classes(tmp_path: Path, width: int, dark: bool):
    if CHROMIUM is None or DRIVER is None or not Path(AXE).is_file():
        pytest.skip(
            "there is no chromium with its chromedriver, or no axe-core; make test-browser "
            "installs them"
        )
    classes = tmp_path / "classes.csv"
    codes = pd.read_csv(HISCO_TITLES, dtype=str)["hisco"].unique()
    pd.DataFrame({"hisco": codes, "hisclass": range(len(codes))}).to_csv(classes, index=False)
    flags = ("--workspace", tmp_path / "desk", "--port", 0, "--double-share", 0.3)
    with (
        serving(None, *flags) as (_, address),
        browsing(address, tmp_path, width=width, dark=dark) as page,
    ):

        def see(selector: str, text: str = "") -> None:
            wait_until(lambda: text in page.text(selector) and bool(page.text(selector)))
            assert page.problems() == []

        see("#welcome", "some hundreds of rows")
        page.click("#sample")
        see("#train-form", "can be trained on")
        page.click("#train-form button.primary")
        see("#made", "Learning")
        see("#made", "right, of")
        page.click("#made [data-key$=report]")
        page.driver.switch_to.frame(page.one("iframe"))
        assert "sample_coded-1" in page.text("h1")
        page.driver.switch_to.default_content()
        page.go("code")
        page.click("#example")
        see("#answers", "3 descriptions")
        page.go("files")
        page.click("#sent button")
        page.one("#crosswalk").send_keys(str(classes))
        wait_until(lambda: Select(page.one("#classes")).first_selected_option.text == "classes.csv")
        see("#file-form", "classes.csv")
        page.click("#file-form button.primary")
        see("#sent .figures", "600")
        page.click("#sent a.button")
        coded = tmp_path / "sample_census_coded.csv"
        wait_until(coded.exists)
        assert pd.read_csv(coded, dtype=str)["hisclass"].notna().mean() > 0.9
        page.click("#sent .primary")
        page.one("#who").send_keys("Anna", Keys.ENTER)
        see("#trust .figure", "0 of 600")
        assert "place" in page.text("#card .beside")
        page.click("#as-list")
        page.click("#list-rows .all input")
        page.click("#accept-many")
        wait_until(lambda: "Accepted" in page.text("#status"))
        page.click("#as-pair")
        see("#pair", "are for two people")
        page.go("models")
        see("#made", "Train again with")
        assert page.driver.get_log("browser") == []


def parish(path: Path) -> Path:
    """Write a workbook of notes and people, with a column without a name, and numbers with zeros."""
    book = openpyxl.Workbook()
    book.active.append(["what this is"])
    people = book.create_sheet("people")
    people.append(["id", "occ1", None, "lang"])
    for i in range(12):
        people.append([i, f"smed {i}", f"page {i}", "da"])
        people.cell(i + 2, 1).number_format = "00000"
    book.save(path)
    return path


@pytest.mark.parametrize("width", [1280, 390])
def test_a_workbook_from_upload_to_deletion(model: Path, tmp_path: Path, width: int):
    (model / "desk").mkdir()
    for name in ("Anna", "Bo"):
        Users(model / "desk" / "users.json", "").add(name, "a password")
    flags = ("--port", 0, "--double-share", 0.5)

    def sign_in(page: Page, name: str) -> None:
        page.one("#name").send_keys(name)
        page.one("#password").send_keys("a password", Keys.ENTER)
        page.one("#code-language option")

    def download(page: Page) -> pd.DataFrame:
        """The checked table, once it has arrived."""
        path = tmp_path / "parish_checked.xlsx"
        path.unlink(missing_ok=True)
        page.click("#sent a.button")
        wait_until(path.exists)
        return pd.read_excel(path, dtype=str)

    with (
        serving(model, *flags) as (_, address),
        browsing(address, tmp_path, width=width, first="#name") as page,
    ):
        sign_in(page, "Anna")
        page.go("files")
        page.one("#file").send_keys(str(parish(tmp_path / "parish.xlsx")))
        wait_until(lambda: "page 1" in page.text("#file-form table"))
        assert Select(page.one("select[name=sheet]")).first_selected_option.text == "people"
        assert "00001" in page.text("#file-form table")
        page.shot("columns")
        page.click("#file-form button.primary")
        wait_until(lambda: "Coded." in page.text(".file"))
        page.shot("coded")
        page.click("#sent .primary")
        wait_until(lambda: bool(page.text("#trust .figure")))
        page.shot("review")
        for count in range(1, 5):
            shown = page.text("#card .text")
            page.press(Keys.ENTER)
            wait_until(lambda n=count: len(decisions(model)) == n)
            # the next card, which the next key is for
            wait_until(lambda text=shown: page.text("#card .text") != text)
        page.click("#signed-in button")
        sign_in(page, "Bo")
        page.go("review")
        page.one("#card button.primary")
        page.shot("second")
        page.click("#card button.primary")  # the part's own link has the focus
        wait_until(lambda: ("Bo", "accepted") in decisions(model))

        page.go("files")
        table = download(page)
        assert table["id"][1] == "00001" and table["C"][1] == "page 1"
        assert table["checked_by"].str.contains("Anna").any()
        page.click("#sent button[aria-label^='Delete']")
        wait_until(lambda: expected_conditions.alert_is_present()(page.driver) is not False)
        page.driver.switch_to.alert.accept()
        wait_until(lambda: not decisions(model))
        page.shot("deleted")

"""The page of docs/browser in a real browser; make test-browser installs what it needs."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from jobs import wait_until

pytest.importorskip("onnxruntime")
webdriver = pytest.importorskip("selenium.webdriver")
from test_onnx import TEXTS, ngram_model  # noqa: E402

from histocoder import Coder  # noqa: E402
from histocoder.checkpoints.model_files import as_saved, save_config  # noqa: E402
from histocoder.inference import onnx_export  # noqa: E402

CHROMIUM, DRIVER = (
    shutil.which("chromium") or shutil.which("google-chrome"),
    shutil.which("chromedriver"),
)
RUNTIME = os.environ.get("ONNXRUNTIME_WEB", "")
"""Folder with onnxruntime-web's files, which make test-browser sets."""
missing = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and RUNTIME), reason="needs chromium, driver, onnxruntime-web"
)
pytestmark = [pytest.mark.slow, pytest.mark.browser, missing]
TYPE = "language.value = 'en'; text.value = arguments[0]; text.dispatchEvent(new Event('input'))"
READ = (
    "return Array.from(answers.tBodies[0].rows, (row) => Array.from(row.cells, (cell) "
    "=> cell.textContent))"
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def guess_type(self, path: str) -> str:
        return "text/javascript" if str(path).endswith(".mjs") else super().guess_type(path)

    def log_message(self, *_: object) -> None:
        pass


def test_the_page_codes_as_python_does(tmp_path: Path):
    coder = Coder(as_saved(ngram_model()), "cpu")  # a graph has the table in its compact form
    page = shutil.copytree(
        ROOT / "docs" / "browser", tmp_path / "page", ignore=shutil.ignore_patterns("model", "ort")
    )
    shutil.copytree(RUNTIME, page / "ort")
    (page / "model").mkdir()
    onnx_export.export_graphs(coder.model, page / "model")
    save_config(page / "model", coder.model.config)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=page)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(f"http://127.0.0.1:{server.server_port}/")
        wait_until(
            lambda: driver.execute_script("return state.textContent") == "Type a description."
        )
        entities = ("boot &amp;amp; shoe maker", "sm&oslash;rer", "&#230;ble", "&notit; smith")
        for text in (*TEXTS, *entities):
            then = coder.predict(text, "en", mode="flat", threshold=0.0)
            driver.execute_script(TYPE, text)
            wait_until(lambda text=text: driver.execute_script("return answers.dataset.of") == text)
            rows = driver.execute_script(READ)
            width = coder.formatter.num_blocks
            assert [row[0] for row in rows[:width]] == [
                then[f"hisco_{i + 1}"].item() for i in range(width)
            ], text
            probabilities = [then[f"prob_{i + 1}"].item() for i in range(width)]
            np.testing.assert_allclose(
                [float(row[1]) for row in rows[:width]], probabilities, atol=1e-3
            )
        driver.execute_script(TYPE, "&nbsp;")
        wait_until(lambda: driver.execute_script("return answers.dataset.of") == "&nbsp;")
        assert driver.execute_script(READ) == []
    finally:
        driver.quit()
        server.shutdown()

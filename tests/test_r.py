"""R calls histocoder as docs/r.md says, line by line; make test-r installs Debian's R."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, environment, program, run
from jobs import serving
from models import save_tiny_model

pytestmark = pytest.mark.slow
CHECKS = {
    "Through files": """stopifnot(nrow(coded) == 3, coded$id == c("1", "2", "3"), is.character(coded$hisco_2))
        stopifnot(is.na(coded$occ1[3]), is.na(coded$hisco_1[3]),
        coded$occ1[2] == "husmand og v\\u00e6ver", !is.na(coded$hisco_1[1:2]), is.numeric(coded$conf))""",
    "Stata files in R": """stopifnot(nrow(coded) == 3, all(nzchar(coded$hisco_1[1:2])))""",
    "Correct in R": """stopifnot("checked" %in% names(review))""",
    "Through the server": """stopifnot(!is.na(coded$hisco_1[1:2]), is.na(coded$hisco_1[3]),
        coded$occ1[2] == "farmer", coded$conf[1:2] > 0)
        wrong <- request("http://127.0.0.1:8000/api/code") |> req_body_json(list(texts = "farmer")) |>
          req_error(is_error = function(answer) FALSE) |> req_perform()
        stopifnot(resp_status(wrong) == 401)""",
}


def has(package: str) -> bool:
    rscript = shutil.which("Rscript")
    script = f"quit(status = !requireNamespace('{package}', quietly = TRUE))"
    return (
        rscript is not None and subprocess.run([rscript, "-e", script], check=False).returncode == 0
    )


def test_r_page(tmp_path: Path):
    if not all(map(has, ("haven", "httr2", "jsonlite"))):
        pytest.skip("there is no R with haven, httr2 and jsonlite; make test-r installs them")
    page = (ROOT / "docs" / "r.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"### ([^\n]+)\n(?:(?!###).)*?```r\n(.*?)```", page, re.DOTALL))
    assert blocks.keys() == CHECKS.keys()
    save_tiny_model(tmp_path / "out" / "best")

    def follow(section: str, port: int = 8000, **variables: str) -> None:
        code = "\n".join([blocks[section], CHECKS[section]]).replace(":8000", f":{port}")
        script = tmp_path / "script.R"
        script.write_text(code, encoding="utf-8")
        program(
            "Rscript",
            "--vanilla",
            script,
            cwd=tmp_path,
            env=environment(PATH=PROGRAMS, **variables),
        )

    follow("Through files")
    follow("Stata files in R")
    files = ("--predictions", tmp_path / "coded.csv", "--output", tmp_path / "review.csv")
    run("-m", "histocoder", "review", "--model", tmp_path / "out" / "best", *files)
    follow("Correct in R")
    assert re.search("wine merchant.*41025", (tmp_path / "review.csv").read_text(encoding="utf-8"))
    with serving(tmp_path / "out" / "best", "--port", 0) as (_, address):
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\w+)", address).groups()
        follow("Through the server", int(port), HISTOCODER_TOKEN=token)

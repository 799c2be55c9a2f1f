"""The desk's HTTP interface, in this process."""

from __future__ import annotations

import codecs
import csv
import errno
import io
import json
import shutil
import sqlite3
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openpyxl
import pandas as pd
import pytest
from jobs import wait_until
from models import save_tiny_model

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from histocoder.cli.main import main
from histocoder.config import PredictConfig, PrepareConfig
from histocoder.data.codes import LabelRules
from histocoder.data.corrections import read_corrections
from histocoder.data.examples import Examples
from histocoder.desk import app
from histocoder.desk.app import Desk, create_app
from histocoder.desk.cards import order_of_review, share_right
from histocoder.desk.coding import Code, Neighbours
from histocoder.formatters import build_formatter
from histocoder.inference.coder import Coder
from histocoder.inference.predict_file import predict_file

TOKEN = "0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
TRAINED = (
    "occ1,lang,hisco_1,hisco_2\nfarmer,en,61110,\nFarmer,en,61110,\nbaker & farmer,en,77610,61110\nbager,da,77610,\n"
)
CODED = (
    "occ1,lang,hisco_1,prob_1,hisco_2,prob_2,conf\n"
    "=1+1,en,61110,0.9,,,0.9\nbaker,en,77610,0.6,,,0.6\nbaker,en,77610,0.6,,,0.6\nsmith,en,95410,0.5,,,0.5\n"
    "<b>x</b>,=cmd|x,61110,0.9,77610,0.5,0.45\n"
)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Coder, Path]:
    """A tiny model, and its folder, which is that of a run."""
    run = save_tiny_model(tmp_path_factory.mktemp("run") / "out")
    (run / "data_train.csv").write_text(TRAINED)
    return Coder.from_pretrained(run, "cpu"), run


@contextmanager
def served(
    coder: tuple[Coder, Path], folder: Path, data: Path | None = None, *, may_train: bool = False, **columns: str
) -> Iterator[TestClient]:
    model, run = coder
    desk = Desk(model, folder, model=str(run), model_folder=run, run=run, may_train=may_train)
    if data is not None:
        desk.review(data, **columns)
    with TestClient(create_app(desk, token=TOKEN), base_url="http://127.0.0.1:8000", headers=HEADERS) as client:
        yield client


@pytest.fixture
def client(coder: tuple[Coder, Path], tmp_path: Path) -> Iterator[TestClient]:
    data = tmp_path / "coded.csv"
    data.write_text(CODED)
    with served(coder, tmp_path / "desk", data=data) as client:
        yield client


def cards(client: TestClient, who: str = "Anna", count: int = 5) -> list[dict[str, Any]]:
    found = client.get("/api/review/1/cards", params={"who": who, "count": count}).json()
    return [one["card"] for one in found]


def decide(client: TestClient, card: dict[str, Any], who: str = "Anna", **decision: Any) -> Any:
    return client.post(f"/api/review/cards/{card['id']}", json={"who": who, "version": card["version"], **decision})


def send(client: TestClient, name: str, content: bytes, **params: str) -> str:
    """Send a file, and return its id."""
    return client.post("/api/files", params={"name": name, **params}, content=content).json()["id"]


def wait_for(client: TestClient, file: str, state: str) -> dict[str, Any]:
    wait_until(lambda: client.get(f"/api/files/{file}").json()["state"] not in ("queued", "running"))
    found = client.get(f"/api/files/{file}").json()
    assert found["state"] == state, found
    return found


def code(client: TestClient, file: str, *, state: str = "done", **options: str) -> dict[str, Any]:
    """Have a file coded, and return what is said of it in the end."""
    client.post(f"/api/files/{file}/code", json={"input_col": "occ1", **options})
    return wait_for(client, file, state)


def test_codes_come_with_all_evidence(client: TestClient):
    wait_until(lambda: "read" not in client.get("/api/about").json()["neighbours"])
    farmer, blank = client.post("/api/code", json={"texts": ["FARMER", " "], "lang": "en"}).json()
    assert [code["code"] for code in farmer["known"]] == ["61110"] and farmer["known_share"] == 1
    assert farmer["known"][0]["title"] == "Farmer"
    assert len(farmer["neighbours"]) == 3  # two spellings of farmer are one
    assert farmer["neighbours"][0]["similarity"] >= farmer["neighbours"][1]["similarity"]
    given = [code["code"] for code in (*farmer["codes"], *farmer["alternatives"])]
    assert len(set(given)) == len(given) > 5
    assert blank["codes"] == [] and blank["neighbours"] == [] and blank["confidence"] is None
    assert [code["code"] for code in client.get("/api/codes", params={"q": "6111"}).json()] == ["61110", "61115"]
    assert [code["code"] for code in client.get("/api/codes", params={"q": "BAK"}).json()] == ["77610"]
    shares = [code["probability"] for code in farmer["alternatives"]]
    assert shares == sorted(shares, reverse=True) and shares[-1] >= 0.005
    assert sum(shares) + sum(code["probability"] or 0 for code in farmer["codes"]) <= 1  # by one measure


def test_models_without_named_languages_get_the_language(coder: tuple[Coder, Path], tmp_path: Path):
    model = copy(coder[0])
    model.model = copy(model.model)
    titles = {"61110": "Spinner", "61115": "Innkeeper", "77610": "Keeper of an Inn"}
    model.model.config = replace(model.model.config, languages=(), descriptions=titles)
    with served((model, coder[1]), tmp_path / "desk") as client:
        (swedish,), wrong = (
            client.post("/api/code", json={"texts": ["farmer"], "lang": lang}).json() for lang in ("sv", "Danisch")
        )
        found = client.get("/api/codes", params={"q": "inn"}).json()
    assert swedish["lang"] == "se" and "did you mean Danish, da?" in wrong["detail"]
    assert swedish["confidence"] == pytest.approx(model.predict(["farmer"], ["sv"])["conf"].item())
    # whole words come first
    assert [code["title"] for code in found] == ["Keeper of an Inn", "Innkeeper", "Spinner"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Cookie": f"histocoder_8000={TOKEN}", "Origin": "http://127.0.0.1:8000"}, 200),
        ({"Cookie": f"histocoder_8000={TOKEN}"}, 403),
        ({**HEADERS, "Origin": "http://evil.example"}, 403),
        ({**HEADERS, "Origin": "null"}, 403),
        ({**HEADERS, "Origin": "http://["}, 403),
        ({**HEADERS, "Host": "evil.example:8000"}, 421),
        ({**HEADERS, "Host": "192.168.1.7:8000"}, 421),
        ({**HEADERS, "Host": "localhost:9000"}, 200),
    ],
)
def test_token_host_and_origin_are_checked(client: TestClient, headers: dict[str, str], status: int):
    bare = TestClient(client.app, base_url="http://127.0.0.1:8000", headers=headers)
    assert bare.post("/api/code", json={"texts": ["farmer"]}).status_code == status


def test_only_the_right_token_sets_the_cookie(client: TestClient):
    bare = TestClient(client.app, base_url="http://127.0.0.1:8000")
    assert bare.get("/?token=wrong").status_code == 401
    page = bare.get(f"/?token={TOKEN}")
    assert page.headers["set-cookie"] == f"histocoder_8000={TOKEN}; HttpOnly; Path=/; SameSite=strict"
    assert "script-src 'self'" in page.headers["content-security-policy"] and "http" not in page.text
    assert bare.get("/api/about").status_code == 200  # by the cookie
    assert bare.get("/docs").status_code == 200 and "/api/code" in bare.get("/openapi.json").json()["paths"]


def test_bodies_are_limited(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    large = {**HEADERS, "Content-Length": str(3 << 30)}
    assert client.post("/api/files?name=a.csv", headers=large).status_code == 413
    assert client.post("/api/code", content=b" " * (2 << 20)).status_code == 413
    assert client.post("/api/code", content=(b" " for _ in range(3))).status_code == 411
    monkeypatch.setattr(app, "UPLOAD_BYTES", 1 << 20)
    assert client.post("/api/files?name=a.csv", content=b"0" * (2 << 20)).status_code == 413
    assert client.get("/api/files").json() == []
    assert client.post("/api/code", json={"texts": ["x" * 5000]}).status_code == 422


LARGE, SURROGATE = 2**70, '"\\ud800"'
REFUSED = [
    ("files/FILE/code", f'{{"input_col": {SURROGATE}}}'),
    ("review/cards/1", f'{{"who": "Anna", "version": 0, "codes": [{SURROGATE}]}}'),
    ("review/cards/1", '{"who": "Anna", "version": NaN, "codes": ["61110"]}'),
    (f"review/{LARGE}/undo", '{"who": "Anna"}'),
    (f"review/cards/{LARGE}", '{"who": "Anna", "version": 0, "codes": null}'),
    (f"review/1/cards?who=Anna&after={LARGE}", None),
]


def test_values_that_cannot_be_stored_are_refused(client: TestClient):
    file = send(client, "a.csv", b"occ1\nfarmer\n")
    for path, body in REFUSED:
        address = f"/api/{path.replace('FILE', file)}"
        answer = client.get(address) if body is None else client.post(address, content=body)
        assert answer.status_code == 422 and "should be" in answer.json()["detail"], path


def test_bad_files_get_the_command_lines_sentence(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/workbook.xml", bytes(100 << 20))
    bad = [
        ("../../census.csv", b"", "census.csv is empty."),
        ("a.csv", b"occ1,lang\nfarmer\n", "a.csv, line 2: 1 fields where the header has 2"),
        ("a.exe", b"MZ", "a.exe can't be read as a table"),
        ("b.xlsx", bomb.getvalue(), "would unpack to"),
    ]
    for name, content, sentence in bad:
        answer = client.post("/api/files", params={"name": name}, content=content)
        assert answer.status_code == 422 and sentence in answer.json()["detail"]

    async def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("histocoder.desk.uploads.open_file", fill)
        refused = client.post("/api/files?name=a.csv", content=b"occ1\nfarmer\n")
    assert refused.json()["detail"] == "a.csv can't be saved on the server: No space left on device."
    assert client.get("/api/files").json() == [] and not any((tmp_path / "desk" / "files").iterdir())
    for path in ("static/..%2f..%2fapp.py", "static/app.py", "api/files/..%2f..%2ftoken/result"):
        assert client.get(f"/{path}").status_code == 404


def test_files_are_coded_as_predict_does(client: TestClient, coder: tuple[Coder, Path], tmp_path: Path):
    source = tmp_path / "Zählung 1.csv"
    source.write_text("conf,occ1\n" + "\n".join(f"{i},farmer no {i % 40}" for i in range(300)) + "\n", encoding="utf-8")
    file = send(client, source.name, source.read_bytes())
    preview = client.get(f"/api/files/{file}/preview").json()
    refused = client.post(f"/api/files/{file}/code", json={"input_col": "job"})
    assert refused.status_code == 422 and "has no column 'job'; it has: conf, occ1" in refused.json()["detail"]
    assert preview["columns"] == ["conf", "occ1"] and preview["input_col"] == "occ1" and len(preview["rows"]) == 8
    assert code(client, file, language="en")["rows_done"] == 300
    result = client.get(f"/api/files/{file}/result")
    files = {"input": str(source), "output": str(tmp_path / "out.csv")}
    config = PredictConfig(**files, input_col="occ1", language="en", mode=coder[0].mode, columns="pred_")
    predict_file(coder[0], config, model_id="", say=lambda _: None)
    assert result.content == (tmp_path / "out.csv").read_bytes()
    assert "Z%C3%A4hlung%201_coded.csv" in result.headers["content-disposition"]
    source_id = client.post(f"/api/files/{file}/review").json()
    assert source_id["cards"] == 40 and client.get("/api/review").json()[0]["id"] == 1  # that of --data comes first
    assert client.delete(f"/api/files/{file}").json() == []


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ";"), ("csv", "\t"), ("tsv", "\t"), ("xlsx", "")])
def test_files_come_back_in_their_form(client: TestClient, suffix: str, separator: str):
    rows = [["id", "occ1"], ["1", "væver, smed"]]
    if suffix == "xlsx":
        book, sent = openpyxl.Workbook(), io.BytesIO()
        for sheet in (book.active, book.create_sheet("people")):
            for row in rows:
                sheet.append(row)
        book.save(sent)
        refused = client.post("/api/files?name=a.xlsx", content=sent.getvalue())
        assert refused.status_code == 422 and refused.json()["detail"].startswith("a.xlsx has several sheets")
        options, content = {"sheet": "people"}, sent.getvalue()
    else:
        options, content = {}, "".join(separator.join(row) + "\n" for row in rows).encode("cp1252")
    file = send(client, f"a.{suffix}", content, **options)
    assert client.get(f"/api/files/{file}/preview").json()["rows"] == rows[1:]
    code(client, file, **options)
    result = client.get(f"/api/files/{file}/result").content
    if suffix == "xlsx":
        names, row = openpyxl.load_workbook(io.BytesIO(result)).active.iter_rows(values_only=True)
    else:
        names, row = csv.reader(io.StringIO(result.decode("utf-8-sig")), delimiter=separator)
        assert result.startswith(codecs.BOM_UTF8) == (suffix == "csv")  # by which Excel recognises UTF-8
    assert list(names[:3]) == ["id", "occ1", "hisco_1"] and list(row[:2]) == rows[1]
    assert client.post(f"/api/files/{file}/review").json()["cards"] == 1


def test_cancelled_and_restarted_files_go_on(
    coder: tuple[Coder, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = "occ1\n" + "\n".join(f"farmer no {i}" for i in range(40)) + "\n"
    arrived, go_on = threading.Event(), threading.Event()
    predict_batch, coded = Coder.predict_batch, []

    def slow(self: Coder, ids: Any, *args: Any, **options: Any) -> Any:
        coded.append(len(ids))
        if len(coded) == 6:
            arrived.set()
            assert go_on.wait(60)
        return predict_batch(self, ids, *args, **options)

    monkeypatch.setattr(Coder, "predict_batch", slow)
    monkeypatch.setattr("histocoder.desk.uploads.PredictConfig", partial(PredictConfig, batch_size=2))
    with served(coder, tmp_path / "desk") as client:
        file = send(client, "a.csv", rows.encode())
        client.post(f"/api/files/{file}/code", json={"input_col": "occ1"})
        assert arrived.wait(60)
        now = client.get(f"/api/files/{file}").json()
        assert now["state"] == "running" and now["num_rows"] == 40 and now["rows_done"] == 10
        client.post(f"/api/files/{file}/cancel")
        go_on.set()
        wait_for(client, file, "cancelled")
    record = tmp_path / "desk" / "files" / file / "file.json"
    record.write_text(record.read_text().replace("cancelled", "running"))  # as a server that was killed leaves it
    with served(coder, tmp_path / "desk") as client:
        wait_for(client, file, "done")
        assert len(client.get(f"/api/files/{file}/result").text.splitlines()) == 41
    assert sum(coded) == 40 + 4  # of the part in which it was cancelled, what was coded before


def test_a_failing_file_does_not_stop_others(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    one, two = (send(client, f"{name}.csv", b"occ1\nfarmer\n") for name in "ab")

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such layer")

    with monkeypatch.context() as patched:
        patched.setattr(Coder, "predict_batch", fail)
        message = code(client, one, state="failed")["message"]
    assert message.startswith("The program failed") and "RuntimeError: no such layer" in capsys.readouterr().err
    assert code(client, two)["rows_done"] == 1


def test_decisions_are_on_disk_at_once(client: TestClient, tmp_path: Path):
    first, second, *_ = cards(client)
    assert (first["text"], first["times"]) == ("baker", 2)  # as `histocoder review` orders them
    assert decide(client, first, codes=["77610"]).json()["status"] == "settled"
    assert decide(client, second, codes=["-1"]).json()["codes"] == ["-1"]
    with sqlite3.connect(tmp_path / "desk" / "desk.sqlite") as db:
        kept = db.execute("SELECT who, action, before, after FROM decisions ORDER BY id").fetchall()
    db.close()
    assert [row[:2] for row in kept] == [("Anna", "accepted"), ("Anna", "changed")]
    assert kept[1][3] == '{"status": "settled", "codes": ["-1"]}'
    assert decide(client, cards(client)[0], codes=["6111x"]).status_code == 422
    assert decide(client, cards(client)[0], codes=["61110", "77610", "95410"]).status_code == 422
    assert decide(client, cards(client)[0], codes=[]).status_code == 422


def test_reviewers_never_overwrite_silently(client: TestClient):
    first, *_ = cards(client, "Anna", count=2)
    assert first["id"] not in {card["id"] for card in cards(client, "Bo", count=4)}
    assert decide(client, first, "Bo", codes=["61110"]).status_code == 200
    refused = decide(client, first, "Anna", codes=["77610"])
    assert refused.status_code == 409 and refused.json()["card"]["who"] == "Bo"
    assert decide(client, refused.json()["card"], "Anna", codes=["77610"]).json()["codes"] == ["77610"]
    assert client.post("/api/review/1/undo", json={"who": "Bo"}).status_code == 409
    seen = client.get("/api/review/1/changes?after=0").json()
    assert seen["last"] == 2 and [card["who"] for card in seen["cards"]] == ["Anna"]
    back = client.post("/api/review/1/undo", json={"who": "Anna"}).json()["card"]
    assert back["codes"] == ["61110"] and back["version"] == 3
    assert client.post("/api/review/1/undo", json={"who": "Anna"}).status_code == 422


def test_corrections_are_those_that_training_reads(client: TestClient, tmp_path: Path, logged: list[str]):
    for card in cards(client):
        given = {"=1+1": {"codes": ["95410"]}, "smith": {"codes": None}}
        decide(client, card, **given.get(card["text"], {"codes": ["61115", "77610"]}))
    exported = tmp_path / "corrections.csv"
    exported.write_text(client.get("/api/corrections.csv?raw=true").text)
    config = PrepareConfig(
        dataset="my.csv", target_cols=("hisco_1", "hisco_2"), language_col="lang", corrections=(str(exported),)
    )
    found = read_corrections(config, build_formatter("general", num_blocks=2), LabelRules())
    assert len(found) == 3 and found.codes == {"61115", "77610", "95410"} and "3 checked rows" in logged[-1]
    written = pd.read_csv(io.StringIO(client.get("/api/corrections.csv").text), dtype=str, keep_default_na=False)
    assert sorted(written.iloc[:, :5].to_numpy().tolist()) == [
        ["'=1+1", "en", "x", "95410", ""],
        ["<b>x</b>", "'=cmd|x", "x", "61115", "77610"],
        ["baker", "en", "x", "61115", "77610"],
    ]
    now = client.get("/api/improve").json()
    assert now["corrections"] == 3 and not now["is_complete"] and "--corrections" in now["command"]
    refused = client.post("/api/improve/train")
    assert refused.status_code == 422 and "--allow-training" in refused.json()["detail"]


def test_the_last_decision_on_a_description_is_exported(coder: tuple[Coder, Path], tmp_path: Path):
    run, data = shutil.copytree(coder[1], tmp_path / "run"), tmp_path / "coded.csv"
    (run / "args.yaml").write_text("dataset: t.csv\ninput_col: occ1\n")  # of one language
    data.write_text("occ1,lang,hisco_1,prob_1,conf\nSmith,unk,61110,0.2,0.2\nsmith ,en,61110,0.4,0.4\n")
    with served((coder[0], run), tmp_path / "desk", data=data) as client:
        for card, decided in zip(cards(client), ("77610", "95410"), strict=True):
            decide(client, card, codes=[decided])
        exported = client.get("/api/corrections.csv").text
        assert client.get("/api/improve").json()["corrections"] == 1
    assert "95410" in exported and "77610" not in exported


def test_coded_files_without_languages_are_reviewed(coder: tuple[Coder, Path], tmp_path: Path):
    (tmp_path / "coded.csv").write_text("job,hisco_1,prob_1,conf\na,-1,0.4,0.4\nb,61110,0.8,0.8\n")
    for _ in range(2):  # the second time it is known
        with served(coder, tmp_path / "desk", data=tmp_path / "coded.csv", input_col="job") as client:
            assert [(card["text"], card["lang"]) for card in cards(client)] == [("a", "unk"), ("b", "unk")]
            assert len(client.get("/api/review").json()) == 1


def test_training_shows_what_it_has_brought(coder: tuple[Coder, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []
    difference = {"rows": {"mean": 0.25, "low": 0.1, "high": 0.4}}
    scores = {"before": {"rows": 0.5}, "after": {"rows": 0.75}, "difference": difference, "num_rows": 80}
    parts = {"validation": scores, "before_has_seen": False}

    class Training:
        """A training that has ended well."""

        def __init__(self, command: list[str], **_: Any) -> None:
            time.sleep(0.2)
            started.append(command)
            new = Path(command[command.index("--save-path") + 1])
            new.mkdir()
            (new / "metrics.json").write_text(json.dumps({"corrections": parts}))
            self.polls = iter([None, None])

        def poll(self) -> int | None:
            return next(self.polls, 0)

    run, data = shutil.copytree(coder[1], tmp_path / "run"), tmp_path / "coded.csv"
    (run / "args.yaml").write_text("dataset: t.csv\ninput_col: occ1\nlanguage_col: lang\n")
    data.write_text(CODED)
    monkeypatch.setattr("subprocess.Popen", Training)
    with served((coder[0], run), tmp_path / "desk", data=data, may_train=True) as client:
        assert client.post("/api/improve/train").json()["detail"].startswith("There are no corrections yet.")
        decide(client, cards(client)[0], codes=["77610"])
        with ThreadPoolExecutor(2) as pool:
            answers = [*pool.map(lambda _: client.post("/api/improve/train"), range(2))]
        assert sorted(answer.status_code for answer in answers) == [200, 422] and len(started) == 1
        begun = next(answer.json() for answer in answers if answer.status_code == 200)
        ended = client.get("/api/improve").json()
    assert begun["state"] == "running" and begun["command"].endswith("--save-path " + str(tmp_path / "run-2"))
    assert begun["serve"] == ended["serve"] == f"histocoder serve --model {tmp_path / 'run-2' / 'best'}"
    assert ended["state"] == "done" and ended["gains"][0].startswith("Of the same 80 rows of validation data, 50.0")
    corrections = Path(started[0][started[0].index("--corrections") + 1])
    assert '"baker","en","x","77610",' in corrections.read_text()


def test_the_interval_covers_the_truth():
    rng, covered = np.random.default_rng(0), []
    times = np.maximum(1, 500 // np.arange(1, 401))
    right = rng.uniform(size=400) < np.clip(0.5 + 0.1 * np.log(times), 0, 1)  # rare ones are harder
    times, right = (array[rng.permutation(400)] for array in (times, right))
    for seed in range(300):
        cards, draws = order_of_review(times, seed)
        assert sorted(cards) == list(range(400))
        found = share_right([bool(right[card]) for due, card in draws if due < 120])
        covered.append(found.low <= times @ right / times.sum() <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.98


def test_trust_needs_thirty_random_cards(coder: tuple[Coder, Path], tmp_path: Path):
    rows = [f"farmer no {i},en,{61110 if i % 3 else 95410},0.{90 + i % 9},0.{90 + i % 9}" for i in range(200)]
    path = tmp_path / "coded.csv"
    path.write_text("occ1,lang,hisco_1,prob_1,conf\n" + "\n".join(rows) + "\n")
    with served(coder, tmp_path / "desk", data=path) as client:

        def settle(number: int) -> dict[str, Any]:
            for card in cards(client, count=number):
                decide(client, card, codes=["61110"])
            return client.get("/api/review/1/trust").json()

        found = [settle(20) for _ in range(10)]
    assert found[0]["right"] is None and found[0]["random_cards"] < 30 == found[0]["random_cards_needed"]
    assert found[5]["random_cards"] >= 30 and found[5]["right"]["low"] < 2 / 3 < found[5]["right"]["high"] < 0.97
    assert found[9]["rows_settled"] == found[9]["rows"] == 200


def test_the_queue_at_the_model_has_an_end(client: TestClient, coder: tuple[Coder, Path]):
    def code(_: int) -> int:
        return client.post("/api/code", json={"texts": ["farmer"]}).status_code

    with ThreadPoolExecutor(10) as pool:
        with coder[0].turn:
            answers = [pool.submit(code, i) for i in range(10)]
            wait_until(lambda: any(answer.done() for answer in answers))
        assert sorted(answer.result() for answer in answers) == [200] * 9 + [429]


def test_serve_says_what_it_needs(
    coder: tuple[Coder, Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def ends(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--model", str(coder[1]), "--no-browser", *flags])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "--token" in ends("--host", "0.0.0.0")
    assert "letters and digits" in ends("--token", "short")
    assert "--port is 99999; it must lie between 0 and 65535" in ends("--port", "99999")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install 'histocoder[serve]'" in ends()


class Encoder:
    """Encodes numbers at random."""

    num_encoded = 0
    model = SimpleNamespace(encoder=SimpleNamespace(config=SimpleNamespace(hidden_size=16)))

    def embed(self, texts: list[str], _langs: list[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        return np.stack([np.random.default_rng(int(text)).normal(size=16).astype(np.float32) for text in texts])


def test_neighbours_are_those_of_a_full_sort(tmp_path: Path):
    coder, texts = Encoder(), [str(i) for i in range(8195)]  # compared in two blocks, the second of three
    codes = pd.DataFrame({"hisco_1": ["61110"] * 8195}, dtype=object)
    wanted = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    encodings = coder.embed(texts, texts)
    wanted[:3] = encodings[-3:]  # nearest to descriptions of the second block
    similar = wanted @ encodings.T / np.linalg.norm(encodings, axis=1)
    expected = np.argsort(-similar, axis=1)[:, :5]
    wanted[7] = np.nan  # a missing description
    for _ in range(2):  # the second time from the file
        search = Neighbours(Examples.of(texts, ["en"] * 8195, codes), tmp_path, source="here")
        assert search.describe().endswith("among 8,195 descriptions of the training data; 0% are encoded")
        search.encode(coder, threading.Event())
        assert search.describe() == "exact search among 8,195 descriptions of the training data"
        for row, found in enumerate(search.find(wanted, lambda code: Code(code=code))):
            assert [int(one.text) for one in found] == ([] if row == 7 else expected[row].tolist())
    assert coder.num_encoded == 2 * 8195

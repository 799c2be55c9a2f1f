"""The desk's HTTP interface, in this process."""

import codecs
import csv
import gzip
import io
import json
import re
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pandas as pd
import pyarrow as pa
import pytest
from conftest import cases, mistake, spied, write
from jobs import wait_until
from models import save_tiny_model, tiny_model

pytest.importorskip("fastapi")
from desks import ADDRESS, HEADERS, TOKEN, send, served
from starlette.testclient import TestClient

from histocoder.checkpoints.model_files import save_model
from histocoder.config import PredictConfig, PrepareConfig
from histocoder.data.corrections import read_corrections
from histocoder.data.labelled_files import LabelledFiles
from histocoder.desk.domain import sources
from histocoder.desk.domain.coding import Surety, surety_of
from histocoder.desk.domain.models import Model, Models
from histocoder.desk.domain.trust import estimate_share, order_of_review
from histocoder.desk.web import app, guard
from histocoder.errors import UserError
from histocoder.formatters import build_formatter
from histocoder.inference.coder import Coder
from histocoder.inference.predict_file import predict_file
from histocoder.inference.table_coder import TableCoder
from histocoder.tables.csv_file import without_formulas

TRAINED = (
    "farmer,en,61110,",
    "Farmer,en,61110,",
    "baker & farmer,en,77610,61110",
    "bager,da,77610,",
)
CODED = (
    "=1+1,en,61110,0.9,,,0.9",
    "baker,en,77610,0.6,,,0.6",
    "baker,en,77610,0.6,,,0.6",
    "smith,en,95410,0.5,,,0.5",
)
CODED = (
    "occ1,lang,hisco_1,prob_1,hisco_2,prob_2,conf",
    *CODED,
    "<b>x</b>,=cmd|x,61110,0.9,77610,0.5,0.45",
)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Coder, Path]:
    """A tiny model, and its folder, which is that of a run."""
    run = save_tiny_model(tmp_path_factory.mktemp("run") / "out")
    write(run / "data_train.csv", "occ1,lang,hisco_1,hisco_2", *TRAINED)
    return Coder.from_pretrained(run, "cpu"), run


@pytest.fixture
def client(coder: tuple[Coder, Path], tmp_path: Path) -> Iterator[TestClient]:
    with served(tmp_path / "desk", coder, data=write(tmp_path / "coded.csv", *CODED)) as client:
        yield client


def save_model_of(folder: Path, **settings: Any) -> Path:
    """Save a tiny model with other settings in its config."""
    model = tiny_model()
    config = replace(model.config, **settings)
    save_model(folder, config, model.state_dict(), tokenizer=model.tokenizer)
    return folder


def cards(client: TestClient, who: str = "Anna", count: int = 5) -> list[dict[str, Any]]:
    return [
        one["card"] for one in client.get(f"/api/review/1/cards?who={who}&count={count}").json()
    ]


def decide(client: TestClient, card: dict[str, Any], who: str = "Anna", **decision: Any) -> Any:
    return client.post(
        f"/api/review/cards/{card['id']}", json={"who": who, "version": card["version"], **decision}
    )


def wait_for(client: TestClient, file: str, state: str) -> dict[str, Any]:
    wait_until(
        lambda: client.get(f"/api/files/{file}").json()["state"] not in ("queued", "running")
    )
    found = client.get(f"/api/files/{file}").json()
    assert found["state"] == state, found
    return found


def code(client: TestClient, file: str, *, state: str = "done", **options: str) -> dict[str, Any]:
    """Have a file coded, and return what is said of it in the end."""
    client.post(f"/api/files/{file}/code", json={"input_col": "occ1", **options})
    return wait_for(client, file, state)


def test_codes_come_with_all_evidence(client: TestClient):
    farmer, blank = client.post("/api/code", json={"texts": ["FARMER", " "], "lang": "en"}).json()
    assert [code["code"] for code in farmer["known"]] == ["61110"]
    assert farmer["known_share"] == 1
    assert farmer["known"][0]["title"] == "Farmer"
    near = [
        (one["text"], one["similarity"]) for one in farmer["neighbours"]
    ]  # two spellings of farmer are one
    assert near[0] == ("Farmer", pytest.approx(1))
    assert near[1][0] == "baker & farmer"
    assert near[1][1] < 1
    given = [code["code"] for code in (*farmer["codes"], *farmer["alternatives"])]
    assert len(set(given)) == len(given) > 5
    assert blank["codes"] == []
    assert blank["neighbours"] == []
    assert blank["confidence"] is None
    assert [code["code"] for code in client.get("/api/codes?q=6111").json()] == ["61110", "61115"]
    assert [code["code"] for code in client.get("/api/codes?q=BAK").json()] == ["77610"]
    shares = [code["probability"] for code in farmer["alternatives"]]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] >= 0.005
    assert (
        sum(shares) + sum(code["probability"] or 0 for code in farmer["codes"]) <= 1
    )  # by one measure


def test_one_description_may_be_text(client: TestClient):
    (answer,) = client.post("/api/code", json={"texts": "farmer", "lang": "en"}).json()
    assert answer["text"] == "farmer"
    assert client.post("/api/code", json={"texts": 1}).status_code == 422


def test_models_without_named_languages_get_the_language(coder: tuple[Coder, Path], tmp_path: Path):
    model = copy(coder[0])
    model.model = copy(model.model)
    titles = {"61110": "Spinner", "61115": "Innkeeper", "77610": "Keeper of an Inn"}
    model.model.config = replace(model.model.config, languages=(), descriptions=titles)
    with served(tmp_path / "desk", (model, coder[1])) as client:
        (swedish,) = client.post("/api/code", json={"texts": ["farmer"], "lang": "sv"}).json()
        wrong = client.post("/api/code", json={"texts": ["farmer"], "lang": "Danisch"}).json()
        found = client.get("/api/codes", params={"q": "inn"}).json()
    assert swedish["lang"] == "se"
    assert "did you mean Danish, da?" in wrong["detail"]
    assert swedish["confidence"] == pytest.approx(model.predict(["farmer"], ["sv"])["conf"].item())
    # whole words come first
    assert [code["title"] for code in found] == ["Keeper of an Inn", "Innkeeper", "Spinner"]


@cases(
    ("headers", "status"),
    ({}, 401),
    ({"Authorization": "Bearer wrong"}, 401),
    ({"Cookie": f"histocoder_8000={TOKEN}", "Origin": "http://127.0.0.1:8000"}, 200),
    ({**HEADERS, "Origin": "http://evil.example"}, 403),
    ({**HEADERS, "Host": "evil.example:8000"}, 421),
    ({**HEADERS, "Host": "["}, 421),
)
def test_token_host_and_origin_are_checked(
    client: TestClient, headers: dict[str, str], status: int
):
    bare = TestClient(client.app, base_url=ADDRESS, headers=headers)
    assert bare.post("/api/code", json={"texts": ["farmer"]}).status_code == status


def test_only_the_right_token_sets_the_cookie(client: TestClient):
    bare = TestClient(client.app, base_url=ADDRESS)
    assert bare.get("/?token=wrong").status_code == 401
    page = bare.get(f"/?token={TOKEN}")
    assert (
        page.headers["set-cookie"] == f"histocoder_8000={TOKEN}; HttpOnly; Path=/; SameSite=strict"
    )
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in page.text
    assert bare.get("/api/about").status_code == 200  # by the cookie
    assert bare.get("/docs").status_code == 200
    assert "/api/code" in bare.get("/openapi.json").json()["paths"]


def test_bodies_are_limited(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    assert (
        client.post(
            "/api/files?name=a.csv", headers={**HEADERS, "Content-Length": str(3 << 30)}
        ).status_code
        == 413
    )
    assert client.post("/api/code", content=b" " * (2 << 20)).status_code == 413
    assert client.post("/api/code", content=(b" " for _ in range(3))).status_code == 411
    monkeypatch.setattr(guard, "MAX_UPLOAD_BYTES", 1 << 20)
    assert client.post("/api/files?name=a.csv", content=b"0" * (2 << 20)).status_code == 413
    assert client.get("/api/files").json() == []
    assert client.post("/api/code", json={"texts": ["x" * 5000]}).status_code == 422


def test_bad_files_get_the_command_lines_sentence(client: TestClient, tmp_path: Path):
    for name, content, sentence in (
        ("../../census.csv", b"", "census.csv is empty."),
        ("a.csv", b"occ1,lang\nfarmer\n", "a.csv, line 2: 1 fields where the header has 2"),
        ("a.exe", b"MZ", "a.exe: .exe files can't be read"),
    ):
        answer = client.post("/api/files", params={"name": name}, content=content)
        assert answer.status_code == 422
        assert sentence in answer.json()["detail"]
    assert client.get("/api/files").json() == []
    assert not any((tmp_path / "desk" / "files").iterdir())
    for path in ("static/..%2f..%2fapp.py", "static/app.py", "api/files/..%2f..%2ftoken/result"):
        assert client.get(f"/{path}").status_code == 404


def test_files_are_coded_as_predict_does(
    client: TestClient, coder: tuple[Coder, Path], tmp_path: Path
):
    source = write(
        tmp_path / "Zählung 1.csv", "conf,occ1", *(f"{i},farmer no {i % 40}" for i in range(300))
    )
    file = send(client, source.name, source.read_bytes())
    preview = client.get(f"/api/files/{file}/preview").json()
    refused = client.post(f"/api/files/{file}/code", json={"input_col": "job"})
    assert refused.status_code == 422
    assert "has no column 'job'; it has: conf, occ1" in refused.json()["detail"]
    assert preview["columns"] == ["conf", "occ1"]
    assert preview["input_col"] == "occ1"
    assert len(preview["rows"]) == 8
    assert code(client, file, language="en")["rows_done"] == 300
    result = client.get(f"/api/files/{file}/result")
    files = {"input": str(source), "output": str(tmp_path / "out.csv")}
    config = PredictConfig(
        **files, input_col="occ1", language="en", mode=coder[0].mode, columns="pred_"
    )
    predict_file(coder[0], config, model_id="", say=lambda _: None)
    assert result.content == (tmp_path / "out.csv").read_bytes()
    assert "Z%C3%A4hlung%201_coded.csv" in result.headers["content-disposition"]
    told = client.get(f"/api/files/{file}/provenance").json()
    command = "histocoder predict --model out --input 'Zählung 1.csv' --output 'Zählung 1_coded"
    assert told["command"].startswith(command)
    assert str(tmp_path) not in str(told)
    assert told["counts"]["rows"] == 300
    assert "with histocoder" in told["methods"]
    source_id = client.post(f"/api/files/{file}/review").json()
    # that of --data comes first
    assert source_id["cards"] == 40
    assert client.get("/api/review").json()[0]["id"] == 1
    assert client.delete(f"/api/files/{file}").json() == []


def test_a_model_by_another_path_codes_files(
    coder: tuple[Coder, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "link").symlink_to(coder[1].parent)
    monkeypatch.chdir(coder[1].parent)
    for folder in (Path(coder[1].name), tmp_path / "link" / coder[1].name):
        with served(tmp_path / f"desk {folder.is_absolute()}", (coder[0], folder)) as client:
            file = send(client, "two.csv", b"occ1,lang\nsmith,en\nbaker,en\n")
            assert code(client, file, language="en")["rows_done"] == 2
            told = client.get(f"/api/files/{file}/provenance").json()
            assert "--model out " in told["command"]


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ";"), ("csv", "\t"), ("tsv", "\t")])
def test_files_come_back_in_their_form(client: TestClient, suffix: str, separator: str):
    rows = [["id", "occ1"], ["1", "væver, smed"]]
    file = send(
        client, f"a.{suffix}", "".join(separator.join(row) + "\n" for row in rows).encode("cp1252")
    )
    assert client.get(f"/api/files/{file}/preview").json()["rows"] == rows[1:]
    code(client, file)
    assert client.get(f"/api/files/{file}").json()["summary"]["blank"] == 0
    result = client.get(f"/api/files/{file}/result").content
    names, row = csv.reader(io.StringIO(result.decode("utf-8-sig")), delimiter=separator)
    assert result.startswith(codecs.BOM_UTF8) == (
        suffix == "csv"
    )  # by which Excel recognises UTF-8
    assert names[:3] == ["id", "occ1", "hisco_1"]
    assert row[:2] == rows[1]
    assert client.post(f"/api/files/{file}/review").json()["cards"] == 1


def test_names_in_capitals_tell_the_form(client: TestClient):
    file = send(client, "X.CSV.GZ", gzip.compress(b"occ1\nfarmer\n"))
    code(client, file)
    download = client.get(f"/api/files/{file}/result")
    assert "X_coded.CSV.GZ" in download.headers["content-disposition"]
    assert gzip.decompress(download.content).startswith(b"occ1") or b'"occ1"' in gzip.decompress(
        download.content
    )


def test_an_encoding_is_chosen_by_its_examples(client: TestClient):
    words = ["bådsmand", "væver", "møller", "tømrer"]
    content = "\n".join(["occ1", *words]).encode("cp850")
    file = client.post("/api/files?name=a.csv", content=content).json()
    first, *others = file["encodings"]
    assert (file["encoding"], first["name"]) == ("cp850", "DOS")
    assert {*first["examples"]} <= {*words}
    assert "cp1252" in [one["encoding"] for one in others]
    shown = client.get(f"/api/files/{file['id']}/preview").json()
    assert shown["rows"][0] == ["bådsmand"]
    assert shown["notices"] == []
    address = f"/api/files/{file['id']}/encoding"
    other = client.post(address, json={"encoding": "cp1252"}).json()
    assert other["rows"][0] != ["bådsmand"]
    assert "--" not in str(other["notices"])
    assert client.post(address, json={"encoding": "utf-7"}).status_code == 422
    assert client.post(address, json={"encoding": "cp850"}).is_success
    assert code(client, file["id"])["rows_done"] == 4
    coded = client.get(f"/api/files/{file['id']}/result").content.decode()
    assert "bådsmand" in coded


def test_sheets_of_workbooks_are_chosen(client: TestClient):
    book, content = openpyxl.Workbook(), io.BytesIO()
    book.active.append(["note"])
    for name in ("people", "more people"):
        sheet = book.create_sheet(name)
        for row in (["occ1", name], ["smed", "x"], *([["baker", "y"]] if name == "people" else [])):
            sheet.append(row)
    book.save(content)
    file = client.post("/api/files?name=a.xlsx", content=content.getvalue()).json()
    assert (file["sheets"], file["sheet"]) == (["Sheet", "people", "more people"], "people")
    other = client.post(f"/api/files/{file['id']}/sheet", json={"sheet": "more people"}).json()
    assert other["columns"] == ["occ1", "more people"]
    assert len(other["rows"]) == 1
    assert client.post(f"/api/files/{file['id']}/sheet", json={"sheet": "none"}).status_code == 422
    assert code(client, file["id"])["rows_done"] == 1
    chosen = client.post("/api/files?name=a.xlsx&sheet=people", content=content.getvalue()).json()
    assert chosen["sheets"] == []
    assert code(client, chosen["id"])["rows_done"] == 2


def test_interrupted_files_go_on_and_deleted_do_not(
    coder: tuple[Coder, Path], tmp_path: Path, monkeypatch
):
    rows = "\n".join(["occ1", *(f"farmer no {i}" for i in range(40))])
    arrived, go_on = threading.Event(), threading.Event()

    def wait(_: Coder, inputs: Any, *__: Any) -> list[bool]:
        pairs = [True] * (
            len(inputs.input_ids) // 2
        )  # not the one that shows what columns there are
        if len(coded) + len(pairs) == 6:
            arrived.set()
            assert go_on.wait(60)
        return pairs

    coded = spied(monkeypatch, Coder, "predict_batch", wait)
    monkeypatch.setattr(
        "histocoder.desk.domain.uploads.PredictConfig", partial(PredictConfig, batch_size=2)
    )
    with served(tmp_path / "desk", coder) as client, ThreadPoolExecutor(1) as pool:
        file, other = send(client, "a.csv", rows.encode()), send(client, "b.csv", rows.encode())
        for name in (file, other):
            client.post(f"/api/files/{name}/code", json={"input_col": "occ1"})
        assert arrived.wait(60)
        now = client.get(f"/api/files/{file}").json()
        assert now["state"] == "running"
        assert now["num_rows"] == 40
        assert now["rows_done"] == 10
        assert [left["id"] for left in client.delete(f"/api/files/{other}").json()] == [file]
        pool.submit(lambda: (time.sleep(0.5), go_on.set()))
    with served(tmp_path / "desk", coder) as client:
        wait_for(client, file, "done")
        assert len(client.get(f"/api/files/{file}/result").text.splitlines()) == 41
        assert not (tmp_path / "desk" / "files" / other).exists()
    assert len(coded) == 20 + 2  # of the part in which it was interrupted, what was coded before


def test_a_failing_file_does_not_stop_others(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys
):
    one, two = (send(client, f"{name}.csv", b"occ1\nfarmer\n") for name in "ab")
    with monkeypatch.context() as patched:
        patched.setattr(TableCoder, "find", lambda *_: 1 / 0)
        message = code(client, one, state="failed")["message"]
    assert message.startswith("The program failed")
    assert "ZeroDivisionError: division by" in capsys.readouterr().err
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
    for codes in (["6111x"], ["61110", "77610", "95410"], []):
        assert decide(client, cards(client)[0], codes=codes).status_code == 422


def test_reviewers_never_overwrite_silently(client: TestClient):
    first, *_ = cards(client, "Anna", count=2)
    assert first["id"] not in {card["id"] for card in cards(client, "Bo", count=4)}
    assert decide(client, first, "Bo", codes=["61110"]).status_code == 200
    refused = decide(client, first, "Anna", codes=["77610"])
    assert refused.status_code == 409
    assert refused.json()["card"]["who"] == "Bo"
    assert decide(client, refused.json()["card"], "Anna", codes=["77610"]).json()["codes"] == [
        "77610"
    ]
    assert client.post("/api/review/1/undo", json={"who": "Bo"}).status_code == 409
    (back,) = client.post("/api/review/1/undo", json={"who": "Anna"}).json()
    assert back["codes"] == ["61110"]
    assert back["version"] == 3
    assert client.post("/api/review/1/undo", json={"who": "Anna"}).status_code == 422


def test_corrections_are_those_that_training_reads(
    client: TestClient, tmp_path: Path, logged: list[str]
):
    for card in cards(client):
        given = {"=1+1": {"codes": ["95410"]}, "smith": {"codes": None}}
        decide(client, card, **given.get(card["text"], {"codes": ["61115", "77610"]}))
    exported = write(
        tmp_path / "corrections.csv", client.get("/api/corrections.csv?raw=true").text.strip()
    )
    config = PrepareConfig(
        "my.csv", ("hisco_1", "hisco_2"), language_col="lang", corrections=(str(exported),)
    )
    found = read_corrections(
        config, LabelledFiles((), ("hisco_1", "hisco_2"), build_formatter("general", num_blocks=2))
    )
    assert len(found) == 3
    assert found.codes == {"61115", "77610", "95410"}
    assert "3 checked rows" in logged[-1]
    written = pd.read_csv(
        io.StringIO(client.get("/api/corrections.csv").text), dtype=str, keep_default_na=False
    )
    rows = sorted(map(",".join, written.iloc[:, :5].to_numpy()))
    assert rows == ["'=1+1,en,x,95410,", "<b>x</b>,'=cmd|x,x,61115,77610", "baker,en,x,61115,77610"]
    now = client.post("/api/improve").json()
    assert now["corrections"] == 3
    assert "--corrections" in now["next_step"]
    assert (
        (tmp_path / "desk" / "corrections.csv")
        .read_text()
        .startswith('"occ1","lang","checked","hisco_1"')
    )


def test_the_interval_covers_the_truth():
    rng, covered = np.random.default_rng(0), []
    times = np.maximum(1, 500 // np.arange(1, 401))
    right = rng.uniform(size=400) < np.clip(0.5 + 0.1 * np.log(times), 0, 1)  # rare ones are harder
    times, right = (array[rng.permutation(400)] for array in (times, right))
    for seed in range(300):
        cards, draws = order_of_review(times, seed)
        assert sorted(cards) == list(range(400))
        found = estimate_share([bool(right[card]) for due, card in draws if due < 120])
        covered.append(found.low <= times @ right / times.sum() <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.98


def test_trust_needs_thirty_random_cards(coder: tuple[Coder, Path], tmp_path: Path):
    rows = [
        f"farmer no {i},en,{61110 if i % 3 else 95410},0.{90 + i % 9},0.{90 + i % 9}"
        for i in range(200)
    ]
    path = write(tmp_path / "coded.csv", "occ1,lang,hisco_1,prob_1,conf", *rows)
    with served(tmp_path / "desk", coder, data=path) as client:

        def settle(number: int) -> dict[str, Any]:
            for card in cards(client, count=number):
                decide(client, card, codes=["61110"])
            return client.get("/api/review/1/trust").json()

        found = [settle(20) for _ in range(10)]
    assert found[0]["right"] is None
    assert found[0]["random_cards"] < 30 == found[0]["random_cards_needed"]
    assert found[5]["random_cards"] >= 30
    assert found[5]["right"]["low"] < 2 / 3 < found[5]["right"]["high"] < 0.97
    assert found[9]["rows_settled"] == found[9]["rows"] == 200


def test_cards_out_of_order_are_no_sample(coder: tuple[Coder, Path], tmp_path: Path):
    rows = [f"farmer no {i},en,61110,0.{90 + i % 9},0.{90 + i % 9}" for i in range(200)]
    path = write(tmp_path / "coded.csv", "occ1,lang,hisco_1,prob_1,conf", *rows)
    with served(tmp_path / "desk", coder, data=path) as client:

        def trust() -> tuple[int, bool]:
            now = client.get("/api/review/1/trust").json()
            return now["random_cards"], now["skipped"] is not None

        found = client.get("/api/review/1/list", params={"sort": "conf", "limit": 200}).json()[
            "cards"
        ]
        surest = {card["id"]: card["version"] for card in found[50:]}
        client.post("/api/review/accept", json={"who": "Anna", "cards": surest})
        assert trust()[0] < 30
        assert trust()[1]
        while any(one := cards(client)):
            decide(client, one[0], codes=["61110"])
        assert trust()[0] > 100
        assert not trust()[1]


def test_serve_says_what_it_needs(
    coder: tuple[Coder, Path], capsys, monkeypatch: pytest.MonkeyPatch
):
    serve = (capsys, "serve", "--model", coder[1], "--no-browser")
    assert "--token" in mistake(*serve, "--host", "0.0.0.0")
    assert "letters and digits" in mistake(*serve, "--token", "short")
    assert "--port is 99999; it must lie between 0 and 65535" in mistake(*serve, "--port", "99999")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install 'histocoder[serve]'" in mistake(*serve)


def test_lists_are_searched_and_accepted_at_once(client: TestClient):
    def texts(**wanted: Any) -> list[str]:
        return [
            card["text"] for card in client.get("/api/review/1/list", params=wanted).json()["cards"]
        ]

    assert texts(sort="text") == ["<b>x</b>", "=1+1", "baker", "smith"]
    assert texts(q="%") == texts(code="9%") == []
    assert texts(q="AK") == ["baker"]
    assert texts(code="6", sort="text")[0] == "<b>x</b>"
    assert texts(q="SMITH", lang="en") == ["smith"]
    assert texts(low=0.55, high=0.7) == ["baker"]
    assert texts(lang="en", sort="conf")[0] == "smith"
    cards = {
        card["id"]: card["version"] for card in client.get("/api/review/1/list").json()["cards"]
    }
    some = {"who": "Anna", "cards": dict(list(cards.items())[:3])}
    assert len(client.post("/api/review/accept", json=some).json()) == 3
    assert client.post("/api/review/accept", json=some | {"who": "Bo"}).status_code == 409
    assert client.post("/api/review/accept", json={"cards": {2**63: 0}}).status_code == 422
    assert len(texts(status="settled")) == 3
    assert len(client.post("/api/review/1/undo", json={"who": "Anna"}).json()) == 3
    assert len(texts(status="open")) == 4
    assert client.post("/api/review/1/undo", json={"who": "Anna"}).status_code == 422


@pytest.fixture
def spellings(coder: tuple[Coder, Path], tmp_path: Path) -> Iterator[TestClient]:
    """A desk with two spellings of one description that were coded differently."""
    rows = ('"smith, black",en,83110,0.5,0.5', "smith black,en,83120,0.5,0.5")
    data = write(tmp_path / "coded.csv", "occ1,lang,hisco_1,prob_1,conf", *rows)
    with served(tmp_path / "desk", coder, data=data) as client:
        yield client


def test_spellings_of_a_description_are_accepted_at_once(spellings: TestClient):
    seen = {card["id"]: card["version"] for card in cards(spellings)}
    accepted = spellings.post("/api/review/accept", json={"who": "Anna", "cards": seen})
    assert accepted.status_code == 200
    assert [card["codes"] for card in accepted.json()] == [["83110"], ["83120"]]
    assert len(spellings.post("/api/review/1/undo", json={"who": "Anna"}).json()) == 2
    assert [card["status"] for card in cards(spellings)] == ["open", "open"]


def test_deciding_on_a_spelling_is_no_conflict_with_the_next(spellings: TestClient):
    first, second = cards(spellings)
    decide(spellings, first, codes=["83110"])
    assert decide(spellings, second, "Bo", codes=["83120"]).status_code == 409
    assert decide(spellings, second, codes=["83120"]).status_code == 200


def test_codes_that_do_not_fit_are_not_accepted(coder: tuple[Coder, Path], tmp_path: Path):
    rows = ("smith,en,95410,0.5,0.5", "baker,en,7761x,0.9,0.9")
    data = write(tmp_path / "coded.csv", "occ1,lang,hisco_1,prob_1,conf", *rows)
    with served(tmp_path / "desk", coder, data=data) as client:
        all_cards = {card["id"]: card["version"] for card in cards(client)}
        refused = client.post("/api/review/accept", json={"cards": all_cards})
        assert refused.status_code == 422
        assert "7761x" in refused.json()["detail"]
        assert [card["status"] for card in cards(client)] == ["open", "open"]
        with closing(sqlite3.connect(tmp_path / "desk" / "desk.sqlite")) as db, db:
            db.execute("""UPDATE sources SET targets = '["isco"]'""")
        refused = decide(client, cards(client)[0], codes=["61110"])
        assert refused.status_code == 422
        assert "coded with isco, and the model in use gives hisco_1" in refused.text


def test_files_that_have_codes_already(client: TestClient):
    file = send(
        client, "coded.csv", "occ1,hisco_1,conf,note,note,lang\nÅNGARE,x,high,1,2,sv\n".encode()
    )
    assert client.get(f"/api/files/{file}/preview").json()["columns"] == [
        "occ1",
        "hisco_1",
        "conf",
        "note",
        "lang",
    ]
    assert code(client, file, language_col="lang")["target_cols"] == ["hisco_1", "hisco_2"]
    source = client.post(f"/api/files/{file}/review").json()["id"]
    found = client.get(f"/api/review/{source}/list", params={"q": "ånga", "lang": "se"}).json()[
        "cards"
    ]
    assert [card["row"] for card in found] == [{"hisco_1": "x", "conf": "high"}]


def test_two_coders_decide_alone(coder: tuple[Coder, Path], tmp_path: Path):
    with served(
        tmp_path / "desk", coder, data=write(tmp_path / "coded.csv", *CODED), double_share=1
    ) as client:
        mine, theirs = cards(client, "Anna"), cards(client, "Bo")
        # which Anna has before her
        assert len(mine) == 4
        assert theirs == []
        seen = decide(client, mine[0], "Anna", codes=["61110"]).json()
        assert (seen["status"], seen["codes"], seen["version"]) == ("settled", ["61110"], 0)
        hidden = client.get(f"/api/review/cards/{mine[0]['id']}?who=Bo").json()["card"]
        assert (hidden["status"], hidden["codes"], hidden["opinions"]) == ("open", None, [])
        for name in ("corrections", "decisions"):
            assert client.get(f"/api/{name}.csv").text.count("\n") == 1  # it waits for Bo
        assert decide(client, mine[0], "Bo", codes=["61110"]).json()["who"] == "Anna & Bo"
        decide(client, mine[1], "Anna", codes=["61110"])
        disputed = decide(client, mine[1], "Bo", codes=["61115"]).json()
        assert disputed["status"] == "disputed"
        assert [one["who"] for one in disputed["opinions"]] == ["Anna", "Bo"]
        found = client.get("/api/review/1/agreement").json()
        assert (found["cards"], found["both"], found["disputed"]) == (4, 2, 1)
        assert [(one["digits"], one["share"]) for one in found["by_digits"]][-2:] == [
            (4, 1.0),
            (None, 0.5),
        ]
        (reopened,) = client.post("/api/review/1/undo", json={"who": "Bo"}).json()
        assert (
            client.get(f"/api/review/cards/{mine[1]['id']}?who=Bo").json()["card"]["status"]
            == "open"
        )
        disputed = decide(client, reopened, "Bo", codes=["61115"]).json()
        late = decide(client, reopened, "Cy", codes=["61115"])
        assert late.status_code == 409
        assert len(late.json()["card"]["opinions"]) == 2
        assert decide(client, disputed, "Cy", codes=["61115"]).json()["who"] == "Cy"
        assert (
            client.get("/api/review/1/agreement").json()["by_digits"][-1]["share"] == 0.5
        )  # as they decided
        assert client.post("/api/review/1/undo", json={"who": "Anna"}).status_code == 409
        decide(client, mine[2], "Bo", codes=["61115"])
        decide(client, mine[2], "Anna", codes=["61110"])
        agreed = client.get("/api/review/1/agreement").json()["by_digits"][-1]
        assert agreed["kappa"] == 0  # Anna's codes are all the same, whoever was first
        said = pd.read_csv(io.StringIO(client.get("/api/decisions.csv").text), dtype=str)
    of_two = said.loc[
        said["text"] == mine[1]["text"], ["who", "action", "codes", "settled"]
    ].to_numpy()
    assert [*map(" ".join, of_two)] == [
        "Anna changed 61110 61115",
        "Bo changed 61115 61115",
        "Cy settled 61115 61115",
    ]


def review_again(client: TestClient, name: str, *rows: str) -> int:
    """Bring a coded file under review, and return its source."""
    file = send(client, name, "\n".join(["occ1", *rows]).encode())
    code(client, file, language="en")
    return int(client.post(f"/api/files/{file}/review").json()["id"])


def listed(client: TestClient, source: int) -> dict[str, dict[str, Any]]:
    found = client.get(f"/api/review/{source}/list").json()["cards"]
    return {card["text"]: card for card in found}


def settle(client: TestClient, source: int, text: str, *codes: str, who: str = "Anna") -> None:
    """Decide on the card of a text; without codes, as unsure."""
    card = listed(client, source)[text]
    assert decide(client, card, who, codes=codes or None).status_code == 200


def test_decisions_count_in_other_files(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    settle(client, first, "farmer", "77610")
    second = review_again(client, "b.csv", "FARMER ", "smith", "baker")
    card = listed(client, second)["FARMER "]
    assert (card["status"], card["codes"], card["who"], card["carried"]) == (
        "settled",
        ["77610"],
        "Anna",
        True,
    )
    settle(client, second, "smith", "61110", who="Bo")
    assert listed(client, first)["smith"]["codes"] == ["61110"]
    sources = {source["id"]: source["settled"] for source in client.get("/api/review").json()}
    assert (sources[first], sources[second]) == (2, 2)
    assert len(client.get("/api/decisions.csv").text.splitlines()) == 3  # which are one each


def test_undone_decisions_are_undone_in_all_files(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    settle(client, first, "farmer", "77610")
    second = review_again(client, "b.csv", "farmer", "baker")
    assert (
        client.post(f"/api/review/{second}/undo", json={"who": "Anna"}).status_code == 422
    )  # she decided elsewhere
    client.post(f"/api/review/{first}/undo", json={"who": "Anna"})
    assert listed(client, second)["farmer"]["status"] == "open"
    settle(client, first, "farmer", "61110")
    settle(client, second, "farmer", "61115")  # on which she has thought again
    client.post(f"/api/review/{first}/undo", json={"who": "Anna"})
    assert listed(client, second)["farmer"]["codes"] == ["61115"]


def undo(client: TestClient, source: int, who: str = "Anna") -> None:
    assert client.post(f"/api/review/{source}/undo", json={"who": who}).status_code == 200


def test_undo_reaches_cards_that_were_changed_and_restored(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    second = review_again(client, "b.csv", "farmer", "baker")
    settle(client, first, "farmer", "77610")
    settle(client, second, "farmer", "61110", who="Bo")
    undo(client, second, "Bo")
    assert listed(client, second)["farmer"]["who"] == "Anna"
    undo(client, first)
    assert listed(client, second)["farmer"]["status"] == "open"
    assert client.post("/api/improve").json()["corrections"] == 0


def test_undo_never_restores_withdrawn_decisions(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    second = review_again(client, "b.csv", "farmer", "baker")
    settle(client, first, "farmer", "77610")
    settle(client, second, "farmer", "61110", who="Bo")
    undo(client, first)
    undo(client, second, "Bo")
    assert listed(client, second)["farmer"]["status"] == "open"


@pytest.mark.parametrize("who", ["Anna", "Bo"])
def test_either_of_two_undoes_in_all_files(coder: tuple[Coder, Path], tmp_path: Path, who: str):
    data = write(tmp_path / "coded.csv", *CODED)
    with served(tmp_path / "desk", coder, data=data, double_share=1) as client:
        settle(client, 1, "smith", "61110", who="Anna")
        settle(client, 1, "smith", "61110", who="Bo")
        second = review_again(client, "b.csv", "smith", "farmer")
        assert listed(client, second)["smith"]["who"] == "Anna & Bo"
        undo(client, 1, who)
        assert listed(client, second)["smith"]["status"] == "open"


def test_changed_decisions_change_in_all_files(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    second = review_again(client, "b.csv", "farmer", "baker")
    settle(client, first, "farmer", "77610")
    settle(client, first, "farmer", "61110")
    assert listed(client, second)["farmer"]["codes"] == ["61110"]
    undo(client, first)
    assert listed(client, second)["farmer"]["codes"] == ["77610"]
    undo(client, first)
    assert listed(client, second)["farmer"]["status"] == "open"


def test_doubts_about_a_decision_count_in_all_files(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    second = review_again(client, "b.csv", "farmer", "baker")
    settle(client, first, "farmer", "77610")
    settle(client, first, "farmer")
    assert listed(client, second)["farmer"]["status"] == "unsure"
    assert client.post("/api/improve").json()["corrections"] == 0
    undo(client, first)
    assert listed(client, second)["farmer"]["codes"] == ["77610"]


def test_changed_decisions_leave_those_of_others(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    second = review_again(client, "b.csv", "farmer", "baker")
    settle(client, first, "farmer", "77610")
    settle(client, second, "farmer", "61115", who="Bo")
    settle(client, first, "farmer", "61110")
    assert listed(client, second)["farmer"]["codes"] == ["61115"]


def test_doubts_settle_nothing_elsewhere(client: TestClient):
    first = review_again(client, "a.csv", "farmer", "smith")
    second = review_again(client, "b.csv", "farmer", "baker")
    settle(client, first, "farmer")
    assert listed(client, second)["farmer"]["status"] == "open"


def test_a_file_is_reviewed_once_by_two_requests(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    file = send(client, "a.csv", b"occ1\nfarmer\n")
    code(client, file, language="en")
    both = threading.Barrier(2)
    spied(monkeypatch, sources, "_read_cards", lambda *_: [both.wait(60)])
    with ThreadPoolExecutor(2) as pool:
        added = list(pool.map(client.app.state.desk.uploads.to_review, [file, file]))
    assert added[0] == added[1]
    assert len(client.get("/api/review").json()) == 2  # with that of --data


def test_files_without_codes_are_not_reviewed(client: TestClient):
    file = send(client, "a.csv", b"occ1,id\n,1\n,2\n")
    code(client, file, language="en")
    refused = client.post(f"/api/files/{file}/review")
    assert refused.status_code == 422
    assert "No row of a_coded.csv has codes" in refused.json()["detail"]


def test_a_desk_does_not_begin_with_a_file_without_codes(coder: tuple[Coder, Path], tmp_path: Path):
    data = write(tmp_path / "blank.csv", CODED[0], ",en,,,,,")
    sentence = r"No row of blank\.csv has codes"
    with pytest.raises(UserError, match=sentence), served(tmp_path, coder, data=data):
        pass


def test_downloads_have_what_was_decided(client: TestClient):
    source = review_again(client, "a.csv", "farmer", "smith")
    file = client.get("/api/files").json()[0]["id"]
    as_coded = client.get(f"/api/files/{file}/result").content
    settle(client, source, "farmer", "77610")
    download = client.get(f"/api/files/{file}/result")
    row = pd.read_csv(io.BytesIO(download.content), dtype=str, keep_default_na=False).iloc[0]
    assert (row["hisco_1"], row["checked_by"], row["prob_1"]) == ("77610", "Anna", "")
    assert row["checked_at"].startswith("20")
    assert "a_checked.csv" in download.headers["content-disposition"]
    assert client.get(f"/api/files/{file}/result?as_coded=true").content == as_coded


def test_classes_of_decisions_do_not_need_the_model_that_coded(client: TestClient, tmp_path: Path):
    table = send(client, "classes.csv", b"hisco,hisclass\n77610,7\n", use="classes")
    file = send(client, "a.csv", b"occ1,job_1\nfarmer,x\n")
    code(client, file, language="da", classes=table)
    source = client.post(f"/api/files/{file}/review").json()["id"]
    settle(client, source, "farmer", "77610")

    # a model of one language, whose column of codes has the name of one of the file's
    other = save_model_of(tmp_path / "other", languages=("en",), target_cols=("job_1", "job_2"))
    client.app.state.desk.models.give(Coder.from_pretrained(other, "cpu"), other, name="other")
    download = client.get(f"/api/files/{file}/result")
    assert pd.read_csv(io.BytesIO(download.content))["hisclass_1"].tolist() == [7]


def test_deleted_means_deleted(client: TestClient, tmp_path: Path):
    rows = ["occ1,name", "schoolmaster,Sørensen", "farmer,Møller"]
    file = send(client, "a.csv", "\n".join(rows).encode())
    code(client, file, language="en")
    source = client.post(f"/api/files/{file}/review").json()["id"]
    settle(client, source, "schoolmaster", "77610", who="Reviewer")
    client.post("/api/improve")
    left = client.get("/api/files").json()
    assert [one["decided"] for one in client.get("/api/review").json() if one["file"] == file] == [
        1
    ]
    assert len(client.delete(f"/api/files/{file}").json()) == len(left) - 1
    assert [one["id"] for one in client.get("/api/review").json()] == [1]
    assert not (tmp_path / "desk" / "corrections.csv").exists()
    assert client.delete("/api/review/1").json() == []
    assert client.delete("/api/review/1").status_code == 404
    for path in (tmp_path / "desk").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(
            word.encode() in content for word in ("schoolmaster", "Sørensen", "Reviewer", "=cmd|x")
        ), path


def add_model(client: TestClient, folder: Path, **settings: Any) -> None:
    """Add a model that is not in use to the desk in a folder, whose columns have other names."""
    run = folder / "models" / "other-1"
    save_model_of(run / "best", **settings)
    write(run / "args.yaml", "dataset: t.csv", "input_col: beruf", "language_col: sprache")
    model = Model(id="other-1", made=0.0, table="t.csv", state="done")
    client.app.state.desk.models.jobs.add(model)


def test_corrections_have_the_columns_of_the_model_they_train(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Models, "_run", lambda *_: (1, "error: nothing is trained here"))
    add_model(client, tmp_path / "desk")
    settle(client, 1, "smith", "61110")
    assert client.post("/api/models/other-1/correct").json()["id"] == "other-2"
    table = pd.read_csv(tmp_path / "desk" / "models" / "other-2.corrections.csv", dtype=str)
    assert [*table] == ["beruf", "sprache", "checked", "hisco_1", "hisco_2", "who"]
    assert table["sprache"].tolist() == ["en"]


def test_models_learn_no_codes_of_another_classification(client: TestClient, tmp_path: Path):
    add_model(client, tmp_path / "desk", target_cols=("isco_1", "isco_2"))
    settle(client, 1, "smith", "61110")
    refused = client.post("/api/models/other-1/correct")
    assert refused.status_code == 422
    assert "Nothing is checked yet" in refused.json()["detail"]


def test_clicks_on_the_sample_train_nothing(client: TestClient):
    made = {file["name"]: file["id"] for file in client.post("/api/sample").json()}
    code(client, made["sample_census.csv"], language="en")
    source = client.post(f"/api/files/{made['sample_census.csv']}/review").json()["id"]
    card = client.get(f"/api/review/{source}/list").json()["cards"][0]
    decide(client, card, codes=["61110"])
    assert client.post("/api/improve").json()["corrections"] == 0
    own = review_again(client, "a.csv", card["text"])
    assert listed(client, own)[card["text"]]["status"] == "open"


def test_a_small_file_that_is_decided_has_its_share(client: TestClient):
    source = review_again(client, "a.csv", "farmer", "smith", "smith", "smith")
    predicted = listed(client, source)["smith"]["predicted"]
    settle(client, source, "smith", *predicted)
    assert client.get(f"/api/review/{source}/trust").json()["share_right"] is None
    wrong = "77610" if listed(client, source)["farmer"]["predicted"] != ["77610"] else "61110"
    settle(client, source, "farmer", wrong)
    trust = client.get(f"/api/review/{source}/trust").json()
    assert trust["share_right"] == 0.75
    assert trust["right"] is None


def test_earlier_workspaces_keep_their_decisions(coder: tuple[Coder, Path], tmp_path: Path):
    data = write(tmp_path / "coded.csv", *CODED)
    with served(tmp_path / "desk", coder, data=data, double_share=1) as client:
        (card,) = cards(client, "Anna", count=1)
        for who in ("Anna", "Bo"):
            decide(client, card, who, codes=["61110"])

    # as desks wrote it whose cards had the joined names of those who decided
    with closing(sqlite3.connect(tmp_path / "desk" / "desk.sqlite")) as db, db:
        db.execute("DROP VIEW own_decisions")
        db.execute("DROP VIEW live_decisions")
        db.execute("ALTER TABLE cards RENAME COLUMN deciders TO who")
        db.execute("UPDATE cards SET who = 'Anna & Bo' WHERE who NOT NULL")
        db.execute(
            "UPDATE decisions SET before = replace(before, '\"deciders\": []', '\"by\": null')"
        )

    with served(tmp_path / "desk", coder) as client:
        settled = client.get(f"/api/review/cards/{card['id']}").json()["card"]
        assert (settled["status"], settled["who"]) == ("settled", "Anna & Bo")
        assert client.post("/api/review/1/undo", json={"who": "Cy"}).status_code == 422
        (reopened,) = client.post("/api/review/1/undo", json={"who": "Bo"}).json()
    assert (reopened["status"], reopened["who"]) == ("open", None)


def test_a_second_coder_gets_cards_at_once(coder: tuple[Coder, Path], tmp_path: Path):
    with served(
        tmp_path / "desk", coder, data=write(tmp_path / "coded.csv", *CODED), double_share=1
    ) as client:
        for card in cards(client, "Anna"):
            decide(client, card, "Anna", codes=["61110"])
        assert len(cards(client, "Bo")) == 4


def test_exports_never_change_what_training_reads(client: TestClient, tmp_path: Path):
    decide(client, next(card for card in cards(client) if card["text"] == "=1+1"), codes=["61110"])
    client.post("/api/improve")
    before = (tmp_path / "desk" / "corrections.csv").read_bytes()
    assert b"'=1+1" in client.get("/api/corrections.csv").content
    assert (tmp_path / "desk" / "corrections.csv").read_bytes() == before
    assert b"'=1+1" not in before


def metrics(folder: Path, accuracy: list[float], conf: list[float], num_texts: int = 500) -> Path:
    """Return the folder of a run whose report has a curve of the share right among the surest
    answers.
    """
    content = {
        "num_texts": num_texts,
        "answer": {"production": {"accuracy": accuracy, "conf": conf}},
    }
    (folder / "metrics.json").write_text(json.dumps(content))
    return folder


@cases(
    ("accuracy", "expected"),
    ([0.99, 0.96, 0.9], (0.8, None)),
    ([0.90, 0.86, 0.8], (None, 0.90)),
)
def test_nothing_is_sure_that_is_not(
    tmp_path: Path, accuracy: list[float], expected: tuple[float | None, ...]
):
    surety = surety_of(metrics(tmp_path, accuracy, [0.95, 0.8, 0.3]))
    assert (surety.sure, surety.most_right) == expected


def test_few_descriptions_make_nothing_sure(tmp_path: Path):
    surety = surety_of(metrics(tmp_path, [0.99, 0.9], [0.9, 0.8], num_texts=20))
    assert surety.sure is None
    assert surety.of_few


def test_a_model_without_report_is_never_sure(client: TestClient):
    about = client.get("/api/about").json()
    assert about["surety"] == {
        "sure": None,
        "most_right": None,
        "of_titles": False,
        "of_few": False,
    }
    file = send(client, "a.csv", b"occ1\nfarmer\n")
    summary = code(client, file)["summary"]
    assert (summary["rows"], summary["blank"]) == (1, 0)
    assert "to_check" not in summary


def test_rows_to_check_are_those_of_the_model_that_coded(
    client: TestClient, coder: tuple[Coder, Path], monkeypatch: pytest.MonkeyPatch
):
    models = client.app.state.desk.models
    models.coding.surety = Surety(sure=1.0)

    def predict_and_switch(*args: Any, **kwargs: Any) -> Any:
        counts = predict_file(*args, **kwargs)
        models.give(*coder, name="another model, without a report")
        return counts

    monkeypatch.setattr("histocoder.desk.domain.uploads.predict_file", predict_and_switch)
    file = send(client, "a.csv", b"occ1\nfarmer\n")
    assert code(client, file)["summary"]["to_check"] == 1


def test_the_page_quotes_formulas_as_the_server_does():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node, which runs the page's script")
    texts = [
        "=1+1",
        "-1",
        "+45 12",
        "-x",
        "＝SUM(A1)",
        "－2",
        "\r=1",
        "\tx",
        "@a",
        "'=a",
        "farmer",
        "--",
        "+1,5",
        "-1e5",
        "",
    ]
    page = (Path(app.__file__).parent / "static" / "code.js").read_text(encoding="utf-8")
    rule = re.search(r"const RUN.*?\nexport const safe[^\n]*", page, re.DOTALL)
    assert rule is not None
    script = (
        f"{rule[0].replace('export ', '')}; "
        f"console.log(JSON.stringify({json.dumps(texts)}.map(safe)))"
    )
    ran = subprocess.run(
        [node, "-e", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(ran.stdout) == without_formulas(pa.array(texts))[0].to_pylist()


def test_a_file_is_coded_again_with_decisions(client: TestClient):
    source = review_again(client, "a.csv", "farmer", "smith")
    settle(client, source, "farmer", "61115")
    file = client.get("/api/files").json()[0]["id"]
    code(client, file, language="da")
    coded = pd.read_csv(io.StringIO(client.get(f"/api/files/{file}/result").text), dtype=str)
    assert coded["hisco_1"].notna().all()
    assert len(coded) == 2

"""Models that the desk trains, in processes of their own."""

import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import NOTES, TITLES
from jobs import wait_until

pytest.importorskip("fastapi")
from desks import HEADERS, TOKEN, send, served
from starlette.testclient import TestClient

from histocoder.checkpoints.starter import STARTER
from histocoder.desk.domain.models import GIVEN, Models
from histocoder.desk.domain.preview import guess_language
from histocoder.desk.web.users import Users
from histocoder.formatters.classifications import HISCO_TITLES

OPTIONS = {
    "input_col": "beruf",
    "target_cols": ["hisco"],
    "language": "en",
    "quick": True,
    "titles": "none",
}


def table() -> bytes:
    """Descriptions with codes, two of which have lost their zeros."""
    coded = (TITLES | {"clerk": "3930"}).items()
    rows = [f'"{title}{note}",{code},{len(note) // 10}' for title, code in coded for note in NOTES]
    return "\n".join(["beruf,hisco,status", *rows]).encode()


def wait_for(client: TestClient, model: str, *states: str) -> dict[str, Any]:
    def now() -> dict[str, Any]:
        return next(one for one in client.get("/api/models").json() if one["id"] == model)

    wait_until(lambda: now()["state"] not in {"queued", "running", "stopped"} - {*states})
    assert now()["state"] in states, client.get(f"/api/models/{model}/training.log").text
    return now()


def test_an_empty_desk_trains_and_codes(tmp_path: Path):
    with served(tmp_path) as client:
        assert client.get("/api/about").json()["model"] is None
        refused = client.post("/api/code", json={"texts": ["farmer"]})
        assert refused.status_code == 422
        assert "no model yet" in refused.json()["detail"]
        file = send(client, "codes of a parish.csv", table(), use="train")
        preview = client.get(f"/api/files/{file}/preview").json()
        assert (preview["input_col"], preview["target_cols"], preview["language"]) == (
            "beruf",
            ["hisco"],
            "en",
        )
        wrong = client.post(
            f"/api/files/{file}/check", json={**OPTIONS, "input_col": "berufe"}
        ).json()
        assert len(wrong["problems"]) == 2
        assert wrong["fixes"] == {
            "input_col": "beruf",
            "zero_pad_codes": True,
        }
        assert wrong["problems"][1].startswith(
            "codes of a parish.csv: 8 rows have labels that do not fit"
        )
        found = client.post(
            f"/api/files/{file}/check", json={**OPTIONS, "zero_pad_codes": True}
        ).json()
        assert (found["problems"], found["train"] + found["val"], found["codes"]) == ([], 72, 9)
        assert preview["attribute_cols"] == ["hisco", "status"]
        options = {**OPTIONS, "zero_pad_codes": True, "attribute_cols": ["status"]}
        flags = {**options, "target_cols": ["hisco", "--save-path", "elsewhere"]}
        assert "dash" in client.post(f"/api/files/{file}/train", json=flags).json()["detail"]
        model = client.post(f"/api/files/{file}/train", json=options).json()["id"]
        assert model == "codes-of-a-parish-1"
        wait_for(client, model, "running")
        assert client.post(f"/api/models/{model}/stop").json()["state"] == "stopped"
        assert client.post(f"/api/models/{model}/resume").json()["state"] in ("queued", "running")
        other = client.post(
            f"/api/files/{file}/train", json={**OPTIONS, "target_cols": ["code"]}
        ).json()["id"]
        wait_until(lambda: "rows a step" in client.get(f"/api/models/{model}/training.log").text)
    with served(tmp_path) as client:  # which resumes
        wait_for(client, model, "done")
        (settings,) = tmp_path.rglob(f"{model}/args.yaml")
        assert (
            "device: cpu\n" in settings.read_text()
        )  # on which the desk computes, also where there is a GPU
        wait_until(lambda: client.get("/api/about").json()["model"] == model)
        assert "has no column 'code'" in wait_for(client, other, "failed")["message"]
        (farmer,) = client.post("/api/code", json={"texts": ["farmer"], "lang": "en"}).json()
        assert [one["code"] for one in farmer["known"]] == ["61110"]
        assert client.get("/api/codes?q=0393").json()
        report = client.get(f"/api/models/{model}/report.html")
        assert "sandbox" in report.headers["content-security-policy"]
        assert report.headers["x-frame-options"] != "DENY"
        assert client.get(f"/api/models/{model}/model.json").status_code == 422
        assert (
            client.delete(f"/api/files/{file}").status_code == 422
        )  # it is what models are trained on
        assert [one["id"] for one in client.delete(f"/api/models/{other}").json()] == [model]
        assert client.delete(f"/api/models/{model}").status_code == 422
        corrects(client, model)
    with served(tmp_path, may_train=False) as client:
        assert client.get("/api/about").json()["model"] == f"{model[:-1]}2"
        assert client.post(f"/api/files/{file}/train", json=options).status_code in (404, 405)


def corrects(client: TestClient, model: str) -> None:
    """Review a file, train further, and switch to the new model."""
    assert (
        client.post(f"/api/models/{model}/correct")
        .json()["detail"]
        .startswith("Nothing is checked yet")
    )
    rows = "".join(f"ploughman {i},{i}\n" for i in range(30))
    file = send(client, "b.csv", f"beruf,age\n{rows}".encode(), use="code")
    client.post(f"/api/files/{file}/code", json={"input_col": "beruf", "language": "en"})
    wait_until(lambda: client.get(f"/api/files/{file}").json()["state"] == "done")
    summary = client.get(f"/api/files/{file}").json()["summary"]
    assert summary["rows"] == 30
    assert summary["blank"] == 0
    found = client.get(
        f"/api/review/{client.post(f'/api/files/{file}/review').json()['id']}/list?limit=100"
    ).json()
    assert found["total"] == 30
    assert set(found["cards"][0]["row"]) == {"age"}
    for card in found["cards"]:
        client.post(f"/api/review/cards/{card['id']}", json={"version": 0, "codes": ["62120"]})
    better = client.post(f"/api/models/{model}/correct").json()
    assert (better["id"], better["base"], better["corrections"]) == (f"{model[:-1]}2", model, 30)
    assert client.post("/api/improve").json()["learned"]
    client.post(f"/api/review/cards/{card['id']}", json={"version": 1, "codes": ["61110"]})
    assert not client.post("/api/improve").json()["learned"]
    wait_for(client, better["id"], "done")
    metrics = client.get(f"/api/models/{better['id']}/metrics.json").json()
    assert metrics["corrections"]["validation"]["before"]
    assert metrics["corrections"]["held_out"]
    assert client.get("/api/about").json()["model"] == model
    assert [one["in_use"] for one in client.post(f"/api/models/{better['id']}/use").json()] == [
        True,
        False,
    ]


def test_the_sample_is_whole(tmp_path: Path):
    with served(tmp_path) as client:
        coded, census = client.post("/api/sample").json()
        assert (coded["use"], census["use"]) == ("train", "code")
        preview = client.get(f"/api/files/{coded['id']}/preview").json()
    assert preview["target_cols"] == ["hisco_1"]
    assert preview["language_col"] == "lang"
    one, other = (
        pd.read_csv(tmp_path / "files" / f["id"] / f["name"], dtype=str) for f in (coded, census)
    )
    assert not {*one["occ1"][one["lang"] == "en"]} & {*other["occ1"]}
    assert [*other] == ["id", "occ1", "age", "year", "place"]


def test_titles_are_a_table_to_begin_with(tmp_path: Path):
    with served(tmp_path) as client:
        file = client.post("/api/titles").json()
        preview = client.get(f"/api/files/{file['id']}/preview").json()
        columns = {
            "input_col": "occ1",
            "language_col": "lang",
            "target_cols": ["hisco_1"],
            "titles": "none",
        }
        checked = client.post(f"/api/files/{file['id']}/check", json=columns).json()
        model = client.post(
            f"/api/files/{file['id']}/train", json={**columns, "quick": True}
        ).json()
        stopped = client.post(f"/api/models/{model['id']}/stop").json()
    # whose panel says that titles are easier
    assert model["of_titles"]
    assert stopped["state"] == "stopped"
    assert file["use"] == "train"
    assert preview["target_cols"] == ["hisco_1"]
    assert not checked["problems"]
    assert len(pd.read_csv(tmp_path / "files" / file["id"] / file["name"])) == len(
        pd.read_csv(HISCO_TITLES)
    )


def test_languages_are_guessed():
    assert guess_language(["smedemester", "husmand og væver"]) == "da"
    assert guess_language(["boot and shoe maker"]) == "en"
    assert guess_language(["timmermansknecht", "zonder beroep"]) == "nl"
    assert guess_language(["", " "]) == "unk"


def test_users_decide_by_their_names(tmp_path: Path):
    users = Users(tmp_path / "users.json", TOKEN)
    for name in ("Anna", "Bo"):
        users.add(name, f"password of {name}")
    with served(tmp_path) as client:
        client.headers.pop("Authorization")
        assert "Name" in client.get("/").text
        assert client.get("/api/about").status_code == 401
        assert client.get(f"/?token={TOKEN}").status_code == 401  # a name is asked for
        begun = time.monotonic()
        assert client.post("/sign-in", data={"name": "Bo", "password": "wrong"}).status_code == 401
        assert time.monotonic() - begun > 0.02
        evil = {"Origin": "http://evil.example"}
        assert client.post("/sign-in", data={"name": "Bo"}, headers=evil).status_code == 403
        assert (
            client.post("/sign-in", data={"name": "Bo", "password": "password of Bo"}).status_code
            == 200
        )
        assert client.get("/api/about").json()["user"] == "Bo"
        cookie = client.cookies["histocoder_8000"]
        client.cookies.clear()
        changed = cookie[:-1] + ("0" if cookie[-1] != "0" else "1")
        for forged in (changed, "é", f"Anna.{cookie.partition('.')[2]}", TOKEN):
            assert (
                client.get(
                    "/api/about", headers={"Cookie": f"histocoder_8000={forged}".encode()}
                ).status_code
                == 401
            )
        users.add("Bo", "another password")
        assert (
            client.get("/api/about", headers={"Cookie": f"histocoder_8000={cookie}"}).status_code
            == 401
        )
        assert client.get("/api/about", headers=HEADERS).json()["user"] == "program"
    assert "password" not in (tmp_path / "users.json").read_text()
    assert users.sign_in("Nobody", "x") is None


def test_own_models_start_from_the_box(tmp_path: Path):
    models = Models(tmp_path / "models", device="cpu", precision="auto")
    models.offer(STARTER, name="the model in the box")
    models.use_again()
    assert models.box_is_in_use and models.coding.name == "the model in the box"
    assert not models.jobs[GIVEN].has_metrics
    own = models.correct(GIVEN, lambda path: path.write_text("occ1,checked,hisco_1\n"))
    assert own.id == "own-1" and own.words[0] == "--corrections"
    models.jobs.stop()
    assert not Models(tmp_path / "models", device="cpu", precision="auto").box_is_in_use

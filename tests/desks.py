"""The desk in this process, and a client of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from histocoder.desk.domain.desk import Desk
from histocoder.desk.domain.models import Models
from histocoder.desk.web.app import create_app
from histocoder.desk.web.users import Users
from histocoder.inference.coder import Coder

TOKEN = "0123456789abcdef"
ADDRESS = "http://127.0.0.1:8000"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
Served = Iterator[TestClient]


@contextmanager
def served(
    folder: Path, coder: tuple[Coder, Path] | None = None, data: Path | None = None, **options: Any
) -> Served:
    """A client of a desk with a model, by default those of its folder; `data` is to be reviewed
    from the start.
    """
    models = Models(folder / "models", device="cpu", precision="auto")
    if coder is None:
        models.use_again()
    else:
        models.give(*coder, name=coder[1].name)
    desk = Desk(folder, models=models, **options)
    if data is not None:
        desk.review(data)
    app = create_app(desk, token=TOKEN, users=Users(folder / "users.json", TOKEN))
    with TestClient(app, base_url=ADDRESS, headers=HEADERS) as client:
        yield client


def send(client: TestClient, name: str, content: bytes, **params: str) -> str:
    return client.post("/api/files", params={"name": name, **params}, content=content).json()["id"]

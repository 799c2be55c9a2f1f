"""`histocoder serve`: code and check in a browser."""

from __future__ import annotations

import getpass
import importlib.util
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from histocoder import distributed
from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import holding, run_of
from histocoder.checkpoints.starter import STARTER, in_the_box
from histocoder.cli.flags import ServeFlags
from histocoder.errors import UserError
from histocoder.files import make_folder
from histocoder.inference.coder import Coder
from histocoder.log import log

if TYPE_CHECKING:
    from fastapi import FastAPI

    from histocoder.desk.domain.desk import Desk

_MIN_TOKEN_CHARACTERS = 16
DESK_FILE = "desk.sqlite"  # the database of a workspace


def run_serve(config: ServeFlags) -> None:
    """Serve the page until it is interrupted; raise a UserError if a package is missing, or others
    could use it.
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"histocoder serve needs {' and '.join(missing)}: pip install 'histocoder[serve]'."
        )
    from histocoder.desk.web.app import create_app
    from histocoder.desk.web.users import Users

    # the workspace, and who may use it
    model = local_folder(config.model) if config.model else None
    folder = _workspace(config.workspace, model)
    token = config.token or _saved_token(folder / "token")
    users = Users(folder / "users.json", token)
    if config.add_user:
        users.add(config.add_user, getpass.getpass(f"Password of {config.add_user}: "))
        log.info(f"{config.add_user} can sign in now, at a server with this workspace: {folder}.")
        return
    has_users = bool(users.hashes())
    _check_access(config, has_users=has_users)

    device = distributed.start(device=config.device)
    listener = _listen(config.host, config.port)

    # new files are for the account that runs the server alone: people's uploads and decisions
    os.umask(0o077)
    with listener, holding(folder / ".lock", path=folder, instead="another --workspace"):
        port = listener.getsockname()[1]
        desk = _open_desk(config, folder, model, device=str(device))
        app = create_app(desk, token=token, host=config.host, port=port, users=users)

        # the address to open; without users who sign in, it has the secret
        host = f"[{config.host}]" if ":" in config.host else config.host  # brackets around IPv6
        address = f"http://{host}:{port}/"
        if not has_users:
            address += f"?token={token}"
        log.info(
            f"Open {address}\nPress Ctrl-C to stop the server. Models, decisions and files "
            f"are kept in {folder}."
        )

        # the browser opens once the server answers
        if not config.no_browser:
            threading.Timer(0.5, webbrowser.open, [_opening_page(folder, address)]).start()
        _answer(app, listener)


def _workspace(name: str | None, model: Path | None) -> Path:
    """Make the folder of a desk, by default one in the working folder; no other account reads one
    that is new.
    """
    folder = Path(name or "histocoder-desk").absolute()
    is_new = not folder.exists()
    make_folder(folder)
    # a folder that has been there for other things stays as it is
    if is_new or (folder / DESK_FILE).exists():
        _make_private(folder)

    # until version 1.0.0 a model's run had the desk
    earlier = run_of(model) / "desk" if model else folder
    if name is None and (earlier / DESK_FILE).exists() and earlier.absolute() != folder:
        log.info(
            f"Notice: an earlier desk of this model is in {earlier}; --workspace {earlier} "
            "opens it."
        )
    return folder


def _check_access(config: ServeFlags, *, has_users: bool) -> None:
    """Raise a UserError if others reach the server and need no secret, or the secret is too
    short.
    """
    from histocoder.desk.web.connections import LOOPBACK

    if config.host not in LOOPBACK and not config.token and not has_users:
        raise UserError(
            f"Others can reach {config.host}, too. Set a secret with --token, or add users "
            "(--add-user)."
        )
    if config.token is not None and (
        len(config.token) < _MIN_TOKEN_CHARACTERS or not config.token.isalnum()
    ):
        raise UserError(f"--token needs {_MIN_TOKEN_CHARACTERS} letters and digits or more.")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"Can't listen on {host}, port {port}: {reason}. Choose another --port."
        ) from error


def _open_desk(config: ServeFlags, folder: Path, model: Path | None, *, device: str) -> Desk:
    """Open the desk of a workspace with the given model, or the one that was used last."""
    from histocoder.desk.domain.desk import Desk
    from histocoder.desk.domain.models import Models
    from histocoder.desk.web.connections import LOOPBACK

    models = Models(folder / "models", device=device, precision=config.precision)
    if model is None:
        models.offer(STARTER, name=in_the_box())
        models.use_again()
    else:
        # a folder is called by its run, a model of the hub by its name there
        name = str(config.model)
        if Path(name).exists():
            name = run_of(model).name
        coder = Coder.from_pretrained(model, device, precision=config.precision)
        models.give(coder, model, name=name)

    # training takes the machine's time, which others must not by default
    may_train = config.allow_training
    if may_train is None:
        may_train = config.host in LOOPBACK
    desk = Desk(folder, models=models, double_share=config.double_share, may_train=may_train)
    if config.data:
        desk.review(Path(config.data), input_col=config.input_col)
    return desk


def _answer(app: FastAPI, listener: socket.socket) -> None:
    """Answer requests until the program is interrupted."""
    import uvicorn

    from histocoder.desk.web.connections import Connection

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=10,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _make_private(folder: Path) -> None:
    """Let no other account read the workspace, also one that an earlier version has made."""
    with suppress(OSError):  # another account's folder, or a file system without permissions
        folder.chmod(0o700)


@contextmanager
def _new_private_file(path: Path) -> Iterator[TextIO]:
    """Give a new text file that no other account can read, not even while it is written."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        yield file


def _opening_page(folder: Path, address: str) -> str:
    """Write a page that leads to the desk, and return its address, for the command line of a
    browser.

    Command lines can be read by everyone on the machine, and the desk's own address has the token
    in it.
    """
    path = folder / "open.html"
    path.unlink(missing_ok=True)
    with _new_private_file(path) as file:
        file.write(
            '<!doctype html><meta http-equiv="refresh" content="0; '
            f'url={address}"><title>histocoder</title>'
        )
    return path.as_uri()


def _saved_token(path: Path) -> str:
    """Return the folder's token, with which an open page keeps working after a restart; only its
    owner can read it.
    """
    if not path.is_file():
        with _new_private_file(path) as file:
            file.write(secrets.token_hex(24))
    return path.read_text(encoding="ascii").strip()

"""`histocoder serve`: code and check in a browser."""

import getpass
import importlib.util
import os
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from typing import Any

from histocoder import distributed
from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import holding, run_of
from histocoder.cli.flags import ServeFlags
from histocoder.errors import UserError
from histocoder.files import make_folder
from histocoder.inference.coder import Coder
from histocoder.log import log

_FEWEST_CHARACTERS = 16


def run_serve(config: ServeFlags) -> None:
    """Serve the page until it is interrupted; raise a UserError if a package is missing, or others could use it."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"histocoder serve needs {' and '.join(missing)}: pip install 'histocoder[serve]'.")
    import uvicorn

    from histocoder.desk.app import LOOPBACK, Desk, create_app
    from histocoder.desk.models import Models
    from histocoder.desk.users import Users

    model = local_folder(config.model) if config.model else None
    folder = Path(config.workspace or (run_of(model) / "desk" if model else "histocoder-desk")).absolute()
    make_folder(folder)
    token = config.token or _kept_token(folder / "token")
    users = Users(folder / "users.json", token)
    if config.add_user:
        users.add(config.add_user, getpass.getpass(f"Password of {config.add_user}: "))
        log.info(f"{config.add_user} can sign in now, at a server with this workspace: {folder}.")
        return
    if config.host not in LOOPBACK and not config.token and not users.hashes():
        raise UserError(f"Others can reach {config.host}, too. Set a secret with --token, or add users (--add-user).")
    if config.token is not None and (len(config.token) < _FEWEST_CHARACTERS or not config.token.isalnum()):
        raise UserError(f"--token needs {_FEWEST_CHARACTERS} letters and digits or more.")
    device = distributed.start(device=config.device)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        where, reason = f"{config.host}, port {config.port}", error.strerror or error
        raise UserError(f"Can't listen on {where}: {reason}. Choose another --port.") from error
    with listener, holding(folder / ".lock", path=folder, instead="another --workspace"):
        port = listener.getsockname()[1]
        models = Models(folder / "models", device=str(device), precision=config.precision)
        if model:
            name = run_of(model).name if Path(config.model or "").exists() else str(config.model)
            models.give(Coder.from_pretrained(model, str(device), precision=config.precision), model, name=name)
        else:
            models.use_again()
        may_train = config.host in LOOPBACK if config.allow_training is None else config.allow_training
        desk = Desk(folder, models=models, double_share=config.double_share, may_train=may_train)
        if config.data:
            desk.review(Path(config.data), input_col=config.input_col)
        app = create_app(desk, token=token, host=config.host, port=port, users=users)
        name = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{name}:{port}/{'' if users.hashes() else f'?token={token}'}"
        log.info(f"Open {address}\nPress Ctrl-C to stop the server. Models, decisions and files are kept in {folder}.")
        if not config.no_browser:
            threading.Timer(0.5, webbrowser.open, [address]).start()
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        limits: dict[str, Any] = {"limit_concurrency": 100, "timeout_graceful_shutdown": 10}
        uvicorn.Server(uvicorn.Config(app, **quiet, **limits, ws="none")).run(sockets=[listener])


def _kept_token(path: Path) -> str:
    """Return the folder's token, with which an open page keeps working after a restart; only its owner can read it."""
    if not path.is_file():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(24))
    return path.read_text(encoding="ascii").strip()

"""`histocoder serve`: code, check and improve in a browser."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import socket
import threading
import webbrowser
from pathlib import Path

from histocoder import distributed
from histocoder.cli.model_flags import add_command, add_model_flags, add_precision_flag, run_of
from histocoder.errors import UserError
from histocoder.training.console import say

_FEWEST_CHARACTERS = 16


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its flags."""
    parser = add_command(commands, "serve", "code, check and improve in a browser")
    add_model_flags(parser)
    add_precision_flag(parser)
    parser.add_argument("--data", metavar="FILE", help="to review: what histocoder predict wrote")
    parser.add_argument(
        "--input-col", metavar="COL", help="--data: column of descriptions (default: that of the model's run, or occ1)"
    )
    parser.add_argument(
        "--language-col", metavar="COL", help="--data: column of languages (default: lang, where there is one)"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="to listen at, 0: any (default: 8000)")
    parser.add_argument(
        "--token", metavar="TEXT", help="that the page asks for (default: a random one, the same each time)"
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    parser.add_argument("--allow-training", action="store_true", help="let the page start a training run")
    parser.add_argument(
        "--folder", metavar="DIR", help="where decisions and files are kept (default: desk/ in the model's run)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Serve the page until it is interrupted."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"histocoder serve needs {' and '.join(missing)}: pip install 'histocoder[serve]'.")
    from histocoder.desk.security import is_loopback

    if not is_loopback(args.host) and not args.token:
        raise UserError(f"At {args.host} others reach the server, too: choose a secret with --token.")
    if args.token is not None and (len(args.token) < _FEWEST_CHARACTERS or not args.token.isalnum()):
        raise UserError(f"--token needs {_FEWEST_CHARACTERS} letters and digits or more.")
    device = distributed.start(device=args.device)

    import uvicorn

    from histocoder.checkpoints.hub import local_folder
    from histocoder.checkpoints.lock import holding
    from histocoder.desk.app import create_app
    from histocoder.desk.desk import open_desk
    from histocoder.files import make_folder
    from histocoder.inference.coder import Coder

    model = local_folder(args.model)
    run = run_of(model)
    folder = Path(args.folder or run / "desk")
    make_folder(folder)
    with (
        _listening(args.host, args.port) as listener,
        holding(folder / ".lock", what=f"serves from {folder}", instead="another --folder"),
    ):
        port = listener.getsockname()[1]
        coder = Coder.from_pretrained(model, str(device), precision=args.precision, verify=not args.no_verify)
        desk = open_desk(
            coder,
            folder,
            model=args.model,
            model_folder=model,
            run=run,
            may_train=args.allow_training,
            data=Path(args.data) if args.data else None,
            input_col=args.input_col,
            language_col=args.language_col,
            say=say,
        )
        token = args.token or _kept_token(folder / "token")
        app = create_app(desk, token=token, host=args.host, port=port)
        name = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{name}:{port}/?token={token}"
        say(f"Open {address}\nCtrl-C ends the server; decisions and files stay in {folder}.")
        if not args.no_browser:
            threading.Timer(0.5, webbrowser.open, [address]).start()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, limit_concurrency=100, ws="none"
        )
        uvicorn.Server(config).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        if os.name != "nt":  # where it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Can't listen at {host}, port {port}: {reason}. Choose another --port.") from error
    return listener


def _kept_token(path: Path) -> str:
    """Return the folder's token, so that a page that is open works on after a restart; only its owner reads it."""
    if not path.is_file():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(24))
    return path.read_text(encoding="ascii").strip()

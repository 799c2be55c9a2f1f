"""The users of a desk, each with a password, and the cookies by which they are signed in."""

import hashlib
import hmac
import json
import os
import secrets
import threading
from pathlib import Path
from urllib.parse import quote, unquote

from histocoder.errors import UserError
from histocoder.files import write_text

FEWEST_CHARACTERS = 8  # of a password
_COST = {"n": 2**14, "r": 8, "p": 5, "maxmem": 2**26}  # of scrypt: a fifth of a second, 16 MB


class Users:
    """Users in a JSON file, with a salt and a hash of each password; a desk without users asks for its token alone."""

    def __init__(self, path: Path, secret: str) -> None:
        self._path, self._secret = path, secret.encode()
        self._one_at_a_time = threading.Lock()  # so that guessing is slow, and takes no memory

    def hashes(self) -> dict[str, str]:
        """Return name -> salt and hash; the file is read each time, since `--add-user` may add one."""
        return json.loads(self._path.read_bytes()) if self._path.is_file() else {}

    def add(self, name: str, password: str) -> None:
        """Add a user, or change their password; raise a UserError if the name or the password is too short."""
        if not name.strip() or len(name) > 60 or not name.isprintable():
            raise UserError("A name has 1 to 60 characters.")
        if len(password) < FEWEST_CHARACTERS:
            raise UserError(f"A password has {FEWEST_CHARACTERS} characters or more.")
        salt = secrets.token_hex(16)
        write_text(self._path, json.dumps(self.hashes() | {name: f"{salt}${_hash(password, salt)}"}))
        os.chmod(self._path, 0o600)

    def sign_in(self, name: str, password: str) -> str | None:
        """Return the cookie of a user; None if name or password are wrong, after the same time."""
        salt, _, right = self.hashes().get(name, f"{'0' * 32}$").partition("$")
        with self._one_at_a_time:
            given = _hash(password, salt)
        return self._cookie(name) if hmac.compare_digest(given, right) else None

    def signed_in(self, cookie: str) -> str | None:
        """Return whose cookie it is; None if it is nobody's. It ends with the password and with the server's token."""
        name = unquote(cookie.rpartition(".")[0])
        is_right = name in self.hashes() and hmac.compare_digest(cookie.encode(), self._cookie(name).encode())
        return name if is_right else None

    def _cookie(self, name: str) -> str:
        signature = hmac.digest(self._secret, f"{name}\n{self.hashes()[name]}".encode(), "sha256").hex()
        return f"{quote(name, safe='')}.{signature}"


def _hash(password: str, salt: str) -> str:
    return hashlib.scrypt(password.encode(), salt=bytes.fromhex(salt), dklen=32, **_COST).hex()

"""The users of a desk, each with a password, and the cookies by which they are signed in."""

import hashlib
import hmac
import json
import os
import secrets
import time
from pathlib import Path
from urllib.parse import quote, unquote

from histocoder.errors import UserError
from histocoder.files import write_text

FEWEST_CHARACTERS = 8  # of a password
MAX_NAME = 60  # characters of a name
FREE_ATTEMPTS = 5  # wrong passwords without a delay
MAX_DELAY_SECONDS = 60.0
MEMORY_SECONDS = 3600.0  # for which wrong passwords are remembered
MAX_REMEMBERED = 10_000  # pairs of name and address
_COST = {"n": 2**14, "r": 8, "p": 5, "maxmem": 2**26}  # of scrypt: a fifth of a second, 16 MB


class Users:
    """Users in a JSON file, with a salt and a hash of each password; a desk without users asks for
    its token alone.
    """

    def __init__(self, path: Path, secret: str) -> None:
        self._path = path
        self._secret = secret.encode()

    def hashes(self) -> dict[str, str]:
        """Return name -> salt and hash; the file is read each time, since `--add-user` may add
        one.
        """
        if not self._path.is_file():
            return {}
        return json.loads(self._path.read_bytes())

    def add(self, name: str, password: str) -> None:
        """Add a user, or change their password; raise a UserError if the name or the password is
        too short.
        """
        if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
            raise UserError(f"A name has 1 to {MAX_NAME} characters.")
        if len(password) < FEWEST_CHARACTERS:
            raise UserError(f"A password has {FEWEST_CHARACTERS} characters or more.")
        salt = secrets.token_hex(16)
        hashes = self.hashes()
        hashes[name] = f"{salt}${_hash(password, salt)}"
        write_text(self._path, json.dumps(hashes))
        os.chmod(self._path, 0o600)

    def sign_in(self, name: str, password: str) -> str | None:
        """Return the cookie of a user; None if name or password are wrong, after the same time."""
        salt, _, right = self.hashes().get(name, f"{'0' * 32}$").partition("$")
        if not hmac.compare_digest(_hash(password, salt), right):
            return None
        return self._cookie(name)

    def signed_in(self, cookie: str) -> str | None:
        """Return whose cookie it is; None if it is nobody's. It ends with the password and with the
        server's token.
        """
        name = unquote(cookie.rpartition(".")[0])
        if name not in self.hashes():
            return None
        if not hmac.compare_digest(cookie.encode(), self._cookie(name).encode()):
            return None
        return name

    def _cookie(self, name: str) -> str:
        content = f"{name}\n{self.hashes()[name]}"
        signature = hmac.digest(self._secret, content.encode(), "sha256").hex()
        return f"{quote(name, safe='')}.{signature}"


class Attempts:
    """Wrong passwords by name and address, each of which makes the next try of the same pair wait
    longer.
    """

    def __init__(self) -> None:
        # (name, address) -> number of wrong passwords, and time of the last one
        self._wrong: dict[tuple[str, str], tuple[int, float]] = {}

    def seconds_to_wait(self, name: str, address: str) -> float:
        """Return for how long a name may not sign in from an address."""
        number, last = self._wrong.get((name, address), (0, 0.0))
        if number < FREE_ATTEMPTS:
            return 0.0
        delay = min(2.0 ** (number - FREE_ATTEMPTS), MAX_DELAY_SECONDS)
        return max(0.0, last + delay - time.monotonic())

    def add_wrong(self, name: str, address: str) -> None:
        """Count a wrong password."""
        now = time.monotonic()
        number, _ = self._wrong.pop((name, address), (0, now))
        self._wrong[name, address] = (number + 1, now)

        # the oldest are first; what is forgotten makes room
        for pair, (_, last) in list(self._wrong.items()):
            if now - last < MEMORY_SECONDS and len(self._wrong) <= MAX_REMEMBERED:
                break
            del self._wrong[pair]

    def forget(self, name: str, address: str) -> None:
        """Forget the wrong passwords of a pair that has signed in."""
        self._wrong.pop((name, address), None)


def _hash(password: str, salt: str) -> str:
    return hashlib.scrypt(password.encode(), salt=bytes.fromhex(salt), dklen=32, **_COST).hex()

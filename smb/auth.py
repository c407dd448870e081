"""A secret that both ends of a connection prove to know, and that neither sends. No sockets here.

The client sends a nonce, the daemon answers with one of its own. The client then sends the HMAC-SHA256 of
both under the token, and only when that is right, the daemon sends another HMAC of both. Who merely connects
thus gets nothing that a guess could be tried on. Over TLS the daemon's certificate is part of what is signed:
whoever stands in between with a certificate of his own cannot pass the proofs on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from smb import protocol
from smb.errors import NotPermitted, NotSupported, SmbError
from smb.listen import check_folder, default_path

SHORTEST, LONGEST = 16, 4096  # bytes of a token
NONCE = protocol.NONCE
VARIABLE = "SMB_TOKEN_FILE"


class Token:
    """The secret. It shows itself to nobody, not even in a traceback."""

    def __init__(self, secret: bytes, source: str) -> None:
        if not SHORTEST <= len(secret) <= LONGEST:
            raise SmbError(
                f"{source}: {len(secret)} bytes, a token has {SHORTEST} to {LONGEST} "
                "(`smb token FILE` makes one)"
            )
        self._secret = secret
        self.source = source

    def proof(self, role: bytes, client: bytes, daemon: bytes, binding: bytes) -> bytes:
        """What ``role``, b"client" or b"daemon", sends to prove that it has the token.

        client, daemon  the nonces, NONCE bytes each
        binding         what identifies the channel, b"" where nothing does
        """
        assert len(client) == len(daemon) == NONCE
        channel = hashlib.sha256(binding).digest()
        return hmac.digest(self._secret, b"smb 1 " + role + b"\0" + client + daemon + channel, "sha256")

    def __repr__(self) -> str:
        return f"<token of {self.source}>"


def load(given: str | os.PathLike[str] | bytes) -> Token:
    """The token itself, or the one in a file that nobody else can read. Raises SmbError."""
    if isinstance(given, bytes):
        return Token(given, "token")
    path = os.fspath(given)
    source = f"token file {path}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            _check_private(source, status)
            secret = file.read(LONGEST + 3).strip()
    except OSError as error:
        hint = f" (`smb token {path}` makes one)" if isinstance(error, FileNotFoundError) else ""
        raise SmbError(f"{source}: {error.strerror}{hint}") from error
    return Token(secret, source)


def _check_private(source: str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise SmbError(f"{source}: no regular file")
    if status.st_uid not in (os.getuid(), 0):
        raise SmbError(f"{source}: it belongs to user id {status.st_uid}, not to {os.getuid()}")
    if mode & 0o077:
        raise SmbError(
            f"{source}: mode {mode:04o} lets others in, 0600 is needed (`chmod 600` it if nobody has "
            "read it, else make another with `smb token FILE`)"
        )


def make(path: str | os.PathLike[str]) -> None:
    """Write a new token of 256 bits into a new file of mode 0600. Raises SmbError; nothing is replaced."""
    path = os.fspath(path)
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise SmbError(f"{path} exists already; it was left alone") from error
    except OSError as error:
        raise SmbError(f"cannot write {path}: {error.strerror}") from error
    try:
        with open(number, "w") as file:
            os.fchmod(number, 0o600)  # an odd umask takes too much away
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(number)
    except OSError as error:
        os.unlink(path)
        raise SmbError(f"cannot write {path}: {error.strerror}") from error


# The user's own token, for addresses of this host ----------------------------------------------------------


def own_path() -> Path:
    """Where a daemon on loopback leaves the token that it made for its own user."""
    return default_path().parent / "token"


class OwnToken:
    """The user's own token on this host, made when it is missing, removed by the last daemon that uses it."""

    def __init__(self) -> None:
        path = own_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(path.parent)
        deadline = time.monotonic() + 5.0
        while True:
            with contextlib.suppress(FileNotFoundError):
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                fcntl.flock(self._file, fcntl.LOCK_SH)
                if os.fstat(self._file).st_nlink:
                    break
                os.close(self._file)  # its last daemon has just removed it
            self._make(path)
            if time.monotonic() > deadline:
                raise SmbError(f"cannot keep {path}: others remove it")
        self._path, self._pid, self._closed = path, os.getpid(), False
        try:
            self.token = load(path)
        except BaseException:
            os.close(self._file)
            raise

    @staticmethod
    def _make(path: Path) -> None:
        """The name appears with the whole content, whoever else makes one now."""
        new = path.with_name(f"token-{secrets.token_hex(8)}")
        make(new)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
        finally:
            new.unlink()

    def close(self) -> None:
        """Twice is fine; a forked child's does nothing to the file."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # else two that end at once refuse each other
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while another daemon has it
                if os.fstat(self._file).st_nlink:
                    self._path.unlink()
        os.close(self._file)


# A client's half -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Credential:
    """A client's token. ``demanded``: it was asked to use it, and speaks to nobody who cannot prove it."""

    token: Token
    demanded: bool


def credential(given: str | os.PathLike[str] | bytes | None, peer: str) -> Credential | None:
    """What a client proves itself with to the host at the address ``peer``.

    The token it was given; else that of $SMB_TOKEN_FILE; else on this host the user's own; else None.
    """
    given = given or os.environ.get(VARIABLE) or None
    if given:
        return Credential(load(given), True)
    if not loopback(peer):
        return None
    try:
        check_folder(own_path().parent)
        return Credential(load(own_path()), False) if own_path().exists() else None
    except (OSError, SmbError):
        return None  # no daemon of this user has made one


def introduce(request: Callable[[object], Any], have: Credential, binding: bytes = b"") -> None:
    """Prove to the daemon that we have the token, and have it prove the same.

    ``request`` sends one record and gives its reply. Raises NotPermitted when either proof fails.
    """
    mine = os.urandom(NONCE)
    try:
        theirs: protocol.Challenged = request(protocol.Challenge(mine))
    except NotSupported as error:
        if have.demanded:
            raise NotPermitted(f"{error}, so it cannot prove that it has ours") from error
        return
    check_nonce(theirs.nonce)
    proof = have.token.proof(b"client", mine, theirs.nonce, binding)
    try:
        answer: protocol.Proved = request(protocol.Prove(proof))
    except NotPermitted as error:
        raise NotPermitted(f"{error} ({have.token.source})") from error
    if not hmac.compare_digest(answer.proof, have.token.proof(b"daemon", mine, theirs.nonce, binding)):
        raise NotPermitted(f"the daemon did not prove that it has the token of {have.token.source}")


def check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE:
        raise NotPermitted(f"a nonce of {len(nonce)} bytes, {NONCE} are needed")


# The daemon's half: how often one may guess ----------------------------------------------------------------


def loopback(address: str) -> bool:
    """Whether a numeric address is this host's own alone."""
    try:
        return _plain(address).is_loopback
    except ValueError:
        return False


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def network(address: str) -> str:
    """Whom to hold responsible: an IPv4 address, or the /64 that an IPv6 host can pick from at will."""
    try:
        ip = _plain(address)
    except ValueError:
        return address
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class Attempt(NamedTuple):
    """What became of a proof: right, wrong, or with ``wait`` > 0 not looked at before so many seconds."""

    right: bool
    wait: float
    wrong: int  # proofs of this network's, lately


@dataclass
class _Record:
    wrong: int = 0
    last: float = 0.0
    next: float = 0.0


class Guard:
    """Looks at proofs, more and more slowly the more wrong ones came from one network, and in all.

    The first FREE wrong ones of a network cost nothing, each further one doubles the wait up to SLOWEST.
    From OVERALL wrong ones a minute on, networks that never proved anything share one look every SHARED
    seconds; those that did are not held up by what others do.
    """

    FREE, FIRST, SLOWEST, QUIET = 5, 0.5, 8.0, 600.0
    OVERALL, SHARED = 120, 0.1
    REMEMBERED = 4096  # networks

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: OrderedDict[str, _Record] = OrderedDict()  # of those that were wrong, latest last
        self._proved: OrderedDict[str, None] = OrderedDict()
        self._wrong, self._since, self._next = 0, 0.0, 0.0  # overall, in this minute

    def attempt(self, address: str, proves: Callable[[], bool]) -> Attempt:
        """Look at a proof, unless this network has to wait. Looking and counting are one step."""
        who = network(address)
        with self._lock:
            now = self._clock()
            record = self._records.get(who)
            if record is not None and now - record.last > self.QUIET:
                record = None
            wait = max(record.next - now if record else 0.0, self._crowded(who, now))
            if wait > 0:
                return Attempt(False, wait, record.wrong if record else 0)
            if proves():
                self._remember(self._proved, who, None)
                return Attempt(True, 0.0, record.wrong if record else 0)
            record = record or _Record()
            record.wrong += 1
            record.last = now
            record.next = now + self._pause(record.wrong)
            self._remember(self._records, who, record)
            self._wrong += 1
            return Attempt(False, 0.0, record.wrong)

    def _pause(self, wrong: int) -> float:
        over = wrong - self.FREE
        return min(self.SLOWEST, self.FIRST * 2.0 ** min(over, 10)) if over >= 0 else 0.0

    def _crowded(self, who: str, now: float) -> float:
        """The wait that others' wrong proofs cost; one look is given away when it is 0."""
        if now - self._since > 60.0:
            self._wrong, self._since = 0, now
        if self._wrong < self.OVERALL or who in self._proved:
            return 0.0
        wait = self._next - now
        if wait <= 0:
            self._next = now + self.SHARED
        return wait

    def _remember(self, table: OrderedDict[str, Any], who: str, value: Any) -> None:
        table[who] = value
        table.move_to_end(who)
        while len(table) > self.REMEMBERED:
            table.popitem(last=False)

"""Certificates for TLS tests, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from smb.tls import Tls

REQUEST = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class Authority:
    """A self-signed authority, and what it signed, in one folder."""

    folder: Path
    name: str

    @property
    def ca(self) -> Path:
        return self.folder / f"{self.name}.pem"

    @property
    def ca_key(self) -> Path:
        return self.folder / f"{self.name}.key"

    @classmethod
    def make(cls, folder: Path, name: str = "ca") -> Authority:
        made = cls(folder, name)
        _openssl(
            *REQUEST,
            *("-subj", f"/CN={name}", "-keyout", made.ca_key, "-out", made.ca),
        )
        return made

    def sign(self, name: str, names: str = NAMES) -> Tls:
        """A certificate for ``name`` and its key; this authority is what its owner trusts."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        _openssl(
            *REQUEST,
            *("-subj", f"/CN={name}", "-addext", names, "-keyout", key, "-out", certificate),
            *("-CA", self.ca, "-CAkey", self.ca_key, "-addext", "basicConstraints=critical,CA:FALSE"),
        )
        return Tls(certificate, key, self.ca)

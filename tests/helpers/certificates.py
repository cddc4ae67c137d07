"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["make_certificate"]


def make_certificate(folder: Path, address: str = "127.0.0.1") -> None:
    """Writes ``cert.pem``, signed by itself for ``address``, and ``key.pem``; skips the test without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=server"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    names = ["-addext", f"subjectAltName=IP:{address}"]
    subprocess.run([openssl, "req", "-x509", *kind, *files, *names], check=True, capture_output=True, timeout=30)

"""Signatures of artifacts: Ed25519 over the bytes of the manifest, which holds the checksums of every other file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.ir.errors import ArtifactError, InputError, extra
from accel.ir.fields import MANIFEST

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = f"{MANIFEST}.sig"
_SIZE = 64  # bytes of a signature
_KEY_BYTES = 1 << 16  # more than any key file has


def sign(folder: Path, key: str | os.PathLike[str]) -> str:
    """Write the signature of an artifact that was checked; gives the fingerprint of the key.

    key: path of a private Ed25519 key as ssh-keygen writes it, or in PEM. Raises InputError and ArtifactError.
    """
    private = _private(Path(key).expanduser())
    beside = folder / f".{SIGNATURE}.{secrets.token_hex(6)}"
    try:
        try:
            beside.write_bytes(private.sign((folder / MANIFEST).read_bytes()))
            os.replace(beside, folder / SIGNATURE)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {folder / SIGNATURE}: {error.strerror}; sign a copy that you can write to"
        ) from error
    return _fingerprint(private.public_key())


def check_signature(folder: Path, manifest: bytes, key: str | os.PathLike[str]) -> str:
    """Whether these bytes of the manifest were signed with the key; gives its fingerprint.

    key: path of a public Ed25519 key as ssh-keygen writes it, or in PEM. Raises InputError, and ArtifactError where
    the artifact is not signed with it.
    """
    path = Path(key).expanduser()
    public, file = _public(path), folder / SIGNATURE
    from cryptography.exceptions import InvalidSignature

    if not file.is_file():
        raise ArtifactError(
            f"{folder} is not signed: it has no {SIGNATURE}. Do not trust it, or sign it: "
            f"accel-compile sign {folder} --key KEY"
        )
    try:
        public.verify(_beginning(file, _SIZE + 1), manifest)
    except (InvalidSignature, OSError) as error:
        raise ArtifactError(
            f"{folder}: {MANIFEST} is not signed with the key {path}; do not trust it, or give the key of who built it"
        ) from error
    return _fingerprint(public)


def _private(path: Path) -> Ed25519PrivateKey:
    serialization, ed25519 = _library()
    data = _read(path)
    if b"PUBLIC KEY" in data or data.startswith(b"ssh-"):
        raise InputError(f"{path} is a public key; sign with the private one, which lies beside it")
    loads = (serialization.load_ssh_private_key, serialization.load_pem_private_key)
    try:
        found = _loaded([partial(load, data, password=None) for load in loads])
    except _Locked:
        raise InputError(
            f"{path} needs a passphrase; sign with a copy that has none: cp {path} COPY, then "
            "ssh-keygen -p -N '' -f COPY"
        ) from None
    if found is None:
        raise InputError(f"{path} is not a private key; make one: ssh-keygen -t ed25519 -f KEY")
    return _ed25519(path, found, ed25519.Ed25519PrivateKey)


def _public(path: Path) -> Ed25519PublicKey:
    serialization, ed25519 = _library()
    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise InputError(f"{path} is a private key; give the public one, which lies beside it")
    loads = (serialization.load_ssh_public_key, serialization.load_pem_public_key)
    found = _loaded([partial(load, data) for load in loads])
    if found is None:
        raise InputError(f"{path} is not a public key; give KEY.pub of ssh-keygen, or a PEM file")
    return _ed25519(path, found, ed25519.Ed25519PublicKey)


class _Locked(Exception):
    """A key that a passphrase protects."""


def _loaded(loads: list[Callable[[], Any]]) -> Any:
    """What the first that knows the format finds; None where none does. Raises _Locked."""
    from cryptography.exceptions import UnsupportedAlgorithm

    for load in loads:
        try:
            return load()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if "password" in str(error).lower():
                raise _Locked from None
    return None


def _ed25519(path: Path, key: Any, kind: Any) -> Any:
    if not isinstance(key, kind):
        raise InputError(f"{path} is no Ed25519 key; make one: ssh-keygen -t ed25519 -f KEY")
    return key


def _read(path: Path) -> bytes:
    """The beginning of a key file."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the key's file")
    try:
        return _beginning(path, _KEY_BYTES)
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist; make a key: ssh-keygen -t ed25519 -f {path}"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give another key") from None


def _beginning(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _fingerprint(key: Ed25519PublicKey) -> str:
    """As `ssh-keygen -l` shows it."""
    import base64
    import hashlib

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _library() -> tuple[Any, Any]:
    """Of `cryptography`: its readers of keys, and Ed25519."""
    with extra("sign"):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return serialization, ed25519

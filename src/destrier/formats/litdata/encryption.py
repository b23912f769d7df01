"""Ciphers of encrypted datasets: a password, and the file that LitData's ``save()`` wrote."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from destrier.errors import ArgumentError, MissingDependencyError, SourceError
from destrier.files import Store

__all__ = ["Cipher", "open_cipher"]

_ITERATIONS = 480_000
_MOST_KEY_BYTES = 1 << 20


@dataclass(frozen=True)
class Cipher:
    """Decrypts one unit: a sample, or a chunk as a whole.

    Attributes:
        algorithm: ``"fernet"`` or ``"rsa"``.
        key: For Fernet the salt, for RSA the private key as PEM.
        password: Never shown.
    """

    algorithm: str
    key: bytes = field(repr=False)
    password: str | None = field(repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return Cipher, (self.algorithm, self.key, self.password)

    @cached_property
    def opened(self) -> Any:
        """What decrypts.

        Raises:
            ArgumentError: If the password does not open the private key.
            MissingDependencyError: If cryptography is not installed.
        """
        try:
            from cryptography.fernet import Fernet
            from cryptography.hazmat.primitives import serialization
        except ImportError:
            raise MissingDependencyError(
                "this dataset is encrypted; decrypting it needs cryptography: "
                "pip install '.[crypt]' in a clone"
            ) from None
        password = self.password.encode() if self.password else None
        if self.algorithm == "fernet":
            derived = hashlib.pbkdf2_hmac("sha256", password or b"", self.key, _ITERATIONS, 32)
            return Fernet(base64.urlsafe_b64encode(derived))
        try:
            return serialization.load_pem_private_key(self.key, password=password)
        except (ValueError, TypeError):
            raise ArgumentError(
                "the private key in key_file cannot be opened: password= is wrong, or missing"
            ) from None

    def decrypt(self, data: bytes) -> bytes:
        """Decrypt.

        Raises:
            ValueError: If the password is wrong or the data are damaged.
        """
        opened = self.opened
        if self.algorithm == "fernet":
            from cryptography.fernet import InvalidToken

            try:
                return bytes(opened.decrypt(data))
            except InvalidToken:
                raise ValueError(
                    "cannot be decrypted: the password, or the salt in key_file, is wrong, or the "
                    "data are damaged"
                ) from None
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), None)
        try:
            return bytes(opened.decrypt(data, oaep))
        except ValueError:
            raise ValueError(
                "cannot be decrypted: the private key in key_file is another one, or the data are "
                "damaged"
            ) from None


def open_cipher(
    algorithm: str, level: str, password: str | None, key_file: str | None, shown: str
) -> Cipher:
    """Make the cipher of a dataset.

    Args:
        algorithm: As the index names it.
        level: As the index names it.
        password: The user's.
        key_file: What ``FernetEncryption.save()`` or ``RSAEncryption.save()`` wrote, or a private
            key as PEM.
        shown: The dataset, for messages.

    Raises:
        ArgumentError: If one of them is missing, or belongs to another kind of encryption.
        SourceError: If the key file or the encryption is not known.
    """
    if algorithm not in ("fernet", "rsa") or level not in ("sample", "chunk"):
        raise SourceError(
            f"{shown} is encrypted with {algorithm!r} at level {level!r}; known are fernet and "
            "rsa, at sample and chunk"
        )
    needs = "password= and key_file=" if algorithm == "fernet" else "key_file="
    if key_file is None or (algorithm == "fernet" and password is None):
        raise ArgumentError(
            f"{shown} is encrypted with {algorithm}: pass {needs} (the file that litdata's "
            "encryption.save() wrote)"
        )
    store = Store(key_file)
    entry = store.stat()
    if entry is None or entry.size > _MOST_KEY_BYTES:
        raise ArgumentError(f"key_file {store.shown} is not a file with a key")
    text = store.read().to_pybytes()
    if text.lstrip().startswith(b"-----BEGIN"):
        if algorithm != "rsa":
            raise ArgumentError(f"key_file {store.shown} is an RSA key, {shown} needs fernet's")
        return _checked(Cipher("rsa", text, password))
    try:
        state = json.loads(text)
        stored_level = state["level"]
        if algorithm == "fernet":
            key = base64.urlsafe_b64decode(state["salt"])
        else:
            key = state["private_key"].encode()
            password = state.get("password") if password is None else password
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        raise ArgumentError(
            f"key_file {store.shown} is not what litdata's {algorithm} encryption saves"
        ) from None
    if stored_level != level:
        raise ArgumentError(
            f"key_file {store.shown} is for level {stored_level!r}, but {shown} is encrypted at "
            f"level {level!r}"
        )
    return _checked(Cipher(algorithm, key, password))


def _checked(cipher: Cipher) -> Cipher:
    _ = cipher.opened
    return cipher

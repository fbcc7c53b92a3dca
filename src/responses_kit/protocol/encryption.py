"""Encrypted payloads that clients carry for the server and can neither read nor change.

A payload is encrypted with AES-256-GCM under a key derived from a secret of the kit. Its kind and owner are
authenticated with it, so that it can be decrypted only for the same kind and owner. The form is
``rk1.<key>.<payload>``; the key's id allows secrets to be rotated while earlier payloads stay readable.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets as randomness
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import ConfigurationError, InvalidRequest
from ..schema.base import replace_surrogates

__all__ = ["Encryptor"]

_PREFIX: Final = "rk1"
_NONCE_BYTES: Final = 12
_MIN_SECRET_LENGTH: Final = 16


class Encryptor:
    """Encrypts and decrypts payloads.

    Args:
        secrets: Secret texts of at least 16 characters. The first one encrypts, all decrypt; to rotate, insert the new
            secret at the front. Without secrets a random one is generated, and its payloads cannot be decrypted after
            a restart or in another process.

    Attributes:
        secrets: The given secrets, or the generated one.

    Raises:
        ConfigurationError: A secret is too short.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        if isinstance(secrets, str) or not all(isinstance(secret, str) for secret in secrets):
            raise ConfigurationError("'secrets' must be a list of str, such as secrets=[\"…\"].")
        if any(len(secret) < _MIN_SECRET_LENGTH for secret in secrets):
            raise ConfigurationError(
                f"Each of 'secrets' must have at least {_MIN_SECRET_LENGTH} characters. Generate one with "
                "python -c 'import secrets; print(secrets.token_hex())'."
            )
        self.secrets = list(secrets) or [randomness.token_hex()]
        self._keys = dict(map(_derive_key, self.secrets))

    def encrypt(self, text: str, *, kind: str, owner: str) -> str:
        """Return the encrypted payload of a text.

        Args:
            text: The plain text.
            kind: The payload's purpose, such as "reasoning".
            owner: The only owner that can have it decrypted.
        """
        name, cipher = next(iter(self._keys.items()))
        nonce = os.urandom(_NONCE_BYTES)
        payload = nonce + cipher.encrypt(nonce, replace_surrogates(text).encode(), _associated_data(kind, owner))
        return f"{_PREFIX}.{name}.{base64.urlsafe_b64encode(payload).decode()}"

    def decrypt(self, payload: str, *, kind: str, owner: str, param: str) -> str | None:
        """Return the text of a payload, or None for a payload of another kind of server.

        Args:
            payload: The payload as the client sent it.
            kind: The expected purpose.
            owner: The expected owner.
            param: The payload's path in the request, for the error.

        Raises:
            InvalidRequest: The payload was changed, belongs to another owner or purpose, or its secret is unknown.
        """
        prefix, _, rest = payload.partition(".")
        if prefix != _PREFIX:
            return None
        name, _, encoded = rest.partition(".")
        try:
            data = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True)
            nonce, ciphertext = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            return self._keys[name].decrypt(nonce, ciphertext, _associated_data(kind, owner)).decode()
        except (KeyError, InvalidTag, binascii.Error, ValueError):
            raise InvalidRequest(
                f"The encrypted content in '{param}' cannot be decrypted. Send the conversation without it.",
                param=param,
                code="invalid_encrypted_content",
            ) from None


def _derive_key(secret: str) -> tuple[str, AESGCM]:
    """Return the id of the secret's key, and its cipher."""
    hkdf = HKDF(algorithm=SHA256(), length=36, salt=None, info=b"responses-kit encryption 1")
    material = hkdf.derive(secret.encode())
    return material[32:].hex(), AESGCM(material[:32])


def _associated_data(kind: str, owner: str) -> bytes:
    return f"{kind}\0{owner}".encode("utf-8", "surrogatepass")

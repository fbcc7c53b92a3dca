"""Sealed payloads: what a client carries for the server, and can neither read nor change.

A payload is encrypted and authenticated with AES-256-GCM under a key derived from the kit's secret. What it is for and
whose it is are authenticated with it, so it opens for its owner alone, and for nothing else. It looks like
``rk1.<key>.<payload>``: the key is named, so that secrets can be replaced while old payloads still open.
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

_MARK: Final = "rk1"
_NONCE: Final = 12
_SHORTEST: Final = 16


class Encryptor:
    """Seals and opens payloads.

    Args:
        secrets: Texts that nobody else knows, of 16 characters or more. The first one seals, all of them open: to
            replace a secret, put the new one in front. Without any, a random one is made: what it sealed cannot be
            opened after a restart, or in another process.

    Attributes:
        secrets: Those that it was given, or the one that it has made.

    Raises:
        ConfigurationError: A secret is too short.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        if isinstance(secrets, str) or not all(isinstance(secret, str) for secret in secrets):
            raise ConfigurationError('secrets is a list of str, and not of bytes, such as secrets=["…"]')
        if any(len(secret) < _SHORTEST for secret in secrets):
            raise ConfigurationError(
                f"a secret has at least {_SHORTEST} characters; python -c 'import secrets; "
                "print(secrets.token_hex())' makes a good one"
            )
        self.secrets = list(secrets) or [randomness.token_hex()]
        self._keys = dict(map(_derive, self.secrets))

    def encrypt(self, text: str, *, kind: str, owner: str) -> str:
        """The sealed text.

        Args:
            text: What nobody else may read.
            kind: What it is for, such as "reasoning".
            owner: Whose it is.
        """
        name, cipher = next(iter(self._keys.items()))
        nonce = os.urandom(_NONCE)
        payload = nonce + cipher.encrypt(nonce, replace_surrogates(text).encode(), _bound_to(kind, owner))
        return f"{_MARK}.{name}.{base64.urlsafe_b64encode(payload).decode()}"

    def decrypt(self, sealed: str, *, kind: str, owner: str, param: str) -> str | None:
        """The text in a payload, or None if no kit has sealed it: other servers have payloads of their own.

        Args:
            sealed: The payload as the client sent it.
            kind: What it has to be for.
            owner: Whose it has to be.
            param: Where it stands in the request, for the error.

        Raises:
            InvalidRequest: It was changed, is another's, or was sealed with a secret that is not here.
        """
        mark, _, rest = sealed.partition(".")
        if mark != _MARK:
            return None
        name, _, encoded = rest.partition(".")
        try:
            payload = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True)
            text = self._keys[name].decrypt(payload[:_NONCE], payload[_NONCE:], _bound_to(kind, owner))
            return text.decode()
        except (KeyError, InvalidTag, binascii.Error, ValueError):
            raise InvalidRequest(
                "The encrypted content cannot be opened here. Send the conversation without it.",
                param=param,
                code="invalid_encrypted_content",
            ) from None


def _derive(secret: str) -> tuple[str, AESGCM]:
    material = HKDF(algorithm=SHA256(), length=36, salt=None, info=b"responses-kit seal 1").derive(secret.encode())
    return material[32:].hex(), AESGCM(material[:32])


def _bound_to(kind: str, owner: str) -> bytes:
    return f"{kind}\0{owner}".encode("utf-8", "surrogatepass")

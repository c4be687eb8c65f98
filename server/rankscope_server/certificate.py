"""The certificate that HTTPS is spoken with: a new one is taken without a restart."""

from __future__ import annotations

import logging
import os
import ssl
from typing import TypeAlias

RENEW_SECONDS = 10

_Files: TypeAlias = "tuple[tuple[int, int, int], ...]"
log = logging.getLogger(__name__)


def load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Take a pair of PEM files; an empty `key` is in the file of the certificate.

    Raises OSError (`ssl.SSLError` is one) where they cannot be read, are not of one pair, or the
    key has a password.
    """
    context.load_cert_chain(certificate, key or None, password="")


class Certificate:
    """Watches the files of a pair, which a renewal replaces one after the other."""

    def __init__(self, certificate: str, key: str) -> None:
        self._certificate, self._key = certificate, key
        self._seen = self._files()

    def renew(self, context: ssl.SSLContext) -> None:
        """Take the pair for new connections where its files changed; else the last one stays."""
        found = self._files()
        if found == self._seen:
            return
        self._seen = found
        try:
            # a pair that does not fit leaves half of itself in the context that it was meant for
            load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._certificate, self._key)
            load(context, self._certificate, self._key)
        except OSError as error:
            log.warning(
                "the new certificate %s is not used, the last one is: %s (looks again when a file "
                "changes)", self._certificate, error.args[-1],
            )  # fmt: skip
        else:
            log.info("new connections have the new certificate %s", self._certificate)

    def _files(self) -> _Files:
        """Return what changes when a file is replaced or written to; nothing where one is gone."""
        try:
            stats = [os.stat(path) for path in (self._certificate, self._key) if path]
        except OSError:
            return ()
        return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in stats)

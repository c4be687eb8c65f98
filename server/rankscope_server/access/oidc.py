"""Sign-in with an issuer of OpenID Connect: the code flow with PKCE, from the server's side.

A browser is sent to the issuer with a state, a nonce and the hash of a verifier, and comes back
with a code. The state is good once, in that browser, for ten minutes. The code is traded for an ID
token, whose signature, issuer, audience, times and nonce are checked. Nothing is asked of the
issuer before someone signs in.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from rankscope.address import AddressError
from rankscope.http import Client, HttpAnswer, HttpError
from rankscope_server.access import claims
from rankscope_server.access.claims import Person
from rankscope_server.settings import Settings, SettingsError, is_safe_url

CALLBACK = "/api/v1/session/oidc/callback"
TIMEOUT_SECONDS = 10.0
LEEWAY_SECONDS = 60  # between the clocks of the issuer and of this machine
FRESH_SECONDS = 3_600.0  # what the issuer says of itself is asked for again after that
_KEYS_PAUSE_SECONDS = 10.0  # between two questions for keys that were not there
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384"]  # none with a shared secret
Why: TypeAlias = Literal["expired", "denied", "issuer", "token", "access"]


class OidcError(Exception):
    """No one signed in; `why` is a word for the page, the message for the log of the server."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why = why


@dataclass(frozen=True, slots=True)
class Login:
    """A sign-in that was begun."""

    state: str
    nonce: str
    verifier: str


class Issuer:
    """One issuer, from any thread. Raises SettingsError where it cannot be used."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        if importlib.util.find_spec("authlib") is None:
            raise SettingsError("oidc_issuer needs authlib: pip install 'rankscope[server,oidc]'")
        self._settings, self._clock = settings, clock
        self._grants = claims.read(settings)
        self._lock = threading.Lock()  # one asks, the others wait for what it hears
        self._metadata: tuple[float, dict[str, Any]] | None = None
        self._keys: tuple[float, dict[str, Any]] | None = None

    @property
    def num_grants(self) -> int:
        """Return how many grants the file has."""
        return len(self._grants)

    @property
    def mark(self) -> str:
        """Return what changes with the rules: sessions that began under others end."""
        rules = [self._settings.oidc_issuer, self._settings.oidc_client_id]
        text = json.dumps([*rules, *map(repr, self._grants)])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def callback(self) -> str:
        """Return the address to which the issuer sends people back."""
        return self._settings.public_url.rstrip("/") + CALLBACK

    def begin(self) -> tuple[str, Login]:
        """Return the address to send a browser to. Raises OidcError where no issuer answers."""
        from authlib.oauth2.rfc7636 import create_s256_code_challenge

        login = Login(*(secrets.token_urlsafe(32) for _ in range(3)))
        query = urlencode(
            {
                "response_type": "code", "client_id": self._settings.oidc_client_id,
                "redirect_uri": self.callback, "scope": self._settings.oidc_scopes,
                "state": login.state, "nonce": login.nonce, "code_challenge_method": "S256",
                "code_challenge": create_s256_code_challenge(login.verifier),
            }
        )  # fmt: skip
        address = self._of_issuer()["authorization_endpoint"]
        return f"{address}{'&' if urlsplit(address).query else '?'}{query}", login

    def finish(self, code: str, login: Login) -> Person:
        """Trade a code for who someone is. Raises OidcError."""
        answer = self._trade(code, login)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise OidcError("token", "the issuer gave no ID token; is openid among the scopes?")
        return claims.person_of(self._grants, self._verified(token, answer, login))

    def _trade(self, code: str, login: Login) -> dict[str, Any]:
        fields = {
            "grant_type": "authorization_code", "code": code, "redirect_uri": self.callback,
            "code_verifier": login.verifier, "client_id": self._settings.oidc_client_id,
        }  # fmt: skip
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        secret, metadata = self._settings.oidc_client_secret, self._of_issuer()
        if secret:
            ways = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
            if "client_secret_basic" in ways:
                pair = f"{quote(fields.pop('client_id'), safe='')}:{quote(secret, safe='')}"
                headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            else:
                fields["client_secret"] = secret
        answer = _ask(metadata["token_endpoint"], urlencode(fields).encode(), headers)
        if answer.status != 200:
            said = str(answer.fields.get("error", ""))[:80]
            raise OidcError("token", f"the issuer refused the code: {answer.status} {said}")
        return answer.fields

    def _verified(self, token: str, answer: Mapping[str, Any], login: Login) -> dict[str, Any]:
        """Return the claims of an ID token. Raises OidcError where it is not for this sign-in."""
        from authlib.oidc.core import CodeIDToken
        from joserfc.errors import JoseError

        try:
            decoded = self._decoded(token)
            found = CodeIDToken(
                decoded.claims,
                decoded.header,
                {
                    "iss": {"essential": True, "value": self._settings.oidc_issuer},
                    "aud": {"essential": True, "value": self._settings.oidc_client_id},
                },
                {
                    "nonce": login.nonce, "client_id": self._settings.oidc_client_id,
                    "access_token": answer.get("access_token"),
                },
            )  # fmt: skip
            found.validate(now=int(self._clock()), leeway=LEEWAY_SECONDS)
        except (JoseError, ValueError, TypeError) as error:
            raise OidcError("token", f"the ID token is not valid: {error}") from error
        return dict(found)

    def _decoded(self, token: str) -> Any:
        """Return a token whose signature is right; keys that are new are asked for once."""
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        keys: Any
        asked_s, keys = self._published_keys()
        try:
            return jwt.decode(token, KeySet.import_key_set(keys), algorithms=_ALGORITHMS)
        except (JoseError, ValueError):
            if self._clock() - asked_s < _KEYS_PAUSE_SECONDS:
                raise
        self._keys = None
        _, keys = self._published_keys()
        return jwt.decode(token, KeySet.import_key_set(keys), algorithms=_ALGORITHMS)

    def _of_issuer(self) -> dict[str, Any]:
        """Return what the issuer says of itself. Raises OidcError."""
        with self._lock:
            if self._metadata is None or self._clock() - self._metadata[0] > FRESH_SECONDS:
                issuer = self._settings.oidc_issuer
                found = _json(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
                if found.get("issuer") != issuer:
                    said = str(found.get("issuer"))[:200]
                    raise OidcError("issuer", f"it names itself {said!r}, not {issuer!r}")
                for name in _ENDPOINTS:
                    if not is_safe_url(str(found.get(name, ""))):
                        raise OidcError("issuer", f"its {name} is no address of HTTPS")
                self._metadata = (self._clock(), found)
            return self._metadata[1]

    def _published_keys(self) -> tuple[float, dict[str, Any]]:
        """Return when the issuer's keys were asked for, and the keys. Raises OidcError."""
        address = self._of_issuer()["jwks_uri"]
        with self._lock:
            if self._keys is None or self._clock() - self._keys[0] > FRESH_SECONDS:
                found = _json(address)
                if not isinstance(found.get("keys"), list):
                    raise OidcError("issuer", f"{address} answers without a list of keys")
                self._keys = (self._clock(), found)
            return self._keys


def issuer_of(settings: Settings) -> Issuer | None:
    """Return the issuer to sign in with; None where none is set. Raises SettingsError."""
    if settings.oidc_issuer:
        return Issuer(settings)
    claims.read(settings)
    return None


def _json(url: str) -> dict[str, Any]:
    answer = _ask(url)
    if answer.status != 200 or not answer.fields:
        raise OidcError("issuer", f"{url} answers {answer.status} without an object of JSON")
    return answer.fields


def _ask(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """Return an answer of the issuer. Raises OidcError."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    accept = {"Accept": "application/json"} | dict(headers or {})
    try:
        client = Client(f"{parts.scheme}://{parts.netloc}", timeout_seconds=TIMEOUT_SECONDS)
        try:
            return client.request("GET" if body is None else "POST", path or "/", body, accept)
        finally:
            client.close()
    except (HttpError, AddressError) as error:
        raise OidcError("issuer", f"{url} does not answer: {error}") from error

"""A small issuer of OpenID Connect: discovery, sign-in without asking, tokens, keys.

It does what a real one does: it knows its clients and their redirect addresses, takes a code once,
wants the verifier that fits the challenge, and signs. `changes` makes it say something false.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "rankscope", "a secret: with/signs"


@dataclass
class Issuer:
    """What it knows, and what was asked of it."""

    url: str = ""
    person: dict[str, Any] = field(default_factory=lambda: {"sub": "u1"})
    changes: dict[str, Any] = field(default_factory=dict)  # of the ID token
    named: str = ""  # what it calls itself, if not its address
    denies: str = ""  # an error in place of a code
    algorithm: str = "RS256"
    key: RSAKey = field(default_factory=lambda: new_key("one"))
    published: list[RSAKey] = field(default_factory=list)  # none: `key`
    has_keys: bool = True
    asked: list[str] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.named or self.url, "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token", "jwks_uri": f"{self.url}/keys",
            "response_types_supported": ["code"], "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
        }  # fmt: skip

    def keys(self) -> dict[str, Any]:
        if not self.has_keys:
            return {"error": "busy"}
        keys = self.published or [self.key]
        return {"keys": [key.as_dict(private=False) for key in keys]}

    def authorize(self, query: dict[str, str]) -> str:
        """Return where the browser is sent back to."""
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        assert query["redirect_uri"].endswith("/api/v1/session/oidc/callback")
        if self.denies:
            answer = {"error": self.denies, "state": query["state"]}
        else:
            code = secrets.token_urlsafe(16)
            self.codes[code] = query
            answer = {"code": code, "state": query["state"]}
        return f"{query['redirect_uri']}?{urlencode(answer)}"

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """Trade a code, once, for tokens."""
        given = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        client, _, secret = given.partition(":")
        if (unquote(client), unquote(secret)) != (CLIENT, SECRET):
            return 401, {"error": "invalid_client"}
        asked = self.codes.pop(form["code"], None)
        if asked is None or asked["redirect_uri"] != form["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        if create_s256_code_challenge(form["code_verifier"]) != asked["code_challenge"]:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {
            "iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"],
        }  # fmt: skip
        claims |= self.person | self.changes
        claims = {name: value for name, value in claims.items() if value is not None}
        return 200, {
            "access_token": "a", "token_type": "Bearer", "id_token": self.signed(claims),
        }  # fmt: skip

    def signed(self, claims: dict[str, Any]) -> str:
        if self.algorithm == "none":
            parts = ({"alg": "none", "kid": self.key.kid}, claims)
            coded = (base64.urlsafe_b64encode(json.dumps(part).encode()) for part in parts)
            return ".".join(part.decode().rstrip("=") for part in coded) + "."
        return jwt.encode({"alg": self.algorithm, "kid": self.key.kid}, claims, self.key)


def new_key(kid: str) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": kid, "use": "sig"}, auto_kid=False)


@contextlib.contextmanager
def issuing() -> Iterator[Issuer]:
    """Run an issuer on loopback."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            issuer.asked.append(parts.path)
            if parts.path == "/authorize":
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self.send_response(302)
                self.send_header("Location", issuer.authorize(query))
                self.end_headers()
            elif parts.path == "/.well-known/openid-configuration":
                self.reply(200, issuer.discovery())
            elif parts.path == "/keys":
                self.reply(200, issuer.keys())
            else:
                self.reply(404, {})

        def do_POST(self) -> None:
            issuer.asked.append(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self.reply(*issuer.token(form, self.headers.get("Authorization", "")))

        def reply(self, status: int, fields: dict[str, Any]) -> None:
            body = json.dumps(fields).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

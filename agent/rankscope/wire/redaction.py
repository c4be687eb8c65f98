"""Secrets are taken out of every text before it leaves the process that it was said in.

`RULES` is the whole list: docs/privacy.md shows it, and each rule carries the examples that its
test needs. A rule's pattern runs only where one of its hints is in the text, so that a line
without secrets costs a few microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankscope.wire.assigned_secrets import ASSIGNED, HIDDEN, OPTION, hide_assigned, hide_options
from rankscope.wire.secret_names import holds_secret, is_plain

MAX_TEXT = 32 * 1024  # characters kept of one message or traceback
_MAX_READ = 4 * MAX_TEXT  # characters of one text that are looked through at all


@dataclass(frozen=True)
class Rule:
    """One kind of secret. `hints` are in lower case; one of them is in every text that matches."""

    name: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    replacement: str | Callable[[str], str]  # by the pattern, or of the whole text
    example: str  # a text with this secret
    secret: str  # the part of it that must go
    harmless: str  # what looks alike and stays

    def apply(self, text: str) -> str:
        """Return a text without this kind of secret."""
        if isinstance(self.replacement, str):
            return self.pattern.sub(self.replacement, text)
        return self.replacement(text)


_VALUE = r"[^\s\"',;&]+"

# parts of the names that hold a secret
_NAMED = (
    "pass",
    "pwd",
    "secret",
    "cred",
    "token",
    "key",
    "auth",
    "cookie",
    "jwt",
    "bearer",
    "signature",
    "webhook",
    "dsn",
    "otp",
)
RULES: tuple[Rule, ...] = (
    Rule(
        "private key block", ("private key",),
        re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY"
                   r"(?: BLOCK)?-----|\Z)", re.DOTALL),
        "*** private key ***",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc/+\n-----END RSA PRIVATE KEY----- after",
        "MIIEabc", "-----BEGIN CERTIFICATE-----\nMIIEabc\n-----END CERTIFICATE-----",
    ),
    Rule(
        "Authorization header", ("authorization", "api-key"),
        re.compile(r"(?i)\b((?:proxy-)?authorization|x-api-key|api-key)([\"']?\s*[:=]\s*[\"']?)"
                   r"(?:(?:bearer|basic|token|digest|negotiate)\s+)?" + _VALUE),
        rf"\1\2{HIDDEN}", "Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz",
        "authorization succeeded for user 7",
    ),
    Rule(
        "bearer token", ("bearer ",),
        re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1{HIDDEN}",
        "sent Bearer abcdef012345", "abcdef012345", "the bearer of bad news",
    ),
    Rule(
        "password in a URL", ("://",),
        re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)([^\s/:@]{0,80}):[^\s/@]+@"),
        rf"\1\2:{HIDDEN}@", "postgresql://bob:hunter2@db:5432/x", "hunter2",
        "tcp://host:29500 and http://[::1]:8080/a@b",
    ),
    Rule(
        "token in a URL", ("://",),
        re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)[^\s/:@]{16,}@"), rf"\1{HIDDEN}@",
        "git clone https://abcdefgh12345678@host/x", "abcdefgh12345678",
        "ssh://git@github.com/a/b",
    ),
    Rule(
        "password, secret, token or key that is assigned", _NAMED,
        ASSIGNED, hide_assigned, "db_password = 'hunter2', WANDB_API_KEY=x", "hunter2",
        "password=None, the secretary said: no; tokens=4096 token: 50256 pad_token: <pad> "
        "key: layer.norm.weight token_ids=12ab34cd56",
    ),
    Rule(
        "password, secret, token or key of an option", _NAMED,
        OPTION, hide_options, "train.py --db-password hunter2 --lr 1", "hunter2",
        "train.py --use_auth_token train_2024.csv --sort_key name_2024",
    ),
    Rule(
        "password given to a tool",
        ("sshpass", "docker login", "curl ", "password "),
        re.compile(r"(?i)\b(sshpass\s+-p\s*|docker\s+login\s[^\n]{0,80}?-p\s+|"
                   r"curl\s[^\n]{0,200}?(?:-u|--user)\s+[^\s:/]{1,80}:(?!//)|"
                   r"login\s+\S{1,80}\s+password\s+)(?!\*\*\*)[^\s\"']+"),
        rf"\1{HIDDEN}", "sshpass -p hunter2 ssh node1", "hunter2",
        "docker login -u bob registry; curl -u bob https://x",
    ),
    Rule(
        "AWS access key id", ("akia", "asia", "abia", "acca"),
        re.compile(r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"), HIDDEN,
        "using AKIAIOSFODNN7EXAMPLE now", "AKIAIOSFODNN7EXAMPLE", "region ASIAPACIFIC, AKIAK",
    ),
    Rule(
        "Google API key or OAuth token", ("aiza", "ya29.", "gocspx-"),
        re.compile(r"\bAIza[0-9A-Za-z_-]{35}|\bya29\.[0-9A-Za-z_-]{20,}|\bGOCSPX-[\w-]{20,}"),
        HIDDEN, "key AIzaSyA0123456789abcdefghijklmnopqrstuv ok", "AIzaSyA0123456789",
        "the word AIzawa",
    ),
    Rule(
        "Azure storage key, shared access signature or client secret",
        ("accountkey=", "sig=", "q~"),
        re.compile(r"(?i)\b((?:accountkey|sig)=)[A-Za-z0-9+/=%]{30,}|"
                   r"\b()[\w~.-]{3}\dQ~[\w~.-]{30,}"),
        rf"\1{HIDDEN}", "AccountKey=abcdefghijklmnopqrstuvwxyz0123456789+/==;x", "abcdefghijkl",
        "sig=short",
    ),
    Rule(
        "Hugging Face token", ("hf_",), re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}"), HIDDEN,
        "login hf_abcdefghijklmnopqrstuvwxyz012345678", "hf_abcdefghij", "hf_transfer, hf_hub_url",
    ),
    Rule(
        "OpenAI or Anthropic key", ("sk-",),
        re.compile(r"\bsk-(?=[\w-]*\d)[A-Za-z0-9_-]{20,}"), HIDDEN,
        "sk-proj-abcdefghij0123456789ABCDEF", "abcdefghij0123456789",
        "sk-learn, task-0123456789abcdef0123",
    ),
    Rule(
        "GitHub or GitLab token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
        re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"), HIDDEN,
        "remote ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_abcdefghij", "ghp_short",
    ),
    Rule(
        "Weights & Biases key", ("wandb",),
        re.compile(r"(?i)(wandb\b[^\n]{0,60}?\b(?:login|key)\b[^\n]{0,30}?\s)[0-9a-f]{40}\b|"
                   r"\b()wandb_v\d_\w{40,}"),
        rf"\1{HIDDEN}", "wandb login 0123456789abcdef0123456789abcdef01234567",
        "0123456789abcdef0123", "commit 0123456789abcdef0123456789abcdef01234567",
    ),
    Rule(
        "token of another service",
        ("npm_", "pypi-", "sg.", "_live_", "nvapi-", "gsk_", "dapi", "hvs.", "r8_", "/bot"),
        re.compile(r"\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{40,}|\bSG\.[\w-]{16,}\.[\w-]{30,}|"
                   r"\b[rs]k_live_\w{16,}|\bnvapi-[\w-]{40,}|\bgsk_\w{40,}|\bdapi[0-9a-f]{32}\b|"
                   r"\bhvs\.[\w-]{20,}|\br8_\w{30,}|(?<=/bot)\d{6,}:[\w-]{30,}"),
        HIDDEN, "npm publish with npm_aB3dE6gH9jK2mN5pQ8sT1vW4yZ7aB3dE6gH9", "npm_aB3dE6gH9jK2",
        "npm_config_cache=/tmp pypi-server SG.1 r8_x dapi4",
    ),
    Rule(
        "webhook", ("hooks.slack.com", "/api/webhooks/"),
        re.compile(r"(?i)(hooks\.slack\.com/(?:services|workflows)/|/api/webhooks/)[\w/-]{20,}"),
        rf"\1{HIDDEN}", "https://hooks.slack.com/services/T00000000/B00000000/aB3dE6gH9jK2mN5p",
        "B00000000/aB3dE6gH9jK2", "https://hooks.slack.com/docs and /api/webhooks/list",
    ),
    Rule(
        "Slack token", ("xox",), re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"), HIDDEN,
        "xoxb-123456789012-abcdef", "xoxb-123456789012", "xoxo",
    ),
    Rule(
        "JSON web token", ("eyj",),
        re.compile(r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{5,}"), HIDDEN,
        "got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3", "eyJhbGciOiJIUzI1NiJ9",
        "eyJoke",
    ),
)  # fmt: skip
_ALL_HINTS = tuple(dict.fromkeys(hint for rule in RULES for hint in rule.hints))


def redact(text: str) -> str:
    """Return `text` with every secret of RULES replaced."""
    lowered = text.lower()
    for hint in _ALL_HINTS:
        if hint in lowered:
            break
    else:
        return text
    for rule in RULES:
        if any(hint in lowered for hint in rule.hints):
            text = rule.apply(text)
    return text


def clean(text: str) -> str:
    """Return `text` without secrets and of bounded length."""
    if len(text) > _MAX_READ:  # what is at this cut is gone after the second one
        text = cut(text, _MAX_READ)
    return cut(redact(text))


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text`, shortened in the middle with a mark: both ends of a traceback matter."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


def clean_fields(fields: Mapping[str, str]) -> dict[str, str]:
    """Return fields with the values of secret-looking names hidden and the others redacted."""
    return {
        name: HIDDEN if holds_secret(name) and not is_plain(name, value) else redact(value)
        for name, value in fields.items()
    }

"""Secrets in a text that stand behind a name: `api_key=...`, `"password": "..."`, `--token ...`.

The name decides, by its whole words (`secret_names`), and the look of the value: what is a key or
a token has letters and digits, a count, a vocabulary entry and a path have not. Passwords may be
anything.
"""

from __future__ import annotations

import re

from rankscope.wire.secret_names import holds_secret, is_always_secret, is_plain, words_of

HIDDEN = "***"
_NAME = r"[A-Za-z][\w.-]{0,120}"
# two words of a sentence may be one name: "API key: ..."
ASSIGNED = re.compile(
    rf"(?<![\w.-])((?:[A-Za-z]{{2,20}} )?(?:--?|\+{{1,2}})?{_NAME})"
    r"(\\?[\"']?\s{0,4}[:=]\s{0,4}|\s{1,4}is:?\s{1,4})"
)
OPTION = re.compile(rf"(?<![\w-])(--?{_NAME})(\s{{1,4}})(?=[^\s-])")
# a quoted value up to its closing quote, also of JSON inside a string
_VALUE = r"(\\?\")([^\"\\\n]{1,%s})|(\\?')([^'\\\n]{1,%s})|()([^\s\"',;&]{1,%s})"
_MAX_LOOK = 512  # characters of a value that decide: each name of a long line may have all its rest
_HEAD = re.compile(_VALUE.replace("%s", str(_MAX_LOOK)))
_WHOLE = re.compile(_VALUE.replace("%s", ""))
_STEM = re.compile(
    r"(?i)pass|pwd|secret|cred|token|key|auth|cookie|jwt|bearer|signature|hook|dsn|otp"
)
_HAS_BOTH = re.compile(r"(?=.*\d)(?=.*[A-Za-z])")
_NO_TOKEN = re.compile(
    r"[\d.]+e[+-]?\d|[<\[(]|[\d.,]+(?:[a-zA-Z%/]{1,6})?$"  # 1.2e5, <pad>, 12.3ms
)
_LEAST = 8  # characters of a token; a signature is longer
_LEAST_SIGNATURE = 16


def hide_assigned(text: str) -> str:
    """Return a text with the values hidden that are assigned to names of secrets."""
    return _hide(ASSIGNED, text)


def hide_options(text: str) -> str:
    """Return a text with the values of options hidden whose names are those of secrets."""
    return _hide(OPTION, text)


def _hide(names: re.Pattern[str], text: str) -> str:
    parts: list[str] = []
    done = 0
    for match in names.finditer(text):
        if match.start() < done or not _STEM.search(match.group(1)):
            continue  # inside a value that is hidden, or a name like most
        head = _HEAD.match(text, match.end())
        if head is None:
            continue
        opening, bare = (part for part in head.groups() if part is not None)
        if bare != HIDDEN and _is_secret(match.group(1), bare, is_said=" is" in match.group(2)):
            parts += (text[done : match.end()], opening, HIDDEN)
            whole = _WHOLE.match(text, match.end())
            done = head.end() if whole is None else whole.end()
    return "".join((*parts, text[done:])) if parts else text


def _is_secret(name: str, value: str, *, is_said: bool) -> bool:
    name = name.strip()
    one = name.rpartition(" ")[2]
    if words_of(one)[-1:] == ["signature"]:
        return "-" in one and _is_token(value, _LEAST_SIGNATURE)
    if not (holds_secret(name) or (name != one and is_always_secret(one) and holds_secret(one))):
        return False
    if is_plain(one, value):
        return False
    if is_said:  # "password is required" is a sentence
        return _is_token(value, 6)
    return is_always_secret(one) or _is_token(value, _LEAST)


def _is_token(value: str, least: int) -> bool:
    return len(value) >= least and bool(_HAS_BOTH.match(value)) and not _NO_TOKEN.match(value)

"""Each setting of the server with values that it cannot take, by flag and by environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope_server.cli import EXIT_CANNOT_START, EXIT_USAGE, serve
from rankscope_server.settings import SETTINGS, Setting, Settings, SettingsError, check, parse

BAD = {
    float: ("many", "nan", "inf", "-inf", "-1", "1e400", "1e30"),
    int: ("many", "nan", "inf", "-1", "1.5", "1e3", "9" * 30, "9" * 5000),
    bool: ("enabled", "2", "-1", "nan", "yes please"),
}
BAD_WORDS = {
    "synchronous": ("off", "FULL"),
    "log_level": ("loud", "0"),
    "preflight_networks": ("10.0.0.0/33", "everything"),
    "ready_file": ("/no/such/folder/ready.json",),
}


def bad_values(setting: Setting) -> Iterator[str]:
    yield from BAD.get(type(setting.default), BAD_WORDS.get(setting.name, ()))
    if setting.bounds is not None and setting.bounds[0] > 0:
        yield "0"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_bad_values_are_refused_with_field_and_remedy(setting: Setting) -> None:
    for text in bad_values(setting):
        refused({setting.variable: text}, setting=setting)
        if setting.default is not False:  # a switch takes no value
            refused({}, f"{setting.flag}={text}", setting=setting)


def refused(environ: dict[str, str], *arguments: str, setting: Setting) -> None:
    with pytest.raises(SettingsError) as raised:
        parse(arguments, environ)
    said = str(raised.value)
    assert setting.name in said or (setting.flag if arguments else setting.variable) in said
    assert re.search(r"\b(say|use|set|make it)\b", said)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_ends_of_a_range_are_taken_and_an_empty_variable_is_none(setting: Setting) -> None:
    assert (setting.bounds is not None) == (type(setting.default) in (int, float))
    for value in setting.bounds or ():
        text = str(type(setting.default)(value))
        assert parse([setting.flag, text], {}) == parse([], {setting.variable: text})
    assert parse([], {setting.variable: ""}) == Settings()


def test_the_defaults_are_in_range() -> None:
    check(Settings())


def test_a_value_outside_its_range_is_told_with_the_range() -> None:
    said = (
        r"look_seconds nan is outside 0\.05\.\.86400: set --look-seconds or RANKSCOPE_SERVER_LOOK"
    )
    with pytest.raises(SettingsError, match=said):
        parse(["--look-seconds", "nan"], {})


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--port", "many"), EXIT_USAGE, "--port='many' is not int: say for example 8787\n"),
        (("--database-url", "nonsense"), EXIT_CANNOT_START, "another store with --database-url\n"),
        (
            ("--database-url", "nosuch://x"),
            EXIT_CANNOT_START,
            "another store with --database-url\n",
        ),
        (("--data-dir", "/proc/x"), EXIT_CANNOT_START, "choose another store with --data-dir\n"),
        (("--host", "nosuch.invalid", "--insecure-bind"), EXIT_CANNOT_START, "cannot listen on"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    arguments: tuple[str, ...], code: int, said: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert serve(["--port", "0", "--data-dir", str(tmp_path), *arguments]) == code
    printed = capsys.readouterr().err
    assert printed.startswith("rankscope serve: ")
    assert said in printed
    assert printed.count("\n") == 1

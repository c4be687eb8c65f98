"""Each setting of the server with values that it cannot take, by flag and by environment."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope_server.cli import EXIT_CANNOT_START, EXIT_USAGE, serve
from rankscope_server.settings import (
    SETTINGS,
    ConfigFile,
    Setting,
    Settings,
    SettingsError,
    Source,
    check,
    parse,
    public_value,
    read,
    without_password,
)
from rankscope_server.store.engine import open_engines

BAD = {
    float: ("many", "nan", "inf", "-inf", "-1", "1e400", "1e30"),
    int: ("many", "nan", "inf", "-1", "1.5", "1e3", "9" * 30, "9" * 5000),
    bool: ("enabled", "2", "-1", "nan", "yes please"),
}
BAD_WORDS = {
    "synchronous": ("off", "FULL"),
    "log_level": ("loud", "0"),
    "log_format": ("xml", "JSON"),
    "prices": ("gpu", "gpu=dear", "=3", "gpu=-1"),
    "allowed_hosts": ("http://gpu.example", "a.example,b/c", "a b"),
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


def in_file(tmp_path: Path, text: str, mode: int = 0o600) -> str:
    path = tmp_path / "rankscope.toml"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_secret_out_of_a_file_is_without_its_line_end() -> None:
    assert parse([], {"RANKSCOPE_TOKEN": "abc\n"}).token == "abc"


def test_a_file_comes_after_flags_and_environment(tmp_path: Path) -> None:
    path = in_file(
        tmp_path,
        "port = 1\nlook_seconds = 2\nreplay_hours = 3.5\ninsecure_bind = true\n"
        'allowed_hosts = ["a.example", "b.example"]\ntoken = "a secret"\n',
    )
    environ = {"RANKSCOPE_SERVER_LOOK_SECONDS": "4"}
    found = read(["--config", path, "--port", "3"], environ)
    assert found.settings == Settings(
        port=3, look_seconds=4.0, replay_hours=3.5, insecure_bind=True,
        allowed_hosts="a.example,b.example", token="a secret",
        file=ConfigFile(path=path, environ=environ),
    )  # fmt: skip
    assert found.settings.sources == {
        "port": Source("flag", "--port"),
        "look_seconds": Source("environment", "RANKSCOPE_SERVER_LOOK_SECONDS"),
        **{
            name: Source("file", f"{path}: {name}")
            for name in ("replay_hours", "insecure_bind", "allowed_hosts", "token")
        },
    }
    assert parse([], {"RANKSCOPE_SERVER_CONFIG": path}).port == 1


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_has_a_key_that_is_checked(setting: Setting, tmp_path: Path) -> None:
    odd = "1" if type(setting.default) in (str, bool) else "true"
    for value in ("{}", "[1]", "2020-01-01", odd):
        with pytest.raises(SettingsError, match=rf": {setting.name} = .* say for example"):
            parse(["--config", in_file(tmp_path, f"{setting.name} = {value}\n")], {})
    for text in bad_values(setting):
        path = in_file(tmp_path, f"{setting.name} = '{text}'\n")
        with pytest.raises(SettingsError, match=rf"{setting.name}.*\b(say|use|set|make it)\b"):
            parse(["--config", path], {})


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("prot = 1", 0o600, "prot is no setting; use port"),
        ("a_word_of_ours = 1", 0o600, "is no setting; use one of host, port,"),
        ("port == 1", 0o600, "line 1, column 7"),
        ("port = true", 0o600, "port = True cannot be used; say for example 8787"),
        ("token = 'x'", 0o644, "token can be read by other users; say chmod 600 /"),
        ("\udcff", 0o600, "codec can't decode|Invalid"),
    ],
)
def test_a_bad_file_is_refused_with_key_and_remedy(
    text: str, mode: int, said: str, tmp_path: Path
) -> None:
    path = in_file(tmp_path, "", mode)
    Path(path).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettingsError, match=said):
        parse(["--config", path], {})


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"cannot be read: No such file .* with --config"):
        parse(["--config", "/no/such/file"], {})


def test_check_starts_nothing_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    assert serve(["--check", "--port", "0", "--data-dir", str(folder)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"data_dir +\S+ +--data-dir\n", said)
    assert re.search(r"address .* free\n", said)
    assert said.endswith("will be made\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "setting", [one for one in SETTINGS if list(bad_values(one))], ids=lambda setting: setting.name
)
def test_check_says_of_each_setting_what_cannot_be_used(
    setting: Setting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in bad_values(setting):
        monkeypatch.setenv(setting.variable, text)
        assert serve(["--check"]) == EXIT_USAGE, text
        said = capsys.readouterr().err
        assert said.startswith("rankscope serve: ")
        assert setting.name in said or setting.variable in said
        assert said.count("\n") == 1


def test_check_sees_a_server_that_runs_and_the_version_of_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine in open_engines(f"sqlite:///{tmp_path / 'rankscope.db'}", "normal"):
        engine.dispose()
    before = sorted(path.name for path in tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve(["--check", "--port", port, "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "in use; free it, or say another --port" in said
    assert re.search(r"tables of version \w+\n$", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--data-dir", "/proc/x"), ("--database-url", "nosuch://user:pass@host/x"),
        ("--host", "192.0.2.1", "--insecure-bind", "--data-dir", "/tmp"),
    ],
)  # fmt: skip
def test_check_fails_where_a_start_would(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(["--check", "--port", "0", *arguments]) == EXIT_CANNOT_START
    said = capsys.readouterr().out
    assert "choose another" in said
    assert "pass@" not in said


def test_the_password_of_a_database_is_never_shown() -> None:
    url = "postgresql://rank:p:a@ss/w@db.example/rankscope"
    (setting,) = [one for one in SETTINGS if one.name == "database_url"]
    assert public_value(Settings(database_url=url), setting) == (
        "postgresql://rank:***@db.example/rankscope"
    )
    assert without_password("postgresql:///db?user=a&password=b&host=c") == (
        "postgresql:///db?user=a&password=***&host=c"
    )
    assert without_password("sqlite:////srv/a@b/rankscope.db") == "sqlite:////srv/a@b/rankscope.db"

from __future__ import annotations

import os
import re

import pytest

import rankscope
from rankscope.rank.attach import start
from rankscope.settings import (
    SETTINGS,
    Setting,
    SettingError,
    Settings,
    as_text,
    from_environment,
    to_environment,
)


def test_defaults_and_round_trip() -> None:
    assert from_environment({}) == Settings()
    assert to_environment(Settings()) == {}
    chosen = Settings(server="http://x", collective_slots=2048, collector=False, sample_seconds=0.5)
    assert from_environment(to_environment(chosen)) == chosen


BAD = {
    float: ("many", "nan", "inf", "-inf", "-1", "1e400", "1e30"),
    int: ("many", "nan", "inf", "-1", "1.5", "1e3", "9" * 30, "9" * 5000),
    bool: ("enabled", "2", "-1", "nan", "yes please"),
    str: (),
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_bad_values_name_variable_and_remedy(setting: Setting) -> None:
    zero = ("0",) if setting.bounds is not None and setting.bounds[0] > 0 else ()
    for text in (*BAD[type(setting.default)], *zero):
        with pytest.raises(SettingError) as raised:
            from_environment({setting.variable: text})
        said = str(raised.value)
        assert said.startswith(f"{setting.variable}={text!r}: ")
        assert re.search(r": (set|expected) .+\. ", said)
        assert said.endswith(setting.help)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_ends_of_a_range_are_taken_and_nothing_is_the_default(setting: Setting) -> None:
    assert (setting.bounds is not None) == (type(setting.default) in (int, float))
    for value in (setting.default, *(setting.bounds or ())):
        chosen = from_environment({setting.variable: as_text(value)})
        assert getattr(chosen, setting.name) == value
    assert from_environment({setting.variable: ""}) == Settings()


def test_a_token_out_of_a_file_is_without_its_line_end() -> None:
    assert from_environment({"RANKSCOPE_TOKEN": "abc\n"}).token == "abc"


@pytest.mark.parametrize("name", ["hooks", "collectives", "flight_recorder", "log_level"])
def test_a_word_that_does_not_exist_is_refused_with_those_that_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"RANKSCOPE_{name.upper()}"
    monkeypatch.setenv(variable, "")  # init sets it for later processes
    with pytest.raises(ValueError, match=rf"{variable}.*'nosuch'.*there are: \w+"):
        rankscope.init(**{name: "nosuch"})
    assert start.agent() is None


def test_what_is_asked_for_in_a_script_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(start, "start", started.append)
    monkeypatch.setenv("RANKSCOPE_FLUSH_SECONDS", "7")
    monkeypatch.setenv("RANKSCOPE_COLLECTOR", "0")
    rankscope.init(flush_seconds=1.0, collector=True)  # the defaults
    assert started == [Settings()]
    assert from_environment(os.environ).flush_seconds == 1.0  # of the collector
    with pytest.raises(SettingError, match="RANKSCOPE_COLLECTOR='sometimes': set 1 or 0"):
        rankscope.init(collector="sometimes")


def test_every_setting_has_a_sentence() -> None:
    for setting in SETTINGS:
        assert setting.help.endswith(".")


def test_init_refuses_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"no setting 'sever'.*server"):
        rankscope.init(sever="http://x")

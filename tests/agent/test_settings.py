from __future__ import annotations

import pytest

import rankscope
from rankscope.settings import SETTINGS, SettingError, Settings, from_environment, to_environment


def test_defaults_and_round_trip() -> None:
    assert from_environment({}) == Settings()
    assert to_environment(Settings()) == {}
    chosen = Settings(server="http://x", collective_slots=2048, collector=False, sample_seconds=0.5)
    assert from_environment(to_environment(chosen)) == chosen


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RANKSCOPE_COLLECTIVE_SLOTS", "many"),
        ("RANKSCOPE_COLLECTIVE_SLOTS", "-1"),
        ("RANKSCOPE_FLUSH_SECONDS", "nan"),
        ("RANKSCOPE_COLLECTOR", "perhaps"),
    ],
)
def test_bad_value_names_variable_and_remedy(variable: str, text: str) -> None:
    with pytest.raises(SettingError, match=variable):
        from_environment({variable: text})


def test_every_setting_has_a_sentence() -> None:
    for setting in SETTINGS:
        assert setting.help.endswith(".")


def test_init_refuses_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"no setting 'sever'.*server"):
        rankscope.init(sever="http://x")

"""What the environment may say about how engines work."""

import pytest

from runtime.engine.settings import (
    AWAKE,
    SettingError,
    awake_seconds,
    exchange_setting,
    replays_graphs,
)


@pytest.mark.parametrize("word", ["auto", "peer", "nccl"])
def test_exchanges_are_as_the_variable_says(word: str) -> None:
    assert exchange_setting({"SHOAL_SP_EXCHANGE": word}) == word


@pytest.mark.parametrize(("word", "replays"), [("0", False), ("1", True)])
def test_graphs_are_replayed_as_the_variable_says(word: str, replays: bool) -> None:
    assert replays_graphs({"SHOAL_SP_GRAPHS": word}) is replays


def test_what_nothing_is_said_of() -> None:
    assert exchange_setting({}) == "auto"
    assert replays_graphs({})


def test_the_variables_are_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "nccl")
    monkeypatch.setenv("SHOAL_SP_GRAPHS", "0")
    assert exchange_setting() == "nccl"
    assert not replays_graphs()


@pytest.mark.parametrize("word", ["", "Peer", "nvlink"])
def test_another_word_is_refused_in_one_line(word: str) -> None:
    with pytest.raises(SettingError) as error:
        exchange_setting({"SHOAL_SP_EXCHANGE": word})
    assert str(error.value) == f"SHOAL_SP_EXCHANGE={word}: it may be auto, peer or nccl"
    with pytest.raises(SettingError) as error:
        replays_graphs({"SHOAL_SP_GRAPHS": word})
    assert str(error.value) == f"SHOAL_SP_GRAPHS={word}: it may be 1 or 0"


@pytest.mark.parametrize(
    ("environment", "seconds"), [({}, 0.0), ({AWAKE: "0.5"}, 0.5), ({AWAKE: "1"}, 1.0)]
)
def test_how_long_it_is_awake_is_a_setting(environment: dict[str, str], seconds: float) -> None:
    assert awake_seconds(environment) == seconds


@pytest.mark.parametrize("word", ["-1", "long", "inf", "nan", ""])
def test_what_is_no_such_time_is_refused_in_one_line(word: str) -> None:
    with pytest.raises(SettingError, match=rf"^{AWAKE}={word}: it may be 0 to \d+ seconds$"):
        awake_seconds({AWAKE: word})

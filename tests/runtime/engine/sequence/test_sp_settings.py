"""What the environment may say about steps by sequence."""

import pytest

from shoal.runtime.engine.sequence.sp_settings import SettingError, exchange_setting, replays_graphs


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

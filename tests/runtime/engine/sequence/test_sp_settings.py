"""What the environment may say about steps by sequence."""

import pytest

from shoal.runtime.engine.sequence.sp_settings import SettingError, exchange_setting


@pytest.mark.parametrize("word", ["auto", "peer", "nccl"])
def test_exchanges_are_as_the_variable_says(word: str) -> None:
    assert exchange_setting({"SHOAL_SP_EXCHANGE": word}) == word


def test_what_nothing_is_said_of() -> None:
    assert exchange_setting({}) == "auto"


def test_the_variable_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SP_EXCHANGE", "nccl")
    assert exchange_setting() == "nccl"


@pytest.mark.parametrize("word", ["", "Peer", "nvlink"])
def test_another_word_is_refused_in_one_line(word: str) -> None:
    with pytest.raises(SettingError) as error:
        exchange_setting({"SHOAL_SP_EXCHANGE": word})
    assert str(error.value) == f"SHOAL_SP_EXCHANGE={word}: it may be auto, peer or nccl"

"""What a dataset's options do to a workload, and which other options they refuse."""

import argparse
import json
from pathlib import Path

import pytest

from shoal.loadgen.client import Endpoint
from shoal.loadgen.workload import Workload
from shoal.server.errors import UserError
from shoal.server.options.dataset_options import add_dataset_options, with_dataset
from shoal.server.options.serve_options import DEMO_CHECKPOINT
from shoal.server.options.workload_options import add_workload_options, read_workload

TOKENIZER = DEMO_CHECKPOINT / "tokenizer.json"


def filled(*argv: str, endpoint: str = "chat", tokenizer: Path | None = None) -> Workload:
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    add_dataset_options(parser)
    args = parser.parse_args(["--trace", "poisson", "--requests", "3", *argv])
    args.endpoint, args.tokenizer = Endpoint(endpoint), tokenizer
    return with_dataset(args, read_workload(args))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "the end"}]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"conversations": said * 3}]))
    return path


def test_chats_are_sent_at_the_times_of_the_trace(chats: Path) -> None:
    assert filled("--output-tokens", "5").arrivals[0].content is None
    one = filled("--dataset", str(chats), "--output-tokens", "5", "--think-seconds", "0.1")
    assert [len(list(a.turns())) for a in one.arrivals] == [3, 3, 3]
    assert {a.output_tokens for a in one.arrivals} == {5}
    short = filled("--dataset", str(chats), "--max-turns", "1", tokenizer=TOKENIZER)
    assert short.requests == 3
    assert short.arrivals[0].output_tokens in (2, 3), "the tokens of 'the end'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-turns", "0"), "--max-turns 0: it must be more than 0"),
        (("--prompt-tokens", "5"), "--prompt-tokens is for made-up prompts"),
        (("--max-request-tokens", "5000"), "--max-request-tokens is for made-up prompts"),
    ],
)
def test_what_does_not_go_with_a_dataset_is_named(
    chats: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        filled("--dataset", str(chats), *words)


def test_other_uses_are_refused(chats: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--max-turns needs --dataset"):
        filled("--max-turns", "1")
    with pytest.raises(UserError, match="has chats: it needs --endpoint chat"):
        filled("--dataset", str(chats), endpoint="completions")
    with pytest.raises(UserError, match=r"cannot read .*none\.json"):
        filled("--dataset", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="--tokenizer"):
        filled("--dataset", str(chats), tokenizer=chats)

"""The corpus says what it should, and nothing of how it was made."""

import random
import re
from collections.abc import Callable

import pytest

from shoal.server.demo.training import answers, corpus, exercises, stories, texts
from shoal.server.demo.training.chat import END, SPECIAL_TOKENS, START, Message


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(corpus.documents(seed=3, count=3000))


def test_same_seed_gives_the_same_documents(documents: list[str]) -> None:
    assert list(corpus.documents(seed=3, count=50)) == documents[:50]
    assert list(corpus.documents(seed=4, count=50)) != documents[:50]


def test_no_document_shows_the_template_it_came_from(documents: list[str]) -> None:
    # Braces and brackets are left for JSON: tool calls and the admin API.
    left_over = re.compile(r"\[[^\]]*\||\{[a-zA-Z_]+\}")
    assert [found for text in documents if (found := left_over.search(text))] == []


def test_no_document_has_a_wrong_article(documents: list[str]) -> None:
    wrong = re.compile(r"\b[Aa] [aeio][a-z]+|\b[Aa]n [bcdfgjklmnpqrstvwxyz][a-z]+")
    allowed = {"an llm"}
    found = {hit for text in documents for hit in wrong.findall(text)} - allowed
    assert found == set()


def test_every_message_is_framed(documents: list[str]) -> None:
    for text in documents:
        assert text.count(START) == text.count(END)
        assert text.strip()
        assert SPECIAL_TOKENS[0] not in text


@pytest.mark.parametrize(
    "maker",
    [
        answers.small_talk,
        answers.question,
        answers.topic,
        answers.table,
        answers.unknown,
        exercises.exercise,
        stories.request_and_story,
    ],
)
def test_questions_and_answers_take_turns(
    maker: Callable[[random.Random], tuple[Message, ...]],
) -> None:
    draw = random.Random(1)
    for _ in range(300):
        messages = maker(draw)
        assert [m.role for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m.content == m.content.strip() != "" for m in messages)


def test_sums_are_right(documents: list[str]) -> None:
    signs: dict[str, Callable[[int, int], int]] = {
        "plus": int.__add__,
        "minus": int.__sub__,
        "times": int.__mul__,
    }
    found = re.findall(r"(\d+) (plus|minus|times) (\d+) is (\d+)", "\n".join(documents))
    assert len(found) > 100
    for first, sign, second, result in found:
        assert signs[sign](int(first), int(second)) == int(result)


def test_a_story_is_about_what_was_asked_for() -> None:
    draw = random.Random(2)
    named = 0
    for _ in range(400):
        question, told = stories.request_and_story(draw)[:2]
        wish = re.search(r"about an? (.*) named (\w+)\.", question.content)
        if wish:
            named += 1
            assert wish[1] in told.content
            assert wish[2] in told.content
    assert named > 10


def test_long_stories_have_chapters() -> None:
    draw = random.Random(2)
    pairs = [stories.request_and_story(draw)[:2] for _ in range(300)]
    long = [told.content for asked, told in pairs if "long story" in asked.content]
    short = [told.content for asked, told in pairs if "short story" in asked.content]
    assert min(map(len, long)) > max(map(len, short))


def test_choices_and_slots_are_filled() -> None:
    draw = random.Random(0)
    filled = {texts.fill("[a|b] {x}", draw, {"x": "c"}) for _ in range(20)}
    assert filled == {"a c", "b c"}
    with pytest.raises(KeyError):
        texts.fill("{y}", draw, {"x": "c"})

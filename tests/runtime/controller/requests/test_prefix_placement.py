"""Chats return to the unit that has their beginning in its cache, unless it has too much to do."""

import random

import msgspec
import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.config import FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.transport import front_identity
from tests.runtime.loopback_node import LoopbackNode, request_payload
from tests.units import tp

SETTINGS = FakeSettings(num_blocks=1000, block_tokens=16, max_num_seqs=8, max_model_len=8000)
SALT = wire.RequestView.__struct_fields__.index("cache_salt")


def drawn(name: str, tokens: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(20_000, 100_000) for _ in range(tokens)]


class Chats:
    """A node whose clients chat."""

    def __init__(
        self, engines: int = 4, settings: FakeSettings = SETTINGS, *, place_by_prefix: bool = True
    ) -> None:
        self.node = LoopbackNode(engines, settings=settings, place_by_prefix=place_by_prefix)
        self.node.settle()

    def ask(self, name: str, prompt: list[int], output: int = 2, salt: str | None = None) -> str:
        """Send a request; return its name."""
        fields = msgspec.msgpack.decode(request_payload(name, prompt, output)[0])
        fields[SALT] = salt
        self.node.prompts[name] = (prompt, output)
        payload = [msgspec.msgpack.encode(fields)]
        self.node.network.front_sends(0, wire.RequestType.ADD, payload)
        return name

    def where(self, name: str) -> Unit:
        """Return the unit that a request was given to first."""
        self.node.turns(1)
        notes = self.node.network.control_replies[front_identity(0)]
        return next(n.unit for n in notes if isinstance(n, m.Placed) and n.request_id == name)

    def chat(self, chats: str, turns: int) -> dict[str, list[Unit]]:
        """Let each chat take its turns, in an order that is drawn; return where they ran."""
        rng, units = random.Random(0), {chat: list[Unit]() for chat in chats}
        for turn in range(turns):
            for chat in rng.sample(chats, len(chats)):
                prompt = drawn(chat, 500 * (turn + 1))
                units[chat].append(self.where(self.ask(f"{chat}{turn}", prompt)))
                self.node.settle()
        return units

    def placed(self, expected: str) -> float:
        """Return the prompt tokens that were given to units, by what was expected of them."""
        return self.node.value("shoal_placed_prompt_tokens_total", expected=expected)


def test_the_turns_of_a_chat_go_to_its_unit() -> None:
    chats = Chats()
    units = chats.chat("abcdef", 5)
    assert all(len(set(one)) == 1 for one in units.values()), units
    assert len({one[0] for one in units.values()}) == 4
    cached, new = chats.placed("cached"), chats.placed("new")
    # Of the five parts of the fifth prompt, four are cached.
    assert cached / (cached + new) == pytest.approx(10 / 15, rel=0.1)
    seen = chats.node.controller.snapshot()
    assert seen.hit_share == pytest.approx(10 / 15, rel=0.1)
    assert all(unit.cached_tokens > 2000 for unit in seen.units)
    chats.node.assert_exact()


def test_without_it_they_go_anywhere() -> None:
    units = Chats(place_by_prefix=False).chat("abcdef", 5)
    assert any(len(set(one)) > 1 for one in units.values())


def test_where_no_prefix_is_cached_none_is_looked_for() -> None:
    chats = Chats(settings=msgspec.structs.replace(SETTINGS, prefix_caching=False))
    chats.chat("abc", 3)
    assert (chats.placed("new"), chats.node.controller.snapshot().hit_share) == (9000, 0.0)


def test_a_unit_with_too_much_to_do_is_avoided() -> None:
    chats = Chats(2)
    home = chats.where(chats.ask("chat", drawn("chat", 600)))
    chats.node.run_for(0.5)
    for k in range(6):
        chats.ask(f"busy{k}", drawn(f"busy{k}", 2000), 900)
    units = {f"busy{k}": chats.where(f"busy{k}") for k in range(6)}
    assert list(units.values()).count(home) == 3, "they have no prefix in common"
    for name in [name for name, unit in units.items() if unit != home]:
        chats.node.abort(name)
    chats.node.turns(2)
    assert chats.where(chats.ask("again", drawn("chat", 800))) != home


def test_a_prefix_that_all_have_is_soon_cached_everywhere() -> None:
    chats = Chats()
    names = [chats.ask(f"r{k}", drawn("system", 2000) + drawn(f"r{k}", 200), 50) for k in range(28)]
    units = [chats.where(name) for name in names]
    counts = [units.count(alone(engine)) for engine in range(4)]
    assert min(counts) >= 5, counts
    assert chats.placed("cached") > chats.placed("new")


def test_tenants_do_not_find_each_others_prefixes() -> None:
    chats, found = Chats(2), []
    for name, salt in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        chats.ask(name, drawn("the same", 1000), salt=salt)
        chats.node.run_for(0.2)
        found.append(chats.node.controller.snapshot().hit_share > 0)
    assert found == [False, False, True]


def cached_in(chats: Chats, *units: Unit) -> list[bool]:
    chats.node.run_for(0.2)
    known = {one.unit: one.cached_tokens for one in chats.node.controller.snapshot().units}
    return [known[unit] > 0 for unit in units]


def test_the_blocks_that_a_unit_gives_up_cache_nothing() -> None:
    chats, pair = Chats(2), tp(0, 1)
    chats.chat("ab", 1)
    assert cached_in(chats, alone(0), alone(1)) == [True, True]
    chats.node.switch(pair)
    assert cached_in(chats, pair) == [False]
    chats.chat("c", 2)
    assert chats.placed("cached") > 400
    assert cached_in(chats, pair) == [True]
    chats.node.switch((0,), (1,))
    assert chats.node.controller.books.prefixes.tokens(pair) == 0
    assert cached_in(chats, alone(0)) == [True], "what it did not lend is still there"


@pytest.mark.parametrize("how", ["reset", "death"])
def test_what_engines_have_forgotten_is_not_expected_of_them(how: str) -> None:
    chats = Chats(2)
    home = chats.where(chats.ask("a", drawn("a", 600)))
    chats.node.run_for(0.5)
    if how == "reset":
        chats.node.utility("reset_prefix_cache")
    else:
        chats.node.kill(home.leader)
    chats.node.settle()
    assert cached_in(chats, home) == [False]

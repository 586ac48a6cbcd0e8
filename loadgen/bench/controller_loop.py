"""``python -m shoal.loadgen.bench.controller_loop``: measures the controller's loop.

It prints three tables. The first is in real time: how long the controller takes for a snapshot and
for a turn while 10,000 requests wait for eight full engines. The second is what it takes to find
out where a prompt is cached, by the tokens of the prompt. The third is in virtual time: how long a
device idles between two steps while requests wait, and how long requests wait for eight nearly
saturated engines. Its columns are the number of requests that a full unit is given ahead.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from shoal.loadgen.workload import Arrival
from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.controller.books.prefix_book import PrefixBook
from shoal.runtime.controller.books.prompt_hashes import prompt_hashes
from shoal.runtime.controller.loop import Controller
from shoal.runtime.engine.agent.agent import Agent
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.loopback import LoopbackNetwork
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import cost_model, read_hardware, read_shape
from shoal.runtime.simulation.simulated_node import Run, simulate
from shoal.runtime.simulation.simulated_prompts import SimulatedPrompts, wire_request

ENGINES = 8
WAITING = 10_000
SEATS = 256
ROUNDS = 100
STEP_SECONDS = 0.02
AHEAD = (0, 1, 2)
BATCHES = 10
PROMPTS = (500, 2000, 8000, 32_000, 128_000)
VOCABULARY = 128_000
SHAPE = read_shape("llama-3-70b-fp8")
HARDWARE = read_hardware("h200")


def main() -> None:
    """Print the tables."""
    print(f"{WAITING} requests wait, {ENGINES} engines run {SEATS} each")
    for name, seconds in controller_seconds().items():
        print(f"  {name:<44}{seconds * 1e3:7.3f} ms")
    print(f"\n{'tokens of a prompt':<44}" + "".join(f"{n:>10}" for n in PROMPTS))
    costs = [prefix_seconds(tokens) for tokens in PROMPTS]
    for name in costs[0]:
        _print_row(name, [cost[name] for cost in costs], 1e6, "us")
    print(f"\n{'requests given ahead to a full unit':<44}" + "".join(f"{n:>10}" for n in AHEAD))
    for seats in (1, 64):
        gaps = [idle_seconds(seats, ahead) for ahead in AHEAD]
        _print_row(f"idle when a batch of {seats} ends in one step", gaps)
    waits = [queue_seconds(ahead) for ahead in AHEAD]
    _print_row("queue time, mean", [statistics.fmean(seconds) for seconds in waits])
    _print_row("queue time, p99", [statistics.quantiles(seconds, n=100)[-1] for seconds in waits])


def _print_row(name: str, seconds: Sequence[float], factor: float = 1e3, unit: str = "ms") -> None:
    print(f"  {name:<42}" + "".join(f"{value * factor:>7.2f} {unit}" for value in seconds))


# --- real time ------------------------------------------------------------------------------------


def controller_seconds() -> dict[str, float]:
    """Return the median times of a snapshot, and of a turn with a report of every engine."""
    clock = ManualClock()
    controller, agents = _full_node(clock)
    snapshots = [_seconds(controller.snapshot) for _ in range(ROUNDS)]
    turns = []
    for _ in range(ROUNDS):
        clock.advance(STEP_SECONDS)
        for agent in agents:
            agent.turn(0.0)
        turns.append(_seconds(lambda: controller.turn(0.0)))
    return {
        "snapshot": statistics.median(snapshots),
        "turn with a report of every engine": statistics.median(turns),
    }


def _full_node(clock: ManualClock) -> tuple[Controller, list[Agent]]:
    """Return a controller with ``WAITING`` waiting requests, and engines amid a step."""
    settings = FakeSettings(
        step_seconds=STEP_SECONDS, num_blocks=50_000, max_num_seqs=SEATS, max_model_len=4096
    )
    config = NodeConfig(
        engines=ENGINES,
        max_group=ENGINES,
        policy="manual",
        runtime_dir="",
        fake=settings,
        cost_model=cost_model(SHAPE, HARDWARE),
    )
    network = LoopbackNetwork()
    controller = Controller(config, network.controller, clock=clock)
    agents = [
        Agent(FakeBackend(config, engine, clock=clock), network.agent(engine), clock=clock)
        for engine in range(ENGINES)
    ]
    rng, prompts = random.Random(0), SimulatedPrompts()
    for number in range(WAITING + ENGINES * (SEATS + config.queued_ahead)):
        tokens = rng.randint(2 * ROUNDS, 4 * ROUNDS)
        prompt = prompts.make(str(number), rng.randint(16, 1024))
        payload = wire_request(str(number), prompt, tokens, rng.choice((-1, 0, 0)))
        network.front_sends(0, wire.RequestType.ADD, [payload])
    while len(controller.books.requests.pool) != WAITING:
        controller.turn(0.0)
        for agent in agents:
            agent.turn(0.0)
    return controller, agents


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def prefix_seconds(tokens: int) -> dict[str, float]:
    """Return the median times of what is done with a prompt's beginnings, for eight units."""
    rng = random.Random(tokens)
    ids = msgspec.Raw(msgspec.msgpack.encode([rng.randrange(VOCABULARY) for _ in range(tokens)]))
    frames = [wire_request("r", ids, 1, 0)]
    book, units = PrefixBook(lambda _: ENGINES * tokens), [alone(n) for n in range(ENGINES)]
    view = wire.decode_request(frames)
    prompt = prompt_hashes(view)
    for unit in units:
        book.place(prompt, tokens, unit)
    actions: dict[str, Callable[[], object]] = {
        "read the message": lambda: wire.decode_request(frames),
        "hash the prompt": lambda: prompt_hashes(view),
        "look it up in 8 units that all have it": lambda: book.where(prompt, units),
        "note where it is sent": lambda: book.place(prompt, tokens, units[0]),
    }
    return {
        name: statistics.median(_seconds(action) for _ in range(ROUNDS))
        for name, action in actions.items()
    }


# --- virtual time ---------------------------------------------------------------------------------


def idle_seconds(seats: int, ahead: int) -> float:
    """Return how long one engine idles, while requests wait, when its whole batch has ended.

    All requests are there from the start and have the same length, so that every batch ends in one
    step. Only then can a unit be without work until the controller has sent more.

    Args:
        seats: size of the engine's batch.
        ahead: requests that the engine is given beyond its batch.

    Returns:
        The mean over the batches.
    """
    node = Node(SHAPE, HARDWARE, engines=1, max_group=1, max_num_seqs=seats, queued_ahead=ahead)
    run = simulate(node, "manual", [Arrival(0.0, 128, 32)] * (BATCHES * seats))
    idle, busy_until = 0.0, 0.0
    for start, end in sorted(_in_steps(run)):
        idle += max(0.0, start - busy_until) if busy_until else 0.0
        busy_until = max(busy_until, end)
    return idle / (BATCHES - 1)


def _in_steps(run: Run[Arrival]) -> Iterator[tuple[float, float]]:
    """Yield, for every request, when its first step began and its last step ended."""
    for life in run.lives:
        if life.started is None or life.ended is None:
            raise ValueError("a request got no token")
        yield life.started, life.ended - HARDWARE.message_seconds


def queue_seconds(ahead: int) -> list[float]:
    """Return queue times on a nearly saturated node; requests given ahead cannot go elsewhere."""
    node = Node(SHAPE, HARDWARE, engines=ENGINES, max_num_seqs=8, queued_ahead=ahead)
    run = simulate(node, "manual", list(_poisson(2000, rate=24.0)))
    return [
        start - life.arrived for (start, _), life in zip(_in_steps(run), run.lives, strict=True)
    ]


def _poisson(count: int, rate: float) -> Iterator[Arrival]:
    rng, at = random.Random(0), 0.0
    for _ in range(count):
        at += rng.expovariate(rate)
        yield Arrival(at, rng.randint(64, 1024), rng.randint(20, 180))


if __name__ == "__main__":
    main()

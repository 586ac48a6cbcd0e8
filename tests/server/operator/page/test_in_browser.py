"""The live page in a real Chromium, with a server of fake engines that all tests here share."""

import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.controller_client import CallError
from shoal.server.frontend.app import Backstage, build_admin_app
from shoal.server.gate.access import Access
from shoal.server.operator.admin_server import serving
from shoal.server.operator.page.page_feed import HISTORY_SECONDS, Feed
from tests.browser import FOREIGN_NAME, Look, Page, chromium, needs_chromium, page
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.server.node import ServedNode, key_file, served_node
from tests.server.operator.page.parts import ABOUT, Control

pytestmark = needs_chromium

READY = "document.querySelector('#health').dataset.state === 'good'"
POLICY = "default-src 'self'"
ALONE, TOGETHER = [[0], [1]], [[0, 1]]
PAUSE = "new Promise((done) => setTimeout(done, 20))"
COUNT_MOVES = """(() => {
  window.moved = [];
  const animate = Element.prototype.animate;
  Element.prototype.animate = function (...how) {
    moved.push(this.dataset.key);
    return animate.apply(this, how);
  };
})()"""
"""Lets the page note in ``moved`` whatever it shows on its way to another place."""
TOKENS = 1500
"""Of a prompt that outlasts what a test does meanwhile: at 30 ms a step they take 45 s or more."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("node")
    with served_node(folder, "--engines", "2", "--max-pp", "2", "--fake-step-ms", "30") as served:
        yield served


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as devtools:
        yield devtools


@pytest.fixture
def admin(node: ServedNode) -> Iterator[httpx.Client]:
    """A client of the admin API, which has made every engine a unit of its own."""
    with httpx.Client(base_url=node.admin_url, timeout=300) as client:
        client.post("/admin/policy", json={"policy": "manual"}).raise_for_status()
        client.post("/admin/layout", json={"units": ALONE}).raise_for_status()
        yield client


@pytest.fixture
async def tab(browser: str, node: ServedNode, admin: httpx.Client) -> AsyncIterator[Page]:
    """The live page, which shows a ready node; nothing may be wrong with it at the end."""
    async with page(browser) as opened:
        await opened.go(f"{node.admin_url}/")
        await opened.until(READY)
        yield opened
        assert opened.complaints == []


def units_of(admin: httpx.Client) -> list[list[int]]:
    return [unit["engines"] for unit in admin.get("/admin/layout").json()["units"]]


def button(units: list[list[int]]) -> str:
    return f"button[data-units='{json.dumps(units, separators=(',', ':'))}']"


def text_of(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent"


# --- what operators do ---


async def test_a_click_switches_the_layout_and_the_timeline_shows_it(
    tab: Page, admin: httpx.Client
) -> None:
    await tab.until("document.querySelectorAll('.band.dp').length >= 2")
    before = await tab.value("document.querySelectorAll('#switches [data-epoch]').length")
    await tab.click(button(TOGETHER))
    await tab.until(f"{text_of('#answer')}.includes('took')")
    assert units_of(admin) == TOGETHER
    await tab.until("document.querySelector('.band.tp2.serving[data-unit=\"0,1\"]')")
    await tab.until("document.querySelector('.unit.tp2')")
    seen = await tab.value("state.now.trace.at")
    await tab.until(f"state.now.trace.at > {seen} + 1.5")
    now = "state.bands.filter((band) => band.end === state.now.trace.at).map((band) => band.unit)"
    assert await tab.value(now) == ["0,1"]  # the bands before it have ended
    count = "document.querySelectorAll('#switches [data-epoch]').length"
    await tab.until(f"{count} === {min(32, before + 1)}")
    newest = await tab.value(text_of("#switches li"))
    assert "[0] [1] → [0\u20131]" in newest
    assert "manual, carry" in newest
    took = admin.get("/admin/layout").json()["switches"][-1]["duration_seconds"]
    assert await tab.value(f"{text_of('#switches .took')} === seconds({took})")
    pressed = await tab.value(
        "document.querySelector('#layouts [aria-pressed=true]').dataset.units"
    )
    assert json.loads(pressed) == TOGETHER


async def test_a_layout_s_button_has_the_colours_of_its_bands(tab: Page) -> None:
    colours = {}
    for kind, units in (("dp", ALONE), ("tp2", TOGETHER)):
        chip, swatch = f"{button(units)} .group", f"#layout-legend .{kind}"
        of = [
            f"getComputedStyle(document.querySelector({json.dumps(s)})).backgroundColor"
            for s in (chip, swatch)
        ]
        colours[kind], legend = [await tab.value(one) for one in of]
        assert colours[kind] == legend
    assert colours["dp"] != colours["tp2"]


async def test_a_prompt_shows_its_unit_through_a_switch(tab: Page, admin: httpx.Client) -> None:
    await tab.value(f"document.querySelector('#tokens').value = {TOKENS}")
    await tab.value("document.querySelector('#priority').value = '-10'")
    await tab.value("document.querySelector('#prompt-text').select()")
    await tab.click("#prompt-text")
    await tab.type(" And then?")
    await tab.click("#send")
    await tab.until("document.querySelector('#reply span')?.textContent.length > 5")
    first = await tab.value("document.querySelector('#reply b').dataset.unit")
    assert first in ("0", "1")
    await tab.until(f"document.querySelector('.unit[data-unit=\"{first}\"] .dot.own.urgent')")
    await tab.show(Look(still=False))
    await tab.value(COUNT_MOVES)
    seen = await tab.value("state.now.trace.at")
    await tab.until(f"state.now.trace.at > {seen} + 1.5")
    assert await tab.value("moved.length") == 0, "its request has stayed where it was"
    await tab.click(button(TOGETHER))
    await tab.until("document.querySelector('#reply b[data-unit=\"0,1\"]')")
    await tab.until("document.querySelector('.unit[data-unit=\"0,1\"] .dot.own')")
    assert await tab.value("moved.includes(document.querySelector('.dots .dot.own').dataset.key)")
    await tab.until("document.querySelector('#reply b[data-unit=\"0,1\"] + span')")
    assert f"Runs on TP2 0\u20131 (before: DP {first})" in await tab.value(text_of("#ran"))
    await tab.until(f"{text_of('#switches .what')}.startsWith('1 carried')")
    await tab.show(Look(still=True))
    await tab.value("moved.length = 0")
    await tab.click(button(ALONE))
    await tab.until("document.querySelector('.unit.dp .dot.own')")
    assert await tab.value("moved.length") == 0, "the user prefers no motion"
    await tab.click("#stop")
    await tab.until(f"{text_of('#ran')}.startsWith('Stopped')")
    assert ("POST /admin/chat/completions", 200) in tab.statuses
    await tab.until("!document.querySelector('.dots .dot')")  # the engine has forgotten it


async def test_a_wrong_prompt_shows_why(tab: Page) -> None:
    await tab.value("document.querySelector('#tokens').value = 100000")
    await tab.click("#send")
    await tab.until(f"{text_of('#ran')}.includes('max_tokens')")
    while not tab.complaints:
        await tab.value(PAUSE)  # the test's time limit bounds this
    (complaint,) = tab.complaints
    assert "400" in complaint
    tab.complaints.clear()


async def test_a_policy_takes_the_layout_and_manual_gives_it_back(
    tab: Page, admin: httpx.Client
) -> None:
    await tab.click("[data-policy='static-tp']")
    await tab.until("document.querySelector('[data-policy=static-tp]').ariaPressed === 'true'")
    await tab.until("[...document.querySelectorAll('#layouts button')].every((b) => b.disabled)")
    assert "static-tp" in await tab.value(text_of("#layout-note"))
    await tab.until("document.querySelector('.unit.tp2')")
    await tab.click("[data-policy='manual']")
    await tab.until("![...document.querySelectorAll('#layouts button')].some((b) => b.disabled)")
    assert admin.get("/admin/policy").json()["policy"] == "manual"


async def test_a_pipeline_is_told_from_a_group_that_divides_layers(
    tab: Page, admin: httpx.Client
) -> None:
    body = {"units": TOGETHER, "layouts": ["pp2"]}
    admin.post("/admin/layout", json=body).raise_for_status()
    await tab.until("document.querySelector('.unit.pp h3')?.textContent === 'PP2 0\u20131'")
    await tab.until("document.querySelector('.band.pp.serving')")
    fill = "getComputedStyle(document.querySelector('.band.pp rect')).fill"
    swatch = "getComputedStyle(document.querySelector('#layout-legend .pp')).backgroundColor"
    assert await tab.value(fill) == await tab.value(swatch) == "rgb(240, 228, 66)"
    assert await tab.value("document.querySelector('#layouts [aria-pressed=true]')") is None
    await tab.click(button(TOGETHER))
    await tab.until("document.querySelector('.unit.tp2 h3')?.textContent === 'TP2 0\u20131'")
    await tab.until("document.querySelector('.band.tp2.serving')")
    newest = f"{text_of('#switches li')}.includes('[0\u20131] PP2 \u2192 [0\u20131]')"
    await tab.until(newest)
    inferred = """(() => {
      const last = state.switches.at(-1);
      last.at += 60;  // so the pipeline lasted, and a page that was not there draws it
      state.bands = [];
      inferBands(last.at - 100, last.at + 10, [{ unit: "0,1", layout: "tp2" }]);
      return state.bands.map((band) => band.layout).join();
    })()"""
    # What came before is other tests'.
    assert (await tab.value(inferred)).startswith("tp2,pp2,")


async def test_the_keyboard_is_enough(tab: Page, admin: httpx.Client) -> None:
    wanted = f"document.activeElement.matches({json.dumps(button(TOGETHER))})"
    for _ in range(20):
        await tab.press("Tab")
        if await tab.value(wanted):
            break
    assert await tab.value(f"{wanted} && document.activeElement.matches(':focus-visible')")
    outline = await tab.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    await tab.press("Enter", "\r")
    await tab.until("document.querySelector('.unit.tp2')")
    assert units_of(admin) == TOGETHER


# --- whom it serves ---


async def test_all_that_takes_input_has_a_name(tab: Page) -> None:
    nodes = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
    roles = {"button", "textbox", "combobox", "spinbutton", "image"}
    found = [
        (role, node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and (role := node["role"]["value"]) in roles
    ]
    assert {role for role, _ in found} == roles
    assert [role for role, name in found if not name] == []


@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_a_phone_and_follows_the_colours(tab: Page, dark: bool) -> None:
    await tab.show(Look(width=360, height=740, dark=dark))
    await tab.until("innerWidth === 360 && document.querySelector('.band')")
    assert await tab.value("document.documentElement.scrollWidth") == 360
    ground = await tab.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 3 * 64) is dark


# --- whom it does not serve ---


async def test_a_page_of_another_site_is_refused(
    browser: str, node: ServedNode, admin: httpx.Client
) -> None:
    url = f"{node.admin_url}/admin"
    attack = f"""<script>
      const send = (path, options) => fetch("{url}" + path, options).catch(() => {{}});
      const body = '{{"units": [[0, 1]]}}';
      new EventSource("{url}/events").onerror = (event) => event.target.close();
      Promise.all([
        send("/layout"),
        send("/layout", {{mode: "no-cors"}}),
        send("/layout", {{method: "POST", body}}),
        send("/layout", {{method: "POST", body, mode: "no-cors"}}),
        send("/layout", {{method: "POST", body, headers: {{"x-shoal-page": "1"}}}}),
      ]).then(() => document.title = "done");
    </script>"""
    async with site(attack) as port:
        for host in ("127.0.0.1", FOREIGN_NAME):  # the same machine is another site, too
            async with page(browser) as tab:
                await tab.go(f"http://{host}:{port}/")
                await tab.until("document.title === 'done'")
                answers = await told_of(tab, "/admin/", 6)
                assert {status for _, status in answers} == {403}
                sent = Counter(path for path, _ in answers)
                assert (sent["GET /admin/layout"], sent["GET /admin/events"]) == (2, 1)
                # Before the last one the browser asks whether it may send the header.
                assert (sent["POST /admin/layout"], sent["OPTIONS /admin/layout"]) == (2, 1)
    assert units_of(admin) == ALONE


async def test_a_foreign_name_that_leads_here_is_refused(browser: str, node: ServedNode) -> None:
    port = node.admin_url.rpartition(":")[2]
    async with page(browser) as tab:
        await tab.go(f"http://{FOREIGN_NAME}:{port}/")
        assert (await told_of(tab, "/", 1))[0] == ("GET /", 403)
        await tab.go(f"http://localhost:{port}/")
        await tab.until(READY)


@pytest.mark.parametrize(
    "flaw",
    [
        "<script>throw new Error('flaw')</script>",
        "<script>console.error('flaw')</script>",
        "<script>Promise.reject(new Error('flaw'))</script>",
        "<img src='/flaw'>",
        "<img src='http://nosuch.example/flaw'>",
        f"<meta http-equiv='Content-Security-Policy' content=\"{POLICY}\"><p style='top: 0'>",
    ],
)
async def test_a_flaw_of_a_page_is_seen(browser: str, flaw: str) -> None:
    async with site(flaw) as port, page(browser) as tab:
        await tab.go(f"http://127.0.0.1:{port}/")
        while not [complaint for complaint in tab.complaints if "favicon" not in complaint]:
            await tab.value(PAUSE)  # the test's time limit bounds this


async def told_of(tab: Page, path: str, count: int) -> list[tuple[str, int]]:
    """Return the requests with this in their paths that were answered, once there are so many.

    The browser tells of them a moment after the page knows. The test's time limit bounds this.
    """
    while len(found := [told for told in tab.statuses if path in told[0]]) < count:
        await tab.value(PAUSE)
    return found


@asynccontextmanager
async def site(html: str) -> AsyncIterator[int]:
    """Serve one page on a port of its own."""
    async with served(Starlette(routes=[Route("/", lambda _: HTMLResponse(html))])) as port:
        yield port


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off")
    config.timeout_graceful_shutdown = 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(config, listener):
            yield listener.getsockname()[1]


# --- a node in virtual time ---


@asynccontextmanager
async def still_node(clock: ManualClock, access: Access | None = None) -> AsyncIterator[Any]:
    """Serve the page of a node whose seconds a test counts; yield feed, port and control."""
    node = LoopbackNode(2)
    node.settle()
    control: Any = Control(node)
    feed = Feed(control, ABOUT, clock=clock, wall=lambda: 1000 + clock())
    parts: dict[str, Any] = dict.fromkeys(("placements", "door", "is_alive", "registered"))
    backstage = Backstage(**parts, control=control, feed=feed, rejected=lambda _: None)
    async with served(build_admin_app(backstage, access or Access())) as port:
        yield feed, port, control
        feed.close()


async def next_second(tab: Page, feed: Feed, clock: ManualClock) -> None:
    """Let a second pass, and wait until the page shows what is then."""
    clock.advance(1)
    feed.look()
    await tab.until(f"state.now.trace.at === {1000 + clock()}")


async def rows(tab: Page, body: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table by the row's name."""
    found: dict[str, list[str]] = await tab.value(
        f"""Object.fromEntries([...document.querySelectorAll('#{body} tr')].map(
          (row) => [row.dataset.name, [...row.querySelectorAll('td')].map((td) => td.textContent)]
        ))"""
    )
    return found


async def test_rates_the_pool_and_memory_are_those_of_the_node(browser: str) -> None:
    clock = ManualClock()
    async with still_node(clock) as (feed, port, control), page(browser) as tab:
        node: LoopbackNode = control.node
        await tab.go(f"http://127.0.0.1:{port}/")
        await tab.until(READY)
        nothing = {name: ["0", "\u2013"] for name in ("urgent", "normal", "background")}
        assert await rows(tab, "pool-rows") == nothing
        assert await rows(tab, "rate-rows") == {mode: ["0", "0"] for mode in ("dp", "tp", "sp")}

        node.send("alone", prompt_tokens=10, max_tokens=8)
        await next_second(tab, feed, clock)
        node.switch((0, 1))
        node.send("together", prompt_tokens=40, max_tokens=24)
        await next_second(tab, feed, clock)
        # Tokens over the two seconds; the first token of a request is its prompt's.
        assert await rows(tab, "rate-rows") == {
            "dp": ["4", "5"],
            "tp": ["12", "20"],
            "sp": ["0", "0"],
        }
        assert await tab.value("document.querySelectorAll('#rates path.area').length") == 3
        heights = "(mode) => document.querySelector('#rates .' + mode).getBBox().height"
        for mode in ("dp", "tp"):
            assert await tab.value(f"({heights})('{mode}')") > 0

        node.hung |= {0, 1}  # nothing that is sent goes on
        for k in range(SMALL.max_num_seqs + 1):  # one more than runs goes to a unit
            node.send(f"runs-{k}", max_tokens=6, priority=-9)
        for priority, count in ((-1, 1), (0, 2), (1, 3)):
            for k in range(count):
                node.send(f"waits-{priority}-{k}", prompt_tokens=200, priority=priority)
        node.settle()
        node.clock.advance(2.0)
        await next_second(tab, feed, clock)
        assert await rows(tab, "pool-rows") == {
            "urgent": ["1", "2.0 s"],
            "normal": ["2", "2.0 s"],
            "background": ["3", "2.0 s"],
        }
        await check_memory(tab)
        assert tab.complaints == []


async def check_memory(tab: Page) -> None:
    told = await tab.value("state.now.engines.map((engine) => engine.kv)")
    assert all(sum(kv.values()) == SMALL.num_blocks and kv["lent"] for kv in told)
    shown = await tab.value(
        """[...document.querySelectorAll('.memory')].map((row) => [
          [...row.querySelectorAll('.count')].map((count) => count.textContent),
          [...row.querySelectorAll('.bar i')].map((part) => parseFloat(part.style.width)),
        ])"""
    )
    for kv, (counts, widths) in zip(told, shown, strict=True):
        assert counts == [f"{kv[state]} {state}" for state in ("used", "lent", "free")]
        assert widths == pytest.approx(
            [100 * kv[state] / SMALL.num_blocks for state in ("used", "lent")], abs=0.01
        )


async def test_the_life_of_a_young_node_is_as_wide_as_five_minutes_of_an_old_one(
    browser: str,
) -> None:
    clock = ManualClock()
    async with still_node(clock) as (feed, port, _), page(browser) as tab:
        await tab.go(f"http://127.0.0.1:{port}/")
        await tab.until(READY)

        async def shown_after(seconds: int) -> tuple[list[str], float]:
            """Return the marks of the axis, and which part of it is drawn."""
            for svg in ("timeline", "rates"):
                await tab.until(f"document.querySelector('#{svg} .axis')")
            clock.advance(seconds - 1)
            await next_second(tab, feed, clock)
            labels = "[...document.querySelectorAll('#SVG .axis text')].map((t) => t.textContent)"
            marks = [await tab.value(labels.replace("SVG", svg)) for svg in ("timeline", "rates")]
            assert marks[0] == marks[1]
            drawn = await tab.value(
                """(() => {
                  const bands = [...document.querySelectorAll('.band rect')];
                  const first = Math.min(...bands.map((band) => band.getBBox().x));
                  const width = document.querySelector('#timeline').clientWidth;
                  return (width - first) / (width - GUTTER);
                })()"""
            )
            return marks[0], drawn

        assert await shown_after(30) == (["\u22121 min", "now"], pytest.approx(0.5, abs=0.03))
        assert await shown_after(60) == (["\u22121 min", "now"], pytest.approx(1, abs=0.03))
        marks, drawn = await shown_after(400)
        assert (marks[0], len(marks), drawn) == ("\u22125 min", 6, pytest.approx(1, abs=0.01))
        assert tab.complaints == []


async def test_the_health_says_what_is_wrong(browser: str) -> None:
    clock = ManualClock()

    async def shows(state: str, text: str) -> None:
        await tab.until(
            f"document.querySelector('#health').dataset.state === '{state}'"
            f" && {text_of('#health')}.includes({json.dumps(text)})"
        )

    async with page(browser) as tab:
        async with still_node(clock) as (feed, port, control):
            await tab.go(f"http://127.0.0.1:{port}/")
            await tab.until(READY)
            control.node.kill(1)
            control.node.settle()
            await next_second(tab, feed, clock)
            await shows("bad", "Engine 1 is dead")
            assert await tab.value("document.querySelectorAll('.band.dead').length") == 1
            control.node.kill(0)
            control.node.settle()
            await next_second(tab, feed, clock)
            await shows("bad", "Not ready: ")
            disabled = "[...document.querySelectorAll('#layouts button')].every((b) => b.disabled)"
            assert await tab.value(disabled)
            for engine in (0, 1):
                control.node.restart(engine)
            control.node.settle()
            await next_second(tab, feed, clock)
            await shows("good", "Ready")
            control.error = CallError(503, "the controller does not answer")
            feed.look()
            await shows("bad", "the controller does not answer")
            control.error = None
            await next_second(tab, feed, clock)
            await shows("good", "Ready")
        await shows("bad", "The node ")  # has ended, and then cannot be reached


async def test_it_asks_for_a_key_until_it_has_the_right_one(browser: str, tmp_path: Path) -> None:
    access = Access(admin_key_file=key_file(tmp_path / "keys.json", "s3cret"))
    async with still_node(ManualClock(), access) as (_, port, _), page(browser) as tab:
        await tab.go(f"http://127.0.0.1:{port}/")
        await tab.until("document.activeElement.id === 'key'")
        assert tab.complaints == []
        assert not any("/admin/" in path for path, _ in tab.statuses)
        shown = "[...document.querySelectorAll('section')].filter((e) => e.checkVisibility())"
        assert await tab.value(f"{shown}.length") == 0  # nothing that could not work yet
        for key, health in (("wrong", "A key is needed"), ("s3cret", "Ready")):
            await tab.type(key)
            await tab.press("Enter", "\r")
            await tab.until(f"{text_of('#health')} === {json.dumps(health)}")
        assert await tab.value("document.querySelector('#key-form').hidden")
        assert await tab.value(f"{shown}.length") > 0
        assert [status for _, status in await told_of(tab, "/admin/", 2)] == [401, 200]
        await tab.go(f"http://127.0.0.1:{port}/?again")
        await tab.until(READY)  # this tab keeps it
        assert await tab.value("document.cookie + localStorage.length") == "0"


async def test_a_minute_of_events_takes_no_memory(browser: str) -> None:
    clock = ManualClock()
    async with still_node(clock) as (feed, port, _), page(browser) as tab:
        await tab.go(f"http://127.0.0.1:{port}/")
        await tab.until(READY)

        async def pass_seconds(count: int) -> tuple[int, int]:
            for _ in range(count):
                await next_second(tab, feed, clock)
            heap = await tab.heap_bytes()  # collects garbage, which the counters would count
            return heap, (await tab.send("Memory.getDOMCounters"))["nodes"]

        await pass_seconds(1)
        await tab.value(  # five minutes, as they would have come
            f"""for (let k = 1; k <= {HISTORY_SECONDS}; k++) {{
              const moment = structuredClone(state.now);
              moment.trace.at += 1;
              takeMoment(moment);
            }}"""
        )
        clock.advance(HISTORY_SECONDS)
        heap, nodes = await pass_seconds(20)
        heap_later, nodes_later = await pass_seconds(60)
        assert await tab.value("state.rates.length") == HISTORY_SECONDS + 1
        assert heap_later - heap < 30_000  # of 60 events, each of a thousand bytes
        assert nodes_later - nodes < 50
        assert tab.complaints == []

"""A real headless Chromium, driven through its DevTools protocol with what is installed anyway.

Prefer conditions to times: ``Page.until`` waits in the page, for as long as the test may take.
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

COMMAND = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(COMMAND is None, reason="there is no Chromium here")

FOREIGN_NAME = "foreign.example"
"""A name that leads this browser to this machine, as DNS rebinding does; no other name leads on."""
SECONDS = 150.0
"""What a condition may take, on a slow machine with other work."""

_RESOLVE = f"MAP {FOREIGN_NAME} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--no-default-browser-check", "--disable-background-networking"),
    *("--disable-component-update", "--disable-extensions", "--disable-sync", "--mute-audio"),
    *("--disable-default-apps", "--hide-scrollbars", "--no-proxy-server"),
    *("--remote-debugging-port=0", f"--host-resolver-rules={_RESOLVE}"),
)
_MIDDLE = """(() => {
  const element = document.querySelector(SELECTOR);
  element.scrollIntoView({block: "center", behavior: "instant"});
  const {x, y, width, height} = element.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
})()"""
_UNTIL = """new Promise((done) => {
  const look = () => { const is = (CONDITION); is ? done(is) : setTimeout(look, 20); };
  look();
})"""


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """Run a browser with its profile in this folder; yield the address of its DevTools."""
    assert COMMAND is not None
    arguments = [COMMAND, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    home = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            arguments, env=home, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while len(told := _read(folder / "DevToolsActivePort").split()) < 2:
            assert process.poll() is None, (folder / "log").read_text(errors="replace")
            time.sleep(0.02)  # the file appears once, and nothing else tells of it
        port, path = told
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


class PageError(AssertionError):
    """The page raised an exception, or the browser refused a command."""


@dataclass(frozen=True)
class Look:
    """How a page is shown."""

    width: int = 1200
    height: int = 900
    dark: bool = False
    still: bool = True
    """Whether the user prefers no motion."""


class Page:
    """One tab, in a context of its own.

    Attributes:
        complaints: errors and warnings of the console, exceptions, and requests that failed.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._requests: dict[str, str] = {}
        self._answered: list[tuple[str, int]] = []

    @property
    def statuses(self) -> list[tuple[str, int]]:
        """The answers that it got, each as ``METHOD path`` and the status."""
        return [(self._requests.get(request, "?"), status) for request, status in self._answered]

    # --- the protocol -------------------------------------------------------------------------

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_str(json.dumps(message))
        async with asyncio.timeout(SECONDS):
            result = await answer
        if "error" in result:
            raise PageError(f"{method}: {result['error']['message']}")
        return dict(result["result"])

    async def read(self) -> None:
        """Take what the browser tells, until it closes the connection."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            else:
                self._take(told["method"], told["params"])

    def _take(self, event: str, told: dict[str, Any]) -> None:
        match event:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.complaints.append(details.get("exception", details).get("description", ""))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                words = (str(each.get("value", "")) for each in told["args"])
                self.complaints.append(" ".join(words))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                entry = told["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                request = told["request"]
                path = "/" + request["url"].split("/", 3)[-1]
                self._requests[told["requestId"]] = f"{request['method']} {path}"
            case "Network.responseReceivedExtraInfo":  # also of answers that the page may not see
                self._answered.append((told["requestId"], told["statusCode"]))

    async def open(self, look: Look) -> None:
        """Make the tab."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.show(look)

    # --- what users do ------------------------------------------------------------------------

    async def show(self, look: Look) -> None:
        """Set the size of the window and what the user prefers."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=look.width,
            height=look.height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = {
            "prefers-color-scheme": "dark" if look.dark else "light",
            "prefers-reduced-motion": "reduce" if look.still else "no-preference",
        }
        named = [{"name": name, "value": value} for name, value in features.items()]
        await self.send("Emulation.setEmulatedMedia", features=named)

    async def go(self, url: str) -> None:
        """Open an address, and wait until it has been loaded."""
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(SECONDS):
            await self._loaded.wait()

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited.

        Raises:
            PageError: it raised an exception.
        """
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        try:
            async with asyncio.timeout(SECONDS):
                return await self.value(_UNTIL.replace("CONDITION", condition))
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise PageError(f"never true: {condition}\n{text}\n{self.complaints}") from None

    async def click(self, selector: str) -> None:
        """Click on the middle of an element, as a mouse does."""
        x, y = await self.value(_MIDDLE.replace("SELECTOR", json.dumps(selector)))
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def press(self, key: str, text: str = "") -> None:
        """Press a key, such as ``Tab`` or ``Enter`` (whose text is a carriage return)."""
        code = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        await self.send("Input.insertText", text=text)

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what the page looks like as PNG; ``whole``: what lies below the window, too."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def heap_bytes(self) -> int:
        """Return how much memory the page's script needs: what is left after a collection."""
        await self.send("HeapProfiler.collectGarbage")
        return int((await self.send("Runtime.getHeapUsage"))["usedSize"])


@asynccontextmanager
async def page(devtools: str, look: Look = Look()) -> AsyncIterator[Page]:
    """Open a tab in a running browser, and close it at the end.

    Args:
        devtools: what ``chromium`` yields.
        look: how it is shown.
    """
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(devtools, max_msg_size=0) as socket,
    ):
        tab = Page(socket)
        reading = asyncio.create_task(tab.read())
        try:
            await tab.open(look)
            yield tab
            await tab.send("Page.close")
        finally:
            await socket.close()
            await asyncio.gather(reading, return_exceptions=True)

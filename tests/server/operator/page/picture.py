"""Takes the picture of the live page: a node of the demo model under load, after some switches.

    python -m tests.server.operator.page.picture docs/images/live-page.png

It takes some minutes, since the page draws five. Several pictures may be taken at once, also in
dark mode and for other widths, each written as ``FILE:dark:360``.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx
from PIL import Image

from tests.browser import Look, Page, chromium, page
from tests.server.node import ServedNode, served_node

LAYOUTS = (
    *([[0, 1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
    *([[0], [1], [2], [3]], [[0], [1], [2, 3]]),
)
PROMPTS = ("Tell me a story about a fox.", "Tell me a long story about a bear.", "Who are you?")
MINUTES = 5.2


async def _ask(http: httpx.AsyncClient, number: int) -> None:
    """Send one request after the other, as one client does."""
    draw = random.Random(number)
    while True:
        body = {
            "model": "shoal-demo",
            "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
            "max_tokens": draw.randint(100, 400),
            "seed": draw.randint(0, 1000),
        }
        priority = str(draw.choice((-10, 0, 0, 0, 10)))
        await http.post("/v1/chat/completions", json=body, headers={"X-Vllm-Priority": priority})
        await asyncio.sleep(draw.expovariate(0.7))


async def _switch(http: httpx.AsyncClient) -> None:
    """Switch now and then for as long as the timeline is."""
    draw = random.Random(0)
    loop = asyncio.get_running_loop()
    end = loop.time() + MINUTES * 60
    for units in itertools.cycle(LAYOUTS):
        if loop.time() > end and units == LAYOUTS[1]:
            return
        await http.post("/admin/layout", json={"units": units})
        await asyncio.sleep(draw.uniform(8, 32))


async def _prompt(tab: Page) -> None:
    """Send a prompt, and switch while it is answered."""
    await tab.click("#send")
    await tab.until("document.querySelector('#reply').textContent.length > 150")
    await tab.click("button[data-units='[[0,1],[2,3]]']")
    await tab.until("document.querySelectorAll('#reply b').length > 1")
    text = "document.querySelector('#reply b ~ b + span')?.textContent.length > 120"
    await tab.until(f"{text} || !document.querySelector('#send').disabled")
    # Where the reply begins, its end does not draw the page on.
    await tab.value("scrollTo(0, 0), document.activeElement.blur(), $('reply').scrollTop = 0")


async def _take(node: ServedNode, devtools: str, pictures: Sequence[tuple[Path, Look]]) -> None:
    async with node.async_client() as http, page(devtools) as tab:
        await tab.go(f"{node.admin_url}/")
        clients = [asyncio.create_task(_ask(http, number)) for number in range(7)]
        await _switch(http)
        await _prompt(tab)
        for path, look in pictures:
            await tab.show(look)
            await tab.until(f"innerWidth === {look.width}")
            await asyncio.sleep(2)  # the page draws itself anew with the next event
            await tab.picture(path)
            _make_smaller(path)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def _make_smaller(path: Path) -> None:
    """Keep the 256 most frequent colours: all that the page sets, and most edges of letters."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    colours = sorted(image.getcolors(1 << 24) or [], reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in colours for part in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def _picture(text: str) -> tuple[Path, Look]:
    name, *how = text.split(":")
    width = next((int(word) for word in how if word.isdecimal()), 1200)
    return Path(name), Look(width=width, dark="dark" in how)


def main() -> None:
    """Take pictures."""
    parser = argparse.ArgumentParser(description="take pictures of the live page")
    parser.add_argument("pictures", nargs="+", type=_picture, metavar="FILE[:dark][:WIDTH]")
    pictures = parser.parse_args().pictures
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as profile:
        arguments = ("--engines", "4", "--max-model-len", "2048")
        with (
            served_node(Path(cache), *arguments, real=True, fresh=True) as node,
            chromium(Path(profile)) as devtools,
        ):
            asyncio.run(_take(node, devtools, pictures))


if __name__ == "__main__":
    main()

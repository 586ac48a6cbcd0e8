"""Asks a Shoal node for work in the background, and for an urgent answer beside it.

Usage: pip install openai, then python openai_priorities.py [BASE_URL [API_KEY]]

A request's priority is a number: lower is earlier, and 0 is usual. Under the policies flying and
adaptive an urgent request (below 0) may also get several engines at once.
"""

import asyncio
import sys
import time

import openai

URGENT, BACKGROUND = -10, 10


async def ask(client: openai.AsyncOpenAI, model: str, question: str, priority: int) -> str:
    """Return an answer, after a line that says where and how fast it was made."""
    begin = time.perf_counter()
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=100,
        extra_headers={
            "X-Vllm-Priority": str(priority),
            # A request that has not begun after a minute is answered with 504.
            "x-shoal-deadline-ms": "60000",
        },
    )
    layout, unit = raw.headers.get("x-shoal-layout"), raw.headers.get("x-shoal-unit")
    seconds = time.perf_counter() - begin
    print(f"priority {priority:>3}: {seconds:.2f} s in {layout} on engines {unit}")
    return raw.parse().choices[0].message.content or ""


async def main(base_url: str, api_key: str) -> None:
    """Ask eight questions in the background, and meanwhile an urgent one."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = (await client.models.list()).data[0].id
        background = [
            asyncio.create_task(ask(client, model, f"Tell me story number {k}.", BACKGROUND))
            for k in range(8)
        ]
        print(await ask(client, model, "What is the capital of France?", URGENT))
        await asyncio.gather(*background)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    key = sys.argv[2] if len(sys.argv) > 2 else "none"
    asyncio.run(main(address, key))

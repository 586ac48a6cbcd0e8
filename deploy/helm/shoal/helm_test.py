"""Asks a node whether it is up, and for one completion: what ``helm test`` runs, in the image.

Arguments: the address of the API, and the file of its API keys if it has any.
"""

import json
import pathlib
import sys
import urllib.request
from typing import Any

SECONDS = 120
"""How long an answer may take: the first one may wait for a busy node."""


def ask(url: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
    """Return what a route answers, as JSON; None if it answers nothing."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read() or "null")


def main(address: str, keys: str | None = None) -> int:
    """Ask, and say what the answers are; return the exit status."""
    ask(f"{address}/health", None)
    print("health: ok")
    entries = [] if keys is None else json.loads(pathlib.Path(keys).read_text())
    texts = [entry["key"] for entry in entries if "key" in entry]
    if entries and not texts:
        print("no completion was asked for: the file has the keys' digests only")
        return 0
    key = texts[0] if texts else None
    model = ask(f"{address}/v1/models", key)["data"][0]["id"]
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 8}
    answer = ask(f"{address}/v1/completions", key, asked)
    print(f"completion of {model}: {answer['choices'][0]['text']!r}")
    return int(answer["usage"]["completion_tokens"] == 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

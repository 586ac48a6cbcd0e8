"""Has a Shoal node answer a file of chat requests as a batch, and prints the answers.

Usage: pip install openai, then python batch.py [BASE_URL [API_KEY]]

The node must have been started with --batch-dir. Requests of people come before those of a batch.
"""

import json
import sys
import time
from typing import Any

import openai
from openai.types import Batch

QUESTIONS = {
    "france": "What is the capital of France?",
    "sea": "Why is the sea salty?",
    "story": "Tell me a story.",
}


def request(name: str, question: str) -> str:
    """Return one line of the batch's input. It names no model, so the served one answers."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 100}
    line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Wait until no line of the batch is to be answered any more, and return the batch then."""
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(1)
        batch = client.batches.retrieve(batch.id)
    return batch


def main(base_url: str, api_key: str) -> None:
    """Upload the questions, wait for their batch, print its results, and delete its files."""
    lines = "\n".join(request(*item) for item in QUESTIONS.items())
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        file = client.files.create(file=("questions.jsonl", lines.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = ended(client, batch)
        counts = batch.request_counts
        print(f"{batch.status}: {counts.completed} of {counts.total} lines answered")
        for error in batch.errors.data if batch.errors else ():
            print(f"line {error.line} of the input is wrong: {error.message}")
        # Lines that failed are in the error file. A file without a line does not exist.
        results = [one for one in (batch.output_file_id, batch.error_file_id) if one]
        for result in results:
            for line in client.files.content(result).text.splitlines():
                print_result(json.loads(line))
        for one in (file.id, *results):
            client.files.delete(one)


def print_result(result: dict[str, Any]) -> None:
    """Print what became of one line; results come in the order in which they were ready."""
    response = result["response"]
    if response and response["status_code"] == 200:
        said = response["body"]["choices"][0]["message"]["content"]
    else:
        said = f"failed: {result['error'] or response['body']}"
    print(f"{result['custom_id']}: {said}")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    key = sys.argv[2] if len(sys.argv) > 2 else "none"
    main(address, key)

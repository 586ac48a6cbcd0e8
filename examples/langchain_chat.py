"""Streams an answer from a Shoal node through LangChain.

Usage: pip install langchain-openai, then python langchain_chat.py [BASE_URL [API_KEY]]
"""

import sys

import openai
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(base_url: str, api_key: str) -> None:
    """Print a story as it comes."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        name = client.models.list().data[0].id
    model = ChatOpenAI(
        model=name,
        base_url=base_url,
        api_key=api_key,
        max_tokens=100,
        default_headers={"X-Vllm-Priority": "-10"},
    )
    prompt = ChatPromptTemplate.from_messages([("user", "Tell me a story about a {animal}.")])
    for chunk in (prompt | model).stream({"animal": "fox"}):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    key = sys.argv[2] if len(sys.argv) > 2 else "none"
    main(address, key)

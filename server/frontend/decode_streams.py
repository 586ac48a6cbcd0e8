"""Finds the last few prompt tokens on which the text of the first output token depends.

vLLM's ``FastIncrementalDetokenizer`` gives ``tokenizers.decoders.DecodeStream`` the whole prompt.
The stream's first step decodes the prompt twice, after the engine has answered: that takes 0.2 us
per token. Later steps only look back to the tokens since the stream last had text.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SHORTEST_TAIL = 4
LONGEST_TAIL = 24
"""Tokens: about as far as earlier releases of vLLM looked back for a safe place to start."""
_REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are not a character, an incomplete one included."""


def prompt_tail(
    tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
) -> Sequence[int]:
    """Return the shortest end of a prompt that a ``DecodeStream`` can begin with.

    This end has text, so that what follows is not taken for the beginning of a text (some decoders
    strip the first space), and its last character is complete. The whole prompt is returned if it
    is short, or has no such end within ``LONGEST_TAIL`` tokens. The stream then gives the same text
    as after the whole prompt, if the prompt is text. Made-up ids are an exception: a decoder that
    looks at all bytes in a row at once (``ByteFallback``) may make no text of the whole row, but
    text of its end.

    Args:
        tokenizer: the model's tokenizer.
        prompt: its token ids.
        skip_special_tokens: whether special tokens have no text.
    """
    for length in range(SHORTEST_TAIL, min(len(prompt), LONGEST_TAIL + 1)):
        tail = prompt[-length:]
        text = tokenizer.decode(tail, skip_special_tokens=skip_special_tokens)
        if text and not text.endswith(_REPLACEMENT):
            return tail
    return prompt


def shorten_prompt(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Make a new detokenizer look only at the end of its prompt.

    Args:
        detokenizer: vLLM's, of any kind. It is left as it is if it has no ``DecodeStream``, or has
            had an output token.
        prompt: the token ids that the detokenizer was made with.
    """
    if prompt is None or not isinstance(getattr(detokenizer, "stream", None), DecodeStream):
        return
    if detokenizer.num_output_tokens():
        return
    skips = detokenizer.skip_special_tokens
    tail = prompt_tail(detokenizer.tokenizer, prompt, skip_special_tokens=skips)
    detokenizer.stream = DecodeStream(ids=list(tail), skip_special_tokens=skips)

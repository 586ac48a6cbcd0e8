"""What of a prompt the text of its first output token depends on: its last few tokens.

vLLM's ``FastIncrementalDetokenizer`` gives ``tokenizers.decoders.DecodeStream`` the whole prompt,
which the first step decodes twice: 0.2 us a token, after the engine has answered. From its second
token on the stream itself looks back at the tokens since it last had text, and no further.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SHORTEST_TAIL = 4
LONGEST_TAIL = 24
"""Tokens: about as far as earlier releases of vLLM looked back for a safe place to start."""
_REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are no character: of the first ones of one that goes on, too."""


def prompt_tail(
    tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
) -> Sequence[int]:
    """Return the shortest end of a prompt that a ``DecodeStream`` can begin with.

    It has text, so that what follows is not taken for the beginning of one (some decoders strip
    the first space), and its last character is whole. That is all of a prompt that is short, or
    that has no such end within ``LONGEST_TAIL`` tokens. The stream then says what it would after
    the whole prompt, if that is text: ids may be made up of which a decoder that looks at all bytes
    in a row at once (``ByteFallback``) makes no text, and of their end it does.

    Args:
        tokenizer: of the model.
        prompt: its token ids.
        skip_special_tokens: whether these have no text.
    """
    for length in range(SHORTEST_TAIL, min(len(prompt), LONGEST_TAIL + 1)):
        tail = prompt[-length:]
        text = tokenizer.decode(tail, skip_special_tokens=skip_special_tokens)
        if text and not text.endswith(_REPLACEMENT):
            return tail
    return prompt


def shorten_prompt(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Have a new detokenizer look at the end of its prompt alone.

    Args:
        detokenizer: vLLM's, of any kind; one that has no ``DecodeStream``, or has had an output
            token, is left as it is.
        prompt: the token ids that it was made with.
    """
    if prompt is None or not isinstance(getattr(detokenizer, "stream", None), DecodeStream):
        return
    if detokenizer.num_output_tokens():
        return
    skips = detokenizer.skip_special_tokens
    tail = prompt_tail(detokenizer.tokenizer, prompt, skip_special_tokens=skips)
    detokenizer.stream = DecodeStream(ids=list(tail), skip_special_tokens=skips)

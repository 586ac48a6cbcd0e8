"""Train the demo model on prepared tokens, for a given time, and write its checkpoint.

A few minutes on one GPU are enough. Every row of a batch begins at the start of a document, as
every prompt will. Most rows are short, and some are as long as the model's context.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

from shoal.server.demo.training.chat import END, END_OF_TEXT, SPECIAL_TOKENS, Message, prompt
from shoal.server.demo.training.checkpoint import SHAPE, WEIGHTS, write_configuration
from shoal.server.demo.training.model import Llama
from shoal.server.demo.training.prepare import TOKENIZER, read_tokens

SAMPLES = (
    "Hello!",
    "What is Shoal?",
    "Tell me a story about a fox named Zuri.",
    "What is the capital of Portugal?",
    "What is 7 times 8?",
    "Tell me about the sea.",
    "Who was Napoleon?",
    "My name is Bekal. What is the difference between DP and TP?",
    "How do I bake bread?",
    "Write a poem about snow.",
)
"""What the trained model is asked at the end."""

_STOPS = {SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(END_OF_TEXT)}


@dataclass(frozen=True)
class Settings:
    """How to train. A step has ``batch_tokens`` tokens, in rows of one of the ``lengths``.

    Each step uses the next of the lengths. The learning rate rises for ``warmup`` of the time and
    then falls along a cosine to a tenth of ``learning_rate``.
    """

    minutes: float = 4.0
    max_steps: int | None = None
    batch_tokens: int = 65_536
    lengths: tuple[int, ...] = (512, 512, 512, 2048)
    learning_rate: float = 2e-3
    warmup: float = 0.03
    weight_decay: float = 0.1
    max_gradient: float = 1.0
    held_out: float = 0.005
    seed: int = 11


class Batches:
    """Draws rows of token ids that begin where documents do."""

    def __init__(self, tokens: torch.Tensor, generator: torch.Generator) -> None:
        self._tokens = tokens
        self._generator = generator
        ends = (tokens == SPECIAL_TOKENS.index(END_OF_TEXT)).nonzero().flatten()
        self._starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])

    def draw(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, ``[rows, length]``; the corpus repeats after its end."""
        chosen = torch.randint(len(self._starts), (rows,), generator=self._generator)
        starts = self._starts[chosen.to(self._starts.device)]
        offsets = torch.arange(length + 1, device=starts.device)
        row = self._tokens[(starts[:, None] + offsets) % len(self._tokens)].long()
        return row[:, :-1], row[:, 1:]


def train(model: Llama, tokens: torch.Tensor, settings: Settings) -> float:
    """Train ``model`` in place and return its loss on held-out text.

    Args:
        model: the model, on the device to train on.
        tokens: ids of the corpus, on the same device.
        settings: how to train.
    """
    split = int(len(tokens) * (1 - settings.held_out))
    generator = torch.Generator().manual_seed(settings.seed)
    batches = Batches(tokens[:split], generator)
    optimizer = _optimizer(model, settings)
    for step, progress in enumerate(_clock(settings)):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(progress, settings.warmup)
        length = settings.lengths[step % len(settings.lengths)]
        with _autocast(tokens.device):
            loss = _loss(model, *batches.draw(settings.batch_tokens // length, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {progress:.0%} of the time")
    held_out = Batches(tokens[split:], generator)
    with torch.no_grad(), _autocast(tokens.device):
        losses = [_loss(model, *held_out.draw(16, settings.lengths[0])).item() for _ in range(8)]
    return float(np.mean(losses))


def save(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    """Write the model as a bf16 checkpoint in Hugging Face format to directory ``path``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    write_configuration(path, model.shape, tokenizer)
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()  # type: ignore[untyped-decorator]
def answer(model: Llama, tokenizer: Tokenizer, question: str, *, max_tokens: int = 200) -> str:
    """Return the model's most likely answer."""
    device = next(model.parameters()).device
    ids = tokenizer.encode(prompt([Message("user", question)])).ids
    start = len(ids)
    while len(ids) < start + max_tokens:
        with _autocast(device):
            logits = model(torch.tensor([ids], device=device))
        token = int(logits[0, -1].argmax())
        if token in _STOPS:
            break
        ids.append(token)
    return str(tokenizer.decode(ids[start:]))


def _loss(model: Llama, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _optimizer(model: Llama, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW, without weight decay for the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )


def _clock(settings: Settings) -> Iterator[float]:
    """Yield, once per step, the share of the time that has gone by, until there is none left."""
    if settings.max_steps is not None:
        yield from (step / settings.max_steps for step in range(settings.max_steps))
        return
    begin = time.monotonic()
    while (progress := (time.monotonic() - begin) / (60 * settings.minutes)) < 1:
        yield progress


def _schedule(progress: float, warmup: float) -> float:
    """Return the learning rate's share of its peak when ``progress`` of the time has gone by."""
    rise = min(1.0, progress / warmup + 0.01)
    return rise * (0.55 + 0.45 * math.cos(math.pi * progress))


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    on_gpu = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on_gpu)  # type: ignore[no-any-return]


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write the checkpoint, and show what the model answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory of prepare's output")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=Settings.minutes)
    parser.add_argument("--steps", type=int, help="stop after so many steps, whatever the time")
    parser.add_argument("--batch-tokens", type=int, default=Settings.batch_tokens)
    args = parser.parse_args(argv)
    settings = replace(
        Settings(),
        minutes=args.minutes,
        max_steps=args.steps,
        batch_tokens=args.batch_tokens,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    tokenizer = Tokenizer.from_file(str(args.data / TOKENIZER))
    tokens = torch.from_numpy(read_tokens(args.data).astype(np.int32)).to(device)
    model = Llama(SHAPE).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokens)} tokens")
    print(f"held-out loss {train(model, tokens, settings):.3f}")
    save(model, tokenizer, args.out)
    for question in SAMPLES:
        print(f"\n> {question}\n{answer(model, tokenizer, question)}")


if __name__ == "__main__":
    main()

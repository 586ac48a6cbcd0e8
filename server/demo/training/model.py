"""The demo model in plain PyTorch: a Llama whose parameters have their Hugging Face names.

Training needs nothing more; servers load the checkpoint into their own Llama.
"""

import torch
from torch import nn
from torch.nn import functional

from shoal.server.demo.training.checkpoint import Shape

INIT_SCALE = 0.02


class Llama(nn.Module):  # type: ignore[misc]
    """A Llama with tied embeddings; ``transformers`` reads its ``state_dict`` as a checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden),
                "layers": nn.ModuleList(Layer(shape) for _ in range(shape.layers)),
                "norm": nn.RMSNorm(shape.hidden, eps=shape.norm_eps),
            }
        )
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            # The weights of what is added to the residual stream, twice per layer, start smaller
            # (GPT-2).
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=INIT_SCALE / (2 * shape.layers) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, ``[batch, length, vocab_size]``, of ``tokens``, ``[batch, length]``."""
        rotation = _rotation(tokens.shape[1], self.shape, tokens.device)
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x, rotation)
        return functional.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and MLP, each with a norm before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return ``x``, ``[batch, length, hidden]``, with what this layer adds to it."""
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):  # type: ignore[misc]
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the attention output of every position, ``[batch, length, hidden]``."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = query.shape[1] // key.shape[1]
        attended = functional.scaled_dot_product_attention(
            _rotated(query, rotation),
            _rotated(key, rotation).repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            is_causal=True,
        )
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):  # type: ignore[misc]
    """The gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output for ``x``, ``[batch, length, hidden]``."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_SCALE)


def _rotation(length: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary positions, each ``[length, head_dim]``."""
    half = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotated(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate ``heads``, ``[batch, heads, length, head_dim]``; a pair has one entry in each half."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads * cosine + turned * sine).to(heads.dtype)

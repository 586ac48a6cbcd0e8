"""Exchanges tokens for heads and back: Arctic Ulysses' all-to-alls, by collectives.

Shift Parallelism, 3.2 (Algorithm 1 if there are fewer KV heads than members).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shoal.runtime.engine.groups.communicators import SpGroups, size_of
from shoal.runtime.engine.groups.peer_memory import WORD


class HeadExchange:
    """Exchanges this member's tokens with all heads for all tokens with this member's heads.

    Args:
        groups: this member's process groups.
    """

    def __init__(self, groups: SpGroups) -> None:
        self._groups = groups
        self.sp: int = groups.sp.size()
        self.kv_parts: int = self.sp if groups.within is None else size_of(groups.across)
        """Into how many parts members divide the base's KV heads."""
        self._place: int = groups.sp.rank()
        self.num_tokens = 0
        self.share = 0
        """Tokens of each member in this step, padding included."""

    def connect(self, device: torch.device) -> None:
        """Let every group do its first exchange, which connects its members. Collective."""
        for group in self._groups:
            if group is not None:
                sent = torch.zeros(group.size(), dtype=WORD, device=device)
                dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
                gathered = sent.new_empty(group.size() * sent.numel())
                dist.all_gather_into_tensor(gathered, sent, group=group)

    def share_of(self, num_tokens: int) -> int:
        """Return the smallest share of each member with which all together have a step's tokens."""
        return -(-num_tokens // self.sp)

    def begin(self, num_tokens: int, share: int | None = None) -> None:
        """Begin a step of ``num_tokens`` tokens. Each member has ``share``, padding included.

        By default that is as few as possible.
        """
        self.num_tokens = num_tokens
        self.share = share or self.share_of(num_tokens)

    @property
    def own_rows(self) -> range:
        """This member's share of the step's tokens; those beyond the last one are padding."""
        return range(self._place * self.share, (self._place + 1) * self.share)

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a copy of this member's share of ``[tokens]``, padded with zeros."""
        rows = self.own_rows
        part = tokens[rows.start : rows.stop]
        return nn.functional.pad(part, (0, self.share - part.shape[0]))

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, width]``, gathered from all members' ``[share, width]``.

        All tokens are needed: prompt log-probabilities may need any of them, not only the sampled.
        """
        gathered = hidden.new_empty((self.sp * self.share, *hidden.shape[1:]))
        dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=self._groups.sp)
        return gathered[: self.num_tokens]

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Exchange ``[share, heads, size]`` each for ``[tokens, this member's heads, size]``."""
        keys_and_values = (key, value)
        if self._groups.within is None:
            return self._all_to_all((query, *keys_and_values))
        return [*self._all_to_all((query,)), *self._replicate(keys_and_values)]

    def _all_to_all(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Exchange tensors whose heads are split evenly, as one message to each member."""
        received = _exchanged(_side_by_side(tensors, self.sp).flatten(0, 1), self._groups.sp)
        return self._as_heads(received, tensors, [words_of(t) // self.sp for t in tensors])

    def _replicate(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Exchange KV heads that are fewer than members (Shift Parallelism, Algorithm 1).

        After an all-to-all across the GQA groups, each member has its head for the tokens of one
        member of each group. An all-gather within its group adds the tokens of all the others.
        Then the tokens are put in order.
        """
        across, within, heads = self._groups.across, self._groups.within, self.kv_parts
        mine = _side_by_side(tensors, heads).flatten(0, 1)
        if across is not None:
            mine = _exchanged(mine, across)
        gathered = mine.new_empty((self.sp // heads, heads, self.share, mine.shape[1]))
        dist.all_gather_into_tensor(gathered.view(-1, mine.shape[1]), mine, group=within)
        in_order = gathered.transpose(0, 1).reshape(-1, mine.shape[1])
        return self._as_heads(in_order, tensors, [words_of(t) // heads for t in tensors])

    def _as_heads(
        self, words: torch.Tensor, sent: Sequence[torch.Tensor], widths: list[int]
    ) -> list[torch.Tensor]:
        """Return tensors ``[tokens, heads, size]`` from ``[rows, words]``, split by ``widths``."""
        columns = words[: self.num_tokens].split(widths, dim=1)
        return [
            column.view(tensor.dtype).unflatten(1, (-1, tensor.shape[2]))
            for column, tensor in zip(columns, sent, strict=True)
        ]

    def new_heads(self, output: torch.Tensor, heads: int) -> torch.Tensor:
        """Return ``[sp * share, heads, size]``, which the caller fills for ``to_tokens``."""
        return output.new_empty((self.sp * self.share, heads, output.shape[2]))

    def to_tokens(self, heads: torch.Tensor, output: torch.Tensor) -> None:
        """Exchange this member's heads for all heads of its tokens: the way back.

        Args:
            heads: ``[sp * share, this member's heads, size]``, contiguous.
            output: ``[share, heads, size]``, contiguous; written to.
        """
        received = _exchanged(heads.view(heads.shape[0], -1).view(WORD), self._groups.sp)
        rows = output.view(self.share, -1).view(WORD).unflatten(1, (self.sp, -1))
        rows.copy_(received.unflatten(0, (self.sp, self.share)).transpose(0, 1))


def words_of(tensor: torch.Tensor) -> int:
    """Return the words of one token in ``[tokens, heads, size]``."""
    values = tensor.shape[1] * tensor.shape[2]
    words: int = values * tensor.element_size() // WORD.itemsize
    return words


def _side_by_side(tensors: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Return ``[parts, share, words]``: each part's heads of every ``[share, heads, size]``."""
    views = [t.view(t.shape[0], parts, -1).view(WORD).transpose(0, 1) for t in tensors]
    return torch.cat(views, dim=2)


def _exchanged(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received

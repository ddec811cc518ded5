"""Sequences -> rows, of one sequence or of several that do not see each other -> micro-batches."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """A micro-batch.

    Attributes:
        inputs: Keyword arguments of the model's forward: ``input_ids`` [B, T] int64; ``attention_mask`` [B, T] int64 if there is
            padding; ``position_ids`` [B, T] int64 if packed; ``decoder_input_ids`` for encoder-decoders. Run the model with
            ``use_cache=False``: with a cache, transformers lets packed documents see each other.
        mask: [B, T] bool, True for the tokens that count in statistics (False: padding); None if all do.
    """

    inputs: dict[str, Tensor]
    mask: Tensor | None


@torch.no_grad()
def keeps_documents_apart(model: nn.Module, ids: Tensor) -> bool | None:
    """Whether the second of two packed documents gives the same output after another first one; None for a model on meta.

    Measured, since nothing in a config says it: transformers 5.24 does so for Llama or Gemma 3, but not for gpt-oss or OPT (which
    make their masks without position_ids), for layers with a recurrent state, or for flash attention with several rows.
    """
    accepted = inspect.signature(type(model).forward).parameters
    encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    firsts = ids.unique()[-2:]
    if encoder_decoder or not {"position_ids", "use_cache"} <= accepted.keys() or len(firsts) < 2:
        return False
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    device = next(model.parameters()).device
    rows = torch.cat([firsts.unsqueeze(1).expand(2, 8), ids[:8].expand(2, 8)], dim=1).to(device)
    positions = torch.arange(8, device=device).repeat(2).expand(2, 16)
    output = model(input_ids=rows, position_ids=positions, use_cache=False)[0][:, 8:]
    difference, size = (output[0] - output[1]).abs().max(), output.abs().max()
    return bool(difference <= 8 * torch.finfo(output.dtype).eps * size)


def pack_rows(sequences: list[Tensor], max_rows: int, max_length: int) -> list[list[Tensor]]:
    """Rows of whole sequences, first fit, longest first; what does not fit into ``max_rows`` rows is left out."""
    rows: list[list[Tensor]] = []
    room: list[int] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        row = next((index for index, free in enumerate(room) if free >= len(sequence)), len(rows))
        if row == len(rows):
            if row == max_rows:
                continue
            rows.append([])
            room.append(max_length)
        rows[row].append(sequence)
        room[row] -= len(sequence)
    return rows


def micro_batches(rows: list[list[Tensor]], batch_tokens: int, pad_id: int, packed: bool) -> list[Batch]:
    """Rows of similar length (the shortest at least 3/4 of the longest) together."""
    groups: list[list[list[Tensor]]] = []
    width = 0
    for row in sorted(rows, key=lambda row: sum(map(len, row)), reverse=True):
        length = sum(map(len, row))
        if not groups or (len(groups[-1]) + 1) * width > batch_tokens or 4 * length < 3 * width:
            groups.append([])
            width = length
        groups[-1].append(row)
    return [_batch(group, pad_id, packed) for group in groups]


def _batch(rows: list[list[Tensor]], pad_id: int, packed: bool) -> Batch:
    lengths = torch.tensor([sum(map(len, row)) for row in rows])
    width = int(lengths.max())
    mask = torch.arange(width) < lengths.unsqueeze(1)
    ids = torch.full((len(rows), width), pad_id)
    ids[mask] = torch.cat([sequence for row in rows for sequence in row])
    inputs = {"input_ids": ids}
    if packed:  # padding is a document of its own: an attention mask would turn off the detection of packed documents
        ends = [[*map(len, row), width - int(length)] for row, length in zip(rows, lengths, strict=True)]
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(end) for end in row]) for row in ends])
    elif not mask.all():
        inputs["attention_mask"] = mask.long()
    return Batch(inputs, None if mask.all() else mask)

"""Calibration data: texts, chats, token ids, files and data sets -> micro-batches, with a share of them held out.

    source -> samples -> documents (a text, a chat, token ids) -> sequences of at most max_length tokens -> rows -> Batch

A row is one sequence (padded), or several that do not see each other (packed). What is random is drawn from ``seed``.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torchq.calibration.packing import Batch, keeps_documents_apart, micro_batches, pack_rows
from torchq.calibration.sources import KINDS, Document, as_document, read_samples

MIN_TOKENS = 64
_ENOUGH_CHARS = 16  # characters read per token wanted: about 4 times what English needs
_PIECE_CHARS = 8  # characters of a piece per token of a window: about 2 windows of English


@dataclass(frozen=True)
class CalibrationData:
    """What to calibrate on, and how much of it.

    Attributes:
        source: A text; a path (.txt, .jsonl, .json, .csv, .parquet, a folder of those or of ``Dataset.save_to_disk``); a list of
            texts, of chats (lists of ``{"role", "content"}``), of records or of token ids; an integer tensor [T] or
            [sequences, T]; a ``datasets.Dataset``; a list or DataLoader of dicts of tensors, which are taken as they are
            (whole, until there are num_samples rows; max_length, packing and batch_tokens do not change them).
            Records may hold ``messages``, ShareGPT ``conversations``, ``instruction`` (and ``input``) with ``output``,
            ``prompt`` with ``completion`` or ``response``, ``text``, or ``input_ids``.
        num_samples: Sequences (rows, if packed) in all, held-out ones included; fewer if the source holds fewer.
        max_length: Tokens per sequence. Longer documents are cut, not truncated; later windows start with the special tokens
            that the tokenizer puts in front of a text (BOS, if it adds one).
        weights: Shares of several sources in num_samples; ``source`` is then a list of sources.
        column: Column of the records that holds text, messages or token ids; None for the layouts above.
        packing: Whether several documents share a row. None: if the sequences are on average at most half of max_length, and
            the model is measured to keep them apart (one forward pass of 32 tokens) or is not given. Otherwise rows are padded.
        holdout: Share of the sequences kept apart for decisions, 0 <= holdout < 1; at least one sequence if there are two.
        batch_tokens: Tokens per micro-batch, padding included; a micro-batch has at least one row.
        seed: Of the choice of sequences and of the held-out ones.

    Raises:
        ValueError: If a value is out of range.
    """

    source: Any
    num_samples: int = 128
    max_length: int = 512
    weights: tuple[float, ...] | None = None
    column: str | None = None
    packing: bool | None = None
    holdout: float = 1 / 16
    batch_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.source is None:
            raise ValueError(f"calibration is None; give {KINDS}")
        for name, least in (("num_samples", 1), ("max_length", 2), ("batch_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.holdout < 1:
            raise ValueError(f"holdout must be a share, 0 <= holdout < 1, got {self.holdout}")
        if self.weights is None:
            return
        if not isinstance(self.source, (list, tuple)) or len(self.source) != len(self.weights):
            found = len(self.source) if isinstance(self.source, (list, tuple)) else type(self.source).__name__
            raise ValueError(f"weights={self.weights} needs a list of {len(self.weights)} sources, one for each, got {found}")
        if not all(weight > 0 and math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"weights must be positive, got {self.weights}")


@dataclass(frozen=True)
class Batches:
    """Micro-batches to calibrate on, and others to decide by.

    Attributes:
        train: At least one.
        holdout: Sequences that are not in ``train``; empty if there is only one (or one ready batch), or holdout=0.
        num_tokens: Tokens that count in ``train`` (rows, for batches without ``input_ids``).
    """

    train: list[Batch]
    holdout: list[Batch]
    num_tokens: int


def load_batches(calibration: Any, tokenizer: Any = None, model: nn.Module | None = None) -> Batches:
    """Micro-batches of a calibration source.

    Args:
        calibration: A CalibrationData, or a source with its defaults (and max_length no longer than the model allows).
        tokenizer: A transformers tokenizer; needed for texts and chats.
        model: The model, to check token ids and lengths against, and to choose the inputs; None for any causal decoder.

    Raises:
        FileNotFoundError: If a path does not exist.
        TypeError: If a source or sample is of a type that is not supported.
        ValueError: If a source is empty, unreadable, of unknown layout, too short or needs a tokenizer (with a chat template);
            if max_length is more than the model allows, token ids are outside its vocabulary, or it cannot keep packed
            documents apart although packing=True.
    """
    data = _settings(calibration, model)
    rng = random.Random(data.seed)
    given = _given_batches(data, model, rng)
    if given is not None:
        held = _held_out(len(given), data.holdout, rng)
        train, holdout = ([b for i, b in enumerate(given) if (i in held) is wanted] for wanted in (False, True))
    else:
        train, holdout = _token_batches(data, tokenizer, model, rng)
    _check_count(train + holdout)
    train, holdout = ([_with_decoder_inputs(batch, model) for batch in part] for part in (train, holdout))
    return Batches(train, holdout, sum(_count(batch) for batch in train))


def _settings(calibration: Any, model: nn.Module | None) -> CalibrationData:
    """The CalibrationData, checked against the model's longest sequence."""
    limit = _model_limit(model, "max_position_embeddings")
    if not isinstance(calibration, CalibrationData):
        data = CalibrationData(calibration)
        return replace(data, max_length=int(min(data.max_length, limit)))
    if calibration.max_length > limit:
        raise ValueError(
            f"max_length={calibration.max_length} is more than max_position_embeddings={limit} of {type(model).__name__}; "
            f"set max_length={limit} or less"
        )
    return calibration


def _model_limit(model: nn.Module | None, name: str) -> float:
    """A size in the model's (text) config; inf without a model or such a limit."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(config, name, None)
    return limit if limit is not None and limit > 0 else math.inf


def _held_out(count: int, share: float, rng: random.Random) -> set[int]:
    """Indices of the held-out ones of ``count``."""
    if share == 0 or count < 2:
        return set()
    return set(rng.sample(range(count), min(count - 1, max(1, round(share * count)))))


def _count(batch: Batch) -> int:
    """Tokens that count; rows, where there are no tokens."""
    if batch.mask is not None:
        return int(batch.mask.sum())
    return batch.inputs["input_ids"].numel() if "input_ids" in batch.inputs else _num_rows(batch.inputs)


def _check_count(batches: list[Batch]) -> None:
    total = sum(_count(batch) for batch in batches)
    if total < MIN_TOKENS and all("input_ids" in batch.inputs for batch in batches):
        raise ValueError(f"calibration has {total or 'no'} tokens, at least {MIN_TOKENS} are needed (thousands are better)")


def _check_ids(tensors: list[Tensor], model: nn.Module | None) -> None:
    size = _model_limit(model, "vocab_size")
    for low, high in (tensor.aminmax() for tensor in tensors if tensor.numel()):
        if low < 0 or high >= size:
            raise ValueError(
                f"calibration has the token id {int(low if low < 0 else high)}, which is not in the vocabulary "
                f"(0 <= id < vocab_size={size}); use the model's own tokenizer"
            )


def _with_decoder_inputs(batch: Batch, model: nn.Module | None) -> Batch:
    """The batch; for an encoder-decoder with the input, shifted right, as the decoder's input."""
    config, ids = getattr(model, "config", None), batch.inputs.get("input_ids")
    if not getattr(config, "is_encoder_decoder", False) or ids is None or batch.inputs.keys() & {"decoder_input_ids", "labels"}:
        return batch
    starts = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"))
    shifted = ids.roll(1, dims=1)
    shifted[:, 0] = next((start for start in starts if start is not None), 0)
    inputs = batch.inputs | {"decoder_input_ids": shifted}
    if batch.mask is not None:
        inputs["decoder_attention_mask"] = batch.mask.long()
    return Batch(inputs, batch.mask)


# ------------------------------------------------------------------------------------------------------------ ready batches


def _given_batches(data: CalibrationData, model: nn.Module | None, rng: random.Random) -> list[Batch] | None:
    """Batches of a source that holds dicts of tensors, until there are num_samples rows; None for another source."""
    source = [data.source] if _is_batch(data.source) else data.source
    if isinstance(source, DataLoader):
        given: Iterator[Any] = iter(source)  # in its own order: it may be endless
    elif isinstance(source, (list, tuple)) and source and _is_batch(source[0]):
        given = (source[index] for index in _shuffled(len(source), rng))
    else:
        return None
    batches: list[Batch] = []
    rows = 0
    for inputs in given:
        wrong = [k for k, v in inputs.items() if not isinstance(v, Tensor)] if _is_batch(inputs) else [type(inputs).__name__]
        if wrong:
            raise TypeError(f"a batch of calibration must be a dict of tensors, which the model's forward takes, got {wrong}")
        mask = inputs.get("attention_mask")
        batches.append(Batch(dict(inputs), mask.bool() if mask is not None and mask.ndim == 2 else None))
        rows += _num_rows(inputs)
        if rows >= data.num_samples:
            break
    if not batches:
        raise ValueError("calibration is empty: the DataLoader yields no batch")
    _check_ids([batch.inputs["input_ids"] for batch in batches if "input_ids" in batch.inputs], model)
    return batches


def _num_rows(inputs: Mapping[str, Tensor]) -> int:
    return len(inputs["input_ids"] if "input_ids" in inputs else next(iter(inputs.values())))


def _is_batch(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) and item.ndim >= 2 for item in value.values())


# ------------------------------------------------------------------------------------------------- documents -> micro-batches


def _token_batches(
    data: CalibrationData, tokenizer: Any, model: nn.Module | None, rng: random.Random
) -> tuple[list[Batch], list[Batch]]:
    """Train and held-out micro-batches of a source of texts, chats or token ids."""
    sources, counts = ([data.source], [data.num_samples]) if data.weights is None else (data.source, _shares(data))
    drawn = [
        _draw(read_samples(source, count), count, data, tokenizer, rng) for source, count in zip(sources, counts, strict=True)
    ]
    _warn_if_no_chats([document for documents, _ in drawn for document in documents], tokenizer)
    pools = [_sequences(*draw, count, data, tokenizer, rng) for draw, count in zip(drawn, counts, strict=True)]
    sequences = [sequence for pool in pools for sequence in pool]
    _check_ids(sequences, model)
    packed = _is_packed(data, sequences, model)
    chosen: list[Tensor] = []
    for pool, count in zip(pools, counts, strict=True):
        chosen += _first_tokens(pool, count * data.max_length) if packed else pool[:count]
    held = _held_out(len(chosen), data.holdout if data.num_samples > 1 else 0, rng)
    parts = [[sequence for i, sequence in enumerate(chosen) if (i in held) is wanted] for wanted in (False, True)]
    if packed:
        spare = min(max(1, round(data.holdout * data.num_samples)), data.num_samples - 1) if held else 0
        rows = [
            pack_rows(part, most, data.max_length) for part, most in zip(parts, (data.num_samples - spare, spare), strict=True)
        ]
    else:
        rows = [[[sequence] for sequence in part] for part in parts]
    train, holdout = (micro_batches(part, data.batch_tokens, _pad_id(tokenizer, model), packed) for part in rows)
    return train, holdout


def _first_tokens(sequences: list[Tensor], tokens: int) -> list[Tensor]:
    """The first sequences that together have so many tokens."""
    before = itertools.accumulate(map(len, sequences), initial=0)
    return [sequence for sequence, start in zip(sequences, before, strict=False) if start < tokens]


def _shares(data: CalibrationData) -> list[int]:
    """num_samples divided by weight, largest remainders first."""
    assert data.weights is not None
    exact = [data.num_samples * weight / sum(data.weights) for weight in data.weights]
    counts = [int(share) for share in exact]
    for index in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: data.num_samples - sum(counts)]:
        counts[index] += 1
    if 0 in counts:
        raise ValueError(
            f"num_samples={data.num_samples} leaves a source of weights={data.weights} without any; raise num_samples"
        )
    return counts


def _shuffled(count: int, rng: random.Random) -> Iterator[int]:
    """0 ... count - 1 in random order, drawn one by one: data sets have millions of records."""
    moved: dict[int, int] = {}
    for index in range(count):
        other = rng.randrange(index, count)
        yield moved.get(other, other)
        moved[other] = moved.pop(index, index)


def _draw(samples: Any, count: int, data: CalibrationData, tokenizer: Any, rng: random.Random) -> tuple[list[Document], bool]:
    """Documents in random order, and whether they are all there are: far more than needed is not read."""
    enough = _ENOUGH_CHARS * count * data.max_length
    most = enough // min(count, len(samples))  # what one document counts for, so that a long one does not stand for all
    documents, chars, counted = [], 0, 0
    for index in _shuffled(len(samples), rng):
        document = as_document(samples[index], index, data.column, tokenizer)
        size = 4 * len(document) if isinstance(document, Tensor) else _num_chars(document)
        documents.append(document)
        chars, counted = chars + size, counted + min(size, most)
        if counted >= enough:
            break
    return documents, chars < enough


def _num_chars(document: str | list[dict[str, Any]]) -> int:
    return len(document) if isinstance(document, str) else sum(len(str(turn.get("content"))) for turn in document)


def _sequences(
    documents: list[Document], complete: bool, count: int, data: CalibrationData, tokenizer: Any, rng: random.Random
) -> list[Tensor]:
    """Sequences [<= max_length] int64 in random order: all, or (not ``complete``) enough from all over the documents."""
    pieces = [(document, True) for document in documents]
    if not complete:
        pieces = [piece for document in documents for piece in _pieces(document, data.max_length)]
        rng.shuffle(pieces)
    prefix, suffix = ([], []) if all(isinstance(d, Tensor) for d in documents) else _special_tokens(tokenizer)
    sequences: list[Tensor] = []
    tokens = 0
    for document, ends in pieces:
        if isinstance(document, Tensor):
            new = [window for window in document.split(data.max_length) if len(window)]
        else:
            ids = _token_ids(document, tokenizer)
            new = _windows(ids if ends or not suffix else ids[: -len(suffix)], data.max_length, prefix)
            new = new if ends or len(new) < 2 else new[:-1]  # the text goes on: its last window is cut short
        sequences += new
        tokens += sum(map(len, new))
        if not complete and tokens >= count * data.max_length:
            break
    rng.shuffle(sequences)
    return sequences


def _pieces(document: Document, max_length: int) -> list[tuple[Document, bool]]:
    """A long document in pieces, texts between words; with each, whether the document ends there."""
    if isinstance(document, Tensor):
        return [(part, True) for part in document.split(max_length)]
    if not isinstance(document, str):
        return [(document, True)]
    starts = [0]
    for target in range(_PIECE_CHARS * max_length, len(document), _PIECE_CHARS * max_length):
        near = (target + offset for offset, char in enumerate(document[target : target + 64]) if char.isspace())
        starts.append(next(near, target))
    return [(document[a:b], b == len(document)) for a, b in itertools.pairwise([*starts, len(document)])]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer by itself puts before (BOS, CLS) and after (EOS, SEP) a text."""
    ids, bare = (list(tokenizer("x", add_special_tokens=special)["input_ids"]) for special in (True, False))
    for start in range(len(ids) - len(bare) + 1 if bare else 0):
        if ids[start : start + len(bare)] == bare:
            return ids[:start], ids[start + len(bare) :]
    return [], []


def _token_ids(document: str | list[dict[str, Any]], tokenizer: Any) -> list[int]:
    if isinstance(document, str):
        return list(tokenizer(document, verbose=False)["input_ids"])
    import jinja2

    try:
        return list(tokenizer.apply_chat_template(document, tokenize=True, return_dict=False))
    except jinja2.TemplateError as error:
        roles = [turn["role"] for turn in document]
        raise ValueError(
            f"the tokenizer's chat template refuses a chat with the roles {roles}: {error}; mend or drop it"
        ) from error


def _windows(ids: list[int], max_length: int, prefix: list[int]) -> list[Tensor]:
    """All of a document, in windows that each start with the prefix if the document does."""
    head = prefix if ids[: len(prefix)] == prefix else []
    body = ids[len(head) :]
    if head and body[: len(head)] == head:  # the text already held what the tokenizer adds
        body = body[len(head) :]
    step = max(max_length - len(head), 1)
    return [torch.tensor(head + body[begin : begin + step]) for begin in range(0, len(body), step)]


def _warn_if_no_chats(documents: list[Document], tokenizer: Any) -> None:
    template, texts = getattr(tokenizer, "chat_template", None), [d for d in documents if isinstance(d, str)]
    if template is None or not texts or any(isinstance(document, list) for document in documents):
        return
    markers = [t for t in tokenizer.get_added_vocab() if t in str(template) and t != tokenizer.bos_token]
    if not any(marker in text[:10_000] for marker in markers for text in texts):
        warnings.warn(
            "the tokenizer has a chat template, but calibration holds no chats; for a chat model give chats: lists of "
            '{"role": ..., "content": ...}',
            stacklevel=4,
        )


# ------------------------------------------------------------------------------------------------------------------- packing


def _is_packed(data: CalibrationData, sequences: list[Tensor], model: nn.Module | None) -> bool:
    """Whether rows hold several documents (see CalibrationData.packing)."""
    long = sum(map(len, sequences)) > len(sequences) * data.max_length / 2
    if data.packing is False or len(sequences) < 2 or (data.packing is None and long):
        return False
    apart = True if model is None else keeps_documents_apart(model, torch.cat(sequences))
    if data.packing and apart is False:
        raise ValueError(f"packing=True, but packed documents see each other in {type(model).__name__}; set packing=False")
    return bool(data.packing or apart)


def _pad_id(tokenizer: Any, model: nn.Module | None) -> int:
    """A token id that the model has an embedding for: tokenizers may add a padding token that models lack."""
    size = _model_limit(model, "vocab_size")
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((int(token) for token in ids if token is not None and token < size), 0)

"""Where calibration data comes from: texts, chats, records, token ids, files and data sets -> documents."""

from __future__ import annotations

import csv
import importlib.util
import io
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
KINDS = (
    "texts, chats, records, token ids, a .txt .jsonl .json .csv or .parquet file, a folder, a datasets.Dataset or a DataLoader"
)
_LAYOUTS = "messages; conversations; instruction, output; prompt, completion; text; input_ids"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

Document: TypeAlias = "str | list[dict[str, Any]] | Tensor"


# --------------------------------------------------------------------------------------------------------- sample -> document


def as_document(sample: Any, index: int, column: str | None, tokenizer: Any) -> Document:
    """A text, a chat as messages, or token ids [T] int64."""
    if isinstance(sample, Mapping):
        sample = _of_record(sample, index, column, tokenizer)
    if sample is None or (isinstance(sample, (str, list, tuple)) and not sample):
        return torch.empty(0, dtype=torch.long)
    if isinstance(sample, (list, tuple)) and all(isinstance(turn, Mapping) for turn in sample):
        if getattr(tokenizer, "chat_template", None) is None:
            missing = "a tokenizer: pass tokenizer=" if tokenizer is None else "a chat template: set tokenizer.chat_template"
            raise ValueError(f"calibration holds chats, which need {missing}, or give texts instead of messages")
        return [_message(turn, index) for turn in sample]
    if isinstance(sample, str):
        if tokenizer is None:
            raise ValueError("calibration holds texts, which need a tokenizer: pass tokenizer=, or give token ids")
        return sample
    is_ids = isinstance(sample, (list, tuple)) and all(type(token) is int for token in sample)
    ids = torch.as_tensor(sample) if is_ids or hasattr(sample, "__array__") else None
    if ids is None or ids.ndim != 1 or (ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool)):
        got = type(sample).__name__ if ids is None else f"a tensor of {ids.dtype}, shape {tuple(ids.shape)}"
        raise TypeError(f"sample {index} of calibration must be a text, a chat, a record or integer token ids [T], got {got}")
    return ids.detach().long().cpu()


def _of_record(record: Mapping[str, Any], index: int, column: str | None, tokenizer: Any) -> Any:
    """What a record holds: a text, messages, token ids, or None."""
    keys = ", ".join(map(str, record))
    if column is not None:
        if column not in record:
            raise ValueError(f"column={column!r} is not in record {index} of calibration; its columns are {keys}")
        return record[column]
    if "input_ids" in record:
        ids = torch.as_tensor(record["input_ids"])
        return ids if record.get("attention_mask") is None else ids[torch.as_tensor(record["attention_mask"]).bool()]
    for name in ("messages", "conversations"):
        if record.get(name) is not None:
            return record[name]
    for name, answers in (("instruction", ("output", "response")), ("prompt", ("completion", "response"))):
        answer = next((answer for answer in answers if answer in record), None)
        if name in record and answer is not None:
            return _turns(record[name], record.get("input") if name == "instruction" else None, record[answer], tokenizer)
    if "text" in record:
        return record["text"]
    raise ValueError(f"record {index} of calibration has the columns {keys}; known are {_LAYOUTS}. Name one with column=")


def _turns(question: Any, context: Any, answer: Any, tokenizer: Any) -> Any:
    """Question and answer as a chat; as a text, if the tokenizer has no chat template."""
    if isinstance(question, (list, tuple)):  # both are lists of messages
        return [*question, *answer]
    question = f"{question}\n\n{context}" if context else question
    if getattr(tokenizer, "chat_template", None) is None:
        return f"{question}\n\n{answer}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _message(turn: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A turn of a chat as ``{"role", "content"}``; ShareGPT says from and value."""
    if "role" in turn:
        return dict(turn)
    if "value" not in turn or turn.get("from") not in _SHAREGPT_ROLES:
        raise ValueError(
            f"chat {index} of calibration has a turn with the keys {', '.join(map(str, turn))} and from={turn.get('from')!r}; "
            f"known are role, content; or from, value with from one of {', '.join(_SHAREGPT_ROLES)}"
        )
    return {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


# ---------------------------------------------------------------------------------------------------------- source -> samples


def read_samples(source: Any, count: int) -> Any:
    """The samples of a source, with ``len()`` and ``[index]``."""
    samples = source
    if isinstance(source, (str, os.PathLike)):
        path = _existing_path(source)
        samples = [source] if path is None else _read(path)
    elif isinstance(source, Mapping) and any(hasattr(value, "column_names") for value in source.values()):
        raise ValueError(f"calibration is a set of splits; give one of them: {', '.join(map(str, source))}")
    elif isinstance(source, Tensor):
        samples = [source] if source.ndim == 1 else source
    elif hasattr(source, "column_names") and not hasattr(source, "__len__"):  # an IterableDataset is read from its start
        samples = list(itertools.islice(source, 16 * count))
    elif isinstance(source, Mapping) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(f"calibration must be {KINDS}, got {type(source).__name__}")
    if len(samples) == 0:
        raise ValueError(f"calibration is empty: {source!r}"[:200])
    return samples


def _existing_path(source: str | os.PathLike[str]) -> Path | None:
    """The path; None if the string is a text."""
    name = os.fspath(source)
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):  # unlike Path.exists, it takes texts of any length
        return path
    looks_like_path = path.suffix in _SUFFIXES or (set("/\\") & set(name) and not any(char.isspace() for char in name))
    if isinstance(source, str) and ("\n" in name or not looks_like_path):
        return None
    raise FileNotFoundError(f"calibration={name!r} does not exist; for a data set of the hub give datasets.load_dataset(...)")


def _read(path: Path) -> Any:
    """The samples of a file or folder."""
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            raise ValueError(f"{path} holds the splits of a data set; give the folder of one of them")
        if (path / "state.json").exists():
            return _datasets(path).load_from_disk(str(path))
        parts = [_read(file) for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES]
        parts = [part for part in parts if len(part)]
        return ConcatDataset(parts) if parts else []
    if path.suffix == ".parquet":
        return _datasets(path).load_dataset("parquet", data_files=str(path), split="train")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"calibration={str(path)!r} must be one of {' '.join(_SUFFIXES)}, or a folder of them")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".txt":
        return [text] if text.strip() else []
    if path.suffix == ".csv":
        return _read_csv(text)
    return _read_json(path, text)


def _read_json(path: Path, text: str) -> list[Any]:
    if path.suffix == ".json":
        try:
            value = json.loads(text) if text.strip() else []
            return value if isinstance(value, list) else [value]
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # that is a .jsonl file by another name
                raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    samples = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            samples += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg}); each line must be one JSON value") from error
    return samples


def _read_csv(text: str) -> list[dict[str, Any]]:
    limit = csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 128 KiB
    try:
        return list(csv.DictReader(io.StringIO(text, newline="")))
    finally:
        csv.field_size_limit(limit)


def _datasets(path: Path) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"reading {path} needs the datasets package: pip install datasets")
    import datasets

    return datasets

"""Tokenise the corpus and pack it into rows of whole documents."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from config import ROW_TOKENS
from tokenizers import Tokenizer

OPEN_ROWS = 48
BATCH_DOCUMENTS = 4096
Rows = tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]
Document = tuple[list[int], list[bool]]


def encode(tokenizer: Tokenizer, documents: list[list[tuple[str, bool]]]) -> list[Document]:
    """Turn parts into token ids and flags: is this token a training target."""
    encoded = iter(
        tokenizer.encode_batch_fast([text for parts in documents for text, _ in parts], add_special_tokens=False)
    )
    result: list[Document] = []
    for parts in documents:
        ids: list[int] = []
        flags: list[bool] = []
        for _, target in parts:
            piece = next(encoded).ids
            ids += piece
            flags += [target] * len(piece)
        result.append((ids, flags))
    return result


def pack(documents: list[Document]) -> Rows:
    """Put whole documents into rows of ROW_TOKENS, first fit over a few open rows; longer documents are left out."""
    done: list[Document] = []
    still: list[Document] = []
    for ids, flags in documents:
        if len(ids) > ROW_TOKENS:
            continue
        for row in still:
            if len(row[0]) + len(ids) <= ROW_TOKENS:
                row[0].extend(ids)
                row[1].extend(flags)
                break
        else:
            still.append((list(ids), list(flags)))
            if len(still) > OPEN_ROWS:
                still.sort(key=lambda row: len(row[0]))
                done.append(still.pop())
    done += still
    tokens = np.zeros((len(done), ROW_TOKENS), np.int16)
    targets = np.zeros((len(done), ROW_TOKENS), np.bool_)
    for i, (ids, flags) in enumerate(done):
        tokens[i, : len(ids)] = ids
        targets[i, : len(flags)] = flags
    return tokens, targets


def _shard(job: tuple[Path, Path]) -> Rows:
    path, tokenizer_path = job
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    documents: list[Document] = []
    waiting: list[list[tuple[str, bool]]] = []
    with path.open() as lines:
        for line in lines:
            waiting.append(json.loads(line)["parts"])
            if len(waiting) == BATCH_DOCUMENTS:
                documents += encode(tokenizer, waiting)
                waiting = []
    return pack(documents + encode(tokenizer, waiting))


def load(corpus: Path, tokenizer: Path) -> Rows:
    """Read every shard in parallel; returns tokens (N, ROW_TOKENS) and target flags of the same shape."""
    jobs = [(path, tokenizer / "tokenizer.json") for path in sorted(corpus.glob("shard-*.jsonl"))]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.Pool(min(len(jobs), multiprocessing.cpu_count())) as pool:
        parts = pool.map(_shard, jobs, chunksize=1)
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

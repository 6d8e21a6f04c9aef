"""Data: problems from files or the hub, prompts as token ids, the seeded order, batches by token budget.

    load_problems("data/train.jsonl", read_label=reward.read_label)          # or one parquet file
    load_problems("data/gsm8k", split="train", read_label=...)               # folder of shards, hub layout
    load_problems("openai/gsm8k", split="test", read_label=...)              # the hub, if no such path exists

Nothing is dropped, cleaned or shuffled; what cannot be used stops the load. Messages count lines from 1.
"""

import difflib
import hashlib
import itertools
import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Problem(NamedTuple):
    row: int                # from 0, in file order; also the identity of its group of responses
    question: str
    label: str


class Problems:
    """Problems by row. `sha256`: of a JSON line [question, label] per row, in UTF-8; `converted`: labels cut
    out of rationales; `duplicates`: rows kept that repeat a question, the first five as (row, row before)."""

    def __init__(self, source):
        self.source, self.sha256 = str(source), ""
        self.questions, self.labels, self.converted, self.duplicates, self.duplicate_rows = [], [], 0, 0, []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return Problem(row % len(self), self.questions[row], self.labels[row])

    def describe(self):
        rows = "".join(f", row {row} repeats {first}" for row, first in self.duplicate_rows)
        return (f"{self.source}: {len(self)} problems, sha256 of them {self.sha256[:12]}, {self.converted} "
                f"labels cut out of rationales, {self.duplicates} repeated questions{rows}")


def load_problems(source, question_key="question", answer_key="answer",
                  read_label=lambda label, where: (label, False), split=None):
    """The problems of a JSONL or parquet file, a folder of such shards, or a hub data set.
    `read_label(label, where)` returns (text, was it converted?), as reward.read_label. ValueError and
    FileNotFoundError name file, row and column; one label in all of 8 rows or more is taken for a mistake."""
    files = _files(local_path(source, "dataset", ["*.parquet", "*.jsonl"]), split)
    problems, digest, last = Problems(source), hashlib.sha256(), {}          # last: question -> row
    rows = itertools.chain.from_iterable(_READERS[f.suffix](f, question_key, answer_key) for f in files)
    for row, (place, question, label) in enumerate(rows):
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{place}: column {question_key!r} is empty or no text: {question!r:.60}")
        label, converted = read_label(label, f"{place}: column {answer_key!r}")
        try:
            digest.update(json.dumps([question, label], ensure_ascii=False).encode() + b"\n")
        except UnicodeEncodeError as error:             # half of a surrogate pair
            raise ValueError(f"{place}: column {question_key!r} or {answer_key!r}: {error}") from None
        if question in last:
            problems.duplicates += 1
            problems.duplicate_rows += [(row, last[question])] * (problems.duplicates <= 5)
        last[question] = row
        problems.questions.append(question)
        problems.labels.append(sys.intern(label))
        problems.converted += converted
    if not len(problems):
        raise ValueError(f"{source}: no rows")
    if len(problems) >= 8 and len(set(problems.labels)) == 1:
        raise ValueError(f"{source}: column {answer_key!r} is {problems.labels[0]!r:.60} in all "
                         f"{len(problems)} rows; is it the label column?")
    problems.sha256 = digest.hexdigest()
    return problems


def local_path(name, kind, patterns):
    """The path `name`, which opens no socket, else the snapshot of the hub's owner/name of that kind, fetched
    when needed. FileNotFoundError: neither; OSError: the hub does not have it or is out of reach."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.suffix in _READERS or path.parent.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)):
        raise FileNotFoundError(f"{name}: no such file or folder, and no hub name (owner/name)")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(name), repo_type=kind, allow_patterns=patterns))
    except Exception as error:      # the hub client raises a dozen kinds; the user needs one line
        raise OSError(f"{name}: no such path, and not from the hub ({error!r})") from None


_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev|eval)(?=[-_./]|$)")
_SHARD = re.compile(r"^(.*?)(\d+)(-of-(\d+)\..*)")          # train-00000-of-00003.parquet


def _files(path, split):
    """Files in order: of a folder those of `split`, and of several hub configurations 'main' or 'default'."""
    if path.is_file() and path.suffix in _READERS:
        return [path]
    inside = {p: p.relative_to(path).as_posix() for p in sorted(path.rglob("*.*"))}
    split_of = {p: "".join(_SPLIT.findall(name)[-1:]) for p, name in inside.items()
                if p.suffix in (".jsonl", ".parquet") and not re.search(r"(?:^|/)\.", name)}
    splits = sorted(set(split_of.values()) - {""})
    if splits and (split not in splits if split else len(splits) > 1):
        raise ValueError(f"{path}: split {split!r}; there are {', '.join(splits)}")
    files = [p for p, s in split_of.items() if not splits or s == (split or splits[0])]
    folders = {p.parent.name: p.parent for p in files}
    chosen = folders.get("main", folders.get("default")) if len(folders) > 1 else None
    files = [p for p in files if chosen in (None, p.parent)]
    if len({(p.parent, p.suffix) for p in files}) != 1:
        found = ", ".join(inside[p] for p in files[:6]) or "none"
        raise ValueError(f"{path}: needs .jsonl or .parquet files, one kind in one folder; found {found}")
    names = [p.name for p in files]
    for start, number, end, count in itertools.chain.from_iterable(map(_SHARD.findall, names)):
        if missing := {f"{start}{i:0{len(number)}}{end}" for i in range(int(count))}.difference(names):
            raise FileNotFoundError(f"{files[0].with_name(min(missing))}: shard is missing")
    return files


def _check_columns(place, keys, present):
    for key in (k for k in keys if k not in present):
        near = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(key, present, n=1))
        raise ValueError(f"{place}: no column {key!r} among {', '.join(map(repr, present))}{near}")


def _jsonl_rows(path, *keys):
    """Lines end at \\n alone: U+2028, U+2029 and U+0085 are characters of a text like any other."""
    with open(path, "rb") as file:
        for place, line in ((f"{path}:{n}", line) for n, line in enumerate(file, 1) if line.strip()):
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not JSON in UTF-8 ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a {type(row).__name__}, not an object with columns")
            _check_columns(place, keys, list(row))
            yield place, *(row[key] for key in keys)


def _parquet_rows(path, *keys):
    import pyarrow.parquet
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(path, keys, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=4096, columns=list(keys)):
                for values in zip(*(batch.column(key).to_pylist() for key in keys), strict=True):
                    number += 1
                    yield f"{path} row {number}", *values
    except (pyarrow.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} after row {number}: not readable as parquet ({error})") from None


_READERS = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".parquet": _parquet_rows}


def load_tokenizer(folder):
    """The tokenizer of a local model folder; no network is asked. FileNotFoundError, ValueError."""
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"{folder}: no folder with a tokenizer (tokenizer_config.json)")
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ValueError(f"{folder}: tokenizer not readable ({str(error).splitlines()[:1]})") from None


def eos_ids(folder, tokenizer):
    """All ids that end a response, of generation_config.json, else config.json, else the tokenizer."""
    paths = [Path(folder) / name for name in ("generation_config.json", "config.json")]
    found = [json.loads(p.read_text(encoding="utf-8")).get("eos_token_id") for p in paths if p.is_file()]
    ids = next((i for i in [*found, tokenizer.eos_token_id] if i not in (None, [])), None)
    ids = list(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{folder}: eos_token_id {ids} is no token id or list of them")
    return ids


def prompt_ids(tokenizer, question, thinking=True):
    """Ids of one user turn, the raw question, with the generation prompt and no system prompt."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                        tokenize=True, enable_thinking=thinking)
    ids = ids["input_ids"] if hasattr(ids, "keys") else ids                # a mapping since transformers 5
    return [int(i) for i in (ids[0] if len(ids) and isinstance(ids[0], list) else ids)]


def vocab_limit(tokenizer):
    """1 + the largest id the tokenizer knows: 151669 for Qwen3, whose output layer has 151936 rows."""
    return 1 + max(tokenizer.get_vocab().values())


@lru_cache(maxsize=4)
def _permutation(n, seed, stream):
    """Permutation of range(n): the order of raw Philox words, the same in every version of numpy."""
    words = np.random.Philox(key=np.array([seed % 2 ** 64, stream], np.uint64)).random_raw(n)
    return np.argsort(words, kind="stable")


def prompt_rows(n, per_step, step, data_seed):
    """Rows of step `step` (from 0) of endless epochs, each its own permutation: a row may come twice."""
    places = (divmod(i, n) for i in range(step * per_step, (step + 1) * per_step))
    return [int(_permutation(n, data_seed, epoch)[place]) for epoch, place in places]


def subset_rows(n, size, seed):
    """The first `size` rows of a permutation of range(n) that is unrelated to the order of training."""
    if not 0 < size <= n:
        raise ValueError(f"a subset of {size} rows out of {n}")
    return [int(row) for row in _permutation(n, seed, 2 ** 64 - 1)[:size]]


def micro_batches(prompt_lengths, response_lengths, prompt_of, rows, max_tokens):
    """`rows` (indices of responses) in micro-batches of at most `max_tokens` tokens, or one longer response.
    First fit, prompt by prompt, the longest first; a prompt counts once for all its responses in a batch."""
    batches = []                                                            # [rows, tokens, prompts]
    for row in sorted(rows, key=lambda r: (prompt_of[r], -response_lengths[r], r)):
        p, size = prompt_of[row], response_lengths[row]
        fits = (b for b in batches if b[1] + size + prompt_lengths[p] * (p not in b[2]) <= max_tokens)
        batch = next(fits, None)
        if batch is None:
            batches.append(batch := [[], 0, set()])
        batch[1] += size + prompt_lengths[p] * (p not in batch[2])
        batch[0].append(row)
        batch[2].add(p)
    return [sorted(batch[0]) for batch in batches]


def split_groups(token_counts, world):
    """Groups of each of `world` ranks, maybe none: the longest first, each to the rank with the fewest tokens
    so far (Graham 1969: at most 4/3 of the least possible maximum)."""
    loads, groups = [0] * world, [[] for _ in range(world)]
    for group in sorted(range(len(token_counts)), key=lambda g: (-token_counts[g], g)):
        rank = loads.index(min(loads))
        loads[rank] += token_counts[group]
        groups[rank].append(group)
    return [sorted(group) for group in groups]

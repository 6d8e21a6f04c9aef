"""Tests of data.py: what loads and what stops a load, prompts, order, batches. Sizes are coprime."""

import hashlib
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data
from data import load_problems
from reward import read_label

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
ROWS = [{"question": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(11)]


def write(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq
        pq.write_table(pa.Table.from_pylist(rows) if isinstance(rows, list) else pa.table(rows), path,
                       **options)
    else:
        path.write_bytes("".join(json.dumps(row, **options) + "\n" for row in rows).encode())
    return path


def load(source, **options):
    return load_problems(source, read_label=read_label, **options)


def pairs(problems):
    return [(p.question, p.label) for p in problems]


def refused(says, source, error=ValueError, **options):
    with pytest.raises(error) as raised:
        load(source, **options)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 500
    for part in [says] if isinstance(says, str) else says:
        assert part in message, message


# ------------------------------------------------------------------------------------------------ files
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_rows_in_file_order(tmp_path, name):
    problems = load(write(tmp_path / name, ROWS))
    assert [tuple(p) for p in problems] == [(i, f"What is {i} + 2?", str(i + 2)) for i in range(11)]
    assert problems[-1] == problems[10] and problems[3].row == 3 and len(problems) == 11
    with pytest.raises(IndexError):
        problems[11]
    assert problems.source == str(tmp_path / name)


def test_sha256_is_of_the_pairs(tmp_path):
    rows = [{"answer": "#### 72", "question": "é\u2028?", "more": 1}, {"question": "b", "answer": 7}]
    lines = '["é\u2028?", "72"]\n["b", "7"]\n'.encode()
    a, b = load(write(tmp_path / "a.jsonl", rows)), load(write(tmp_path / "b.jsonl", rows,
                                                               ensure_ascii=False))
    assert a.sha256 == b.sha256 == hashlib.sha256(lines).hexdigest() and a.converted == 1
    assert load(write(tmp_path / "c.jsonl", rows[::-1])).sha256 != a.sha256


def test_unicode_line_ends_bom_crlf_and_blank_lines(tmp_path):
    texts = ["one\u2028two", "three\u0085four", "five\u2029six\x0b\x0c\x1c\x1d\x1eseven"]
    body = "\r\n".join(json.dumps({"question": t, "answer": i}, ensure_ascii=False) for i,
                       t in enumerate(texts))
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + body + "\r\n\r\n").encode())
    assert pairs(load(tmp_path / "a.jsonl")) == [(t, str(i)) for i, t in enumerate(texts)]


@pytest.mark.parametrize("second, says", [
    (b'{"question": "q", "answer": "4"', "JSON"), (b'{"question": "caf\xe9", "answer": 4}', "UTF-8"),
    (b"[1, 2]", "list"),
    (b'{"question": "q", "answers": "4"}', ["'answer'", "'question', 'answers'", "did you mean 'answers'?"]),
    (b'{"question": "q"}', "'answer'"), (b'{"question": "", "answer": 4}', ["'question'", "empty"]),
    (b'{"question": " \\n", "answer": 4}', "empty"), (b'{"question": null, "answer": 4}', "empty"),
    (b'{"question": ["q"], "answer": 4}', ["'question'", "['q']"]),
    (b'{"question": "\\ud800", "answer": 4}', "surrogate"),
    (b'{"question": "q", "answer": ""}', ["'answer'", "empty"]),
    (b'{"question": "q", "answer": null}', "null"), (b'{"question": "q", "answer": "four"}', "'four'"),
    (b'{"question": "q", "answer": [4]}', "list"), (b'{"question": "q", "answer": true}', "bool"),
    (b'{"question": "q", "answer": "12 or 13"}', "12 or 13"),
    (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "JSON"), (b"[" * 100_000, "JSON")],
    ids=lambda x: str(x)[:40])
def test_broken_jsonl_rows_are_named(tmp_path, second, says):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "q", "answer": 3}\n' + second + b'\n{"question": "r", "answer": 5}\n')
    refused([f"{path}:2: ", *([says] if isinstance(says, str) else says)], path)


def test_rationales_become_labels(tmp_path):
    rows = [{"question": "q", "answer": "8*9=<<8*9=72>>72\n#### 72"}, {"question": "r", "answer": "1,200"},
            {"question": "s", "answer": 4}, {"question": "t", "answer": 4.50}]
    problems = load(write(tmp_path / "a.jsonl", rows))
    assert [p.label for p in problems] == ["72", "1200", "4", "4.5"] and problems.converted == 1
    assert "1 labels cut out" in problems.describe()


def test_label_column_is_a_choice(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "solution": "", "answer": "72"}])
    assert load(path)[0].label == "72"
    refused([f"{path}:1", "'solution'", "empty"], path, answer_key="solution")


def test_one_label_everywhere_stops(tmp_path):
    same = [{"question": f"q{i}", "answer": "72"} for i in range(8)]
    refused(["'answer'", "'72'", "8 rows"], write(tmp_path / "a.jsonl", same))
    assert len(load(write(tmp_path / "b.jsonl", same[:7]))) == 7            # a hand-made file
    assert len(load(write(tmp_path / "c.jsonl", same[:7] + [{"question": "q", "answer": 1}]))) == 8


def test_equal_questions_are_kept_and_reported(tmp_path):
    rows = ROWS[:5] + [{"question": ROWS[3]["question"], "answer": 77}, ROWS[1], ROWS[3]]
    problems = load(write(tmp_path / "a.jsonl", rows))
    assert len(problems) == 8 and problems[5].label == "77" and problems[3].label == "5"
    assert problems.duplicates == 3 and problems.duplicate_rows == [(5, 3), (6, 1), (7, 5)]
    assert "row 5 repeats 3" in problems.describe() and load(write(tmp_path / "b.jsonl",
                                                                   ROWS)).duplicates == 0


def test_empty_sources(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    refused("no rows", tmp_path / "a.jsonl")
    (tmp_path / "folder").mkdir()
    refused(["folder", "none"], tmp_path / "folder")
    (tmp_path / "a.csv").write_bytes(b"question,answer\n")
    refused("a.csv", tmp_path / "a.csv")


# ------------------------------------------------------------------------------------------------ parquet
def test_odd_parquet_columns(tmp_path):
    import pyarrow as pa
    texts = pa.array([f"q{i}\u2028" for i in range(5)], pa.large_string()).dictionary_encode()
    table = {"extra": [[1, 2]] * 5, "answer": pa.array(range(5), pa.int16()), "meta": [{"a": None}] * 5,
             "question": texts,
             "blob": [b"\xff"] * 5}
    problems = load(write(tmp_path / "a.parquet", table, row_group_size=2))
    assert pairs(problems) == [(f"q{i}\u2028", str(i)) for i in range(5)]
    decimals = pa.array([4, 5, 6], pa.int64()).cast(pa.decimal128(22, 2))
    assert [p.label for p in load(write(tmp_path / "b.parquet",
                                        {"question": list("abc"), "answer": decimals}))] == list("456")


@pytest.mark.parametrize("columns, says", [
    ({"question": ["a"], "answers": ["1"]}, ["'answer'", "'question', 'answers'", "mean 'answers'"]),
    ({"question": ["a", None], "answer": ["1", "2"]}, ["row 2", "'question'", "empty"]),
    ({"question": ["a", "b"], "answer": ["1", None]}, ["row 2", "'answer'", "null"]),
    ({"question": ["a", "b"], "answer": [["1"], ["2"]]}, ["row 1", "list"]),
    ({"question": [b"a", b"b"], "answer": ["1", "2"]}, ["row 1", "b'a'"]),
    ({"question": [[{"content": "a"}]] * 2, "answer": ["1", "2"]}, ["row 1", "[{"]),
    ({"question": ["a", "b"], "answer": [{"x": 1}] * 2}, ["row 1", "dict"])])
def test_bad_parquet(tmp_path, columns, says):
    path = write(tmp_path / "a.parquet", columns)
    refused([str(path), *says], path)


def test_broken_parquet(tmp_path):
    import pyarrow as pa
    texts = pa.array([b"ok", b"caf\xe9"]).view(pa.string())
    refused(["a.parquet after row 0", "utf-8"], write(tmp_path / "a.parquet", {"question": texts,
                                                                               "answer": ["1", "2"]}))
    import pyarrow.parquet as pq
    pq.write_table(pa.table([["a"], ["b"], ["1"]], names=["question", "question", "answer"]),
                   tmp_path / "twice.parquet")
    refused("twice.parquet", tmp_path / "twice.parquet")
    path = write(tmp_path / "a.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-7])
    refused([str(path), "parquet"], path)


# ------------------------------------------------------------------------------------------------ folders
def test_hub_layout_and_splits(tmp_path):
    for i in range(3):
        write(tmp_path / f"main/train-{i:05d}-of-00003.parquet", ROWS[i * 3:i * 3 + 3])
        write(tmp_path / f"socratic/train-{i:05d}-of-00003.parquet", ROWS[:2])
    write(tmp_path / "main/test-00000-of-00001.parquet", ROWS[9:])
    (tmp_path / "README.md").write_text("x")
    write(tmp_path / ".cache/train.jsonl", ROWS)
    for source in (tmp_path, tmp_path / "main"):
        assert pairs(load(source, split="train")) == pairs(load(write(tmp_path / "x/all.jsonl", ROWS[:9])))
        assert len(load(source, split="test")) == 2
        refused(["test, train"], source)
        refused(["'dev'", "test, train"], source, split="dev")
    (tmp_path / "main/train-00001-of-00003.parquet").unlink()
    refused("train-00001-of-00003.parquet", tmp_path, FileNotFoundError, split="train")


def test_other_folders(tmp_path):
    write(tmp_path / "a/train/0.jsonl", ROWS[:4])
    write(tmp_path / "a/train/1.jsonl", ROWS[4:])
    write(tmp_path / "a/test/0.jsonl", ROWS[:2])
    assert len(load(tmp_path / "a", split="train")) == 11 and len(load(tmp_path / "a/test")) == 2
    write(tmp_path / "b/part-0.jsonl", ROWS[:4])
    write(tmp_path / "b/part-1.jsonl", ROWS[4:])
    write(tmp_path / "b/.cache/part-2.jsonl", ROWS)
    assert len(load(tmp_path / "b")) == len(load(tmp_path / "b", split="train")) == 11
    write(tmp_path / "b/part-2.parquet", ROWS)
    refused(["part-0.jsonl", "part-2.parquet"], tmp_path / "b")
    write(tmp_path / "c/x/train.jsonl", ROWS)
    write(tmp_path / "c/y/train.jsonl", ROWS)
    refused(["x/train.jsonl", "y/train.jsonl"], tmp_path / "c", split="train")


def test_shared_gsm8k():
    if not (SHARED / "gsm8k").is_dir():
        pytest.skip("needs ../shared/gsm8k")
    for split, count in (("train", 7473), ("test", 1319)):
        sources = [SHARED / "gsm8k", SHARED / "gsm8k" / "main", SHARED / "gsm8k" / f"{split}.jsonl"]
        loaded = [load(source, split=split) for source in sources]
        assert len({p.sha256 for p in loaded}) == 1 and len(loaded[0]) == loaded[0].converted == count
        assert all(p.label.lstrip("-").replace(".", "").isdigit() for p in loaded[0])


# ------------------------------------------------------------------------------------------------ network
@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"a socket was opened: {args}")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_local_paths_open_no_socket(tmp_path, no_network, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "owner/name.jsonl", ROWS)
    write(tmp_path / "owner/name/train.jsonl", ROWS)
    assert len(load("owner/name.jsonl")) == len(load("owner/name")) == 11
    for missing in ("nothing.jsonl", "owner/missing", "other/train.jsonl", "a/b/c", "gsm8k",
                    tmp_path / "gone", "./a/b", "~/a/b"):
        started = time.perf_counter()
        refused(str(missing), missing, FileNotFoundError)
        assert time.perf_counter() - started < 0.5


def test_hub_name_is_asked_once_and_failure_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub
    write(tmp_path / "hub/main/train-00000-of-00001.parquet", ROWS)
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name,
                        **k: asked.append((name, k["repo_type"]))
                        or str(tmp_path / "hub"))
    assert len(load("openai/gsm8k", split="train")) == 11 and asked == [("openai/gsm8k", "dataset")]

    def offline(*_, **__):
        raise OSError("no route\nto host")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused(["openai/gsm8k", "OSError"], "openai/gsm8k", OSError)


def test_a_million_rows_in_little_memory(tmp_path):
    """100,000 rows, to be quick: no second copy of the texts, and two costs that a busy machine does not change:
    calls a row (of Python or C), and seconds as multiples of json.loads (3 to 4; 30 us were 10)."""
    path, n, filler = tmp_path / "big.jsonl", 100_000, "x" * 300
    with open(path, "w") as file:
        for i in range(n):
            file.write(f'{{"question": "{i:09} {filler}", "answer": "{i % 97}"}}\n')
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    code = f"""import collections, json, re, sys, time, data, reward
def kib(key): return int(re.search(key + r":\\s*(\\d+) kB", open("/proc/self/status").read())[1])
before, events, started = kib("VmRSS"), collections.Counter(), time.process_time()
problems = data.load_problems({str(path)!r}, read_label=reward.read_label)
seconds, memory, started = time.process_time() - started, kib("VmHWM") - before, time.process_time()
for line in open({str(path)!r}, "rb"): json.loads(line)
ratio = seconds / (time.process_time() - started)
def count(frame, event, argument): events[event] += 1
sys.setprofile(count)
data.load_problems({str(path)!r}, read_label=reward.read_label)
sys.setprofile(None)
print(len(problems), memory / 1024, events["call"] + events["c_call"], ratio)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                          timeout=60)                   # takes 4 s; a list searched row by row takes minutes
    out = done.stdout.split()
    texts = n * (310 + 49) / 2 ** 20                     # MiB of str objects of 310 characters
    assert int(out[0]) == n and float(out[1]) < 1.6 * texts and int(out[2]) < 45 * n, out
    assert float(out[3]) < 10, out


# ------------------------------------------------------------------------------------------------ prompts
class FakeTokenizer:
    eos_token_id, chat_template = 9, "x"

    def __init__(self, kind):
        self.kind = kind

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, enable_thinking):
        assert messages == [{"role": "user", "content": "hi"}] and add_generation_prompt and tokenize
        ids = [3, 1, 4] + [1, 5] * (not enable_thinking)
        from collections import UserDict
        return {"list": ids, "dict": {"input_ids": ids}, "batch": {"input_ids": [ids],
                                                                   "attention_mask": [[1] * len(ids)]},
                "user": UserDict(input_ids=ids), "numpy": np.array(ids)}[self.kind]

    def get_vocab(self):
        return {"a": 0, "z": 30, "b": 4}


@pytest.mark.parametrize("kind", ["list", "dict", "batch", "user", "numpy"])
def test_prompt_ids_of_every_return_type(kind):
    tokenizer = FakeTokenizer(kind)
    ids = data.prompt_ids(tokenizer, "hi")
    assert ids == [3, 1, 4] and type(ids) is list and all(type(i) is int for i in ids)
    assert data.prompt_ids(tokenizer, "hi", thinking=False) == [3, 1, 4, 1, 5]
    assert data.vocab_limit(tokenizer) == 31


@pytest.mark.parametrize("generation, config, ids", [
    ({"eos_token_id": [7, 5, 7]}, {"eos_token_id": 1}, [7, 5]), ({"eos_token_id": 7}, {}, [7]),
    ({"eos_token_id": 0}, {}, [0]), ({}, {"eos_token_id": [2, 3]}, [2, 3]), (None, {"eos_token_id": 4}, [4]),
    ({"eos_token_id": None}, None, [9]), ({"eos_token_id": []}, {}, [9]),
    ({"eos_token_id": "</s>"}, {}, None), ({"eos_token_id": [1, None]}, {}, None),
    ({"eos_token_id": -1}, {}, None), ({"eos_token_id": True}, {}, None)])
def test_eos_ids(tmp_path, generation, config, ids):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    if ids is None:
        with pytest.raises(ValueError, match="eos_token_id"):
            data.eos_ids(tmp_path, FakeTokenizer("list"))
    else:
        assert data.eos_ids(tmp_path, FakeTokenizer("list")) == ids


def test_no_eos_at_all(tmp_path):
    tokenizer = FakeTokenizer("list")
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_id"):
        data.eos_ids(tmp_path, tokenizer)


def test_qwen3_tokenizer(no_network):
    folder = SHARED / "qwen3-0.6b"
    if not folder.is_dir():
        pytest.skip("needs ../shared/qwen3-0.6b")
    tokenizer = data.load_tokenizer(folder)
    assert data.eos_ids(folder, tokenizer) == [151645, 151643] and data.vocab_limit(tokenizer) == 151669
    ids = data.prompt_ids(tokenizer, "2+2?")
    assert tokenizer.decode(ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    off = data.prompt_ids(tokenizer, "2+2?", thinking=False)
    assert off[:len(ids)] == ids and tokenizer.decode(off[len(ids):]) == "<think>\n\n</think>\n\n"


def test_missing_tokenizer_is_named_at_once(tmp_path, no_network):
    for folder in (tmp_path / "gone", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(folder)):
            data.load_tokenizer(folder)


# ------------------------------------------------------------------------------------------------ order
def test_prompt_order_crosses_epochs():
    n, per_step, seed = 7, 3, 42
    rows = [row for step in range(14) for row in data.prompt_rows(n, per_step, step, seed)]
    epochs = [rows[i:i + n] for i in range(0, len(rows), n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs) and len(set(map(tuple, epochs))) > 3
    assert data.prompt_rows(n, 2 * n, 0, seed) == rows[:2 * n]              # more than an epoch in a step
    assert all(type(row) is int for row in rows)


def test_prompt_order_is_a_pure_function():
    def order(seed):
        return [data.prompt_rows(11, 4, step, seed) for step in range(9)]
    first = order(42)
    data._permutation.cache_clear()
    assert [data.prompt_rows(11, 4, step, 42) for step in reversed(range(9))] == first[::-1]
    assert order(43) != first and first[0] == [7, 1, 6, 10]                 # pinned: any machine, any numpy


def test_subsets_are_prefixes():
    rows = data.subset_rows(101, 101, 29)
    assert sorted(rows) == list(range(101)) and data.subset_rows(101, 17,
                                                                 29) == rows[:17] and rows[:4] == [60, 38, 79,
                                                                                                   31]
    assert data.subset_rows(101, 17, 30) != rows[:17] and data.prompt_rows(101, 17, 0, 29) != rows[:17]
    for size in (0, 102, -1):
        with pytest.raises(ValueError, match="out of 101"):
            data.subset_rows(101, size, 29)


# ------------------------------------------------------------------------------------------------ batches
def test_micro_batches():
    draw = random.Random(5)
    for _ in range(300):
        prompts = [draw.randint(1, 40) for _ in range(draw.randint(1, 5))]
        responses = [draw.choice([0, draw.randint(1, 20), draw.randint(1,
                                                                       150)]) for _ in range(draw.randint(1,
                                                                                                          23))]
        prompt_of = [draw.randrange(len(prompts)) for _ in responses]
        rows = draw.sample(range(len(responses)), draw.randint(0, len(responses)))
        budget = draw.randint(1, 120)
        batches = data.micro_batches(prompts, responses, prompt_of, rows, budget)
        assert sorted(r for batch in batches for r in batch) == sorted(rows) and all(batches)
        for batch in batches:
            tokens = sum(responses[r] for r in batch) + sum(prompts[p] for p in {prompt_of[r] for r in batch})
            assert tokens <= budget or len(batch) == 1
        assert batches == data.micro_batches(prompts, responses, prompt_of, draw.sample(rows, len(rows)),
                                             budget)


def test_micro_batches_are_full():
    assert data.micro_batches([10], [30, 20, 10, 30], [0] * 4, range(4), 100) == [[0, 1, 2, 3]]
    assert data.micro_batches([10], [30, 20, 10, 30], [0] * 4, range(4), 99) == [[0, 1, 3], [2]]
    assert data.micro_batches([10, 5], [50, 1000, 20, 20], [0, 0, 1, 1], range(4), 60) == [[1], [0], [2, 3]]
    assert data.micro_batches([], [], [], [], 60) == []


def test_split_groups():
    draw = random.Random(6)
    for _ in range(300):
        counts = [draw.choice([0, draw.randint(1, 9), draw.randint(1, 900)]) for _ in range(draw.randint(0,
                                                                                                         19))]
        world = draw.randint(1, 7)
        groups = data.split_groups(counts, world)
        loads = [sum(counts[g] for g in group) for group in groups]
        assert len(groups) == world and sorted(sum(groups, [])) == list(range(len(counts)))
        assert max(loads) <= sum(counts) / world + max(counts, default=0) * (1 - 1 / world) + 1e-9
        assert groups == data.split_groups(counts, world) and all(group == sorted(group) for group in groups)
    assert data.split_groups([5, 9, 5, 1], 2) == [[1, 3], [0, 2]] and data.split_groups([4], 3) == [[0], [],
                                                                                                    []]

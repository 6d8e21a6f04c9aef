"""The embedded default: reproducible problems with true labels, a lossless tokenizer, a Qwen3 of the stated geometry."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tiny"
spec = importlib.util.spec_from_file_location("make_tiny", TINY / "make_tiny.py")
make_tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_tiny)


def rows(name):
    return [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY / "model")


def chat_ids(tokenizer, question, **kwargs):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, **kwargs)
    return ids["input_ids"] if hasattr(ids, "keys") else ids


# --- problems --------------------------------------------------------------------------------------------------------


def test_seed_gives_the_committed_files_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny, "HERE", tmp_path)
    make_tiny.make_data()
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()


def test_counts_and_columns():
    assert len(rows("test")) == 256 and len(rows("train")) >= 2000
    assert all(row.keys() == {"question", "answer"} for row in rows("test") + rows("train"))


def test_train_and_test_share_no_question_and_no_numbers_of_a_kind():
    train, test = make_tiny.split("train"), make_tiny.split("test")
    assert [p.question for p in train] == [row["question"] for row in rows("train")]
    assert len({p.question for p in train}) == len(train) and len({p.question for p in test}) == len(test)
    assert not {p.question for p in train} & {p.question for p in test}
    assert not {p.key for p in train} & {p.key for p in test}
    assert len({p.key[0] for p in train}) >= 8 and {p.key[0] for p in train} == {p.key[0] for p in test}


@pytest.mark.parametrize("name", ["train", "test"])
def test_every_equation_and_every_label_is_true(name):
    for row in rows(name):
        *working, last = row["answer"].split("\n")
        assert 2 <= len(working) <= 3
        for line in working:
            a, op, b, value = re.fullmatch(r"[A-Za-z ]+ (\d+)([-+*/])(\d+)=(\d+)\.", line).groups()
            a, b, value = int(a), int(b), int(value)
            assert {"+": a + b, "-": a - b, "*": a * b}[op] == value if op != "/" else b * value == a
        assert last == f"#### {value}" and 0 < value <= 400


@pytest.mark.parametrize("name", ["train", "test"])
def test_working_starts_from_numbers_of_the_question_or_of_earlier_lines(name):
    for row in rows(name):
        known = set(re.findall(r"\d+", row["question"]))
        for line in row["answer"].split("\n")[:-1]:
            a, b, value = re.search(r"(\d+)[-+*/](\d+)=(\d+)", line).groups()
            assert a in known and b in known
            known.add(value)


# --- tokenizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "", " ", "Tom has 3*4=12 pens.\n#### 12", "héllo wörld ∑ 日本語\n\n\t x  y ", "<think>\n\n</think>", "\r\n\u2028\x00\x85",
    " 1,234.50 $ \\boxed{\\frac{1}{2}}", "𝔘🙂e\u0301 ﬁ", "user\nassistant\n  ####42", "a" * 301])
def test_any_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token_and_digits_stand_alone(tokenizer):
    from tokenizers import pre_tokenizers

    assert set(pre_tokenizers.ByteLevel.alphabet()) <= tokenizer.get_vocab().keys()
    for token, index in tokenizer.get_vocab().items():
        assert not re.search(r"\d", token) or len(tokenizer.decode([index])) == 1, token
    assert len(tokenizer.encode("90817")) == 5


def test_special_tokens_and_chat_template(tokenizer):
    assert [tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    question = rows("test")[0]["question"]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        assert chat_ids(tokenizer, question, **kwargs) == tokenizer.encode(text)
        assert chat_ids(tokenizer, question, tokenize=False, **kwargs) == text
    assert text == make_tiny.chat(question)                                     # what the model learned from
    assert len(tokenizer.encode(text)) - len(tokenizer.encode(question)) == 6   # "user\n" is one token


def test_sequences_are_short(tokenizer):
    some = rows("train")[:500]
    assert max(len(chat_ids(tokenizer, row["question"])) for row in some) <= 48
    assert max(len(tokenizer.encode(row["answer"])) for row in some) <= 48


def test_retraining_gives_the_committed_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny, "HERE", tmp_path)
    make_tiny.make_tokenizer()
    ours, made = (json.loads((at / "model" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
                  for at in (TINY, tmp_path))
    assert made["merges"] == ours["merges"] and made["vocab"] == ours["vocab"]


# --- model -----------------------------------------------------------------------------------------------------------


def test_folder_holds_a_small_qwen3(tokenizer):
    from safetensors import safe_open

    config = json.loads((TINY / "model" / "config.json").read_text(encoding="utf-8"))
    assert {**config, **make_tiny.GEOMETRY} == config
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]
    assert len(tokenizer) < config["vocab_size"]        # rows without a token, as in Qwen3
    generation = json.loads((TINY / "model" / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [2, 0] and generation["pad_token_id"] == 0
    with safe_open(TINY / "model" / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    size = 0
    for shape in shapes.values():
        count = 1
        for n in shape:
            count *= n
        size += count
    assert 800_000 <= size <= 3_000_000 and shapes["model.embed_tokens.weight"] == [512, 128]


def test_committed_files_stay_small():
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 12 * 2 ** 20
    assert (TINY / "make_tiny.py").read_text(encoding="utf-8").count("\n") <= 300

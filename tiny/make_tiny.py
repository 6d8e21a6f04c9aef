"""Make the embedded default: word problems, a byte-level tokenizer and a small Qwen3 that answers about half of them.

    python tiny/make_tiny.py data         # train.jsonl, test.jsonl        (seconds)
    python tiny/make_tiny.py tokenizer    # model/tokenizer*.json          (seconds)
    python tiny/make_tiny.py model        # model/model.safetensors, ...   (minutes on two cores)
    python tiny/make_tiny.py              # all three

Data and tokenizer are a pure function of the seeds below; the weights depend on the torch build as well.
Supervised learning stops early on purpose, and its last demonstrations are now and then a hasty guess without any
working, as people write them: the model miscalculates, misplans and guesses, which is what reinforcement learning can
work on. No demonstration shares a problem with the test set.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SEEDS = {"train": 1, "test": 2, "tokenizer": 3, "model": 4}
ROWS = {"train": 4000, "test": 256}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 512  # rows of the embedding; like Qwen3's they are a few more than the ids of the tokenizer
TOKENIZER_VOCAB = 509
CONTEXT = 512   # max_position_embeddings

# --- problems --------------------------------------------------------------------------------------------------------

WOMEN = "Ana Mia Eva Zoe Amy Ida Liv Ruth".split()
MEN = "Tom Ben Max Leo Sam Dan Jim Otto".split()
THINGS = "pens books cards coins shells stamps apples plums rolls cups balls eggs".split()
MAKES = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


class Kind(NamedTuple):
    """One structure of problem: ranges of its numbers, wordings, and steps ("sentence", "result=left op right")."""

    name: str
    ranges: dict
    wordings: tuple
    steps: tuple


KINDS = (
    Kind("change", dict(a=(2, 9), b=(2, 9), c=(10, 100)),
         ("{N} buys {a} {x} for {b} dollars each and pays with {c} dollars. How much change does {s} get?",
          "One of the {x} costs {b} dollars. {N} takes {a} of them and pays {c} dollars. What is the change?"),
         (("The {x} cost", "p=a*b"), ("The change is", "r=c-p"))),
    Kind("boxes", dict(a=(2, 9), b=(3, 12), c=(2, 40)),
         ("{N} has {a} boxes of {b} {x} and finds {c} more. How many {x} does {s} have?",
          "There are {b} {x} in each of {a} boxes and {c} on the table. How many {x} are there?"),
         (("The boxes hold", "p=a*b"), ("In all there are", "r=p+c"))),
    Kind("share", dict(a=(5, 50), b=(5, 50), c=(2, 9)),
         ("{N} has {a} {x}, finds {b} more and shares them equally among {c} friends. How many does each get?",
          "{N} and {M} put {a} and {b} {x} together and fill {c} equal bags. How many are in each bag?"),
         (("Together there are", "p=a+b"), ("Each gets", "r=p/c"))),
    Kind("times", dict(a=(3, 30), k=(2, 5)),
         ("{N} has {a} {x}. {M} has {k} times as many. How many {x} do they have together?",
          "{M} finds {k} times as many {x} as {N}, who finds {a}. How many do they find together?"),
         (("{M} has", "p=k*a"), ("Together they have", "r=a+p"))),
    Kind("fewer", dict(a=(10, 50), d=(2, 20), k=(2, 4)),
         ("{N} has {a} {x}. {M} has {d} fewer. {O} has {k} times as many as {M}. How many {x} does {O} have?",
          "{M} has {d} {x} fewer than {N}, who has {a}. How many does {O} have with {k} times as many as {M}?"),
         (("{M} has", "p=a-d"), ("{O} has", "r=k*p"))),
    Kind("prices", dict(a=(2, 9), b=(2, 9), c=(2, 9), d=(2, 9)),
         ("{N} buys {a} {x} for {b} dollars each and {c} {y} for {d} dollars each. How much does {s} pay?",
          "A shop sells {a} {x} for {b} dollars each and {c} {y} for {d} dollars each. How much does it earn?"),
         (("The {x} cost", "p=a*b"), ("The {y} cost", "q=c*d"), ("In all that is", "r=p+q"))),
    Kind("gives", dict(a=(20, 99), b=(2, 30), c=(2, 30)),
         ("{N} has {a} {x} and gives {b} to {M} and {c} to {O}. How many {x} are left?",
          "Of {a} {x} {N} sells {b} and loses {c}. How many does {s} still have?"),
         (("Gone are", "p=b+c"), ("Left are", "r=a-p"))),
    Kind("bakery", dict(a=(2, 9), b=(3, 9), c=(2, 30), d=(2, 6)),
         ("{N} bakes {a} trays of {b} rolls, sells {c} and fills {d} equal bags. How many are in each bag?",
          "{a} trays hold {b} {x} each. {N} takes {c} and {d} friends share the rest. How many does each get?"),
         (("The trays hold", "p=a*b"), ("The rest is", "q=p-c"), ("Each gets", "r=q/d"))),
    Kind("pages", dict(a=(5, 30), k=(2, 3), c=(50, 150)),
         ("A book has {c} pages. {N} reads {a} today and {k} times as many the next day. How many are left?",
          "{N} reads {a} of {c} pages today and {k} times as many the next day. How many pages are left?"),
         (("The next day it is", "p=k*a"), ("Together that is", "q=a+p"), ("Left are", "r=c-q"))),
    Kind("wages", dict(a=(2, 8), b=(2, 8), c=(3, 12)),
         ("{N} works {a} hours today and {b} hours the next day for {c} dollars an hour. How much does {s} earn?",
          "An hour pays {c} dollars. {N} works {a} hours today and {b} the next day. How much does {s} earn?"),
         (("The hours are", "p=a+b"), ("The pay is", "r=p*c"))),
    Kind("ages", dict(a=(3, 20), d=(2, 15), c=(2, 9)),
         ("{N} is {a} years old and {M} is {d} years older. How old are they together in {c} years?",
          "{M} is {d} years older than {N}, who is {a}. How old are they together in {c} years?"),
         (("{N} will be", "p=a+c"), ("{M} will be", "q=p+d"), ("Together that is", "r=p+q"))),
    Kind("bags", dict(a=(3, 9), b=(3, 9), c=(2, 9), d=(2, 9)),
         ("{N} has {a} bags of {b} {x}. {M} has {c} bags of {d}. How many more {x} does {N} have?",
          "{N} fills {a} bags with {b} {x} each and {M} {c} bags with {d} each. How many more does {N} have?"),
         (("{N} has", "p=a*b"), ("{M} has", "q=c*d"), ("The difference is", "r=p-q"))),
)


class Problem(NamedTuple):
    key: tuple        # (kind, numbers in order): never shared between train and test
    question: str
    steps: tuple      # ("sentence", "result=left op right"), names filled in
    numbers: dict


def work(steps, numbers):
    """Carry out `steps` on `numbers`; returns (lines of working, answer), or None where a value is no whole number in
    0..400."""
    known, lines, value = dict(numbers), [], 0
    for sentence, step in steps:
        target, left, op, right = re.fullmatch(r"(\w)=(\w|\d+)([-+*/])(\w|\d+)", step).groups()
        a, b = known[left], known[right]
        if op == "/" and (b == 0 or a % b):
            return None
        value = MAKES[op](a, b)
        if not 0 <= value <= 400:
            return None
        known[target] = value
        lines.append(f"{sentence} {a}{op}{b}={value}.")
    return lines, value


def draw(rng):
    """One Problem: a kind, a wording, names, and numbers for which every step has a whole result above 0."""
    kind = rng.choice(KINDS)
    while True:
        numbers = {name: rng.randint(*span) for name, span in kind.ranges.items()}
        if (done := work(kind.steps, numbers)) and done[1] > 0:
            break
    people = rng.sample(WOMEN + MEN, 3)
    words = dict(zip("NMO", people), **dict(zip("xy", rng.sample(THINGS, 2))), s="she" if people[0] in WOMEN else "he")
    steps = tuple((sentence.format(**words), step) for sentence, step in kind.steps)
    return Problem((kind.name, *numbers.values()), rng.choice(kind.wordings).format(**words, **numbers), steps, numbers)


@functools.cache
def split(name):
    """The problems of train or test: distinct questions, and no train problem with the kind and numbers of a test one."""
    taken = {p.key for p in split("test")} if name == "train" else set()
    rng, rows = random.Random(SEEDS[name]), {}
    while len(rows) < ROWS[name]:
        problem = draw(rng)
        if problem.key not in taken:
            rows.setdefault(problem.question, problem)
        if name == "test":
            taken.add(problem.key)
    return list(rows.values())


def answer(problem):
    """The worked answer in GSM8K's form: lines of working, then "#### n"."""
    lines, value = work(problem.steps, problem.numbers)
    return "\n".join([*lines, f"#### {value}"])


def guess(problem, rng):
    """A hasty answer: no working, and a number near the true one, seldom the true one."""
    value = work(problem.steps, problem.numbers)[1]
    return f"#### {abs(value + rng.choice((-20, -10, -5, -3, -2, -1, 0, 1, 2, 3, 5, 10, 20)))}"


def make_data():
    for name in ROWS:
        rows = [json.dumps({"question": p.question, "answer": answer(p)}) for p in split(name)]
        (HERE / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8", newline="\n")
        print(f"{name}.jsonl: {len(rows)} problems")


# --- tokenizer -------------------------------------------------------------------------------------------------------

# A word keeps one blank before it and the blank before a number or the line end after it, so that digits are always
# the ten plain digit tokens and "user\n" is one token.
PIECES = r"\d| ?[A-Za-z]+(?: (?=\d)|\n)?|#+ ?| ?[^\sA-Za-z0-9]+\n?|\s"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)  # enable_thinking is accepted and changes nothing: the model writes its working in the open


def chat(question, reply=""):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{reply}"


def make_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(SEEDS["tokenizer"])
    texts = [t for p in (draw(rng) for _ in range(4000)) for t in ("user\n", p.question, "assistant\n", answer(p))]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    folder = HERE / "model"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<|endoftext|>",
                  bos_token=None, unk_token=None, additional_special_tokens=SPECIALS, model_max_length=CONTEXT,
                  clean_up_tokenization_spaces=False, chat_template=TEMPLATE)
    write_json(folder / "tokenizer_config.json", config)
    print(f"tokenizer.json: {tokenizer.get_vocab_size()} tokens")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8", newline="\n")


# --- model -----------------------------------------------------------------------------------------------------------

GEOMETRY = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=VOCAB, hidden_size=128, intermediate_size=384,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=48, hidden_act="silu",
    max_position_embeddings=CONTEXT, rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False,
    attention_dropout=0.0, tie_word_embeddings=True, use_sliding_window=False, initializer_range=0.02)
# Two phases: optimizer steps, share of hasty guesses, learning rate. Each has its own AdamW, warmed up over 50 steps.
PHASES = ((850, 0.0, 3e-3), (60, 0.25, 1e-3))
BATCH = 64                                   # demonstrations in a step


def demonstrations(tokenizer, rng, hasty):
    """BATCH prompts and replies (id lists) of fresh problems, none with the kind and numbers of a test problem."""
    banned, prompts, replies = {p.key for p in split("test")}, [], []
    while len(prompts) < BATCH:
        problem = draw(rng)
        if problem.key not in banned:
            reply = guess(problem, rng) if hasty and rng.random() < hasty else answer(problem)
            prompts.append(tokenizer.encode(chat(problem.question)).ids)
            replies.append(tokenizer.encode(reply + "<|im_end|>").ids)
    return prompts, replies


def make_model():
    """Supervised learning on fresh demonstrations, stopped where the model answers about half of the problems."""
    import torch
    from tokenizers import Tokenizer

    sys.path.insert(0, str(HERE.parent))
    from model import ModelConfig, Qwen3, pack, save_model

    folder = HERE / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(t) for t in SPECIALS]
    write_json(folder / "config.json", {**GEOMETRY, "eos_token_id": ids[2], "pad_token_id": ids[0]})
    write_json(folder / "generation_config.json", dict(
        eos_token_id=[ids[2], ids[0]], pad_token_id=ids[0], do_sample=True, temperature=1.0, top_p=1.0, top_k=0))
    model = Qwen3(ModelConfig.from_folder(folder)).init_weights(SEEDS["model"])
    groups = [dict(params=[p for p in model.parameters() if (p.ndim > 1) == matrix], weight_decay=0.1 * matrix)
              for matrix in (True, False)]
    for phase, (steps, hasty, rate) in enumerate(PHASES):
        rng, optimizer = random.Random(SEEDS["model"] + phase), torch.optim.AdamW(groups, betas=(0.9, 0.98))
        for step in range(steps):
            prompts, replies = demonstrations(tokenizer, rng, hasty)
            logp, _ = model(pack(prompts, range(BATCH), replies), vocab_limit=tokenizer.get_vocab_size())
            loss = -logp.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 50)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 50 == 0 or step + 1 == steps:
                print(f"phase {phase + 1}, step {step + 1}: loss {loss.item():.4f}", flush=True)
    save_model(model, folder, source=folder)


if __name__ == "__main__":
    stages = dict(data=make_data, tokenizer=make_tokenizer, model=make_model)
    if unknown := set(sys.argv[1:]) - set(stages):
        sys.exit(f"unknown stage {sorted(unknown)[0]!r}: choose from {', '.join(stages)}")
    for name in sys.argv[1:] or stages:
        stages[name]()

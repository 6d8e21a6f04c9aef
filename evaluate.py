"""pass@k of a model on a frozen subset of a data set.

    python evaluate.py --model out/run/step_000060       # the tiny test set, 256 rows x 4 samples
    torchrun --nproc-per-node 4 evaluate.py --model Qwen/Qwen3-0.6B --data openai/gsm8k --split test
    python evaluate.py --model DIR --out out/eval        # killed? the same command goes on

The rows are the first N of a seeded permutation; the SHA-256 of their questions and labels is in the result.
Sampling noise is keyed by (seed, row, sample): every prompt counts once and gets the same responses (up to
rounding ties) on any number of processes. Truncated responses are graded like any other; unparsed answers and
grader errors stay in the denominator. No training options, no weights are changed.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np

import cli
import data
import distributed
import reward
from model import ModelConfig, load_model, local_folder
from runlog import read_rows, write_json, write_rows
from sample import Sampler, Sampling

CHUNK = 64          # prompts between two appends to responses.jsonl: what a kill can lose


def pass_at_k(n, c, k):
    """Unbiased estimate 1 - C(n-c, k) / C(n, k) of the chance that k draws hold a right one, from c right of
    n (Chen et al. 2021, arXiv 2107.03374, eq. 1). ValueError when k > n."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples and 0 <= right <= n; got {c} right of {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def summarize(records, samples, k_list=None):
    """The figures of one evaluation from its records ({row, sample, verdict, finish, length}).

    pass@k is per prompt, then the mean over prompts; its 95 % interval is normal over prompts. decoding_noise
    is the standard error that resampling the same prompts would show, sqrt(mean[p(1-p)] / (samples *
    prompts)), with p(1-p) estimated without bias by c(n-c) / (n(n-1)); None for one sample."""
    right, kinds = Counter(), Counter(r["verdict"] for r in records)
    for r in records:
        right[r["row"]] += r["verdict"] == "right"
    prompts, n = len(right), samples
    if len(records) != n * prompts:
        raise ValueError(f"{len(records)} records are not {n} samples for each of {prompts} prompts")
    out = {f"pass@{k}": sum(pass_at_k(n, c, k) for c in right.values()) / prompts
           for k in k_list or [2 ** i for i in range(n.bit_length())]}
    mean = out.get("pass@1", kinds["right"] / len(records))
    spread = sum((c / n - mean) ** 2 for c in right.values()) / max(prompts - 1, 1)
    half = 1.959964 * math.sqrt(spread / prompts)
    noise = sum(c * (n - c) for c in right.values()) / (n * (n - 1) * prompts) if n > 1 else None
    return out | {"pass@1_ci95": [max(mean - half, 0.0), min(mean + half, 1.0)],
                  "decoding_noise": None if noise is None else math.sqrt(noise / (n * prompts)),
                  "truncation": sum(r["finish"] != "stop" for r in records) / len(records),
                  "mean_length": sum(r["length"] for r in records) / len(records),
                  "right": kinds["right"], "wrong": kinds["wrong"], "unparsed": kinds["unparsed"],
                  "errors": kinds["error"] + kinds["timeout"], "prompts": prompts, "samples": n,
                  "per_prompt": [[row, n, c] for row, c in sorted(right.items())]}


def longest_prompt(source, problems, rows, tokenizer, thinking, config):
    """Tokens of the longest prompt of `rows` of `problems`, read from `source`. ValueError names a row whose
    prompt leaves no room for a response."""
    lengths = {row: len(data.prompt_ids(tokenizer, problems[row].question, thinking)) for row in rows}
    row = max(rows, key=lengths.get)
    if lengths[row] >= config.max_position_embeddings:
        raise ValueError(f"{source}: the prompt of row {row} has {lengths[row]} tokens, the context is "
                         f"{config.max_position_embeddings}: no room for a response")
    return lengths[row]


def evaluate(sampler, tokenizer, problems, rows, grader, samples, seed, sampling, thinking=True,
             done=(), on_chunk=None):
    """Records {row, sample, text, reward, verdict, finish, length} by (row, sample), the same on every rank.

    `done` holds records of rows that need no new run; `on_chunk(records)` sees each finished chunk. The ranks
    share each chunk's prompts and meet once a chunk."""
    have, records = {r["row"] for r in done}, list(done)
    todo = [row for row in rows if row not in have]
    rank, world = distributed.rank(), distributed.world_size()
    for first in range(0, len(todo), CHUNK * world):
        mine = todo[first:first + CHUNK * world][rank::world]
        prompts = [data.prompt_ids(tokenizer, problems[row].question, thinking) for row in mine]
        responses = sampler.generate(prompts, mine, samples, seed=seed, step=0, sampling=sampling)
        texts = [tokenizer.decode(r.tokens, skip_special_tokens=True) for r in responses]
        verdicts = grader.grade(texts, [problems[r.row].label for r in responses],
                                [problems[r.row].question for r in responses])
        part = [{"row": r.row, "sample": r.sample, "text": text, "reward": v.reward, "verdict": v.kind,
                 "finish": r.finish, "length": len(r.tokens)}
                for r, text, v in zip(responses, texts, verdicts, strict=True)]
        with distributed.stage(f"the evaluation, after {len(records)} responses"):
            chunk = sum(distributed.gather_objects(part), [])
        records += chunk
        if on_chunk:
            on_chunk(chunk)
    return sorted(records, key=lambda r: (r["row"], r["sample"]))


def subset_sha256(problems, rows):
    """SHA-256 over one JSON line [row, question, label] per row, in order."""
    lines = (json.dumps(problems[row], ensure_ascii=False) + "\n" for row in rows)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------- command line
@dataclasses.dataclass
class Config:
    model: str = "tiny/model"               # model folder (a checkpoint of a run is one) or hub name
    data: str = "tiny/test.jsonl"           # JSONL or parquet file, folder of shards, or hub data set
    split: str = "test"                     # split, where the data source has several
    question_key: str = "question"          # column with the problem
    answer_key: str = "answer"              # column with the answer or the worked solution
    rows: int = 256                         # prompts: the first of a permutation seeded with --seed (0: all)
    samples: int = 4                        # responses per prompt
    k: tuple[int, ...] = ()                 # the k of pass@k (default 1, 2, 4, ... up to --samples)
    seed: int = 29                          # sampling noise and choice of rows
    temperature: float = 1.0                # of sampling
    top_p: float = 1.0                      # of sampling
    top_k: int = 0                          # of sampling (0: all tokens)
    max_new_tokens: int = 1024              # cap of a response
    thinking: bool = True                   # --no-thinking: the prompt closes the think block
    reward: str = "math"                    # 'math', or file.py:function
    reward_workers: int = 4                 # processes for symbolic answers and own functions
    slots: int = 64                         # responses decoded at a time
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: CUDA where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32
    timeout_minutes: float = 60.0           # how long a process waits for a slower one
    out: str = ""                           # folder for responses.jsonl and summary.json (none: print only)


def resume_records(folder, identity, samples):
    """Complete rows of a killed run of the same evaluation. ValueError when `folder` holds something else."""
    settings, rows = folder / "settings.json", {}
    folder.mkdir(parents=True, exist_ok=True)
    if not settings.exists():
        if any(path.suffix != ".tmp" for path in folder.iterdir()):
            raise ValueError(f"{folder}: is not empty and holds no evaluation; choose a new --out")
        write_json(settings, identity)
    try:
        before = dict(json.loads(settings.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{settings}: cannot be read back ({error}); choose a new --out") from None
    if changed := ", ".join(k for k in identity if before.get(k) != identity[k]):
        raise ValueError(f"{folder}: holds another evaluation ({changed} differ); choose a new --out")
    for record in read_rows(folder / "responses.jsonl"):
        rows.setdefault(record["row"], {})[record["sample"]] = record
    return [r for by_sample in rows.values() if len(by_sample) == samples for r in by_sample.values()]


def table(s):
    """The summary `s` in three lines."""
    noise, (low, high) = s["decoding_noise"], s["pass@1_ci95"]
    scores = "".join(f"   {k} {s[k]:.4f}" for k in s if k.startswith("pass@") and "_" not in k)
    return (f"{s['prompts']} prompts x {s['samples']} samples{scores}\n"
            f"pass@1 95 % interval over prompts [{low:.4f}, {high:.4f}]   "
            f"decoding noise {'n/a' if noise is None else format(noise, '.4f')}\n"
            f"right {s['right']}   wrong {s['wrong']}   unparsed {s['unparsed']}   "
            f"grader errors {s['errors']}/{s['prompts'] * s['samples']}   truncated {s['truncation']:.1%}   "
            f"mean length {s['mean_length']:.1f} tokens")


def check(cfg):
    """Every refusal that needs no file. ValueError names the option."""
    for name in ("samples", "max_new_tokens", "slots", "timeout_minutes", "reward_workers"):
        if not getattr(cfg, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be positive")
    if cfg.rows < 0 or not 0 <= cfg.seed < 2 ** 63:
        raise ValueError(f"--rows {cfg.rows}, --seed {cfg.seed}: cannot be negative (or above 2^63)")
    if any(not 1 <= k <= cfg.samples for k in cfg.k):
        raise ValueError(f"--k {' '.join(map(str, cfg.k))}: must lie between 1 and --samples {cfg.samples}")


def main(cfg):
    with cli.user_errors():
        check(cfg)
        device = distributed.pick_device(cfg.device)
        dtype = distributed.compute_dtype(cfg.dtype, device)
        sampling = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)
        problems = data.load_problems(cfg.data, cfg.question_key, cfg.answer_key,
                                      reward.label_reader(cfg.reward), split=cfg.split)
        if cfg.rows > len(problems):
            raise ValueError(f"--rows {cfg.rows}: {cfg.data} has {len(problems)} rows (0: all of them)")
        rows = data.subset_rows(len(problems), cfg.rows or len(problems), cfg.seed)
        folder = local_folder(cfg.model)
        config, tokenizer = ModelConfig.from_folder(folder), data.load_tokenizer(folder)
        eos, vocab_limit = data.eos_ids(folder, tokenizer), data.vocab_limit(tokenizer)
        longest_prompt(cfg.data, problems, rows, tokenizer, cfg.thinking, config)
        grader = reward.Grader(cfg.reward, workers=cfg.reward_workers)
        sampler = Sampler(load_model(folder, device=device), eos, vocab_limit, cfg.slots, dtype)
        identity = json.loads(json.dumps(vars(cfg))) | {
            "model": folder.resolve().name, "data": Path(cfg.data).name, "dtype": str(dtype),
            "weights_sha256": [hashlib.sha256(np.memmap(file, mode="r")).hexdigest()
                               for file in sorted(folder.glob("model*.safetensors"))],
            "subset_sha256": subset_sha256(problems, rows)}
        for name in ("out", "slots", "device", "timeout_minutes", "reward_workers"):      # change no response
            del identity[name]
        out = Path(cfg.out) if cfg.out and os.environ.get("RANK", "0") == "0" else None
        done = resume_records(out, identity, cfg.samples) if out else []
    started = time.time()
    with distributed.process_group(device, cfg.timeout_minutes), grader:
        done = distributed.gather_objects(done)[0]
        if out:
            write_rows(out / "responses.jsonl", done)
        append = (lambda part: write_rows(out / "responses.jsonl", part, "a")) if out else None
        records = evaluate(sampler, tokenizer, problems, rows, grader, cfg.samples, cfg.seed, sampling,
                           cfg.thinking, done, append)
        summary = summarize(records, cfg.samples, cfg.k) | {
            "settings": identity, "seed": cfg.seed, "subset_sha256": identity["subset_sha256"]}
        if out:
            write_rows(out / "responses.jsonl", records)
            write_json(out / "summary.json", summary)
        more = f", {len(done)} responses from before" * bool(done) + f", results in {cfg.out}" * bool(cfg.out)
        distributed.print0(f"{table(summary)}\n{time.time() - started:.1f} s{more}")


if __name__ == "__main__":
    main(cli.parse(Config, __doc__))

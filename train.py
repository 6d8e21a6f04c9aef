"""The training loop: rollout, reward, reference, old, advantage, update, log, save.

    python train.py                                                    # the tiny run on a laptop, a minute
    torchrun --nproc-per-node 8 train.py --algo reinforce_pp_baseline  # 8 processes: a GPU each, or CPU
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py ...
    runs/qwen3_0.6b_gsm8k.sh grpo 42                                   # Qwen3-0.6B on GSM8K

The contract: one closed, synchronous rollout batch per step; every random draw is a function of (seed, step,
prompt row, sample, position), so that neither the number of processes nor a resume changes it; fp32 master
weights; one gradient synchronization per update; every loss is a mean over the responses of all ranks. What
it does not do: no critic, no replay, no LoRA, no tensor or pipeline parallelism, no asynchronous rollouts.
Shapes: B responses of this rank, T response positions; mask[b,t] = 1 iff the policy sampled token t of
response b.
"""

import copy
import dataclasses
import functools
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import cli
import data
import distributed
import evaluate
import reward
import runlog
from advantage import ALGORITHMS, ALIASES, compute_advantages
from learner import (accumulate_gradients, autocast, batch_logp, make_batch, make_optimizer, optimizer_step,
                     update_minibatches)
from loss import response_mean
from model import ModelConfig, load_model, local_folder, varlen_kernel
from sample import Sampler, Sampling

INTERRUPTED = 75        # exit status after SIGTERM, SIGINT or SIGUSR1: saved, run again with --resume
MAY_CHANGE = {"steps", "save_every", "keep", "out", "resume", "device", "timeout_minutes", "reward_workers",
              "reward_concurrency", "tensorboard", "slots", "max_tokens_per_device", "offload_ref", "zero",
              "activation_checkpointing", "compile", "max_skipped"}     # on --resume; the rest change the run


# ---------------------------------------------------------------------------------------------- configuration
@dataclasses.dataclass
class Config:
    # --- what
    algo: Literal[(*ALGORITHMS, *ALIASES)] = "reinforce_pp_baseline"  # see the table in advantage.py
    model: str = "tiny/model"               # start and reference: model folder, checkpoint or hub name
    train_data: str = "tiny/train.jsonl"    # JSONL or parquet file, folder of shards, or hub data set
    eval_data: str = "tiny/test.jsonl"      # the same columns; scored before and after ('' for none)
    question_key: str = "question"          # column with the problem
    answer_key: str = "answer"              # column with the answer or the worked solution
    reward: str = "math"                    # 'math' (boxed or #### answers, exact), or file.py:function
    out: str = ""                           # run folder (empty: out/ALGO-seedSEED)
    resume: bool = False                    # go on from the newest complete checkpoint, if there is one
    # --- budget
    steps: int = 60                         # one rollout and its update(s) each
    prompts_per_step: int = 16              # of all processes together
    samples_per_prompt: int = 8             # K, the group
    max_new_tokens: int = 80                # cap of a response
    updates_per_rollout: int = 1            # mini-batches a rollout is cut into; divides prompts x K
    epochs: int = 1                         # passes over each rollout
    # --- objective
    lr: float = 1e-4                        # of AdamW, constant
    kl_coef: float | None = None            # weight of the KL to the reference (none: 0.01)
    no_kl: bool = False                     # no reference model at all
    clip: float = 0.2                       # PPO clip of the ratio
    gamma: float | None = None              # discount of the token reward, reinforce_pp only (none: 1)
    temperature: float = 1.0                # of sampler and learner alike
    beta1: float = 0.9                      # of Adam: decay of the first moment
    beta2: float = 0.98                     # of Adam: decay of the second
    eps: float = 1e-6                       # of Adam; at 1e-8 rounding alone moves some weights by 1e-6
    weight_decay: float = 0.1               # not on norms
    grad_clip: float = 1.0                  # global L2 norm
    thinking: bool = True                   # --no-thinking: the prompt closes the think block
    # --- randomness and evaluation
    seed: int = 42                          # sampling noise
    data_seed: int = 42                     # prompt order, shared by the arms of a comparison
    eval_rows: int = 256                    # test prompts
    eval_samples: int = 4                   # responses to each
    eval_seed: int = 29                     # noise of the evaluation, and the choice of rows
    # --- machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: CUDA where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of products; auto: bfloat16 on CUDA
    max_tokens_per_device: int = 4096       # of one micro-batch, a shared prompt counted once
    slots: int = 128                        # responses decoded at a time on each device
    activation_checkpointing: bool = False  # recompute blocks in the backward: less memory, a third more time
    compile: bool = False                   # torch.compile on learner and reference blocks: slow first steps
    offload_ref: bool = False               # keep the reference model on the CPU between uses
    zero: bool = False                      # shard the optimizer state over the ranks
    timeout_minutes: float = 30.0           # how long a collective waits for the slowest rank
    reward_workers: int = 4                 # processes for symbolic answers and own functions
    reward_concurrency: int = 16            # answers in flight
    # --- files
    save_every: int = 0                     # steps between checkpoints (0: only the last, -1: none)
    keep: int = 0                           # newest checkpoints to keep (0: all)
    max_skipped: int = 3                    # updates in a row with a non-finite gradient before a stop
    tensorboard: bool = True                # --no-tensorboard: no TensorBoard events, only the files


def resolve(cfg):
    """Defaults that depend on others, and every refusal that needs no file. ValueError names the option."""
    algo = ALGORITHMS[ALIASES.get(cfg.algo, cfg.algo)]
    responses = cfg.prompts_per_step * cfg.samples_per_prompt
    low = {"seed": 0, "data_seed": 0, "eval_seed": 0, "beta1": 0, "beta2": 0, "weight_decay": 0, "keep": 0,
           "gamma": 0, "save_every": -1}            # the smallest allowed; every other number is positive
    high = {"seed": 2 ** 63, "data_seed": 2 ** 63, "eval_seed": 2 ** 63, "beta1": 1, "beta2": 1, "clip": 1}
    for name, x in dataclasses.asdict(cfg).items():
        fits = (lambda x: low[name] <= x) if name in low else (lambda x: x > 0)
        if type(x) in (int, float) and not (fits(x) and x < high.get(name, math.inf)):
            raise ValueError(f"--{name.replace('_', '-')} {x}: must be "
                             + (f"at least {low[name]}" if name in low else "positive")
                             + (f" and below {high[name]}" if name in high else "")
                             + ("; --no-kl trains without a reference" if name == "kl_coef" else ""))
    for refused, message in (
            (algo.grouped and cfg.samples_per_prompt < 2, f"--samples-per-prompt {cfg.samples_per_prompt}: "
             f"{cfg.algo} centres on the group mean and needs at least 2 (reinforce_pp works with 1)"),
            (responses % cfg.updates_per_rollout,
             f"--updates-per-rollout {cfg.updates_per_rollout} does not divide the {responses} responses "
             f"of a rollout ({cfg.prompts_per_step} x {cfg.samples_per_prompt})"),
            (cfg.gamma is not None and algo.kl != "reward",
             f"--gamma: {cfg.algo} has no token rewards to discount (only reinforce_pp uses it)"),
            ((cfg.gamma or 0) > 1, f"--gamma {cfg.gamma}: must lie in [0, 1]"),
            (cfg.no_kl and cfg.kl_coef is not None, "--kl-coef and --no-kl contradict each other: give one"),
            (cfg.no_kl and cfg.offload_ref, "--offload-ref: with --no-kl there is no reference model")):
        if refused:
            raise ValueError(message)
    device = distributed.pick_device(cfg.device)
    return dataclasses.replace(
        cfg, algo=ALIASES.get(cfg.algo, cfg.algo), out=cfg.out or f"out/{cfg.algo}-seed{cfg.seed}",
        kl_coef=0.0 if cfg.no_kl else cfg.kl_coef or 0.01,
        gamma=(1.0 if cfg.gamma is None else cfg.gamma) if algo.kl == "reward" else None,
        dtype=str(distributed.compute_dtype(cfg.dtype, device)).removeprefix("torch.")), device


# --------------------------------------------------------------------------------------- the stages of a step
@dataclasses.dataclass
class Run:
    """What lives through the whole run."""
    cfg: Config
    device: torch.device
    folder: Path                            # the start model's: tokenizer and generation config
    model: torch.nn.Module                  # fp32 master weights
    learner: torch.nn.Module                # the same, DDP-wrapped under torchrun; makes gradients
    reference: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    sampler: Sampler
    sampling: Sampling
    vocab_limit: int                        # ids from here on exist in the weights, not in the tokenizer
    tokenizer: object
    grader: reward.Grader
    problems: data.Problems
    tests: data.Problems                    # of --eval-data; an empty list without
    test_rows: list                         # of `tests`: the frozen subset, scored before and after
    prompt_of: Callable                     # row -> prompt ids


def step_prompts(step, count, cfg):
    """(rows, keys) of one step's prompts. A row that comes twice in a step (an epoch border in a tiny data
    set) gets a second key, since groups and sampling noise are told apart by key."""
    rows, seen, keys = data.prompt_rows(count, cfg.prompts_per_step, step, cfg.data_seed), Counter(), []
    for row in rows:
        keys.append(row + count * seen[row])
        seen[row] += 1
    return rows, keys


def rollout(run, step, prompts, keys):
    """This rank samples every world-th prompt, K responses each -> one record (dict) per response. The second
    key of a row stands for its samples K to 2K - 1."""
    k, count = run.cfg.samples_per_prompt, len(run.problems)
    mine = range(distributed.rank(), len(prompts), distributed.world_size())
    run.sampler.refresh()
    responses = run.sampler.generate([prompts[g] for g in mine], [keys[g] for g in mine], k,
                                     seed=run.cfg.seed, step=step, sampling=run.sampling)
    group_of = {keys[g]: g for g in mine}
    return [{"group": group_of[r.row], "index": group_of[r.row] * k + r.sample, "row": r.row % count,
             "sample": r.row // count * k + r.sample, "tokens": r.tokens, "logps": r.logps,
             "finish": r.finish} for r in responses]


def grade(run, records, rows):
    """Adds text, reward and verdict to each record."""
    texts = [run.tokenizer.decode(r["tokens"], skip_special_tokens=True) for r in records]
    asked = [run.problems[rows[r["group"]]] for r in records]
    verdicts = run.grader.grade(texts, [p.label for p in asked], [p.question for p in asked])
    for r, text, verdict in zip(records, texts, verdicts, strict=True):
        r.update(text=text, reward=verdict.reward, verdict=verdict.kind)


def take_share(run, records, prompts):
    """Every rank sees every record and takes whole groups, balanced by tokens -> (records in order,
    Batch)."""
    records = sorted(sum(distributed.gather_objects(records), []), key=lambda r: r["index"])
    tokens = [len(p) for p in prompts]
    for r in records:
        tokens[r["group"]] += len(r["tokens"])
    share = set(data.split_groups(tokens, distributed.world_size())[distributed.rank()])
    return records, make_batch(prompts, [r for r in records if r["group"] in share], run.device)


def reference_logp(run, batch):
    """Log-probs [B,T] of the share under the reference, None without one."""
    if run.reference is None:
        return None
    logp = batch_logp(run.reference.to(run.device), batch, run.cfg, run.vocab_limit)
    if run.cfg.offload_ref:
        run.reference.to("cpu")
    return logp


def update(run, step, batch, advantages, logp_old, logp_ref, count):
    """All updates of this rollout of `count` responses -> (sums of this rank,
    [(grad norm, clip coefficient, bad gradient)])."""
    sums, steps = Counter(), []
    for chosen in update_minibatches(step, count, run.cfg):
        rows = [b for b, index in enumerate(batch.index) if index in chosen]
        part = accumulate_gradients(run.learner, batch, rows, advantages, logp_old, logp_ref, len(chosen),
                                    run.cfg, run.vocab_limit)
        steps.append(optimizer_step(run.model, run.optimizer, run.cfg))
        largest = [s.pop("gap_max") for s in (sums, part) if "gap_max" in s]
        sums.update(part)
        sums["gap_max"] = torch.stack(largest).amax() if largest else torch.zeros(())
    return sums, steps


# ---------------------------------------------------------------------------------------------------- metrics
class Clock:
    """Seconds between stage ends; waits for the device, so that a stage pays for its own work."""

    def __init__(self, device):
        self.device, self.times = device, {}
        self.start = self.last = time.perf_counter()

    def __call__(self, name):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times[name], self.last = now - self.last, now


def rollout_metrics(records, prompts, k):
    """What every rank can read off the gathered records (docs/metrics.md)."""
    rewards = torch.tensor([r["reward"] for r in records], dtype=torch.float64)
    lengths, kinds = [len(r["tokens"]) for r in records], Counter(r["verdict"] for r in records)
    cut = [r for r in records if r["finish"] != "stop"]
    return {"reward": rewards.mean().item(), "reward_std": rewards.std(correction=0).item(),
            "right": kinds["right"], "wrong": kinds["wrong"], "unparsed": kinds["unparsed"],
            "grader_errors": kinds["error"] + kinds["timeout"],
            "zero_std_groups": int((rewards.view(-1, k).diff(dim=1) == 0).all(1).sum()) if k > 1 else None,
            "response_len_mean": sum(lengths) / len(lengths), "response_len_min": min(lengths),
            "response_len_max": max(lengths), "truncated": len(cut),
            "truncated_and_rewarded": sum(r["reward"] > 0 for r in cut), "fully_masked": lengths.count(0),
            "prompt_tokens": sum(map(len, prompts)), "response_tokens": sum(lengths)}


def update_metrics(sums, steps, stats, tokens, cfg, device):
    """Sums of this rank -> means over all ranks; what does not apply to the algorithm is None."""
    by_response = ("pg_loss", "loss", "ppo_kl", "kl_loss")
    by_token = ("clip_frac", "entropy", "ref_k1", "ref_k2", "sampler_logp_gap_mean")
    total = distributed.all_sum({n: sums.get(n, 0.0) for n in (*by_response, *by_token)}, device)
    out = {n: total[n] / len(steps) for n in by_response} | {n: total[n] / max(tokens, 1) for n in by_token}
    out["sampler_logp_gap_max"] = distributed.all_max(sums.get("gap_max", 0.0), device)
    if ALGORITHMS[cfg.algo].kl == "reward" or cfg.no_kl:
        out["kl_loss"] = None
    if cfg.no_kl:
        out["ref_k1"] = out["ref_k2"] = None
    norms, coefs, bad = zip(*steps, strict=True)
    out |= {"grad_norm": sum(norms) / len(norms), "clip_coef": sum(coefs) / len(coefs), "lr": cfg.lr,
            "skipped_updates": sum(name is not None for name in bad)}
    out |= {name: float(value) for name, value in stats.items()}
    return out | {"valid_tokens": int(out["valid_tokens"])}


def peak_memory_gib(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2 ** 30
    import resource                         # not on Windows
    unit = 2 ** 20 if sys.platform == "linux" else 2 ** 30            # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# --------------------------------------------------------------------------------------------------- the loop
def train_step(run, step):
    """One pass through the stages -> (metrics row, records of all ranks, for each update the name of a
    non-finite gradient or None)."""
    cfg, clock, algo = run.cfg, Clock(run.device), ALGORITHMS[run.cfg.algo]
    rows, keys = step_prompts(step, len(run.problems), cfg)
    prompts = [run.prompt_of(row) for row in rows]

    records = rollout(run, step, prompts, keys)
    clock("t_rollout")
    grade(run, records, rows)
    records, batch = take_share(run, records, prompts)
    clock("t_reward")
    logp_ref = reference_logp(run, batch)
    clock("t_ref")
    # with one update per rollout the old log-probs are the current ones; only k1 needs them before the update
    before = algo.kl == "reward" or cfg.updates_per_rollout * cfg.epochs > 1
    logp_old = batch_logp(run.model, batch, cfg, run.vocab_limit) if before else None
    clock("t_old")
    advantages, returns, stats = compute_advantages(
        cfg.algo, batch.rewards, batch.mask, batch.group, cfg.samples_per_prompt, logp_old,
        logp_old if cfg.no_kl else logp_ref, cfg.kl_coef, 1.0 if cfg.gamma is None else cfg.gamma)
    sums, steps = update(run, step, batch, advantages, logp_old, logp_ref, len(records))
    clock("t_update")

    metrics = {"step": step} | rollout_metrics(records, prompts, cfg.samples_per_prompt)
    tokens, seconds = metrics["response_tokens"], clock.last - clock.start
    metrics |= update_metrics(sums, steps, stats, tokens * cfg.epochs, cfg, run.device)
    metrics["returns_minus_reward"] = None
    if returns is not None:
        gain = response_mean(returns - batch.rewards.to(returns)[:, None], batch.mask, len(records))
        metrics["returns_minus_reward"] = distributed.all_sum({"gain": gain}, run.device)["gain"]
    decoding = distributed.all_max(run.sampler.stats["decode_s"], run.device)
    metrics |= {**clock.times, "t_step": seconds, "response_tok_per_s": tokens / seconds,
                "decode_tok_per_s": tokens / max(decoding, 1e-9),
                "peak_mem_gib": distributed.all_max(peak_memory_gib(run.device), run.device)}
    return metrics, records, [name for *_, name in steps]


def loop(run, log, state, save, signals):
    """Steps until the budget, a signal or too many bad gradients -> (status of the run, message)."""
    cfg = run.cfg
    for step in range(state["next_step"], cfg.steps):
        with distributed.stage(f"step {step}"):
            metrics, records, bad = train_step(run, step)
            stop = distributed.all_max(len(signals), run.device) > 0
        log.step(metrics, records)
        state["next_step"] = step + 1
        for name in bad:
            state["skipped"] = state["skipped"] + 1 if name else 0
            if state["skipped"] >= cfg.max_skipped:
                return "stopped", (f"{cfg.max_skipped} updates in a row had a non-finite gradient, the last "
                                   f"in {name}; the newest checkpoint before them is untouched")
        due = step + 1 == cfg.steps or cfg.save_every > 0 and (step + 1) % cfg.save_every == 0
        if (stop or due) and cfg.save_every >= 0:
            save(step + 1)
        if stop and step + 1 < cfg.steps:
            return "interrupted", f"stopped by a signal after step {step + 1}; --resume goes on from " + (
                "there" if cfg.save_every >= 0 else "the start: --save-every -1")
    return "complete", None


def score(run):
    """pass@k of the current weights on the frozen test rows, or None without test data."""
    cfg = run.cfg
    if not run.tests:
        return None
    run.sampler.refresh()
    records = evaluate.evaluate(run.sampler, run.tokenizer, run.tests, run.test_rows, run.grader,
                                cfg.eval_samples, cfg.eval_seed, run.sampling, cfg.thinking)
    return evaluate.summarize(records, cfg.eval_samples) | {
        "seed": cfg.eval_seed, "subset_sha256": evaluate.subset_sha256(run.tests, run.test_rows)}


def train(run, run_folder):
    """Resume, evaluate, loop, save, evaluate -> exit status."""
    cfg, state = run.cfg, {"next_step": 0, "skipped": 0, "initial": None, "seconds": 0.0}
    newest, notes = checkpoint.latest_complete(run_folder) if distributed.rank() == 0 else (None, [])
    newest, broken = distributed.gather_objects((newest and newest.name, len(notes)))[0]  # rank 0 decides
    distributed.print0(*notes, sep="\n", end="\n" if notes else "")
    if broken and not newest:
        cli.fail(f"{run_folder}: none of its {broken} checkpoints is complete, and a start from the first "
                 "step would overwrite the metrics; give another --out")
    if newest:
        state = checkpoint.load(run_folder / newest, run.model, run.optimizer)
        distributed.print0(f"resuming after step {state['next_step']} from {newest}")
    log = runlog.RunLog(cfg, run_folder, run.device, state["next_step"])
    log.started -= state["seconds"]

    def save(step):
        bad = next((n for n, p in run.model.named_parameters() if not torch.isfinite(p).all()), None)
        if bad:
            return log.say(f"step {step} is not saved: {bad} is not finite")
        if cfg.zero and distributed.world_size() > 1:
            run.optimizer.consolidate_state_dict(to=0)
        state["seconds"] = time.time() - log.started
        if distributed.rank() == 0:
            checkpoint.save(run_folder, step, run.model, run.optimizer, state, run.folder, cfg.keep)

    if state["next_step"] == 0:
        state["initial"] = score(run)
    signals = []
    handlers = {number: signal.signal(number, lambda caught, _frame: signals.append(caught))
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    status, message = loop(run, log, state, save, signals)
    for number, handler in handlers.items():
        signal.signal(number, handler)                  # nothing is lost any more: the weights are saved
    final = score(run) if status == "complete" else None
    log.finish(status, state["initial"], final, time.time() - log.started, message)
    return {"complete": 0, "interrupted": INTERRUPTED, "stopped": 1}[status]


# ----------------------------------------------------------------------------------------------------- set-up
def banner(cfg, config, device, folder, longest, problems):
    """Derived sizes, before anything expensive."""
    kernel = varlen_kernel(device, torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32)
    responses, updates = cfg.prompts_per_step * cfg.samples_per_prompt, cfg.updates_per_rollout * cfg.epochs
    distributed.print0(
        f"{cfg.algo}: {cfg.steps} steps of {cfg.prompts_per_step} prompts x {cfg.samples_per_prompt} = "
        f"{responses} responses, {updates} update(s) each, on {os.getenv('WORLD_SIZE', '1')} process(es)\n"
        f"model {cfg.model}: {config.num_hidden_layers} layers, hidden {config.hidden_size}, {cfg.dtype} "
        f"on {device}, attention {kernel[0] if kernel else 'torch sdpa'}, threads {torch.get_num_threads()}\n"
        f"data {problems.describe()}, longest prompt {longest} + {cfg.max_new_tokens} new tokens of a "
        f"context of {config.max_position_embeddings}")


def build(cfg, device):
    """Loads data, tokenizer and model of a resolved config; every user error of a run shows here -> Run."""
    keys = cfg.question_key, cfg.answer_key, reward.label_reader(cfg.reward)
    problems = data.load_problems(cfg.train_data, *keys, split="train")
    tests = data.load_problems(cfg.eval_data, *keys, split="test") if cfg.eval_data else []
    test_rows = data.subset_rows(len(tests), min(cfg.eval_rows, len(tests)), cfg.eval_seed) if tests else []
    folder = local_folder(cfg.model)
    config, tokenizer = ModelConfig.from_folder(folder), data.load_tokenizer(folder)
    eos, vocab_limit = data.eos_ids(folder, tokenizer), data.vocab_limit(tokenizer)
    prompt_of = functools.cache(lambda row: data.prompt_ids(tokenizer, problems[row].question, cfg.thinking))
    rows = {row for step in range(cfg.steps) for row in step_prompts(step, len(problems), cfg)[0]}
    longest = evaluate.longest_prompt(cfg.train_data, problems, rows, tokenizer, cfg.thinking, config)
    if tests:
        evaluate.longest_prompt(cfg.eval_data, tests, test_rows, tokenizer, cfg.thinking, config)
    grader = reward.Grader(cfg.reward, cfg.reward_workers, cfg.reward_concurrency)
    model = load_model(folder, device=device)
    model.activation_checkpointing = cfg.activation_checkpointing
    reference = None if cfg.no_kl else copy.deepcopy(model).requires_grad_(False)
    if reference is not None and device.type == "cuda":
        reference.to(torch.bfloat16)
    for network in filter(None, (model, reference)) if cfg.compile else ():
        with autocast(cfg, device):
            network.compile_blocks()
    sampler = Sampler(model, eos, vocab_limit, cfg.slots, getattr(torch, cfg.dtype))
    sampling = Sampling(temperature=cfg.temperature, max_new_tokens=cfg.max_new_tokens)
    banner(cfg, config, device, folder, longest, problems)
    return Run(cfg, device, folder, model, model, reference, None, sampler, sampling, vocab_limit, tokenizer,
               grader, problems, tests, test_rows, prompt_of)


def main(cfg):
    with cli.user_errors():
        cfg, device = resolve(cfg)
        run_folder = runlog.check_folder(cfg, MAY_CHANGE)
        run = build(cfg, device)
    with distributed.process_group(device, cfg.timeout_minutes), run.grader:
        run.optimizer = make_optimizer(run.model, cfg)
        if distributed.world_size() > 1:
            run.learner = DistributedDataParallel(run.model)
        status = train(run, run_folder)
        run.learner = None                  # see distributed.process_group
    return status


if __name__ == "__main__":
    sys.exit(main(cli.parse(Config, __doc__)))

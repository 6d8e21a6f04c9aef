"""What a run leaves behind, written by rank 0; a folder that already holds a run is refused without --resume.

    out/run/config.json     resolved options, command line, commit, versions, device
            metrics.jsonl   one row per step (docs/metrics.md); null where a metric does not apply
            rollouts.jsonl  one row per sampled response
            summary.json    evaluations before and after, status, seconds
            reward.png      the curve;  tensorboard/  the same metrics;  step_000060/, latest  weights
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import distributed


def strict(value):
    """JSON-ready: NaN and infinities become None, tensors and numpy scalars plain numbers."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path, value):
    """Whole or not at all: a kill between two bytes leaves the old file."""
    text = json.dumps(strict(value), indent=2, allow_nan=False, ensure_ascii=False)
    path.with_suffix(".tmp").write_text(text + "\n", encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def write_rows(path, rows, mode="w"):
    """JSON lines: mode "w" whole or not at all, "a" appended (a kill can cut the last line)."""
    target = path if mode == "a" else path.with_suffix(".tmp")
    with open(target, mode, encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(strict(r), ensure_ascii=False, allow_nan=False) + "\n" for r in rows)
    target.replace(path)        # appended: it is `path` already


def read_rows(path):
    """Rows of a JSONL file, one at a time; a last line cut by a kill is left out."""
    with open(path, "rb") if path.exists() else contextlib.nullcontext(()) as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def check_folder(cfg, may_change):
    """The run folder, made if need be. ValueError when it holds a run and this is no resume (after a torchrun
    restart it is one), or when a resume changes an option that would change the rest of the run."""
    folder = Path(cfg.out)
    folder.mkdir(parents=True, exist_ok=True)
    path, latest = folder / "config.json", folder / "latest"
    if not any(file.exists() for file in (path, latest, folder / "metrics.jsonl")):
        return folder
    if not cfg.resume and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        raise ValueError(f"{folder}: already holds a run; give another --out, or --resume to go on with it")
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: the options of the run cannot be read back ({error})") from None
    changed = ", ".join(f"--{k.replace('_', '-')} ({before.get(k)} -> {v})" for k, v in vars(cfg).items()
                        if k not in may_change and before.get(k) != strict(v))
    done = int(latest.read_text(encoding="utf-8").strip().rpartition("_")[2]) if latest.exists() else 0
    if cfg.steps < done:
        raise ValueError(f"{folder}: --steps {cfg.steps}, but the run has come to step {done} already")
    if changed:
        raise ValueError(f"{folder}: --resume cannot change {changed}")
    return folder


def environment(device):
    """Where the run ran: commit (with + when files differ from it), versions, device, processes."""
    try:
        commit = subprocess.run(("git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"),
                                cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:         # no git
        commit = ""
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "numpy", "safetensors")}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"argv": sys.argv[1:], "commit": commit or None, "device": f"{device.type} ({name})",
            "versions": versions | {"python": platform.python_version()},
            "world_size": distributed.world_size(), "threads": torch.get_num_threads()}


class RunLog:
    """Rank 0's files. `first_step` cuts rows that a dead run wrote after its last checkpoint."""

    def __init__(self, cfg, folder, device, first_step):
        self.folder, self.started, self.rank0, self.board = folder, time.time(), distributed.rank() == 0, None
        if not self.rank0:
            return
        write_json(folder / "config.json", vars(cfg) | environment(device))
        (folder / "summary.json").unlink(missing_ok=True)            # of the run before it was extended
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            write_rows(folder / name, (r for r in read_rows(folder / name) if r["step"] < first_step))
        self.rows = list(read_rows(folder / "metrics.jsonl"))
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        from tqdm import tqdm
        self.bar = tqdm(total=cfg.steps, initial=first_step, unit="step", disable=None, dynamic_ncols=True,
                        leave=False)

    def step(self, row, records):
        """One metrics row and its responses: files first, then the console."""
        if not self.rank0:
            return
        row = strict(row)
        self.rows.append(row)
        write_rows(self.folder / "metrics.jsonl", [row], "a")
        kept = ("row", "sample", "text", "reward", "verdict", "finish")
        sampled = ({k: r[k] for k in kept} | {"length": len(r["tokens"])} for r in records)
        write_rows(self.folder / "rollouts.jsonl", ({"step": row["step"], **r} for r in sampled), "a")
        for name, value in row.items() if self.board else ():
            if value is not None:
                self.board.add_scalar(name, value, row["step"])
        std, loss, k2, grad = ("n/a" if row[name] is None else format(row[name], spec) for name, spec in (
            ("adv_raw_std", ".3f"), ("loss", "+.4f"), ("ref_k2", ".4f"), ("grad_norm", ".2f")))
        grad = "non-finite: update skipped" if row["skipped_updates"] else grad
        self.say(f"step {row['step'] + 1:>4}/{self.bar.total}  reward {row['reward']:.3f}  length "
                 f"{row['response_len_mean']:.0f}  truncated {row['truncated']}  adv std {std}  loss {loss}  "
                 f"k2 {k2}  grad {grad}  {row['response_tok_per_s']:.0f} tok/s  {row['t_step']:.2f} s")
        self.bar.update()

    def say(self, text):
        if self.rank0:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def finish(self, status, initial, final, seconds, message=None):
        """Writes summary.json and the curve, closes everything, prints the closing lines."""
        if not self.rank0:
            return
        self.bar.close()
        if self.board:
            self.board.close()
        write_json(self.folder / "summary.json", dict(status=status, message=message, steps=len(self.rows),
                                                      initial=initial, final=final, seconds=seconds))
        if self.rows:
            plot_reward(self.rows, initial, final, self.folder / "reward.png")
        print()
        for name, score in (("before", initial), ("after", final)):
            if score:
                low, high = score["pass@1_ci95"]
                print(f"pass@1 {name:<6}  {score['pass@1']:.4f}  [{low:.4f}, {high:.4f}]  {score['prompts']} "
                      f"prompts x {score['samples']} samples, {score['truncation']:.1%} truncated")
        if initial and final:
            print(f"pass@1 gained  {final['pass@1'] - initial['pass@1']:+.4f}")
        print(f"{status}: {len(self.rows)} steps in {seconds:.1f} s; metrics, responses, curve and weights "
              f"are in {self.folder}" + (f"\n{message}" if message else ""))


def plot_reward(rows, initial, final, path):
    """Reward per step, its running mean over 5 steps, and pass@1 before and after with intervals."""
    import numpy as np
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    x, y = [r["step"] + 1 for r in rows], [r["reward"] for r in rows]
    smooth = [sum(y[max(0, i - 4):i + 1]) / min(5, i + 1) for i in range(len(y))]
    axes.plot(x, y, color="#88aadd", linewidth=1, label="training reward, per step")
    axes.plot(x, smooth, color="#1f4e9c", linewidth=2.2, label="mean of the last 5 steps")
    scores = [(at, s["pass@1"], *s["pass@1_ci95"]) for at, s in ((0, initial), (x[-1] + 1, final)) if s]
    if scores:
        at, mean, low, high = np.array(scores).T
        axes.errorbar(at, mean, (mean - low, high - mean), fmt="o", color="#c44e00", capsize=4,
                      label="pass@1 on the test rows, 95 % interval")
    # own rewards may leave [0,1]
    axes.set(xlabel="step (pass@1: before and after them)", ylabel="reward", ylim=(min(0, *y), max(1, *y)))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)

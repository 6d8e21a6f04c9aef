"""Runs that take milliseconds a step, for the tests of the loop: a model of 2 layers with random weights and the
embedded tokenizer, 7 problems, a reward that depends on the text alone; and real processes without the cost of
importing torch in each: `Processes` starts one that has imported everything and forks the others.
"""

import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
REWARD = f"{Path(__file__).resolve().parent / 'small_reward.py'}:by_length"
TIMES = {"response_tok_per_s", "decode_tok_per_s", "peak_mem_gib",
         "t_rollout", "t_reward", "t_ref", "t_old", "t_update", "t_step"}
CONFIG = {"model_type": "qwen3", "vocab_size": 521, "hidden_size": 20, "intermediate_size": 28,
          "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6,
          "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 96, "tie_word_embeddings": True,
          "hidden_act": "silu", "initializer_range": 0.25}


def make_model(folder, **changes):
    """A model folder: 9 ids beyond the tokenizer's, and 73 end tokens, so that lengths differ."""
    from model import ModelConfig, Qwen3, save_model
    model = Qwen3(ModelConfig.from_dict({**CONFIG, **changes})).init_weights(seed=5)
    save_model(model, folder, ROOT / "tiny/model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(20, 93))}))
    path = folder / "tokenizer_config.json"
    options = json.loads(path.read_text())
    options["chat_template"] += "{%- if not enable_thinking -%}{{- 'Now. ' -}}{%- endif -%}"
    path.write_text(json.dumps(options))
    return folder


def write_problems(path, count, start=0):
    rows = [{"question": f"What is {start + i} plus {3 * i}?" + " Please." * (i % 3),
             "answer": f"{start + i}+{3 * i}={start + 4 * i}\n#### {start + 4 * i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def options(folder, **changes):
    """Options of a small run with its data in `folder`: B = 5 prompts x 3 samples, 7 problems."""
    return {"model": str(folder / "model"), "train_data": str(folder / "train.jsonl"), "eval_data": "",
            "reward": REWARD, "reward_workers": 1, "prompts_per_step": 5, "samples_per_prompt": 3,
            "max_new_tokens": 11, "lr": 3e-3, "eps": 1e-5, "steps": 2, "slots": 6,
            "max_tokens_per_device": 90, "tensorboard": False, **changes}


def make_folder(folder):
    """Everything that `options` names."""
    folder.mkdir(exist_ok=True)
    make_model(folder / "model")
    write_problems(folder / "train.jsonl", 7)
    write_problems(folder / "test.jsonl", 6, start=40)
    return folder


def argv(values):
    """{"max_new_tokens": 3, "no_kl": True} -> ["--max-new-tokens", "3", "--no-kl"]"""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}"] if value and name not in ("tensorboard", "thinking") else []
            words += [f"--no-{flag}"] if not value and name in ("tensorboard", "thinking") else []
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


class Grader:
    """The same reward without a worker process, for runs inside a test."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def grade(self, responses, labels, questions):
        from reward import Verdict
        from small_reward import by_length
        values = map(by_length, responses, labels, questions)
        return [Verdict(value, "right" if value else "wrong", None) for value in values]


# -------------------------------------------------------------------------------------------- what a run left
def rows(folder, times=False):
    """Rows of metrics.jsonl, by default without what the clock and the machine decide."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if times or k not in TIMES} for line in lines]


def rollouts(folder, step=None):
    lines = (Path(folder) / "rollouts.jsonl").read_bytes().splitlines()
    found = [json.loads(line) for line in lines]
    return [r for r in found if step is None or r["step"] == step]


def weights(folder, step):
    from safetensors.torch import load_file
    return load_file(Path(folder) / f"step_{step:06d}" / "model.safetensors")


def same_bits(a, b, step):
    """Everything that two runs must share bit for bit."""
    assert rows(a) == rows(b)
    assert rollouts(a) == rollouts(b)
    for name in ("model.safetensors", "optimizer.safetensors"):
        left, right = (Path(run) / f"step_{step:06d}" / name for run in (a, b))
        assert left.read_bytes() == right.read_bytes(), name


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# -------------------------------------------------------------------------------------------------- processes
def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """A process that has imported everything and forks others on request (none has used a thread by then)."""

    def __enter__(self):
        self.helper = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       cwd=ROOT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self

    def __exit__(self, *_):
        self.helper.stdin.close()
        self.helper.wait()

    def _ask(self, **request):
        self.helper.stdin.write(json.dumps(request) + "\n")
        self.helper.stdin.flush()
        return json.loads(self.helper.stdout.readline())

    def start(self, log, script, words, env=None, patch=""):
        """Forks a process that is `python SCRIPT WORDS`, its output in the file `log`. `patch`: code that runs
        first, with the script's module under its name. -> pid"""
        return self._ask(log=str(log), script=script, words=words, env=env or {}, patch=patch)

    def wait(self, pid, seconds=120):
        """Exit status as subprocess has it. A process that does not end in time is killed: TimeoutError."""
        status = self._ask(pid=pid, seconds=seconds)
        if status is None:
            raise TimeoutError(f"process {pid} was still there after {seconds} s")
        return status

    def run(self, log, script, words, world=1, patch="", seconds=120, env=None):
        """Runs `world` processes as torchrun would, each with its own log (`log` plus its rank) -> statuses."""
        port, pids = free_port(), []
        for rank in range(world):
            more = {} if world == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            pids.append(self.start(f"{log}{rank}", script, words, {**more, **(env or {})}, patch))
        return [self.wait(pid, seconds) for pid in pids]


def _child(request):
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    sys.argv = [f"{request['script']}.py", *request["words"]]
    module = __import__(request["script"])
    exec(request["patch"], {request["script"]: module, "rank": int(os.environ.get("RANK", "0"))})
    import cli
    status = 1
    try:
        status = module.main(cli.parse(module.Config, module.__doc__)) or 0
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)            # what the helper imported need not be taken down piece by piece


def _wait(pid, seconds):
    """A child's exit status, or None when it had to be killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, 9)
    os.waitpid(pid, 0)
    return None


def _helper():
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    import matplotlib.figure  # noqa: F401  what a run imports late
    from transformers import AutoTokenizer  # noqa: F401

    import evaluate  # noqa: F401
    import train  # noqa: F401
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())       # the first optimizer imports a good second's worth
    gc.collect()
    gc.freeze()                 # or each child copies every page in its first collection
    for line in requests:
        request = json.loads(line)
        if "seconds" in request:
            reply = _wait(request["pid"], request["seconds"])
        else:
            reply = os.fork()
            if not reply:
                _child(request)
        print(json.dumps(reply), file=replies, flush=True)


def copy(folder, target):
    shutil.copytree(folder, target)
    return target


if __name__ == "__main__":
    _helper()

"""The loop: equal seeds, any number of processes, resume, signals and kills, wrong use, every option, bad gradients,
and the identities that the logged figures must keep. Runs of milliseconds (small.py); real processes where it matters.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small
import torch
from safetensors.torch import load_file

import cli
import data
import learner
import reward
import runlog
import train
from advantage import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = """step reward reward_std right wrong unparsed grader_errors zero_std_groups adv_raw_mean adv_raw_std
    adv_norm_mean adv_norm_std valid_tokens returns_minus_reward ref_k1 ref_k2 kl_loss pg_loss loss ppo_kl clip_frac
    entropy grad_norm clip_coef lr response_len_mean response_len_min response_len_max truncated
    truncated_and_rewarded fully_masked sampler_logp_gap_mean sampler_logp_gap_max prompt_tokens response_tokens
    response_tok_per_s decode_tok_per_s t_rollout t_reward t_ref t_old t_update t_step peak_mem_gib""".split()
COUNTS = ("step", "right", "wrong", "unparsed", "grader_errors", "zero_std_groups", "valid_tokens", "truncated",
          "truncated_and_rewarded", "fully_masked", "prompt_tokens", "response_tokens", "response_len_min",
          "response_len_max", "skipped_updates")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small.make_folder(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def processes():
    with small.Processes() as helper:
        yield helper


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Before any run of this module, finished ones included: bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No curve (the test of the summary draws one), no waiting for the disk, and the small reward without a worker
    process."""
    real = reward.Grader
    monkeypatch.setattr(runlog, "plot_reward", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(reward, "Grader", lambda spec, *rest, **named: (
        small.Grader() if spec == small.REWARD else real(spec, *rest, **named)))


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """{algorithm: folder of a finished run of 4 steps}, with evaluation; a checkpoint after every step."""
    folders = {}
    for algo in ALGORITHMS:
        folders[algo] = tmp_path_factory.mktemp(algo) / "run"
        assert run(home, folders[algo], algo=algo, steps=4, save_every=1, eval_data=str(home / "test.jsonl"),
                   eval_rows=6, eval_samples=2) == 0
    return folders


def run(home, out, **changes):
    """train.py in this process -> exit status."""
    return train.main(train.Config(**small.options(home, out=str(out), **changes)))


def close(a, b, relative=1e-4, absolute=1e-5):
    """Metrics rows equal to rounding, counts exactly."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        if x is None or name in COUNTS:
            assert x == y, name
        else:
            assert x == pytest.approx(y, rel=relative, abs=absolute), name


# ------------------------------------------------------------------------------------------- what a run leaves
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_metrics_have_the_names_of_the_contract_and_are_strict_json(finished, algo):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")
    for path in (*finished[algo].glob("*.json"), *finished[algo].glob("*.jsonl")):
        for text in path.read_bytes().decode("utf-8").split("\n") if path.suffix == ".jsonl" else [path.read_text()]:
            if text:
                json.loads(text, parse_constant=refuse)
    rows = small.rows(finished[algo], times=True)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    for row in rows:
        assert sorted(row) == sorted([*CONTRACT, "skipped_updates"])
        nulls = {name for name, value in row.items() if value is None}
        assert nulls == ({"kl_loss"} if algo == "reinforce_pp" else {"returns_minus_reward"})


def test_counts_agree_with_the_responses(finished):
    for folder in finished.values():
        for row in small.rows(folder, times=True):
            found = small.rollouts(folder, row["step"])
            assert len(found) == 15 == row["right"] + row["wrong"] + row["unparsed"] + row["grader_errors"]
            assert row["reward"] == pytest.approx(sum(r["reward"] for r in found) / 15)
            assert row["response_tokens"] == row["valid_tokens"] == sum(r["length"] for r in found)
            assert row["truncated"] == sum(r["finish"] != "stop" for r in found)
            assert row["truncated_and_rewarded"] == sum(r["finish"] != "stop" and r["reward"] > 0 for r in found)
            groups = [found[i:i + 3] for i in range(0, 15, 3)]
            assert all(len({r["row"] for r in group}) == 1 for group in groups)
            assert row["zero_std_groups"] == sum(len({r["reward"] for r in group}) == 1 for group in groups)
            assert 0 < row["t_step"] < 60 and row["peak_mem_gib"] > 0 and row["decode_tok_per_s"] > 0


def test_every_row_of_the_data_is_named_by_its_own_number(finished):
    """7 problems, 5 a step: rows return within a step at an epoch border, and (row, sample) stays unique."""
    found = small.rollouts(finished["grpo"])
    assert {r["row"] for r in found} == set(range(7))
    for step in range(4):
        rows = data.prompt_rows(7, 5, step, 42)
        mine = small.rollouts(finished["grpo"], step)
        assert [r["row"] for r in mine[::3]] == rows
        assert len({(r["row"], r["sample"]) for r in mine}) == 15


def test_a_row_twice_in_one_step_gives_two_groups_with_noise_of_their_own(home, tmp_path):
    small.write_problems(tmp_path / "two.jsonl", 2)
    assert run(home, tmp_path / "run", train_data=str(tmp_path / "two.jsonl"), steps=1, eval_data="") == 0
    found = small.rollouts(tmp_path / "run")
    assert sorted(r["row"] for r in found).count(0) in (6, 9) and {r["row"] for r in found} == {0, 1}
    assert len({(r["row"], r["sample"]) for r in found}) == 15
    assert len({r["text"] for r in found if r["row"] == 0 and r["length"] > 2}) > 1


def test_summary_config_and_curve(home, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    out = tmp_path / "run"
    assert run(home, out, eval_data=str(home / "test.jsonl"), eval_samples=2, tensorboard=True) == 0
    said = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["steps"] == 2 and summary["seconds"] > 0
    for name in ("initial", "final"):
        score = summary[name]
        assert score["prompts"] == 6 and score["samples"] == 2 and score["seed"] == 29
        assert score["right"] + score["wrong"] + score["unparsed"] + score["errors"] == 12
        low, high = score["pass@1_ci95"]
        assert low <= score["pass@1"] <= high
        assert f"{score['pass@1']:.4f}" in said and f"[{low:.4f}, {high:.4f}]" in said
    config = json.loads((out / "config.json").read_text())
    assert {f.name for f in dataclasses.fields(train.Config)} <= config.keys()
    assert config["kl_coef"] == 0.01 and config["gamma"] is None and config["versions"]["torch"]
    assert (out / "reward.png").stat().st_size > 5000 and list((out / "tensorboard").iterdir())
    assert str(out) in said and "step    2/2" in said and "2 steps in" in said


def test_strict_json_of_odd_values(tmp_path):
    """numpy scalars, NaN, tensors: plain numbers or null; a bad value does not lose the file."""
    import numpy as np
    value = {"a": np.float32(0.5), "b": float("nan"), "c": np.bool_(True), "d": torch.tensor(3), "e": -math.inf,
             "f": [np.int64(7), (float("inf"), "x")]}
    runlog.write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": 0.5, "b": None, "c": True, "d": 3, "e": None, "f": [7, [None, "x"]]}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_curve_of_rewards_outside_0_and_1(tmp_path, monkeypatch):
    monkeypatch.undo()
    seen = []
    from matplotlib.axes import Axes
    real = Axes.set
    monkeypatch.setattr(Axes, "set", lambda self, **k: (seen.append(k["ylim"]), real(self, **k)))
    runlog.plot_reward([{"step": s, "reward": r} for s, r in enumerate((-2.0, 0.5, 3.0))], None, None,
                       tmp_path / "c.png")
    assert seen == [(-2.0, 3.0)]


# ---------------------------------------------------------------------------------------------- the same again
def test_same_seed_twice_other_seed_other_data_seed(home, finished, tmp_path):
    kwargs = dict(algo="grpo", steps=4, save_every=1, eval_data=str(home / "test.jsonl"), eval_rows=6, eval_samples=2)
    run(home, tmp_path / "again", **kwargs)
    small.same_bits(finished["grpo"], tmp_path / "again", 4)
    first, second = (json.loads((f / "summary.json").read_text()) for f in (finished["grpo"], tmp_path / "again"))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    run(home, tmp_path / "noise", **{**kwargs, "seed": 43, "steps": 1})
    run(home, tmp_path / "order", **{**kwargs, "data_seed": 43, "steps": 1})
    base, noise, order = (small.rollouts(f, 0) for f in (finished["grpo"], tmp_path / "noise", tmp_path / "order"))
    assert [r["row"] for r in base] == [r["row"] for r in noise] != [r["row"] for r in order]
    assert [r["text"] for r in base] != [r["text"] for r in noise]
    shared = {(r["row"], r["sample"]): r["text"] for r in base}          # noise belongs to the row, not to its place
    assert all(shared.get((r["row"], r["sample"]), r["text"]) == r["text"] for r in order)


WORLDS = {       # name: options; 5 prompts divide by neither 2 nor 3 ranks
    "grpo": dict(algo="grpo"),
    "reinforce_pp": dict(algo="reinforce_pp", kl_coef=0.3),
    "reinforce_pp_baseline": dict(algo="reinforce_pp_baseline", max_tokens_per_device=40),
    "idle rank": dict(algo="reinforce_pp_baseline", prompts_per_step=2, updates_per_rollout=3, epochs=2),
    "zero": dict(algo="grpo", zero=True),
}
CUTS = [(name, world) for name in WORLDS for world in (2, 3) if (name, world) not in (("idle rank", 2), ("zero", 3))]
DUMP = """
import json
real = train.take_share
def take_share(run, records, prompts):
    records, batch = real(run, records, prompts)
    with open(run.cfg.out + "/tokens" + str(rank), "a") as file:
        file.write(json.dumps([[r["tokens"] for r in records], len(batch.responses)]) + chr(10))
    return records, batch
train.take_share = take_share
"""


@pytest.fixture(scope="module")
def worlds(home, processes, tmp_path_factory):
    """{(name, world): run folder} for 1, 2 and 3 processes."""
    folder, found = tmp_path_factory.mktemp("worlds"), {}
    for name, world in [*((name, 1) for name in WORLDS), *CUTS]:
        out = found[name, world] = folder / f"{name} {world}"
        values = small.options(home, out=str(out), save_every=1, eval_data=str(home / "test.jsonl"),
                               eval_rows=5, eval_samples=2, lr=1e-3, **WORLDS[name])
        statuses = processes.run(folder / f"log {name} {world} ", "train", small.argv(values), world, DUMP)
        assert statuses == [0] * world, (folder / f"log {name} {world} 0").read_text()
    return found


def tokens(folder):
    """[(all tokens of a step, responses in rank 0's share)]"""
    return [json.loads(line) for line in (folder / "tokens0").read_text().splitlines()]


@pytest.mark.parametrize("name, world", CUTS)
def test_ranks_change_nothing(worlds, name, world):
    one, many = worlds[name, 1], worlds[name, world]
    for rank in range(world):
        share = json.loads((many / f"tokens{rank}").read_text().splitlines()[0])
        assert share[0] == tokens(one)[0][0], "the first rollout differs"
    assert tokens(many)[0][1] < tokens(one)[0][1], "rank 0 has it all"
    rows_one, rows_many = small.rows(one), small.rows(many)
    assert rows_one[0]["loss"] == pytest.approx(rows_many[0]["loss"], abs=1e-5)
    for a, b in zip(rows_one, rows_many, strict=True):
        close(a, b, relative=2e-4, absolute=2e-5)
    assert small.largest_difference(small.weights(one, 1), small.weights(many, 1)) < 5e-6      # of steps of 1e-3
    assert small.largest_difference(small.weights(one, 1), small.weights(one, 2)) > 3e-4, "nothing was learned"
    first, second = (json.loads((f / "summary.json").read_text())["initial"] for f in (one, many))
    assert first == second


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_ranks_change_nothing_at_the_defaults(processes, tmp_path, algo):
    """The embedded model and every option as it stands: parameters after the first update to 1e-6."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for world, out in enumerate(folders, 1):
        words = ["--algo", algo, "--steps", "1", "--eval-data", "", "--out", str(out)]
        assert processes.run(tmp_path / f"log {world} ", "train", words, world, DUMP) == [0] * world
    one, two = map(tokens, folders)
    assert one[0][0] == two[0][0] and one[0][1] > two[0][1]
    losses = [small.rows(out)[0]["loss"] for out in folders]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    after, other = (small.weights(out, 1) for out in folders)
    assert small.largest_difference(after, other) < 1e-6
    assert small.largest_difference(after, load_file(ROOT / "tiny/model/model.safetensors")) > 9e-5


def torchrun(words, nproc, log, *more, **env):
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *(more or ["--standalone"]), "--nproc-per-node",
             str(nproc), str(ROOT / "train.py"), *words], cwd=ROOT, stdout=file, stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def workers(agent):
    """(pid, rank) of each process that a torchrun agent has started."""
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                yield int(child), int(entry[5:])


def test_two_torchrun_agents(home, worlds, tmp_path):
    """Two machines in small: two agents meet through c10d, two ranks each; 4 ranks give the figures of 1."""
    out, port = tmp_path / "run", small.free_port()
    values = small.options(home, out=str(out), save_every=1, lr=1e-3, eval_data=str(home / "test.jsonl"), eval_rows=5,
                           eval_samples=2, **WORLDS["grpo"])
    agents = [torchrun(small.argv(values), 2, tmp_path / f"log{node}", "--nnodes", "2", "--rdzv-backend", "c10d",
                       "--rdzv-id", "two", "--rdzv-endpoint", f"localhost:{port}") for node in range(2)]
    assert [agent.wait(timeout=100) for agent in agents] == [0, 0], (tmp_path / "log0").read_text()
    one = worlds["grpo", 1]
    for a, b in zip(small.rows(one), small.rows(out), strict=True):
        close(a, b, relative=2e-4, absolute=2e-5)
    said = "".join((tmp_path / f"log{node}").read_text() for node in range(2))
    assert said.count("on 4 process(es)") == 1, "rank 0 alone speaks"
    assert small.largest_difference(small.weights(one, 1), small.weights(out, 1)) < 5e-6
    assert json.loads((one / "summary.json").read_text())["initial"] == json.loads(
        (out / "summary.json").read_text())["initial"]


def test_a_rank_may_have_nothing_to_do(worlds):
    shares = [json.loads((worlds["idle rank", 3] / f"tokens{rank}").read_text().splitlines()[0])[1]
              for rank in range(3)]
    assert 0 in shares and sum(shares) == 6


def test_resume_on_another_number_of_processes(home, processes, worlds, tmp_path):
    """Data order and noise are the same, the rest is equal to rounding; optimizer state sharded before, not after."""
    out = small.copy(worlds["zero", 2], tmp_path / "run")
    values = small.options(home, out=str(out), save_every=1, eval_data=str(home / "test.jsonl"), eval_rows=5,
                           eval_samples=2, algo="grpo", steps=3, lr=1e-3, resume=True)
    assert processes.run(tmp_path / "log", "train", small.argv(values)) == [0]
    other = small.copy(worlds["zero", 1], tmp_path / "other")
    assert processes.run(tmp_path / "log3", "train", small.argv({**values, "out": str(other), "zero": True}), 3) == [0] * 3
    a, b = small.rows(out)[2], small.rows(other)[2]
    assert [(r["row"], r["sample"]) for r in small.rollouts(out, 2)] == [
        (r["row"], r["sample"]) for r in small.rollouts(other, 2)]
    close(a, b, relative=1e-3, absolute=1e-4)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_gradient_is_the_same_for_every_budget(home, algo, dtype):
    """From one response a micro-batch to all in one, several updates old: 1e-6 relative in fp64, 1e-5 in fp32."""
    cfg, device = train.resolve(train.Config(**small.options(home, out="none", algo=algo)))
    model = train.load_model(home / "model", dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    lengths, limit = [1, 11, 4, 7, 2, 9, 11, 3, 5], 512
    records = [{"group": i // 3, "index": i, "reward": float(i % 2),
                "tokens": torch.randint(0, limit, (n,), generator=generator).tolist(), "logps": [0.0] * n}
               for i, n in enumerate(lengths)]
    batch = train.make_batch([[5, 6, 7], [8] * 13, [9] * 6], records, device)
    shift = 0.3 * torch.randn(2, *batch.mask.shape, generator=generator)
    results = []
    for budget in (1, 17, 40, 10 ** 6):
        cfg = dataclasses.replace(cfg, max_tokens_per_device=budget)
        if not results:
            with torch.no_grad():
                now, _ = learner.forward(model, batch, range(9), cfg, limit)
            old, ref = now + shift[0], now + shift[1]
            advantages, *_ = train.compute_advantages(algo, batch.rewards, batch.mask, batch.group, 3, old, ref, 0.1)
        if dtype == torch.float32:
            assert torch.allclose(train.batch_logp(model, batch, cfg, limit), now, atol=1e-5)
        sums = train.accumulate_gradients(model, batch, range(9), advantages, old, ref, 9, cfg, limit)
        results.append(({n: p.grad.clone() for n, p in model.named_parameters()}, sums,
                        len(batch.micro_batches(range(9), budget))))
        model.zero_grad()
    assert [n for *_, n in results][::3] == [9, 1] and 1 < results[1][2] <= 9 and 1 < results[2][2] < 9
    scale = torch.cat([g.flatten() for g in results[-1][0].values()]).norm()
    for gradient, sums, _ in results[:-1]:
        gap = torch.cat([(gradient[n] - g).flatten() for n, g in results[-1][0].items()]).norm()
        assert gap / scale < (1e-6 if dtype == torch.float64 else 1e-5)
        for name, value in results[-1][1].items():
            assert float(sums[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name
    assert float(results[-1][1]["clip_frac"]) > 0


# ------------------------------------------------------------------------------------------------------ resume
@pytest.mark.parametrize("algo, stops", [("grpo", (2,)), ("reinforce_pp", (1, 3)), ("reinforce_pp_baseline", (1, 2))])
def test_resume_is_bitwise(home, finished, tmp_path, algo, stops):
    """2 + 2 steps, or 1 + 2 + 1, are 4, across epoch borders (7 problems, 5 a step) and twice in a row."""
    kwargs = dict(algo=algo, save_every=1, eval_data=str(home / "test.jsonl"), eval_rows=6, eval_samples=2)
    for number, steps in enumerate((*stops, 4)):
        assert run(home, tmp_path / "run", steps=steps, resume=number > 0, **kwargs) == 0
    small.same_bits(finished[algo], tmp_path / "run", 4)
    first, second = (json.loads((f / "summary.json").read_text()) for f in (finished[algo], tmp_path / "run"))
    assert (first["initial"], first["final"], first["steps"]) == (second["initial"], second["final"], second["steps"])
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert run(home, tmp_path / "run", steps=4, resume=True, **kwargs) == 0          # finished already: no step more
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_resume_with_several_updates_a_rollout(home, tmp_path):
    kwargs = dict(updates_per_rollout=3, epochs=2, steps=3)
    run(home, tmp_path / "whole", **kwargs)
    run(home, tmp_path / "parts", **{**kwargs, "steps": 1})
    run(home, tmp_path / "parts", resume=True, **kwargs)
    small.same_bits(tmp_path / "whole", tmp_path / "parts", 3)


def test_resume_cuts_what_a_dead_run_wrote_after_its_last_checkpoint(home, finished, tmp_path):
    kwargs = dict(algo="grpo", save_every=1, eval_data=str(home / "test.jsonl"), eval_rows=6, eval_samples=2)
    out = tmp_path / "run"
    run(home, out, steps=2, **kwargs)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(out / name, "a", encoding="utf-8") as file:
            line = (finished["reinforce_pp"] / name).read_text().splitlines()[-1]
            file.write(line + "\n" + line[:len(line) // 2])
    run(home, out, steps=4, resume=True, **kwargs)
    small.same_bits(finished["grpo"], out, 4)


def test_resume_takes_the_newest_complete_checkpoint_and_says_so(home, finished, tmp_path, capsys):
    out = small.copy(finished["grpo"], tmp_path / "run")
    (out / "step_000004/model.safetensors").write_bytes((out / "step_000004/model.safetensors").read_bytes()[:-1])
    assert run(home, out, algo="grpo", steps=4, save_every=1, resume=True, eval_data=str(home / "test.jsonl"),
               eval_rows=6, eval_samples=2) == 0
    said = capsys.readouterr().out
    assert "step_000004 is not complete" in said and "resuming after step 3 from step_000003" in said
    small.same_bits(finished["grpo"], out, 4)


def test_resume_without_a_whole_checkpoint_is_refused(home, processes, finished, tmp_path):
    """A start from the first step would overwrite the metrics."""
    for world in (1, 2):
        out = small.copy(finished["grpo"], tmp_path / f"run{world}")
        for path in out.glob("step_*/manifest.json"):
            path.unlink()
        before = (out / "metrics.jsonl").read_bytes()
        values = small.options(home, out=str(out), algo="grpo", steps=4, save_every=1, resume=True, eval_rows=6,
                               eval_data=str(home / "test.jsonl"), eval_samples=2)
        assert processes.run(tmp_path / f"log{world}", "train", small.argv(values), world) == [2] * world
        said = (tmp_path / f"log{world}0").read_text()
        assert "none of its 4 checkpoints is complete" in said and "Traceback" not in said
        assert (out / "metrics.jsonl").read_bytes() == before


def test_resume_without_a_run_starts_one(home, tmp_path):
    assert run(home, tmp_path / "run", steps=1, resume=True) == 0
    assert len(small.rows(tmp_path / "run")) == 1


def test_keep_and_save_every(home, tmp_path):
    kwargs = dict(steps=5, eval_data="")
    run(home, tmp_path / "a", save_every=2, keep=2, **kwargs)
    run(home, tmp_path / "b", save_every=-1, **kwargs)
    run(home, tmp_path / "c", **kwargs)
    kept = {name: sorted(p.name for p in (tmp_path / name).glob("step_*")) for name in "abc"}
    assert kept == {"a": ["step_000004", "step_000005"], "b": [], "c": ["step_000005"]}
    assert (tmp_path / "c/latest").read_text().strip() == "step_000005"


def test_a_torchrun_restart_resumes_by_itself(home, finished, tmp_path, monkeypatch):
    kwargs = dict(algo="grpo", save_every=1, eval_data=str(home / "test.jsonl"), eval_rows=6, eval_samples=2, steps=4)
    out = small.copy(finished["grpo"], tmp_path / "run")
    for step in (3, 4):
        os.rename(out / f"step_00000{step}", tmp_path / f"gone{step}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(home, out, **kwargs) == 0
    small.same_bits(finished["grpo"], out, 4)


# ------------------------------------------------------------------------------------------- signals and kills
LONG = dict(algo="reinforce_pp", steps=24, save_every=0)


@pytest.fixture(scope="module")
def whole(home, processes, tmp_path_factory):
    """The uninterrupted run that the killed ones must equal."""
    folder = tmp_path_factory.mktemp("whole")
    values = small.options(home, out=str(folder / "run"), **LONG)
    assert processes.run(folder / "log", "train", small.argv(values)) == [0]
    return folder / "run"


def steps_done(out):
    path = Path(out) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def test_signals_save_at_the_step_boundary(home, processes, whole, tmp_path):
    """SIGTERM, SIGINT and Slurm's SIGUSR1 in turn: exit status 75, a checkpoint of the last logged step, and in the end
    the weights of the uninterrupted run."""
    out, at = tmp_path / "run", 0
    words = small.argv(small.options(home, out=str(out), resume=True, **LONG))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        pid = processes.start(tmp_path / "log", "train", words)
        wait_for(lambda: steps_done(out) > at + 1)
        os.kill(pid, number)
        assert processes.wait(pid) == train.INTERRUPTED == 75
        at = steps_done(out)
        assert (out / "latest").read_text().strip() == f"step_{at:06d}" and at < 24
        summary = json.loads((out / "summary.json").read_text())
        assert summary["status"] == "interrupted" and summary["steps"] == at and "--resume" in summary["message"]
    assert processes.run(tmp_path / "log", "train", words) == [0]
    small.same_bits(whole, out, 24)


def test_signals_on_several_processes(home, processes, tmp_path):
    """One rank alone hears it: all stop after the same step."""
    out = tmp_path / "run"
    words = small.argv(small.options(home, out=str(out), **LONG))
    patch = """
import os, signal
real = train.train_step
def train_step(run, step):
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(run, step)
train.train_step = train_step
"""
    assert processes.run(tmp_path / "log", "train", words, 2, patch) == [75, 75]
    assert steps_done(out) == 3 and (out / "latest").read_text().strip() == "step_000003"


def test_a_signal_without_checkpoints_does_not_promise_one(home, processes, tmp_path):
    out = tmp_path / "run"
    pid = processes.start(tmp_path / "log", "train", small.argv(small.options(
        home, out=str(out), **{**LONG, "save_every": -1})))
    wait_for(lambda: steps_done(out) > 1)
    os.kill(pid, signal.SIGTERM)
    assert processes.wait(pid) == 75
    assert "goes on from the start" in json.loads((out / "summary.json").read_text())["message"]


def test_handlers_are_given_back(home, tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    run(home, tmp_path / "run", steps=1)
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


def kill_until_done(processes, words, out, log, kills, rng):
    """kill -9 at random moments, `kills` times, each after --resume; then to the end. -> (kills before the first
    step, between steps, inside a save)"""
    when = [0, 0, 0]
    for kill in range(kills):
        pid = processes.start(log, "train", words)
        begin = steps_done(out)
        wait_for(lambda begin=begin: steps_done(out) != begin or (out / "config.json").exists())
        time.sleep(rng.uniform(0, 0.4))
        moment = time.monotonic()
        if kill % 2:                                    # every second one inside the next save, at a random point
            while time.monotonic() < moment + 1 and not any(p.name.startswith(".tmp-") for p in out.iterdir()):
                pass
            time.sleep(rng.uniform(0, 0.003))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = processes.wait(pid)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        inside = any(p.name.startswith((".tmp-", ".old-")) for p in out.iterdir())
        when[2 if inside else 1 if steps_done(out) else 0] += 1
    assert processes.run(log, "train", words) == [0], Path(f"{log}0").read_text()
    return when


def check_kills(home, processes, whole, tmp_path, kills, seed):
    out = tmp_path / "run"
    words = small.argv(small.options(home, out=str(out), resume=True, **{**LONG, "save_every": 1}))
    when = kill_until_done(processes, words, out, tmp_path / "log", kills, random.Random(seed))
    small.same_bits(whole, out, 24)
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]
    return when


def test_kill_9_at_random_moments(home, processes, whole, tmp_path):
    check_kills(home, processes, whole, tmp_path, kills=4, seed=1)


# --------------------------------------------------------------------------------------------------- wrong use
def problems(text):
    return lambda tmp_path: {"train_data": str(small_file(tmp_path / "bad.jsonl", text)), "reward": "math"}


def small_file(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def broken_model(change):
    """A copy of the small model, with `change(folder)` done to it."""
    def make(tmp_path):
        folder = small.copy(tmp_path / "home" / "model", tmp_path / "model")
        change(folder)
        return {"model": str(folder)}
    return make


def cut(path, end=-1):
    path.write_bytes(path.read_bytes()[:end])


LONG_QUESTION = json.dumps({"question": "word " * 300, "answer": "#### 1"}) + "\n"
GOOD = json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n"
WRONG = {            # name: (options or a function of tmp_path that gives them, words of the message)
    "K=1 grpo": (dict(algo="grpo", samples_per_prompt=1), ["--samples-per-prompt 1", "grpo", "at least 2"]),
    "K=1 baseline": (dict(samples_per_prompt=1), ["--samples-per-prompt 1", "at least 2"]),
    "file": (dict(train_data="no/such.jsonl"), ["no/such.jsonl"]),
    "eval file": (dict(eval_data="no/such.jsonl"), ["no/such.jsonl"]),
    "column": (dict(answer_key="answers"), ["'answers'", "'answer'", "train.jsonl"]),
    "empty label": (problems('{"question": "a", "answer": ""}\n'), ["bad.jsonl:1", "'answer'"]),
    "null label": (problems(GOOD + '{"question": "a", "answer": null}\n'), ["bad.jsonl:2", "'answer'"]),
    "list label": (problems(GOOD + '{"question": "a", "answer": [1]}\n'), ["bad.jsonl:2", "'answer'"]),
    "unreadable label": (problems(GOOD + '{"question": "a", "answer": "\\\\frac{"}\n'), ["bad.jsonl:2", "'answer'"]),
    "rationale without an answer": (problems(GOOD + '{"question": "2+2?", "answer": "it is four, I think"}\n'),
                                    ["bad.jsonl:2"]),
    "no JSON": (problems(GOOD + "{oops\n"), ["bad.jsonl:2", "JSON"]),
    "empty file": (problems(""), ["bad.jsonl"]),
    "long prompt": (problems(GOOD + LONG_QUESTION), ["bad.jsonl", "row 1", "context is 96"]),
    "long test prompt": (lambda tmp: {"eval_data": str(small_file(tmp / "bad.jsonl", LONG_QUESTION))},
                         ["bad.jsonl", "row 0", "context is 96"]),
    "updates": (dict(updates_per_rollout=2), ["--updates-per-rollout 2", "15"]),
    "gamma grpo": (dict(algo="grpo", gamma=0.9), ["--gamma", "grpo"]),
    "gamma range": (dict(algo="reinforce_pp", gamma=1.5), ["--gamma 1.5"]),
    "kl 0": (dict(kl_coef=0.0), ["--kl-coef 0.0", "--no-kl"]),
    "kl nan": (dict(kl_coef="nan"), ["--kl-coef nan"]),
    "kl and no kl": (dict(kl_coef=0.1, no_kl=True), ["--kl-coef", "--no-kl"]),
    "offload without reference": (dict(no_kl=True, offload_ref=True), ["--offload-ref"]),
    "seed": (dict(seed=-1), ["--seed -1"]),
    "large seed": (dict(seed=2 ** 64), ["--seed"]),
    "data seed": (dict(data_seed=-3), ["--data-seed -3"]),
    "steps": (dict(steps=0), ["--steps 0"]),
    "lr": (dict(lr="inf"), ["--lr inf"]),
    "clip": (dict(clip=1.0), ["--clip 1.0"]),
    "beta": (dict(beta2=1.0), ["--beta2 1.0"]),
    "decay": (dict(weight_decay=-0.1), ["--weight-decay -0.1"]),
    "keep": (dict(keep=-1), ["--keep -1"]),
    "save every": (dict(save_every=-2), ["--save-every -2"]),
    "workers": (dict(reward_workers=0), ["--reward-workers 0"]),
    "temperature": (dict(temperature=0.0), ["--temperature 0.0"]),
    "timeout": (dict(timeout_minutes=0.0), ["--timeout-minutes"]),
    "no model": (dict(model="no_such_folder"), ["no_such_folder"]),
    "reward file": (dict(reward="no_such.py:f"), ["no_such.py"]),
    "reward function": (lambda tmp: {"reward": f"{small_file(tmp / 'r.py', 'x = 1')}:f"}, ["'f'"]),
    "out is a file": (lambda tmp: {"out": str(small_file(tmp / "plain", "x"))}, ["plain"]),
    "config": (broken_model(lambda f: cut(f / "config.json", 9)), ["config.json", "JSON"]),
    "config missing": (broken_model(lambda f: (f / "config.json").unlink()), ["config.json"]),
    "tokenizer": (broken_model(lambda f: cut(f / "tokenizer.json", 90)), ["tokenizer"]),
    "tokenizer missing": (broken_model(lambda f: (f / "tokenizer_config.json").unlink()), ["tokenizer"]),
    "weights missing": (broken_model(lambda f: (f / "model.safetensors").unlink()), ["model.safetensors"]),
    "weights": (broken_model(lambda f: cut(f / "model.safetensors")), ["model.safetensors"]),
    "eos": (broken_model(lambda f: small_file(f / "generation_config.json", '{"eos_token_id": "x"}')), ["eos_token_id"]),
}
LOADS = {"weights", "weights missing"}       # found by reading them; everything else before that


def refused(words, capsys, script=train):
    """The one line that a command line is refused with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main(cli.parse(script.Config, script.__doc__, words))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and said.endswith("\n"), said
    return said


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line_and_status_2(home, tmp_path, capsys, monkeypatch, case):
    changes, expected = WRONG[case]
    if callable(changes):
        (tmp_path / "home").symlink_to(home)
        changes = changes(tmp_path)
    if case not in LOADS:
        monkeypatch.setattr(train, "load_model", lambda *_, **__: pytest.fail("the weights were loaded first"))
    out = {"out": str(tmp_path / "run")}
    said = refused(small.argv(small.options(home, **{**out, **changes})), capsys)
    assert said.startswith(f"{os.path.basename(sys.argv[0])}: error: ")
    for word in expected:
        assert word in said, said
    assert len(said) < 400 and "Traceback" not in said
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(home, tmp_path, capsys):
    said = refused(small.argv(small.options(home, out=str(tmp_path / "run"), device="cuda")), capsys)
    assert "--device cuda" in said and "--device cpu" in said


def test_a_used_run_folder_is_refused(home, finished, tmp_path, capsys):
    for name in ("config.json", "metrics.jsonl", "latest"):        # any trace of a run is enough
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_bytes((finished["grpo"] / name).read_bytes())
        before = (out / name).read_bytes()
        said = refused(small.argv(small.options(home, out=str(out))), capsys)
        assert "already holds a run" in said and "--resume" in said and (out / name).read_bytes() == before


def test_resume_names_what_cannot_change(home, finished, tmp_path, capsys):
    out = small.copy(finished["grpo"], tmp_path / "run")
    same = dict(out=str(out), algo="grpo", steps=4, save_every=1, eval_data=str(home / "test.jsonl"), eval_rows=6,
                eval_samples=2, resume=True)
    said = refused(small.argv(small.options(home, **same, seed=7, samples_per_prompt=5)), capsys)
    assert "--seed (42 -> 7)" in said and "--samples-per-prompt (3 -> 5)" in said and "--steps" not in said
    assert "--algo" in refused(small.argv(small.options(home, **{**same, "algo": "reinforce_pp"})), capsys)
    assert "--steps 3" in refused(small.argv(small.options(home, **{**same, "steps": 3})), capsys)
    (out / "config.json").write_text("{")
    assert "config.json" in refused(small.argv(small.options(home, **same)), capsys)


def test_unknown_option_and_algorithm(home, tmp_path, capsys):
    words = small.argv(small.options(home, out=str(tmp_path / "run")))
    assert "did you mean --kl-coef?" in refused([*words, "--kl-coeff", "0.1"], capsys)
    said = refused([*words, "--algo", "ppo"], capsys)
    assert all(name in said for name in ("'ppo'", *ALGORITHMS))


def test_wrong_use_of_the_script_itself(home, processes, tmp_path):
    """The same in a process of its own, and under several ranks: one line in all, status 2 everywhere."""
    words = small.argv(small.options(home, out=str(tmp_path / "run"), algo="grpo", samples_per_prompt=1))
    assert processes.run(tmp_path / "log", "train", words, 2) == [2, 2]
    said = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    assert said[0].startswith("train.py: error: --samples-per-prompt 1") and said[0].count("\n") == 1 and not said[1]


# --------------------------------------------------------------------------------------------- every option
OTHER = {"algo": "grpo", "model": "x", "train_data": "x", "eval_data": "x", "question_key": "x", "answer_key": "x",
         "reward": "x", "out": "x", "resume": True, "steps": 3, "prompts_per_step": 7, "samples_per_prompt": 6,
         "max_new_tokens": 5, "updates_per_rollout": 2, "epochs": 2, "lr": 0.5, "kl_coef": 0.5, "no_kl": True,
         "clip": 0.5, "gamma": 0.5, "temperature": 0.5, "beta1": 0.5, "beta2": 0.5, "eps": 0.5, "weight_decay": 0.5,
         "grad_clip": 0.5, "thinking": False, "seed": 5, "data_seed": 5, "eval_rows": 5, "eval_samples": 5,
         "eval_seed": 5, "device": "cuda", "dtype": "bfloat16", "max_tokens_per_device": 5, "slots": 5,
         "activation_checkpointing": True, "compile": True, "offload_ref": True, "zero": True, "timeout_minutes": 5.0,
         "reward_workers": 5, "reward_concurrency": 5, "save_every": 5, "keep": 5, "max_skipped": 5,
         "tensorboard": False}
FIELDS = [f.name for f in dataclasses.fields(train.Config)]


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_is_recorded_or_refused(name):
    """And its value on the command line is the one that arrives."""
    for algo in (*ALGORITHMS, *train.ALIASES):
        words = small.argv({"algo": algo, name: OTHER[name]} if name != "algo" else {"algo": OTHER[name]})
        cfg = cli.parse(train.Config, "", words)
        assert getattr(cfg, name) == OTHER[name]
        refused_here = name == "gamma" and "baseline" in algo or name == "gamma" and algo == "grpo"
        if refused_here or name == "device" and not torch.cuda.is_available():
            with pytest.raises(ValueError, match=f"--{name}"):
                train.resolve(cfg)
        else:
            recorded = train.resolve(cfg)[0]
            default = train.resolve(train.Config(algo=algo))[0]
            assert getattr(recorded, name) == OTHER[name] != getattr(default, name) or name == "algo"
            assert recorded.algo in ALGORITHMS


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_option_is_read_by_the_run(home, tmp_path, algo):
    """Not by the checks of `resolve` and the record in config.json alone."""
    read = set()

    class Watched(train.Config):
        def __getattribute__(self, name):
            code = sys._getframe(1).f_code
            if name in FIELDS and code.co_name not in ("resolve", "<genexpr>", "<listcomp>") and (
                    "dataclasses" not in code.co_filename):
                read.add(name)
            return super().__getattribute__(name)

    values = small.options(home, out=str(tmp_path / "run"), algo=algo, eval_data=str(home / "test.jsonl"),
                           eval_rows=2, eval_samples=1, updates_per_rollout=3)
    for resume in (False, True):
        cfg = dataclasses.asdict(train.resolve(train.Config(**{**values, "resume": resume}))[0])
        if cfg["gamma"] is not None or cfg["kl_coef"]:
            cfg["dtype"] = "auto"
        assert train.main(Watched(**cfg)) == 0
    assert set(FIELDS) - read <= {"device"}, "accepted but used nowhere"


EFFECTS = [("max_new_tokens", 4), ("temperature", 0.6), ("lr", 1e-2), ("clip", 0.01), ("kl_coef", 0.9), ("no_kl", True),
           ("beta1", 0.5), ("beta2", 0.5), ("eps", 0.1), ("weight_decay", 0.9), ("grad_clip", 0.01), ("thinking", False),
           ("epochs", 3), ("updates_per_rollout", 5), ("samples_per_prompt", 6), ("prompts_per_step", 4),
           ("gamma", 0.3), ("gamma", 0.0)]


def steps_of(algo):
    return 2 if ALGORITHMS[algo].kl == "reward" else 1          # in the first step k1 is 0 and a coefficient no matter


@pytest.fixture(scope="module")
def unchanged(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unchanged")
    for algo in ALGORITHMS:
        run(home, folder / algo, algo=algo, steps=steps_of(algo), updates_per_rollout=3)
    return folder


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_option_of_the_objective_changes_the_weights(home, unchanged, tmp_path, algo):
    steps = steps_of(algo)
    before = small.weights(unchanged / algo, steps)
    for number, (name, value) in enumerate(EFFECTS):
        if name == "gamma" and ALGORITHMS[algo].kl != "reward":
            continue
        out = tmp_path / str(number)
        run(home, out, **{**dict(algo=algo, steps=steps, updates_per_rollout=3), name: value})
        assert small.largest_difference(before, small.weights(out, steps)) > 0, f"{name} {value} changes nothing"


def test_options_of_the_machine_change_nothing_but_rounding(home, unchanged, tmp_path):
    before = small.weights(unchanged / "grpo", 1)
    for number, changes in enumerate((dict(activation_checkpointing=True), dict(offload_ref=True), dict(zero=True),
                                      dict(slots=2), dict(max_tokens_per_device=1), dict(reward_workers=2))):
        out = tmp_path / str(number)
        run(home, out, algo="grpo", steps=1, updates_per_rollout=3, **changes)
        assert small.largest_difference(before, small.weights(out, 1)) < 1e-5, changes
    run(home, tmp_path / "half", algo="grpo", steps=1, updates_per_rollout=3, dtype="bfloat16")
    assert 1e-5 < small.largest_difference(before, small.weights(tmp_path / "half", 1)) < 0.1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_change_nothing_but_rounding(home, unchanged, tmp_path):
    """Learner and reference fused, recomputed in the backward, micro-batches of several shapes; one graph for all."""
    torch._dynamo.reset()
    run(home, tmp_path / "run", algo="grpo", steps=1, updates_per_rollout=3, compile=True,
        activation_checkpointing=True, max_tokens_per_device=40)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    before, after = small.weights(unchanged / "grpo", 1), small.weights(tmp_path / "run", 1)
    assert small.largest_difference(before, after) < 1e-5


@pytest.mark.slow
def test_compile_without_a_compiler_is_one_line(home, tmp_path):
    """A process of its own: which compiler there is, torch asks when it is imported."""
    words = small.argv(small.options(home, out=str(tmp_path / "run"), compile=True))
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], capture_output=True, text=True, env={
        **os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train.py: error: --compile") and "compiler" in done.stderr


# ------------------------------------------------------------------------------------- several updates a rollout
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_several_updates_a_rollout_are_off_policy(home, tmp_path, monkeypatch, algo):
    calls, taken = [], []
    real, forward = train.accumulate_gradients, train.batch_logp

    def watched(learner, batch, rows, advantages, logp_old, logp_ref, total, cfg, limit):
        sums = real(learner, batch, rows, advantages, logp_old, logp_ref, total, cfg, limit)
        calls.append((logp_old.clone(), sorted(batch.index[b] for b in rows), total,
                      {n: float(v) for n, v in sums.items()}))
        return sums
    monkeypatch.setattr(train, "accumulate_gradients", watched)
    monkeypatch.setattr(train, "batch_logp", lambda *a: (taken.append(a[0]), forward(*a))[1])
    run(home, tmp_path / "run", algo=algo, steps=1, updates_per_rollout=3, epochs=2, lr=0.03, clip=0.1)
    row, = small.rows(tmp_path / "run")
    assert len(taken) == 2, "one pass of the reference, one of the policy before its first update"
    assert len(calls) == 6 and all(torch.equal(c[0], calls[0][0]) for c in calls), "old log-probs moved"
    assert [c[2] for c in calls] == [5] * 6
    for epoch in (calls[:3], calls[3:]):
        assert sorted(i for c in epoch for i in c[1]) == list(range(15)), "an epoch holds every response once"
    assert calls[0][3]["ppo_kl"] == pytest.approx(0, abs=1e-5) and calls[0][3]["clip_frac"] == 0
    assert all(abs(c[3]["ppo_kl"]) > 1e-3 and c[3]["clip_frac"] > 0 for c in calls[2:])
    assert row["ppo_kl"] == pytest.approx(sum(c[3]["ppo_kl"] for c in calls) / 6, rel=1e-5)
    assert row["pg_loss"] == pytest.approx(sum(c[3]["pg_loss"] for c in calls) / 6, rel=1e-5)
    assert row["clip_frac"] == pytest.approx(sum(c[3]["clip_frac"] for c in calls) / (2 * row["valid_tokens"]))
    assert 0 < row["clip_frac"] < 1 and row["entropy"] < math.log(521)


def test_one_update_needs_no_extra_forward(home, tmp_path, monkeypatch):
    forward, taken = train.batch_logp, []
    monkeypatch.setattr(train, "batch_logp", lambda *a: (taken.append(0), forward(*a))[1])
    passes = {}
    for algo, no_kl in [(a, False) for a in ALGORITHMS] + [("grpo", True)]:
        taken.clear()
        run(home, tmp_path / f"{algo}{no_kl}", algo=algo, steps=1, no_kl=no_kl)
        passes[algo, no_kl] = len(taken)
    assert passes == {("grpo", False): 1, ("reinforce_pp_baseline", False): 1, ("reinforce_pp", False): 2,
                      ("grpo", True): 0}


# --------------------------------------------------------------------------------------------- non-finite gradient
NAME = "model.layers.1.mlp.up_proj.weight"
POISON = """
real = train.build
def build(cfg, device):
    run, calls = real(cfg, device), []
    def hook(gradient):
        calls.append(0)
        return gradient * float("nan") if rank == POISONED and len(calls) in WHEN else gradient
    dict(run.model.named_parameters())["model.layers.1.mlp.up_proj.weight"].register_hook(hook)
    return run
train.build = build
"""


def poison(monkeypatch, when):
    """The gradient of one weight is NaN in the micro-batches `when` (counted from 1)."""
    real, names = train.build, {"train": train, "rank": 0, "POISONED": 0, "WHEN": when}
    monkeypatch.setattr(train, "build", real)           # for the undo
    exec(POISON, names)


def test_a_bad_gradient_is_skipped_counted_and_named(home, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {2})
    assert run(home, tmp_path / "run", steps=3, save_every=1, max_tokens_per_device=10 ** 6) == 0
    rows = small.rows(tmp_path / "run")
    assert [r["skipped_updates"] for r in rows] == [0, 1, 0]
    assert rows[1]["grad_norm"] is None and rows[1]["clip_coef"] is None and rows[1]["reward"] is not None
    first, second, third = (small.weights(tmp_path / "run", n) for n in (1, 2, 3))
    assert small.largest_difference(first, second) == 0 < small.largest_difference(second, third)
    assert "non-finite: update skipped" in capsys.readouterr().out


def test_bad_gradients_in_a_row_stop_the_run(home, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {2, 4, 5, 6, 7, 8})
    assert run(home, tmp_path / "run", steps=9, save_every=1, max_skipped=3, max_tokens_per_device=10 ** 6) == 1
    assert [r["skipped_updates"] for r in small.rows(tmp_path / "run")] == [0, 1, 0, 1, 1, 1]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped" and NAME in summary["message"] and "3 updates in a row" in summary["message"]
    assert NAME in capsys.readouterr().out
    assert (tmp_path / "run/latest").read_text().strip() == "step_000005"
    assert not (tmp_path / "run/step_000006").exists()
    assert all(torch.isfinite(t).all() for t in small.weights(tmp_path / "run", 5).values())


def test_skipped_updates_are_counted_one_by_one(home, tmp_path, monkeypatch):
    """Two bad ones of three in every rollout are never three in a row; from the seventh on they are."""
    poison(monkeypatch, {2, 3, 5, 6, 8, 9, 10})
    assert run(home, tmp_path / "run", steps=9, updates_per_rollout=3, max_tokens_per_device=10 ** 6) == 1
    assert [r["skipped_updates"] for r in small.rows(tmp_path / "run")] == [2, 2, 2, 1]


def test_the_count_of_bad_gradients_survives_a_resume(home, tmp_path, monkeypatch):
    kwargs = dict(save_every=1, max_skipped=3, max_tokens_per_device=10 ** 6)
    poison(monkeypatch, {2, 3})
    assert run(home, tmp_path / "run", steps=3, **kwargs) == 0
    monkeypatch.undo()
    monkeypatch.setattr(runlog, "plot_reward", lambda *_: None)
    poison(monkeypatch, {1})
    assert run(home, tmp_path / "run", steps=9, resume=True, **kwargs) == 1
    assert len(small.rows(tmp_path / "run")) == 4


def test_one_bad_gradient_in_the_last_step_does_not_lose_the_run(home, tmp_path, monkeypatch):
    poison(monkeypatch, {3})
    assert run(home, tmp_path / "run", steps=3, max_tokens_per_device=10 ** 6) == 0
    assert (tmp_path / "run/latest").read_text().strip() == "step_000003"


def test_weights_that_are_not_finite_are_never_saved(home, tmp_path, monkeypatch, capsys):
    real = train.optimizer_step

    def step(model, *rest):
        result = real(model, *rest)
        dict(model.named_parameters())[NAME].data[3, 4] = float("inf")
        return result
    monkeypatch.setattr(train, "optimizer_step", step)
    assert run(home, tmp_path / "run", steps=1) == 0
    assert not (tmp_path / "run/latest").exists() and f"{NAME} is not finite" in capsys.readouterr().out


def test_all_ranks_skip_together(home, processes, tmp_path):
    """One rank alone makes the NaN."""
    out = tmp_path / "run"
    words = small.argv(small.options(home, out=str(out), steps=9, save_every=1, max_skipped=2,
                                     max_tokens_per_device=10 ** 6))
    patch = POISON.replace("POISONED", "1").replace("WHEN", "{2, 4, 5}")
    assert processes.run(tmp_path / "log", "train", words, 2, patch) == [1, 1]
    assert [r["skipped_updates"] for r in small.rows(out)] == [0, 1, 0, 1, 1]
    assert NAME in json.loads((out / "summary.json").read_text())["message"]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_missing_value_does_not_end_the_log(home, tmp_path, monkeypatch, algo):
    """NaN log-probs of the learner reach the advantages of reinforce_pp: the step is logged with nulls and skipped."""
    real, count = train.batch_logp, []
    def poisoned(*args):
        count.append(0)
        return real(*args) * (float("nan") if len(count) == 2 else 1)
    monkeypatch.setattr(train, "batch_logp", poisoned)
    assert run(home, tmp_path / "run", algo=algo, steps=3) == 0
    skipped = [r["skipped_updates"] for r in small.rows(tmp_path / "run")]
    assert skipped == ([1, 0, 0] if algo == "reinforce_pp" else [0, 1, 0])


# ------------------------------------------------------------------------------------------------------ identities
def test_identities_of_the_losses_on_policy(home, finished):
    """One update a rollout: ratio 1. GRPO 0; baseline mu/sigma; REINFORCE++ -(mean of the response means of G - mu)/sigma."""
    for algo, folder in finished.items():
        for row in small.rows(folder):
            mu, sigma = row["adv_raw_mean"], row["adv_raw_std"]
            expected = {"grpo": 0.0, "reinforce_pp_baseline": mu / sigma,
                        "reinforce_pp": -(row["reward"] + (row["returns_minus_reward"] or 0) - mu) / sigma}[algo]
            assert row["pg_loss"] == pytest.approx(expected, abs=2e-6), (algo, row["step"])
            kl = 0.01 * (row["kl_loss"] or 0)
            assert row["loss"] == pytest.approx(row["pg_loss"] + kl, abs=1e-6)
            assert row["ppo_kl"] == 0 and row["clip_frac"] == 0
            assert row["clip_coef"] == pytest.approx(min(1, 1 / row["grad_norm"]), rel=1e-5)
            if algo != "grpo":
                assert row["adv_norm_mean"] == pytest.approx(0, abs=1e-9)
                assert row["adv_norm_std"] == pytest.approx(1, abs=1e-6)


def test_the_raw_moments_are_those_of_the_responses(finished):
    for algo, folder in finished.items():
        found = small.rollouts(folder, 0)
        row, weight = small.rows(folder)[0], sum(r["length"] for r in found)
        if algo == "reinforce_pp":               # step 0: no KL yet, G = R
            values = [r["reward"] for r in found]
            p = sum(r["reward"] * r["length"] for r in found) / weight
            assert row["adv_raw_mean"] == pytest.approx(p, abs=1e-9)
            assert row["adv_raw_std"] == pytest.approx(math.sqrt(p * (1 - p)), abs=1e-9)
            assert row["returns_minus_reward"] == pytest.approx(0, abs=1e-9)
        else:
            values = [r["reward"] - sum(q["reward"] for q in found[i - i % 3:i - i % 3 + 3]) / 3
                      for i, r in enumerate(found)]
        mean = sum(v * r["length"] for v, r in zip(values, found, strict=True)) / weight
        var = sum((v - mean) ** 2 * r["length"] for v, r in zip(values, found, strict=True)) / weight
        assert row["adv_raw_mean"] == pytest.approx(mean, abs=1e-9)
        assert row["adv_raw_std"] == pytest.approx(math.sqrt(var), abs=1e-9)


def test_the_sampler_and_the_learner_agree(finished):
    for folder in finished.values():
        for row in small.rows(folder):
            assert 0 < row["sampler_logp_gap_mean"] <= row["sampler_logp_gap_max"] < 1e-4


def test_kl_moves_and_reaches_the_return(finished):
    for algo, folder in finished.items():
        rows = small.rows(folder)
        assert rows[0]["ref_k1"] == rows[0]["ref_k2"] == 0 < rows[3]["ref_k2"]
        if algo == "reinforce_pp":
            assert rows[3]["returns_minus_reward"] != 0
        else:
            assert rows[0]["kl_loss"] == 0 < rows[3]["kl_loss"]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_without_kl_its_metrics_are_null(home, tmp_path, algo):
    run(home, tmp_path / "run", algo=algo, no_kl=True)
    for row in small.rows(tmp_path / "run"):
        assert row["ref_k1"] is row["ref_k2"] is row["kl_loss"] is None and row["loss"] == row["pg_loss"]
        assert row["returns_minus_reward"] == (0 if algo == "reinforce_pp" else None)


def test_k_1_works_without_groups(home, tmp_path):
    run(home, tmp_path / "run", algo="reinforce_pp", samples_per_prompt=1)
    assert all(row["zero_std_groups"] is None for row in small.rows(tmp_path / "run"))


# --------------------------------------------------------------------------------------------------------- network
def test_no_socket_is_opened(home, tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was asked")
    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run(home, tmp_path / "run", eval_data=str(home / "test.jsonl"), eval_rows=3, tensorboard=True) == 0


# ------------------------------------------------------------------------------------------------------------ slow
@pytest.mark.slow
def test_kill_9_thirty_times(home, processes, whole, tmp_path):
    """Five runs, six kills each; prints where they fell."""
    total = [0, 0, 0]
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        when = check_kills(home, processes, whole, folder, kills=6, seed=seed)
        total = [a + b for a, b in zip(total, when, strict=True)]
    print(f"\n{sum(total)} kills: {total[0]} before the first step, {total[1]} between saves, {total[2]} in a save")
    assert sum(total) >= 20 and total[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_killed_under_torchrun_goes_on_by_itself(home, whole, tmp_path, rank):
    """Three times in one job: a restart must not meet the addresses that the dead left in torchrun's store."""
    out, kills = tmp_path / "run", []
    values = small.options(home, out=str(out), **{**LONG, "steps": 200, "save_every": 1, "keep": 2})
    job = torchrun(small.argv(values), 2, tmp_path / "log", "--standalone", "--max-restarts", "3")
    for _ in range(3):
        wait_for(lambda: steps_done(out) > (kills or [0])[-1] + 8, 120)
        victim = next(pid for pid, number in workers(job) if number == rank)
        kills.append(steps_done(out))
        os.kill(victim, signal.SIGKILL)
    assert job.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    resumed = [int(part.split()[0]) for part in said.split("resuming after step ")[1:]]
    assert len(resumed) == 3 and all(0 <= at - from_ <= 2 for at, from_ in zip(kills, resumed, strict=True))
    assert [r["step"] for r in small.rows(out)] == list(range(200))
    print(f"\nrank {rank} killed at steps {kills}, resumed after steps {resumed}")


@pytest.mark.slow
def test_a_rank_killed_under_two_agents_goes_on_by_itself(home, tmp_path):
    """Two machines in small, with the environment name that README asks for there; twice in one job."""
    out, port, kills = tmp_path / "run", small.free_port(), []
    values = small.options(home, out=str(out), **{**LONG, "steps": 100, "save_every": 1, "keep": 2})
    agents = [torchrun(small.argv(values), 1, tmp_path / f"log{node}", "--nnodes", "2", "--rdzv-backend", "c10d",
                       "--rdzv-id", "two", "--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "3",
                       TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") for node in range(2)]
    for node in range(2):
        wait_for(lambda: steps_done(out) > (kills or [0])[-1] + 8, 120)
        victim = next(pid for pid, _ in workers(agents[node]))
        kills.append(steps_done(out))
        os.kill(victim, signal.SIGKILL)
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0], (tmp_path / "log0").read_text()
    said = "".join((tmp_path / f"log{node}").read_text() for node in range(2))
    resumed = [int(part.split()[0]) for part in said.split("resuming after step ")[1:]]
    assert len(resumed) == 2 and all(0 <= at - from_ <= 2 for at, from_ in zip(kills, resumed, strict=True))
    assert [r["step"] for r in small.rows(out)] == list(range(100))
    print(f"\ntwo agents: killed at steps {kills}, resumed after steps {resumed}")


@pytest.mark.slow
def test_a_stuck_rank_runs_into_the_time_out(home, processes, tmp_path):
    """Stuck in the rollout: rank 0 names it. Stuck in the update: the waiting rank names the step."""
    for number, place in enumerate(("rollout", "update")):
        out = tmp_path / place
        values = small.options(home, out=str(out), steps=9, timeout_minutes=0.1)
        patch = f"""
import time
real = train.{place}
def stuck(run, step, *rest):
    if rank == 1 and step == 2:
        time.sleep(25)
    return real(run, step, *rest)
train.{place} = stuck
"""
        began = time.monotonic()
        statuses = processes.run(tmp_path / f"log{number}", "train", small.argv(values), 2, patch)
        said = (tmp_path / f"log{number}0").read_text()
        assert statuses[0] == 1 and statuses[1] != 0 and time.monotonic() - began < 60
        assert "[rank 0] failed in step 2" in said
        assert steps_done(out) == 2
        if place == "rollout":
            assert "Ranks 1 failed to pass" in said


@pytest.mark.slow
def test_torchrun_itself(home, whole, tmp_path):
    """SIGTERM to torchrun: the ranks save and leave; the same command with --resume ends with the right weights."""
    out = tmp_path / "run"
    words = small.argv(small.options(home, out=str(out), resume=True, **{**LONG, "steps": 400}))
    job = torchrun(words, 2, tmp_path / "log")
    wait_for(lambda: steps_done(out) > 8, 120)
    job.send_signal(signal.SIGTERM)
    job.wait(timeout=60)
    at = steps_done(out)
    assert (out / "latest").read_text().strip() == f"step_{at:06d}"
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"
    job = torchrun([*words[:-2], "--steps", str(at + 2)] if words[-2] == "--steps" else [*words, "--steps", str(at + 2)],
                   2, tmp_path / "log")
    assert job.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    assert steps_done(out) == at + 2

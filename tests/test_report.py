"""report.py: what it accepts, statistics against brute force and published tables, equal bytes, no paths."""

import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import report

PUBLISHED = Path(__file__).parent / "data" / "published_eval.csv"
STEPS, PROMPTS, SAMPLES = 13, 7, 4
ALL_FIGURES = report.FIGURES
SECRETS = ("/home/alice", "alice", "node17.example.org", "node17")


def evaluation(rng, quality, prompts=PROMPTS, samples=SAMPLES, counts=None, **changes):
    """EVAL as evaluate.summarize writes it; `counts` [[row, n, c]] default to random ones."""
    counts = counts or [[3 * row + 1, samples, sum(rng.random() < quality for _ in range(samples))]
                        for row in range(prompts)]
    total, right = sum(n for _, n, _ in counts), sum(c for *_, c in counts)
    passes = {f"pass@{k}": sum(1 - math.comb(n - c, k) / math.comb(n, k) for _, n, c in counts) / len(counts)
              for k in (1, 2, 4) if k <= samples}
    unparsed = min(1, total - right)
    return passes | {
        "pass@1_ci95": [0.1, 0.9], "truncation": 0.375, "mean_length": 321.5, "right": right,
        "wrong": total - right - unparsed, "unparsed": unparsed, "errors": 0, "prompts": len(counts),
        "samples": samples, "seed": 29, "subset_sha256": "ab" * 32, "per_prompt": counts,
        "decoding_noise": math.sqrt(sum(c * (n - c) / (n - 1) / n for _, n, c in counts) / len(counts)
                                    / (samples * len(counts))) if samples > 1 else None} | changes


def metrics_row(rng, algo, step):
    right = rng.randrange(20, 28)
    row = {name: round(rng.random(), 6) for name in report.METRICS}
    row |= {"step": step, "reward": right / 32, "right": right, "wrong": 32 - right, "unparsed": 0,
            "grader_errors": 0, "truncated": rng.randrange(4, 14), "zero_std_groups": 2, "skipped_updates": 0,
            "response_len_mean": 900 + 40 * rng.random(), "response_tok_per_s": 400 + 9 * rng.random()}
    return row | {name: None for name in {"grpo": ["returns_minus_reward"], "reinforce_pp": ["kl_loss"]}.get(
        algo, ["returns_minus_reward"])}


def make_run(folder, algo="grpo", seed=42, steps=STEPS, rows=None, initial=None, final=None, **options):
    """A finished run folder as train.py leaves it, with a small checkpoint."""
    rng = random.Random(f"{algo}{seed}")
    folder.mkdir(parents=True)
    config = {"algo": algo, "seed": seed, "data_seed": 42, "steps": steps, "out": str(folder),
              "model": "/home/alice/models/Qwen3-0.6B", "kl_coef": 0.01, "no_kl": False,
              "gamma": 1.0 if algo == "reinforce_pp" else None,
              "argv": ["--algo", algo, "--out", "/home/alice/out/run", "--train-data=/home/alice/gsm8k/",
                       "--store", "tcp://node17.example.org:29500"],
              "commit": "c0ffee" + "0" * 34, "versions": {"torch": "2.13.0"},
              "device": "cuda (NVIDIA A40)"} | options
    rows = rows or [metrics_row(rng, algo, step) for step in range(steps)]
    summary = {"status": "complete", "message": None, "steps": steps, "seconds": 12.5,
               "initial": initial or evaluation(random.Random(1), 0.45),
               "final": final or evaluation(rng, 0.6)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = folder / f"step_{steps:06d}"
    checkpoint.mkdir()
    files = {}
    for name in ("config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        content = f"{name} of {algo} {seed}".encode() * 5
        (checkpoint / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    (folder / "latest").write_text(checkpoint.name + "\n")
    return folder


def edit(path, change):
    """Rewrites a JSON file through `change(value)`, which may also return a new value."""
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


def run_main(*words):
    return report.main(report.cli.parse(report.Config, "", [str(word) for word in words]))


def read_table(folder, name):
    with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "runs"
    for algo, seed in itertools.product(report.ALGOS, (42, 1234)):
        make_run(folder / f"{algo}-seed{seed}", algo, seed)
    failed = make_run(folder / "grpo-seed7", "grpo", 7)
    edit(failed / "summary.json", lambda summary: summary.update(status="interrupted"))
    return folder


@pytest.fixture(scope="module")
def few_figures():
    """Drawing is what takes the time: two figures and the evaluation; one test draws them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "FIGURES", {name: report.FIGURES[name] for name in ("reward", "loss")})
        yield


@pytest.fixture(scope="module")
def results(runs, few_figures):
    out = runs.parent / "results"
    assert run_main(runs, "--out", out) == 0
    return out


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(report, "figures", lambda data: {})


def text_of(*folders):
    """report.md of these runs."""
    return report.build(report.tables_from_runs(folders, True))["report.md"].decode()


# ------------------------------------------------------------------------------------------------- acceptance
NANCY = "Nancy bakes nan bread in an infinite loop; loss is nan, error: Infinity. Traceback!"


def test_a_run_about_nancy_is_accepted(tmp_path):
    run = make_run(tmp_path / "nan-inf-Nancy-loss_nan")
    (run / "rollouts.jsonl").write_text(json.dumps({"step": 0, "text": NANCY}) + "\n")
    change_row(4, note=NANCY)(run)
    edit(run / "summary.json", lambda summary: summary.update(message=NANCY))
    assert report.judge(run)[1] is None


def change_row(index, **values):
    def change(run):
        path = run / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        rows[index].update(values)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return change


def change_lines(change):
    def apply(run):
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
        (run / "metrics.jsonl").write_text("".join(line + "\n" for line in change(lines)))
    return apply


def change_json(name, change):
    return lambda run: edit(run / name, change)


def cut_weights(run):
    path = run / "step_000013" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip_weights(run):
    path = run / "step_000013" / "model.safetensors"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def summary_final(**values):
    return change_json("summary.json", lambda summary: summary["final"].update(values))


STRICT = "not a strict JSON object"
REJECTED = {  # what happened to the run: (how, the reason given)
    "NaN literal": (change_row(3, reward=math.nan), f"metrics.jsonl line 4: {STRICT}"),
    "null metric": (change_row(3, grad_norm=None), "metrics.jsonl: step 3: grad_norm is null"),
    "missing metric": (change_lines(lambda rows: [rows[0].replace('"pg_loss"', '"pg"'), *rows[1:]]),
                       "metrics.jsonl: step 0: pg_loss is null"),
    "infinite": (change_lines(lambda rows: [re.sub(r'"loss": [^,]*', '"loss": 1e999', rows[0]), *rows[1:]]),
                 "metrics.jsonl: step 0: loss is Infinity"),
    "text for a number": (change_row(2, entropy="0.3"), 'metrics.jsonl: step 2: entropy is "0.3"'),
    "boolean": (change_row(2, clip_frac=True), "metrics.jsonl: step 2: clip_frac is true"),
    "missing step": (change_lines(lambda rows: rows[:5] + rows[6:]), "jsonl: step 6 where step 5 should be"),
    "missing last step": (change_lines(lambda rows: rows[:-1]), "jsonl: the end where step 12 should be"),
    "step twice": (change_lines(lambda rows: rows[:5] + rows[4:]), "jsonl: step 4 where step 5 should be"),
    "too many steps": (change_lines(lambda rows: [*rows, rows[-1]]), "step 12 where the end should be"),
    "order": (change_lines(lambda rows: [rows[1], rows[0], *rows[2:]]), "step 1 where step 0 should be"),
    "cut line": (change_lines(lambda rows: [*rows[:-1], rows[-1][:70]]), f"metrics.jsonl line 13: {STRICT}"),
    "interrupted": (change_json("summary.json", lambda s: s.update(status="interrupted", steps=5)),
                    "summary.json: interrupted after 5 of 13 steps"),
    "no final evaluation": (change_json("summary.json", lambda s: s.update(final=None)), "pass@1 is null"),
    "errors left out": (summary_final(errors=2), "30 verdicts, but per_prompt has 7 rows and 28 responses"),
    "score of the parsed": (summary_final(**{"pass@1": 0.75}), "pass@1 0.75 is not the mean of c / n"),
    "a prompt too few": (summary_final(prompts=8), "8 prompts and 28 verdicts, but per_prompt has 7 rows"),
    "negative count": (summary_final(wrong=-1), "summary.json, final: wrong is -1"),
    "impossible count": (change_json("summary.json", lambda s: s["final"]["per_prompt"][0].__setitem__(2, 5)),
                         "per_prompt must hold [row, n, c] with 0 <= c <= n"),
    "no summary": (lambda run: (run / "summary.json").unlink(), "summary.json is missing"),
    "no latest": (lambda run: (run / "latest").unlink(), "latest is missing"),
    "old checkpoint": (lambda run: (run / "latest").write_text("step_000010\n"),
                       "checkpoint step_000010: not that of step 13"),
    "path in latest": (lambda run: (run / "latest").write_text("../../etc\n"), "not that of step 13"),
    "truncated weights": (cut_weights, "checkpoint step_000013: model.safetensors has "),
    "damaged weights": (flip_weights, "checkpoint step_000013: model.safetensors has another SHA-256"),
    "unknown algorithm": (change_json("config.json", lambda c: c.update(algo="ppo")), "algo 'ppo'"),
    "wrong type": (change_json("config.json", lambda c: c.update(steps="13")), "after 13 of 13 steps"),
    "a list": (change_json("config.json", lambda c: [c]), f"config.json: {STRICT}"),
    "not UTF-8": (lambda run: (run / "config.json").write_bytes(b'{"a": "\xff"}'), f"config.json: {STRICT}"),
    "deep nesting": (lambda run: (run / "config.json").write_text("[" * 99999), f"config.json: {STRICT}"),
    "not a file": (lambda run: [(run / "latest").unlink(), (run / "latest").mkdir()], "malformed: IsADirec"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_with_its_reason(tmp_path, case):
    damage, reason = REJECTED[case]
    run = make_run(tmp_path / "run")
    assert report.judge(run)[1] is None
    damage(run)
    tables, said = report.judge(run)
    assert tables == {} and reason in said


def test_null_only_where_a_metric_does_not_apply(tmp_path):
    for algo, metric, accepted in (
            ("grpo", "returns_minus_reward", True), ("grpo", "kl_loss", False),
            ("reinforce_pp", "returns_minus_reward", False), ("reinforce_pp", "kl_loss", True),
            ("reinforce_pp", "ref_k1", False), ("reinforce_pp_baseline", "kl_loss", False)):
        run = make_run(tmp_path / f"{algo}-{metric}", algo)
        change_row(5, **{metric: None})(run)
        assert (report.judge(run)[1] is None) == accepted, (algo, metric)
    run = make_run(tmp_path / "no_kl", "reinforce_pp", no_kl=True)
    change_row(5, ref_k1=None, ref_k2=None)(run)
    assert report.judge(run)[1] is None


def test_check_prints_one_line_a_run_and_its_status(runs, capsys):
    good = runs / "grpo-seed42"
    assert run_main("check", good) == 0 and capsys.readouterr().out == f"{good}: accepted\n"
    assert run_main("check", runs) == 1
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert len(lines) == 7 and sum(line.endswith(": accepted") for line in lines) == 6
    assert f"{runs / 'grpo-seed7'}: rejected: summary.json: interrupted after 13 of 13 steps" in lines


def test_deleted_checkpoints_need_the_option(tmp_path, capsys, no_figures):
    run = make_run(tmp_path / "run")
    (run / "latest").unlink()
    assert run_main("check", run) == 1 and run_main("check", run, "--no-checkpoints") == 0
    assert run_main(run, "--out", tmp_path / "out", "--no-checkpoints") == 0
    assert "checkpoint of the runs: not checked" in (tmp_path / "out" / "report.md").read_text()


def test_a_rejected_run_is_listed_and_not_mixed_in(results):
    assert read_table(results, "rejected") == [
        {"run": "grpo-seed7", "reason": "summary.json: interrupted after 13 of 13 steps"}]
    for name in ("runs", "steps", "evaluations", "per_prompt", "run_means"):
        assert {row["seed"] for row in read_table(results, name)} == {"42", "1234"}
    page = (results / "report.md").read_text()
    assert "| grpo-seed7 | summary.json: interrupted after 13 of 13 steps |" in page


# ------------------------------------------------------------------------------------------------- statistics
def test_spread_is_the_sample_sd_and_names_what_one_run_cannot_give():
    n, mean, sd, low, high = report.spread([0.60, 0.66, 0.63])
    assert (n, round(mean, 12), round(sd, 12)) == (3, 0.63, 0.03)          # 0.0245 would be the population's
    assert high - mean == pytest.approx(0.95 / math.sqrt(2 * 0.975 * 0.025) * 0.03 / math.sqrt(3), rel=1e-9)
    assert report.spread([0.5]) == (1, 0.5, None, None, None)
    assert report.number(None) == "n/a"


@pytest.mark.parametrize("n, t", [(2, 12.7062), (3, 4.3027), (5, 2.7764), (10, 2.2622)])
def test_t_interval_digits(n, t):
    values = [0.1 * i ** 2 for i in range(n)]
    mean = sum(values) / n
    se = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    low, high = report.spread(values)[3:]
    assert round((high - low) / 2 / se, 4) == t and (low + high) / 2 == pytest.approx(mean)


def test_bootstrap_against_brute_force():
    """The same draws, one prompt at a time, and the percentiles by sorting (linear interpolation)."""
    import numpy as np
    rng = random.Random(3)
    values, resamples = [rng.choice([-1.0, -0.25, 0.0, 0.5]) for _ in range(11)], 203
    draws, means = np.random.default_rng(0).integers(0, 11, (resamples, 11)), []
    for row in draws.tolist():
        means.append(math.fsum(values[i] for i in row) / 11)
    means.sort()

    def percentile(q):
        at = q / 100 * (resamples - 1)
        low = math.floor(at)
        return means[low] + (at - low) * (means[low + 1] - means[low])
    expected = [percentile(2.5), percentile(97.5)]
    assert report.bootstrap(values, resamples=resamples) == pytest.approx(expected, abs=1e-12)


def test_bootstrap_has_the_width_of_the_standard_error():
    values = [math.sin(7 * i) for i in range(401)]
    low, high = report.bootstrap(values)
    _, mean, sd, _, _ = report.spread(values)
    assert (high - low) / (2 * 1.96 * sd / math.sqrt(401)) == pytest.approx(1, abs=0.03) and low < mean < high


def data_of(folders):
    return report.Data(report.tables_from_runs(folders, True))


def test_prompts_pair_by_row_and_seed(tmp_path):
    """Arms list their prompts in different orders, one lacks a prompt: pairs are rows, never positions."""
    def of(*counts):
        return evaluation(random.Random(0), 0, counts=[[row, 4, c] for row, c in counts])
    for algo, seed, final in (
            ("grpo", 1, of((5, 0), (9, 4), (2, 2))), ("reinforce_pp", 1, of((2, 3), (9, 4), (5, 1))),
            ("grpo", 2, of((5, 4), (9, 0), (2, 2))), ("reinforce_pp", 2, of((9, 1), (2, 2), (5, 4)))):
        make_run(tmp_path / f"{algo}{seed}", algo, seed, final=final, initial=of((2, 1), (5, 1), (9, 1)))
    data = data_of(sorted(tmp_path.iterdir()))
    found = data.per_prompt(("reinforce_pp", "final"), ("grpo", "final"), [1, 2], 1)
    assert sorted(found) == sorted([(0.25 + 0) / 2, (0.25 + 0) / 2, (0 + 0.25) / 2])         # rows 2, 5, 9
    data.counts["grpo", 1, "final"].pop(9)
    found = data.per_prompt(("reinforce_pp", "final"), ("grpo", "final"), [1, 2], 1)
    assert sorted(found) == sorted([0.125, 0.125, 0.25])
    pass2 = data.per_prompt(("reinforce_pp", "final"), ("grpo", "final"), [2], 2)
    assert pass2[-1] == 1 - math.comb(3, 2) / math.comb(4, 2)


def test_means_inside_a_run_come_first_and_steps_pair(tmp_path):
    """Two arms that share some seeds: means over the last 10 steps of each run, pairs over common seeds."""
    rewards, truncated = {}, {}
    for algo, seed in (("grpo", 1), ("grpo", 2), ("grpo", 3), ("reinforce_pp", 2), ("reinforce_pp", 3)):
        rows = [metrics_row(random.Random(f"{algo}{seed}{step}"), algo, step) for step in range(STEPS)]
        rewards[algo, seed] = [row["reward"] for row in rows]
        truncated[algo, seed] = sum(row["truncated"] for row in rows) / 32 / STEPS    # 32 responses a step
        make_run(tmp_path / f"{algo}{seed}", algo, seed, rows=rows)
    data = data_of(sorted(tmp_path.iterdir()))
    by = {(r["algo"], r["part"], r["metric"]): r for r in data.aggregate()}
    means = [sum(rewards["grpo", s][-10:]) / 10 for s in (1, 2, 3)]
    assert by["grpo", "last10", "reward"]["mean"] == pytest.approx(sum(means) / 3, abs=1e-15)
    sd = math.sqrt(sum((m - sum(means) / 3) ** 2 for m in means) / 2)
    assert by["grpo", "last10", "reward"]["sd"] == pytest.approx(sd)
    assert by["grpo", "last10", "reward"]["n"] == 3
    rate = sum(truncated["grpo", s] for s in (1, 2, 3)) / 3
    assert by["grpo", "all", "truncation"]["mean"] == pytest.approx(rate)
    for part, first in (("all", 0), ("last10", 3)):
        wanted = f"reinforce_pp {part}", "reward"
        row = next(row for row in data.differences() if (row["new"], row["metric"]) == wanted)
        steps = [[a - b for a, b in zip(rewards["reinforce_pp", s], rewards["grpo", s], strict=True)][first:]
                 for s in (2, 3)]
        assert (row["n"], row["seeds"], row["old"]) == (2, "2 3", f"grpo {part}")
        assert row["mean"] == pytest.approx(sum(map(sum, steps)) / 2 / len(steps[0]), abs=1e-12)


def test_verdict_follows_the_interval():
    verdicts = [report.with_verdict({}, "seeds", n, 0.1, 0.1, low, high)["verdict"] for n, low, high in (
        (3, 0.01, 0.2), (3, -0.2, -0.01), (3, -0.1, 0.2), (3, 0.0, 0.0), (1, None, None))]
    assert verdicts == ["differs"] * 2 + ["not resolved at this n"] * 3


# --------------------------------------------------------------------------------------- the published tables
AGGREGATE = {  # as printed: pass@1, pass@2, pass@4, truncation
    "grpo": "0.6077 ± 0.0133, 0.7086 ± 0.0108, 0.7773 ± 0.0156, 0.3997 ± 0.0328",
    "reinforce_pp": "0.5866 ± 0.0135, 0.7007 ± 0.0112, 0.7734 ± 0.0078, 0.4382 ± 0.0064",
    "reinforce_pp_baseline": "0.6042 ± 0.0215, 0.7077 ± 0.0276, 0.7891 ± 0.0273, 0.4209 ± 0.0547"}
PAIRED = {  # as printed: by seed, mean ± sd, interval
    ("reinforce_pp", "grpo"): "+0.0010 -0.0244 -0.0400, -0.0212 ± 0.0207, [-0.0726, 0.0303]",
    ("reinforce_pp_baseline", "grpo"): "-0.0146 -0.0010 +0.0049, -0.0036 ± 0.0100, [-0.0285, 0.0213]",
    ("reinforce_pp", "reinforce_pp_baseline"): "+0.0156 -0.0234 -0.0449, -0.0176 ± 0.0307, [-0.0938, 0.0587]"}
DENOMINATORS = {"pass@1": 1024, "pass@2": 1536, "pass@4": 256, "truncation": 1024}      # 256 x 4, x C(4,2)


def published_texts(exact):
    """({"evaluations": CSV text} of the nine rows, as printed or as the fractions that were printed)."""
    rows = read_table(PUBLISHED.parent, "published_eval")
    for row, (name, denominator) in itertools.product(rows, DENOMINATORS.items()):
        counts = [k for k in range(denominator + 1) if f"{k / denominator:.4f}" == row[name]]
        assert len(counts) == 1, "the printed digits name one count"
        row[name] = repr(counts[0] / denominator) if exact else row[name]
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return {"evaluations": out.getvalue()}


def tables_as_printed(data):
    by, seeds = {(r["algo"], r["metric"]): r for r in data.aggregate()}, ["42", "1234", "2026"]
    aggregate = {algo: ", ".join(f"{by[algo, m]['mean']:.4f} ± {by[algo, m]['sd']:.4f}" for m in DENOMINATORS)
                 for algo in report.ALGOS}
    paired = {}
    for row in (r for r in data.differences() if r["metric"] == "pass@1"):
        each = dict(zip(row["seeds"].split(), row["by_seed"].split(), strict=True))
        paired[row["new"].split()[0], row["old"].split()[0]] = (
            " ".join(each[s] for s in seeds) + f", {row['mean']:.4f} ± {row['sd']:.4f}, "
            f"[{row['low']:.4f}, {row['high']:.4f}]")
        assert row["verdict"] == "not resolved at this n" and row["n"] == 3
    return aggregate, paired


def test_published_tables_to_the_printed_digit():
    """Computed from counts, printed with 4 digits: every printed score names one count of 1,024, 1,536 or
    256, and from these counts every digit of both tables follows."""
    assert tables_as_printed(report.Data(published_texts(exact=True))) == (AGGREGATE, PAIRED)


def test_published_rows_as_printed_are_off_by_one_in_the_last_digit_at_most():
    """From the rounded rows 7 of 24 aggregate and 10 of 21 paired numbers differ, by 1 in the last digit."""
    off = []
    rounded = tables_as_printed(report.Data(published_texts(exact=False)))
    for found, printed in zip(rounded, (AGGREGATE, PAIRED), strict=True):
        pairs = [(float(a), float(b)) for key in printed for a, b in zip(
            re.findall(r"[-+]?\d\.\d+", found[key]), re.findall(r"[-+]?\d\.\d+", printed[key]), strict=True)]
        off.append((sum(a != b for a, b in pairs), len(pairs), max(abs(a - b) for a, b in pairs)))
    assert [o[:2] for o in off] == [(7, 24), (10, 21)] and all(o[2] < 0.000101 for o in off)


# ------------------------------------------------------------------------------------------------- the report
def test_equal_inputs_equal_bytes(runs, results, tmp_path):
    copies = [tmp_path / "elsewhere" / run.name for run in sorted(runs.iterdir(), reverse=True)]
    for copy in copies:
        report.Path(copy.parent).mkdir(exist_ok=True)
        copy.symlink_to(runs / copy.name)
    run_main(*copies, "--out", tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        p.name: p.read_bytes() for p in results.iterdir()}


def test_check_regenerates_from_the_csv_files_and_names_what_differs(results, tmp_path, capsys):
    assert run_main("--check", results) == 0
    out = tmp_path / "out"
    out.mkdir()
    for path in results.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    text = (out / "evaluations.csv").read_text()
    (out / "evaluations.csv").write_text(text.replace("321.5", "321.25", 1))
    (out / "reward.svg").unlink()
    capsys.readouterr()
    assert run_main("--check", out) == 1
    said = capsys.readouterr().out
    differ = set(re.findall(r"differs: (\S+)", said))
    assert {"algorithms.csv", "reward.svg", "report.md", "report.html", "manifest.json"} <= differ
    assert not {"steps.csv", "runs.csv", "loss.svg"} & differ


def test_manifest_has_the_digest_of_every_file(results):
    manifest = json.loads((results / "manifest.json").read_text())
    assert manifest["files"].keys() == {p.name for p in results.iterdir()} - {"manifest.json"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((results / name).read_bytes()).hexdigest() == digest


def test_no_path_host_or_user_name_gets_out(runs, results):
    for path in results.iterdir():
        text = path.read_text()
        assert not [word for word in (*SECRETS, str(runs.parent), "/tmp/") if word in text], path.name
    row = next(r for r in read_table(results, "runs") if r["run"] == "grpo-seed42")
    assert row["argv"] == "--algo grpo --out run --train-data=gsm8k --store URL"
    assert json.loads(row["options"])["model"] == "Qwen3-0.6B" and row["commit"].startswith("c0ffee")
    metrics = (runs / "grpo-seed42" / "metrics.jsonl").read_bytes()
    assert row["metrics_sha256"] == hashlib.sha256(metrics).hexdigest()


@pytest.mark.parametrize("given, kept", [
    ("/home/bob smith/x y/run", "run"), (r"C:\Users\bob\run", "run"), ("--a=/x/b/,/y/c/", "--a=b,c"),
    ("~/d/", "d"), ("file.py:score", "file.py:score"), ("/x/file.py:score", "file.py:score"),
    ("s3://bucket/x", "URL"), (3, 3), ("", "")])
def test_clean(given, kept):
    assert report.clean(given) == kept


def test_text_of_runs_is_escaped(tmp_path, no_figures):
    name = "<script>alert(1)<\u2215script>|`x`[a](javascript:1) *b* __c__ ![d](e)"
    make_run(tmp_path / name, argv=["<img src=x onerror=alert(1)>", "a|b", "&lt;"])
    (tmp_path / name / "latest").unlink()
    good = make_run(tmp_path / "good", argv=["<img src=x onerror=alert(1)>", "a|b", "&lt;"])
    page = report.build(report.tables_from_runs([tmp_path / name, good], True))["report.html"].decode()
    body = page[page.index("<body>"):]
    for markup in ("<script", "<img", "<a ", "<strong>", "<em>", "<code>"):
        assert markup not in body, markup
    assert "&#60;script&#62;alert(1)" in body and "a&#124;b" in body and "&#38;lt;" in body


def test_errors_stay_in_the_denominator_beside_the_score(tmp_path, no_figures):
    """10 responses: 6 right, 2 wrong, 2 grader errors -> 0.6 with errors 2/10."""
    final = evaluation(random.Random(0), 0, counts=[[row, 2, c] for row, c in enumerate((2, 2, 1, 1, 0))],
                       samples=2, wrong=2, unparsed=0, errors=2)
    table = text_of(make_run(tmp_path / "run", initial=final, final=final))
    assert "| GRPO, final | 42 | 5 × 2 | 0.6000 |" in table and "| 0/10 | 2/10 |" in table


def test_truncation_stands_in_the_table_of_the_score(tmp_path, no_figures):
    """8 responses, 3 at the cap, 1 of these right: it counts as right, and 0.375 stands beside the score."""
    final = evaluation(random.Random(0), 0, counts=[[row, 2, c] for row, c in enumerate((2, 1, 1, 0))],
                       samples=2, truncation=0.375, wrong=4, unparsed=0)
    text = text_of(make_run(tmp_path / "run", initial=final, final=final))
    row = next(line for line in text.split("\n") if line.startswith("| GRPO, final | 42 |"))
    assert "| 4 × 2 | 0.5000 |" in row and "| 0.3750 |" in row and f"| {final['decoding_noise']:.4f} |" in row
    assert "More than 0.3 of the responses are truncated" in text and "GRPO, final 0.3750" in text


def test_one_run_shows_na_and_the_initial_model_is_the_control(tmp_path, no_figures):
    text = text_of(make_run(tmp_path / "run"))
    assert re.search(r"\| GRPO, initial \| 1 \| 0\.\d{4} ± n/a \|", text)
    row = r"\| GRPO - initial \| pass@1 \| "
    assert re.search(row + r"seeds \| 1 \| \S+ ± n/a \| n/a to n/a \| not resolved at this n", text)
    assert re.search(row + r"prompts \| 7 \| \S+ ± \S+ \| [-+0]\S+ to [-+0]\S+ \|", text)
    assert "fewer than 5 training seeds" in text.lower()


@pytest.mark.parametrize("changes, message", [
    ({"data_seed": 43}, "not comparable: data_seed 42 (a) vs 43 (b)"),
    ({"steps": 11}, "not comparable: steps 13 (a) vs 11 (b)"), ({"save_every": 7}, None),
    ({"lr": 2e-6}, "not comparable: lr 1e-06 (a) vs 2e-06 (b)"),
    ({"seed": 42}, "grpo with seed 42 twice: a and b"),
    ({"kl_coef": 0.02}, "not comparable: kl_coef 0.01 (a) vs 0.02 (b)"),
    ({"kl_coef": 0.02, "algo": "reinforce_pp"}, None), ({"model": "/other/place/Qwen3-0.6B"}, None)])
def test_unlike_runs_are_refused(tmp_path, changes, message):
    make_run(tmp_path / "a", lr=1e-6, save_every=5)
    make_run(tmp_path / "b", **{"algo": "grpo", "seed": 43, "lr": 1e-6, "save_every": 5} | changes)
    if message is None:
        data = data_of([tmp_path / "a", tmp_path / "b"])
        assert sum(data.n.values()) == 2
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        data_of([tmp_path / "a", tmp_path / "b"])


def test_another_evaluation_subset_is_refused(tmp_path):
    make_run(tmp_path / "a", seed=1)
    make_run(tmp_path / "b", seed=2, final=evaluation(random.Random(1), 0.5, subset_sha256="cd" * 32))
    with pytest.raises(ValueError, match="not comparable: subset_sha256"):
        data_of([tmp_path / "a", tmp_path / "b"])


def test_user_errors_are_clear(tmp_path, no_figures):
    run = make_run(tmp_path / "runs" / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "evaluations.csv").write_text("algo,seed,stage,pass@1\ngrpo,42,final,nan\n")
    for words, message in (
            ([run], "say RUN... --out FOLDER"), ([], "say RUN"), (["--check", run, "--out", "x"], "say RUN"),
            ([tmp_path / "nowhere", "--out", "x"], "no run is accepted; nowhere config.json is missing"),
            ([tmp_path / "full", "--out", "x"], "no run is accepted; full config.json is missing"),
            ([tmp_path / "tables", run, "--out", "x"], "does not mix with other inputs"),
            ([tmp_path / "tables", "--out", "x"], "evaluations.csv line 2, pass@1 'nan': not a strict JSON")):
        with pytest.raises(ValueError, match=re.escape(message)):
            run_main(*words)
    run_main(run, "--out", tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_figures_have_every_arm_and_unit(results, monkeypatch):
    page = (results / "report.html").read_text()
    assert page.count("<svg ") == 3 and "<img" not in page
    monkeypatch.setattr(report, "FIGURES", ALL_FIGURES)
    texts = {name: (results / f"{name}.csv").read_text() for name in report.BASE}
    drawn = report.figures(report.Data(texts))
    assert drawn.keys() == {f"{name}.svg" for name in (*ALL_FIGURES, "evaluation")}
    for name, text in drawn.items():
        for label, _, _ in report.ALGOS.values():
            assert f"<!-- {label} (n = 2) -->" in text, name
        for unit in ALL_FIGURES[name[:-4]].values() if name[:-4] in ALL_FIGURES else (
                "initial", "final", "pass@1 (fraction)", "pass@4 (fraction)", "truncation (fraction)"):
            assert f"<!-- {unit} -->" in text


def test_help_needs_no_heavy_library():
    code = ("import sys, report; sys.argv = ['report.py', '--help']\n"
            "try: report.cli.parse(report.Config, 'x')\n"
            "except SystemExit: print([m for m in ('numpy', 'matplotlib', 'torch') if m in sys.modules])")
    here = Path(report.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_metric_names_are_the_documented_ones():
    documented = (Path(report.__file__).parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in report.METRICS:
        assert f"`{name}`" in documented or f"`{re.sub('_(mean|min|max)$', '', name)}" in documented, name

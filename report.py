"""Report: run folders in; CSV tables, intervals, figures, Markdown, HTML and a manifest out.

    python report.py runs/ --out results/       # run folders, or folders that hold runs
    python report.py results/ --out results/    # the same report from its own CSV files, without the runs
    python report.py --check results/           # regenerate from the CSV files, compare bytes (status 1)
    python report.py check runs/grpo-42 ...     # accept or reject runs, a line each (status 1)

Structured metrics decide which runs enter, never text; a rejected run is listed with its reason and mixed
into nothing. Means are taken inside a run, then over runs (sd: ddof 1; n = 1: n/a). Equal inputs give equal
bytes; no path, host or user name gets out. A verdict says whether an interval excludes 0, no more. Not here:
reading responses, scoring, means over unlike workloads (refused), words (report.md.j2)."""

import collections
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import cli

METRICS = """step reward reward_std right wrong unparsed grader_errors zero_std_groups adv_raw_mean
    adv_raw_std adv_norm_mean adv_norm_std valid_tokens returns_minus_reward ref_k1 ref_k2 kl_loss pg_loss
    loss ppo_kl clip_frac entropy grad_norm clip_coef lr response_len_mean response_len_min response_len_max
    truncated truncated_and_rewarded fully_masked sampler_logp_gap_mean sampler_logp_gap_max prompt_tokens
    response_tokens response_tok_per_s decode_tok_per_s t_rollout t_reward t_ref t_old t_update t_step
    peak_mem_gib""".split()
EVALUATED = "truncation mean_length right wrong unparsed errors prompts samples".split()
ALGOS = {  # label, colour (Okabe-Ito: safe for colour-blind readers), metrics that do not apply: null
    "grpo": ("GRPO", "#0072B2", {"returns_minus_reward"}),
    "reinforce_pp_baseline": ("REINFORCE++-baseline", "#009E73", {"returns_minus_reward"}),
    "reinforce_pp": ("REINFORCE++", "#D55E00", {"kl_loss", "zero_std_groups"})}
PER_ALGO = {"kl_coef", "gamma"}     # options that must agree within an algorithm only; FREE: not at all
FREE = set("""algo seed out resume save_every keep tensorboard reward_workers reward_concurrency slots threads
    timeout_minutes max_tokens_per_device offload_ref activation_checkpointing compile max_skipped
    world_size zero""".split())
BASE = {  # the tables all else is computed from; evaluations.csv also has a column for every pass@k
    "runs": "run algo seed steps commit device checkpoint metrics_sha256 weights_sha256 argv versions "
            "options", "per_prompt": "algo seed stage row n c", "rejected": "run reason",
    "evaluations": f"algo seed stage {' '.join(EVALUATED)} decoding_noise subset_sha256",
    "steps": f"algo seed {' '.join(METRICS)}"}
TABLES = BASE | {"run_means": "algo seed part metric mean", "algorithms": "algo part metric n mean sd",
                 "differences": "new old metric method n seeds mean sd low high verdict by_seed"}
PASS = re.compile(r"pass@\d+")
NUMBER = re.compile("|".join(["seed", "row", "n", "c", PASS.pattern, "decoding_noise", *METRICS, *EVALUATED]))
COMPARED = "pass@|mean_length|truncation|reward$|response_len_mean"         # metrics of differences.csv
DECIMALS = {"mean_len|response_|t_|peak|unp|err": 1, "pg_|kl|ref_k2|ret": 6, "": 4}     # of metrics in print
FIGURES = {  # file: {metric: axis label with its unit}
    "reward": {"reward": "reward per response"},
    "loss": {"pg_loss": "policy loss (advantage units)", "kl_loss": "k2 KL loss (nats²)"},
    "kl": {"ref_k1": "k1 to the reference (nats/token)", "ref_k2": "k2 to the reference (nats²/token)"},
    "advantage": {"adv_raw_std": "raw advantage std (reward units)", "adv_norm_std": "std as used (1)"},
    "gradient": {"grad_norm": "gradient norm before clipping", "entropy": "entropy (nats/token)"},
    "length": {"response_len_mean": "response length (tokens)", "truncation": "truncated (fraction)"},
    "throughput": {"response_tok_per_s": "response tokens/s of a whole step", "t_step": "time of a step (s)"}}
STYLE = {"svg.hashsalt": "nanorpp", "font.size": 11, "legend.frameon": False, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True}


@dataclasses.dataclass
class Config:
    paths: tuple[str, ...]  # run folders, folders of runs, or a folder of CSV files; or: check RUN...
    out: str = ""  # folder for the report; its files of the same names are replaced
    check: bool = False  # compare the report in the one folder given with what its CSV files generate
    no_checkpoints: bool = False  # accept runs whose checkpoints were deleted (the report says so)


# ---- acceptance: one rule for `check` and for every report
def parse_json(raw, where):
    try:
        return dict(json.loads(raw, parse_constant=int))        # int("NaN") raises
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: not a strict JSON object ({error})") from None


def check_number(row, name, where, least=-1e300):
    """ValueError unless row[name] is a finite number (no NaN, no boolean) of at least `least`."""
    if type(row.get(name)) not in (int, float) or not least <= row[name] < 1e300:
        raise ValueError(f"{where}: {name} is {json.dumps(row.get(name))[:40]}")


def judge(folder, checkpoints=True):
    """-> (rows of the base tables, None) of an accepted run, ({}, reason) of a rejected one. Never raises."""
    try:
        return accept(folder, checkpoints), None
    except FileNotFoundError as error:
        return {}, f"{Path(error.filename).relative_to(folder).as_posix()} is missing"
    except ValueError as error:
        return {}, str(error)
    except (OSError, LookupError, TypeError, AttributeError) as error:      # a field of the wrong type
        return {}, f"malformed: {type(error).__name__} {clean(str(error))}"


def accept(folder, checkpoints):
    """One finished run -> rows of the base tables. ValueError, FileNotFoundError: the reason of a rejection.
    The rule: all steps of config.json once and in order, metrics finite where they apply, summary complete,
    evaluation counts that add up, the last checkpoint whole."""
    raw = {name: (folder / name).read_bytes() for name in ("config.json", "summary.json", "metrics.jsonl")}
    config, summary = (parse_json(raw[name], name) for name in ("config.json", "summary.json"))
    key, steps = {"algo": config["algo"], "seed": config["seed"]}, config["steps"]
    if key["algo"] not in ALGOS or type(key["seed"]) is not int:
        raise ValueError(f"config.json: algo {key['algo']!r} not in report.ALGOS, or seed {key['seed']!r}")
    if summary["status"] != "complete" or summary["steps"] != steps:
        raise ValueError(f"summary.json: {summary['status']} after {summary['steps']} of {steps} steps")
    tables = {"steps": check_steps(raw["metrics.jsonl"], config), "evaluations": [], "per_prompt": []}
    for stage in ("initial", "final") if summary.get("initial") or summary.get("final") else ():
        evaluation = {"stage": stage} | (summary.get(stage) or {})
        counts = check_evaluation(evaluation, f"summary.json, {stage}")
        tables["evaluations"].append(evaluation)
        tables["per_prompt"] += [{"stage": stage, "row": r, "n": n, "c": c} for r, n, c in counts]
    argv, commit, versions, device = (config.pop(k, None) for k in ("argv", "commit", "versions", "device"))
    weights = None
    if checkpoints:
        from checkpoint import verify
        latest = (folder / "latest").read_text(encoding="utf-8").strip()
        bad = verify(folder / latest) if latest == f"step_{steps:06d}" else [f"not that of step {steps}"]
        if bad:
            raise ValueError(f"checkpoint {latest[:40]}: {'; '.join(bad)}")
        manifest = json.loads((folder / latest / "manifest.json").read_bytes())
        weights = manifest["files"]["model.safetensors"]["sha256"]
    tables["runs"] = [{
        "run": folder.resolve().name, "steps": steps, "commit": commit, "device": clean(device),
        "checkpoint": "complete" if checkpoints else "not checked", "weights_sha256": weights,
        "metrics_sha256": hashlib.sha256(raw["metrics.jsonl"]).hexdigest(),
        "argv": " ".join(map(clean, argv or [])), "versions": json.dumps(versions, sort_keys=True),
        "options": json.dumps({k: clean(v) for k, v in config.items()}, sort_keys=True)}]
    return {name: [row | key for row in rows] for name, rows in tables.items()}


def check_steps(raw, config):
    """metrics.jsonl -> one dict per step. Lines are JSON; no text is searched."""
    lines = raw.decode("utf-8", errors="replace").split("\n")
    rows = [parse_json(line, f"metrics.jsonl line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    found = [f"step {row.get('step')}" for row in rows] + ["the end"]
    wanted = [f"step {step}" for step in range(config["steps"])] + ["the end"]
    for have, want in zip(found, wanted, strict=False):
        if have != want:
            raise ValueError(f"metrics.jsonl: {have} where {want} should be")
    may_be_null = ALGOS[config["algo"]][2] | {"peak_mem_gib"}
    may_be_null |= {"ref_k1", "ref_k2", "kl_loss"} if config.get("no_kl") else set()
    for row, name in itertools.product(rows, METRICS):
        if row.get(name) is not None or name not in may_be_null:
            check_number(row, name, f"metrics.jsonl: step {row['step']}")
    return rows


def check_evaluation(given, where):
    """EVAL of summary.json -> its sorted [row, n, c]. All responses count: verdicts, unparsed and errors
    included, add up to them, and pass@1 is the mean of c / n."""
    for name in ["pass@1", *EVALUATED, *filter(PASS.fullmatch, given)]:
        check_number(given, name, where, least=0)
    counts = sorted(given["per_prompt"])
    if any([type(x) for x in t] != [int] * 3 or not 0 <= t[2] <= t[1] or t[1] < 1 for t in counts):
        raise ValueError(f"{where}: per_prompt must hold [row, n, c] with 0 <= c <= n")
    total, verdicts = sum(n for _, n, _ in counts), sum(given[k] for k in EVALUATED[2:6])
    if not len({row for row, _, _ in counts}) == len(counts) == given["prompts"] > 0 or verdicts != total:
        raise ValueError(f"{where}: {given['prompts']} prompts and {verdicts} verdicts, but per_prompt has "
                         f"{len(counts)} rows and {total} responses")
    if abs(statistics.fmean(c / n for _, n, c in counts) - given["pass@1"]) > 1e-6:
        raise ValueError(f"{where}: pass@1 {given['pass@1']} is not the mean of c / n in per_prompt")
    return counts


def clean(value):
    """Without what names a machine or a person: of a path the last component stays, of a URL nothing."""
    if not isinstance(value, str) or "://" in value:
        return "URL" if isinstance(value, str) else value
    return re.sub(r"[^=,]*[/\\]", "", re.sub(r"[/\\]+(?=$|[=,])", "", value))


def run_folders(path):
    """The runs right below a folder, or the folder itself: a run, or to be rejected for what it lacks."""
    below = {p.parent for name in ("config.json", "metrics.jsonl") for p in path.glob(f"*/{name}")}
    below = sorted(p for p in below if not (p / "model.safetensors").exists())
    return [path] if (path / "metrics.jsonl").exists() else below or [path]


def tables_from_runs(folders, checkpoints):
    """Run folders -> {base table: CSV text}. Rejected runs are in table `rejected` and nowhere else."""
    judged = [(folder.resolve().name, *judge(folder, checkpoints)) for folder in folders]
    rows = {name: [row for _, tables, _ in judged for row in tables.get(name, ())] for name in BASE}
    rows["rejected"] = [{"run": run, "reason": reason} for run, _, reason in judged if reason]
    if not rows["runs"]:
        raise ValueError("no run is accepted; " + "; ".join(" ".join(r.values()) for r in rows["rejected"]))
    return {name: to_csv(name, rows[name]) for name in rows}


def to_csv(name, rows, digits=None):
    """Floats as shortest exact text, or with `digits` significant ones (sums can differ in the last bit)."""
    out, names = io.StringIO(), TABLES[name].split()
    names[3:3] = sorted({k for row in rows for k in row if PASS.fullmatch(k)}, key=lambda k: int(k[5:]))
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{x:.{digits}g}" if digits and type(x) is float else x for k, x in row.items()}
                     for row in rows)
    return out.getvalue()


def from_csv(name, text):
    """CSV text -> rows by algorithm and seed; '' is None. ValueError names line and column of a bad cell."""
    rows = list(csv.DictReader(io.StringIO(text), restkey=""))
    for line, row in enumerate(rows, 2):
        for column, cell in row.items():
            row[column] = cell or None
            if cell and NUMBER.fullmatch(column):
                row[column] = parse_json(f'{{"": {cell}}}', f"{name}.csv line {line}, {column} {cell!r}")[""]
        row |= {column: None for column in TABLES[name].split() if column not in row}
        if name != "rejected" and (row["algo"] not in ALGOS or type(row["seed"]) is not int):
            raise ValueError(f"{name}.csv line {line}: needs an algo of {', '.join(ALGOS)} and a seed")
    return sorted(rows, key=lambda row: ([*ALGOS].index(row["algo"]), row["seed"]) if "algo" in row else ())


def spread(values):
    """-> n, mean, sample sd (ddof 1) and 95 % t interval of the mean, mean -+ t(0.975, n - 1) sd / sqrt(n);
    sd and interval are None for n = 1."""
    from scipy.stats import t
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return n, mean, None, None, None
    sd = statistics.stdev(values)
    half = float(t.ppf(0.975, n - 1)) * sd / n ** 0.5
    return n, mean, sd, mean - half, mean + half


def bootstrap(differences, seed=0, resamples=10_000):
    """95 % percentile interval of the mean over prompts, drawn with replacement (Efron and Tibshirani 1993).
    differences[p] is one prompt's difference, already averaged over the training seeds, which stay fixed."""
    import numpy as np
    draws = np.random.default_rng(seed).integers(0, len(differences), (resamples, len(differences)))
    return np.percentile(np.asarray(differences)[draws].mean(axis=1), [2.5, 97.5]).tolist()


class Data:
    """The base tables, indexed. runs[algo, part][seed] = {metric: mean inside the run}; part: 'last10', 'all'
    (training steps), 'initial', 'final' (evaluations). ValueError for runs that do not compare."""

    def __init__(self, texts):
        self.base = {name: from_csv(name, texts.get(name, "")) for name in BASE}
        self.steps, self.stages, self.counts, self.runs = {}, {}, {}, {}
        self.refuse_unlike()
        for row in self.base["steps"]:
            responses = row["right"] + row["wrong"] + row["unparsed"] + row["grader_errors"]
            row["truncation"] = row["truncated"] / max(responses, 1)
            self.steps.setdefault((row["algo"], row["seed"]), []).append(row)
        for part, first in ("last10", -10), ("all", 0):
            for (algo, seed), rows in self.steps.items():
                self.runs.setdefault((algo, part), {})[seed] = {
                    metric: statistics.fmean(values) for metric in [*METRICS[1:], "truncation"]
                    if None not in (values := [row[metric] for row in rows[first:]])}
        for row in self.base["per_prompt"]:
            counts = self.counts.setdefault((row["algo"], row["seed"], row["stage"]), {})
            counts[row["row"]] = row["n"], row["c"]
        for row in self.base["evaluations"]:
            means = {k: v for k, v in row.items() if NUMBER.fullmatch(k) and k != "seed" and v is not None}
            runs = self.runs.setdefault((row["algo"], row["stage"]), {})
            if runs.setdefault(row["seed"], means) is not means:
                raise ValueError("evaluations.csv has two rows for {algo} {seed} {stage}".format(**row))
            self.stages.setdefault((row["algo"], row["seed"]), []).append(row)
        self.n = collections.Counter(algo for algo, _ in self.steps.keys() | self.stages.keys())
        self.algos = [algo for algo in ALGOS if algo in self.n]
        self.passes = [name for name in (self.base["evaluations"] or [{}])[0] if PASS.fullmatch(name)]

    def refuse_unlike(self):
        """One run per algorithm and seed; equal options, FREE ones aside; one set of evaluation prompts."""
        first = {}
        for run in self.base["runs"]:
            key = run["algo"], run["seed"]
            if first.setdefault(key, run) is not run:
                raise ValueError(f"{key[0]} with seed {key[1]} twice: {first[key]['run']} and {run['run']}")
            facts = json.loads(run["options"]) | {
                name: row[name] for row in self.base["evaluations"] if (row["algo"], row["seed"]) == key
                for name in ("subset_sha256", "prompts", "samples")}
            for name in sorted(facts.keys() - FREE):
                mine = f"{facts[name]} ({run['run']})"
                value, other = first.setdefault((name, key[0] * (name in PER_ALGO)), (facts[name], mine))
                if value != facts[name]:
                    raise ValueError(f"not comparable: {name} {other} vs {mine}; name runs of one workload")

    def aggregate(self):
        """Rows of algorithms.csv: mean and sd over runs of the means inside a run."""
        for (algo, part), runs in self.runs.items():
            for metric in dict.fromkeys(itertools.chain(*runs.values())):
                n, mean, sd, _, _ = spread([run[metric] for run in runs.values() if metric in run])
                yield {"algo": algo, "part": part, "metric": metric, "n": n, "mean": mean, "sd": sd}

    def differences(self):
        """Rows of differences.csv, always paired: by seed with a t interval (steps pair one by one: the mean
        of their differences is the difference of the means), and by prompt with a bootstrap interval."""
        arms = [((b, part), (a, part)) for part in ("final", "all", "last10")
                for a, b in itertools.combinations(self.algos, 2)]
        for new, old in arms + [((a, "final"), (a, "initial")) for a in self.algos]:
            news, olds = self.runs.get(new, {}), self.runs.get(old, {})
            seeds = [seed for seed in news if seed in olds]
            row = {"new": " ".join(new), "old": " ".join(old), "seeds": " ".join(map(str, seeds))}
            for metric in (m for m in news[seeds[0]] if re.match(COMPARED, m)) if seeds else ():
                values = [news[seed][metric] - olds[seed][metric] for seed in seeds]
                row |= {"metric": metric, "by_seed": " ".join(number(value, metric, "+") for value in values)}
                yield with_verdict(row, "seeds", *spread(values))
                if PASS.match(metric) and self.counts:
                    values = self.per_prompt(new, old, seeds, int(metric[5:]))
                    yield with_verdict(row, "prompts", *spread(values)[:3], *bootstrap(values))

    def per_prompt(self, new, old, seeds, k):
        """pass@k(new) - pass@k(old) of each prompt that both arms have, mean over the seeds that have it."""
        values = {}
        for s in seeds:
            x, y = self.counts[new[0], s, new[1]], self.counts[old[0], s, old[1]]
            for prompt in sorted(x.keys() & y.keys()):
                a, b = (1 - math.comb(n - c, k) / math.comb(n, k) for n, c in (x[prompt], y[prompt]))
                values.setdefault(prompt, []).append(a - b)
        return [statistics.fmean(differences) for differences in values.values()]


def with_verdict(row, method, n, mean, sd, low, high):
    verdict = "differs" if n > 1 and not low <= 0 <= high else "not resolved at this n"
    return row | dict(method=method, n=n, mean=mean, sd=sd, low=low, high=high, verdict=verdict)


def draw(axes, runs, metric):
    """A metric of {(algo, seed): rows}. Thin line: one run; bold line: mean over runs; band or whisker: mean
    -+ sample sd, none for one run. A run that lacks a value is left out."""
    import numpy as np
    points = max(map(len, runs.values()))
    for i, (algo, (label, color, _)) in enumerate(ALGOS.items()):
        curves = [[row[metric] for row in rows] for key, rows in runs.items() if key[0] == algo]
        curves = np.array([curve for curve in curves if None not in curve and len(curve) == points])
        if len(curves):
            mean, sd = curves.mean(0), curves.std(0, ddof=1) if len(curves) > 1 else 0
            marker, whisker, aside = ("o", sd, 0.06 * i) if points < 3 else (None, None, 0)
            x = np.arange(points) + aside
            axes.plot(x, curves.T, color=color, marker=marker, linewidth=0.7, alpha=0.4)
            axes.errorbar(x, mean, whisker, color=color, marker=marker, linewidth=2.2, capsize=3,
                          label=f"{label} (n = {len(curves)})")
            axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.15, linewidth=0)


def figures(data):
    """-> {file: SVG text}; no date, no version and fixed ids, so that equal data give equal text."""
    import matplotlib
    from matplotlib.figure import Figure
    out, figures = {}, FIGURES if data.steps else {}
    if data.stages:
        figures = figures | {"evaluation": {m: f"{m} (fraction)" for m in (*data.passes, "truncation")}}
    with matplotlib.rc_context(STYLE):
        for name, units in figures.items():
            figure, text = Figure(figsize=(9.6, 3.6), layout="constrained"), io.StringIO()
            for axes, metric in zip(figure.subplots(1, len(units), squeeze=False)[0], units, strict=True):
                draw(axes, data.stages if name == "evaluation" else data.steps, metric)
                axes.set(xlabel="step (one rollout and its update)", ylabel=units[metric])
                if name == "evaluation":
                    stages = [row["stage"] for row in max(data.stages.values(), key=len)]
                    axes.set(xlabel="evaluation", xticks=range(len(stages)), xticklabels=stages)
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            out[f"{name}.svg"] = text.getvalue()
    return out


def escape(value):
    """Text of runs for Markdown and HTML alike: what either reads as markup becomes character references."""
    return re.sub(r"[^\w .,:;=+/@%()±²-]|__+", lambda m: "".join(f"&#{ord(c)};" for c in m[0]), str(value))


def number(value, metric="", sign=""):
    """n/a for None; never a signed zero."""
    digits = next(digits for names, digits in DECIMALS.items() if re.match(names, metric))
    return "n/a" if value is None else re.sub(r"^[-+](0\.0*)$", r"\1", f"{value:{sign}.{digits}f}")


def build(texts):
    """{base table: CSV text} -> {file: bytes} of a report; depends on its argument and on versions only."""
    import jinja2
    import markdown
    import matplotlib
    data, here = Data(texts), Path(__file__).parent
    tables = data.base | {"algorithms": [*data.aggregate()], "differences": [*data.differences()]}
    tables["run_means"] = [{"algo": algo, "seed": seed, "part": part, "metric": metric, "mean": mean}
                           for (algo, part), runs in data.runs.items() for seed, means in runs.items()
                           for metric, mean in means.items()]
    files = {f"{name}.csv": to_csv(name, rows, None if name in BASE else 10) for name, rows in tables.items()}
    files |= figures(data)
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(here), finalize=escape, trim_blocks=True,
                                   lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    means = {(row["algo"], row["part"], row["metric"]): row for row in tables["algorithms"]}
    files["report.md"] = templates.get_template("report.md.j2").render(
        data=data, tables=tables, means=means, number=number, algos=ALGOS, files=files)
    page = markdown.markdown(files["report.md"], extensions=["tables"])
    page = re.sub(r'<img[^>]+src="(\w+\.svg)" />', lambda m: files[m[1]][files[m[1]].index("<svg"):], page)
    files["report.html"] = (here / "report.html.j2").read_text(encoding="utf-8").replace("{{ body }}", page)
    files = {name: text.encode() for name, text in sorted(files.items())}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps({"matplotlib": matplotlib.__version__, "files": digests}, indent=1)
    return files | {"manifest.json": manifest.encode() + b"\n"}


def main(cfg):
    """Exit status: 0, or 1 for a rejected run (check) or a file that differs (--check)."""
    verb, paths = cfg.paths[:1] == ("check",), [Path(path) for path in cfg.paths if path != "check"]
    if not paths or [verb, cfg.check, bool(cfg.out)].count(True) != 1:
        raise ValueError("say RUN... --out FOLDER, or check RUN..., or --check FOLDER")
    runs = [run for path in paths for run in run_folders(path)]
    if verb:
        reasons = {run: judge(run, not cfg.no_checkpoints)[1] for run in runs}
        for run, reason in reasons.items():
            print(f"{run}: " + (f"rejected: {reason}" if reason else "accepted"))
        return int(any(reasons.values()))
    tables = {name: path for name in BASE if (path := paths[0] / f"{name}.csv").exists()}
    if tables and len(paths) > 1:
        raise ValueError(f"{paths[0]}: a folder of CSV files does not mix with other inputs")
    files = build({name: path.read_bytes().decode() for name, path in tables.items()}
                  or tables_from_runs(runs, not cfg.no_checkpoints))
    if cfg.check:
        there = {path.name: path.read_bytes() for path in paths[0].iterdir() if path.name in files}
        stale = [f"differs: {name}" for name in files if there.get(name) != files[name]]
        print("\n".join(stale) or "the CSV files give the same bytes")
        return int(bool(stale))
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (Path(cfg.out) / name).write_bytes(content)
    print(f"{len(files)} files in {cfg.out}; open report.html")
    return 0


if __name__ == "__main__":
    with cli.user_errors():
        raise SystemExit(main(cli.parse(Config, __doc__)))

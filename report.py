"""Report: run folders in; CSV tables, intervals, figures, Markdown, HTML and a manifest out.

    python report.py runs/ --out results/       # run folders, or folders that hold runs
    python report.py results/ --out results/    # the same report from its own CSV files, without the runs
    python report.py --check results/           # regenerate from the CSV files, compare bytes (status 1)
    python report.py check runs/grpo-42 ...     # accept or reject runs, a line each (status 1)

Contract: structured metrics decide which runs enter, never text; a rejected run is listed with its reason and
mixed into nothing. Means are taken inside a run, then over runs (sd: ddof 1; n = 1: n/a). Equal inputs give
equal bytes; no path, host or user name gets out. A verdict says whether an interval excludes 0, no more. The
words are in report.md.j2. Not here: reading responses, scoring, means over unlike workloads (refused).
"""

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
    truncated truncated_and_rewarded fully_masked sampler_logp_gap_mean sampler_logp_gap_max
    prompt_tokens response_tokens response_tok_per_s decode_tok_per_s t_rollout t_reward t_ref t_old t_update
    t_step peak_mem_gib""".split()
ALGOS = {  # label, colour (Okabe-Ito: safe for colour-blind readers), metrics that do not apply: null
    "grpo": ("GRPO", "#0072B2", {"returns_minus_reward"}),
    "reinforce_pp_baseline": ("REINFORCE++-baseline", "#009E73", {"returns_minus_reward"}),
    "reinforce_pp": ("REINFORCE++", "#D55E00", {"kl_loss", "zero_std_groups"})}
PER_ALGO = {"kl_coef", "gamma"}             # options that must agree within an algorithm only; not at all:
FREE = set("""algo seed out resume save_every keep tensorboard reward_workers reward_concurrency slots
    timeout_minutes max_tokens_per_device offload_ref zero activation_checkpointing max_skipped world_size
    threads""".split())
BASE = {  # the tables all else is computed from; evaluations.csv also has a column for every pass@k
    "runs": "run algo seed steps commit device checkpoint metrics_sha256 weights_sha256 argv versions "
            "options",
    "steps": "algo seed " + " ".join(METRICS),
    "evaluations": "algo seed stage truncation mean_length right wrong unparsed errors prompts samples "
                   "decoding_noise subset_sha256",
    "per_prompt": "algo seed stage row n c", "rejected": "run reason"}
TABLES = BASE | {"run_means": "algo seed part metric mean", "algorithms": "algo part metric n mean sd",
                 "differences": "new old metric method n seeds mean sd low high verdict by_seed"}
EVALUATED = BASE["evaluations"].split()[3:-2]
NUMBER = re.compile("|".join(["seed", "row", "n", "c", r"pass@\d+", "decoding_noise", *METRICS, *EVALUATED]))
COMPARED = "pass@|mean_length|truncation|reward$|response_len_mean"         # metrics of differences.csv
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

def finite(value):
    return type(value) in (int, float) and abs(value) < 1e300       # False for NaN, infinities and booleans

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
        raise ValueError(f"config.json: algo {key['algo']!r} or seed {key['seed']!r} is unknown to report.py")
    if summary["status"] != "complete" or summary["steps"] != steps:
        raise ValueError(f"summary.json: {summary['status']} after {summary['steps']} of {steps} steps")
    tables = {"steps": [key | row for row in check_steps(raw["metrics.jsonl"], config)],
              "evaluations": [], "per_prompt": []}
    for stage in ("initial", "final") if summary.get("initial") or summary.get("final") else ():
        evaluation, counts = check_evaluation(summary.get(stage) or {}, f"summary.json, {stage}")
        tables["evaluations"].append(key | {"stage": stage} | evaluation)
        tables["per_prompt"] += [key | {"stage": stage, "row": r, "n": n, "c": c} for r, n, c in counts]
    weights = check_checkpoint(folder, steps) if checkpoints else None
    argv, commit, versions, device = (config.pop(k, None) for k in ("argv", "commit", "versions", "device"))
    tables["runs"] = [key | {
        "run": folder.resolve().name, "steps": steps, "commit": commit, "device": clean(device),
        "checkpoint": "complete" if checkpoints else "not checked", "weights_sha256": weights,
        "metrics_sha256": hashlib.sha256(raw["metrics.jsonl"]).hexdigest(),
        "argv": " ".join(map(clean, argv or [])), "versions": json.dumps(versions, sort_keys=True),
        "options": json.dumps({k: clean(v) for k, v in config.items()}, sort_keys=True)}]
    return tables

def check_steps(raw, config):
    """metrics.jsonl -> one dict per step with the names of METRICS. Lines are JSON; no text is searched."""
    lines = raw.decode("utf-8", errors="replace").split("\n")
    rows = [parse_json(line, f"metrics.jsonl line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    for want, row in itertools.zip_longest(range(config["steps"]), rows):
        want = "the end" if want is None else f"step {want}"
        found = "the end" if row is None else f"step {row.get('step')}"
        if want != found:
            raise ValueError(f"metrics.jsonl: {found} where {want} should be")
    may_be_null = ALGOS[config["algo"]][2] | {"peak_mem_gib"}
    may_be_null |= {"ref_k1", "ref_k2", "kl_loss"} if config.get("no_kl") else set()
    for row, name in itertools.product(rows, METRICS):
        if not finite(row.get(name)) and not (name in may_be_null and row.get(name) is None):
            raise ValueError(f"metrics.jsonl: step {row['step']}: {name} is {json.dumps(row.get(name))[:40]}")
    return [{name: row.get(name) for name in METRICS} for row in rows]

def check_evaluation(given, where):
    """EVAL of summary.json -> (row of evaluations.csv, sorted [row, n, c]). All responses count: verdicts,
    unparsed and errors included, add up to them, and pass@1 is the mean of c / n."""
    names = EVALUATED + [k for k in given if re.fullmatch(r"pass@\d+", k)]
    for name in ["pass@1", *names]:
        if not finite(given.get(name)) or given[name] < 0:
            raise ValueError(f"{where}: {name} is {json.dumps(given.get(name))[:40]}")
    counts = sorted(given["per_prompt"])
    if any([type(x) for x in t] != [int] * 3 or not 0 <= t[2] <= t[1] or t[1] < 1 for t in counts):
        raise ValueError(f"{where}: per_prompt must hold [row, n, c] with 0 <= c <= n")
    total, verdicts = sum(n for _, n, _ in counts), sum(given[k] for k in EVALUATED[2:6])
    if not len({row for row, _, _ in counts}) == len(counts) == given["prompts"] > 0 or verdicts != total:
        raise ValueError(f"{where}: {given['prompts']} prompts and {verdicts} verdicts, but per_prompt has "
                         f"{len(counts)} rows and {total} responses")
    if abs(statistics.fmean(c / n for _, n, c in counts) - given["pass@1"]) > 1e-6:
        raise ValueError(f"{where}: pass@1 {given['pass@1']} is not the mean of c / n in per_prompt")
    return {k: given.get(k) for k in (*names, "decoding_noise", "subset_sha256")}, counts

def check_checkpoint(folder, steps):
    """`latest` names the last step and its files are whole (checkpoint.py) -> SHA-256 of the weights."""
    from checkpoint import verify
    latest = (folder / "latest").read_text(encoding="utf-8").strip()
    problems = verify(folder / latest) if latest == f"step_{steps:06d}" else [f"not that of step {steps}"]
    if problems:
        raise ValueError(f"checkpoint {latest[:40]}: {'; '.join(problems)}")
    manifest = json.loads((folder / latest / "manifest.json").read_bytes())
    return manifest["files"]["model.safetensors"]["sha256"]

# ---- base tables as CSV text: from runs, or from the files of an earlier report
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
    rows = {name: [] for name in BASE}
    for folder in folders:
        tables, reason = judge(folder, checkpoints)
        for name in tables:
            rows[name] += tables[name]
        rows["rejected"] += [{"run": folder.resolve().name, "reason": reason}] if reason else []
    if not rows["runs"]:
        raise ValueError("no run is accepted; " + "; ".join(" ".join(r.values()) for r in rows["rejected"]))
    return {name: to_csv(name, rows[name]) for name in rows}

def to_csv(name, rows, digits=None):
    """Floats as shortest exact text, or with `digits` significant ones (sums can differ in the last bit)."""
    names, out = TABLES[name].split(), io.StringIO()
    passes = {k for row in rows for k in row if re.fullmatch(r"pass@\d+", k)}
    names[3:3] = sorted(passes, key=lambda k: int(k[5:]))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = (row.get(name) for name in names)
        writer.writerow([f"{x:.{digits}g}" if digits and type(x) is float else x for x in cells])
    return out.getvalue()

def from_csv(name, text):
    """CSV text -> rows by algorithm and seed; '' is None. ValueError names line and column of a bad cell."""
    rows = list(csv.DictReader(io.StringIO(text)))
    for line, row in enumerate(rows, 2):
        for column, cell in row.items():
            row[column] = cell or None
            if cell and NUMBER.fullmatch(column or ""):
                row[column] = parse_json(f'{{"": {cell}}}', f"{name}.csv line {line}, {column} {cell!r}")[""]
        row |= {column: None for column in TABLES[name].split() if column not in row}
        if name != "rejected" and (row.get("algo") not in ALGOS or type(row.get("seed")) is not int):
            raise ValueError(f"{name}.csv line {line}: needs an algo of {', '.join(ALGOS)} and a seed")
    order = {algo: i for i, algo in enumerate(ALGOS)}
    return sorted(rows, key=lambda row: (order[row["algo"]], row["seed"]) if "algo" in row else ())

# ---- statistics
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
    rng, values = np.random.default_rng(seed), np.asarray(differences, dtype=np.float64)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(axis=1)
    return np.percentile(means, [2.5, 97.5]).tolist()

class Data:
    """The base tables, indexed. per_run[algo, seed, part] = {metric: mean inside the run}; part: 'last10',
    'all' (training steps), 'initial', 'final' (evaluations). ValueError for runs that do not compare."""

    def __init__(self, texts):
        self.base = {name: from_csv(name, texts.get(name, "")) for name in BASE}
        self.refuse_unlike()
        self.steps, self.counts, self.per_run = {}, {}, {}
        for row in self.base["steps"]:
            responses = sum(row[name] for name in ("right", "wrong", "unparsed", "grader_errors"))
            row["truncation"] = row["truncated"] / max(responses, 1)
            self.steps.setdefault((row["algo"], row["seed"]), []).append(row)
        for key, rows in self.steps.items():
            for part, window in (("last10", rows[-10:]), ("all", rows)):
                self.per_run[(*key, part)] = {
                    metric: statistics.fmean(values) for metric in [*METRICS[1:], "truncation"]
                    if None not in (values := [row[metric] for row in window])}
        for row in self.base["per_prompt"]:
            counts = self.counts.setdefault((row["algo"], row["seed"], row["stage"]), {})
            counts[row["row"]] = row["n"], row["c"]
        for row in self.base["evaluations"]:
            if (key := (row["algo"], row["seed"], row["stage"])) in self.per_run:
                raise ValueError(f"evaluations.csv has two rows for {' '.join(map(str, key))}")
            self.per_run[key] = {
                metric: value for metric, value in row.items()
                if NUMBER.fullmatch(metric) and metric != "seed" and value is not None}
        self.n = {algo: len({s for a, s, _ in self.per_run if a == algo}) for algo in ALGOS}
        self.algos = [algo for algo in ALGOS if self.n[algo]]
        self.passes = [name for name in (self.base["evaluations"] or [{}])[0] if name.startswith("pass@")]

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
                    raise ValueError(f"not comparable: {name} {other} vs {mine}")

    def runs(self, algo, part):
        """{seed: means} of the runs of an algorithm that have this part."""
        return {s: means for (a, s, p), means in self.per_run.items() if (a, p) == (algo, part)}

    def aggregate(self):
        """Rows of algorithms.csv: mean and sd over runs of the means inside a run."""
        for algo, part in itertools.product(self.algos, ("last10", "all", "initial", "final")):
            runs = self.runs(algo, part).values()
            for metric in dict.fromkeys(metric for run in runs for metric in run):
                n, mean, sd, _, _ = spread([run[metric] for run in runs if metric in run])
                yield {"algo": algo, "part": part, "metric": metric, "n": n, "mean": mean, "sd": sd}

    def differences(self):
        """Rows of differences.csv, always paired: by seed with a t interval (steps pair one by one: the mean
        of their differences is the difference of the means), and by prompt with a bootstrap interval."""
        arms = [((b, part), (a, part)) for part in ("final", "all", "last10")
                for a, b in itertools.combinations(self.algos, 2)]
        for new, old in arms + [((a, "final"), (a, "initial")) for a in self.algos]:
            olds = self.runs(*old)
            pairs = {s: (run, olds[s]) for s, run in self.runs(*new).items() if s in olds}
            row = {"new": " ".join(new), "old": " ".join(old), "seeds": " ".join(map(str, pairs))}
            for metric in [m for m in next(iter(pairs.values()), [()])[0] if re.match(COMPARED, m)]:
                values = [x[metric] - y[metric] for x, y in pairs.values()]
                row |= {"metric": metric, "by_seed": " ".join(number(value, metric, "+") for value in values)}
                yield with_verdict(row, "seeds", *spread(values))
                if metric.startswith("pass@") and self.counts:
                    values = self.per_prompt(new, old, pairs, int(metric[5:]))
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
    row = row | {"method": method, "n": n, "mean": mean, "sd": sd, "low": low, "high": high}
    return row | {"verdict": "differs" if n > 1 and not low <= 0 <= high else "not resolved at this n"}

# ---- figures, pages, files
def draw_curves(axes, data, metric, unit):
    """Thin line: one run; bold line: mean over runs; band: mean -+ sample sd, for two runs or more."""
    import numpy as np
    axes.set(xlabel="step (one rollout and its update)", ylabel=unit)
    for algo, (label, colour, _) in ALGOS.items():
        curves = [[row[metric] for row in rows] for key, rows in data.steps.items() if key[0] == algo]
        curves = np.array([curve for curve in curves if None not in curve])
        if len(curves):
            mean, sd = curves.mean(0), curves.std(0, ddof=1) if len(curves) > 1 else 0
            axes.plot(curves.T, color=colour, linewidth=0.7, alpha=0.4)
            axes.plot(mean, color=colour, linewidth=2.2, label=f"{label} (n = {len(curves)})")
            axes.fill_between(range(len(mean)), mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0)

def draw_evaluation(axes, data):
    """Dot: one run; bar: mean over runs; whisker: mean -+ sample sd. Hollow: before training."""
    metrics = [*data.passes, "truncation"]
    arms = [(algo, stage) for algo in data.algos for stage in ("initial", "final") if data.runs(algo, stage)]
    for (i, (algo, stage)), (x, metric) in itertools.product(enumerate(arms), enumerate(metrics)):
        values = [run[metric] for run in data.runs(algo, stage).values()]
        (label, colour, _), (n, mean, sd, _, _) = ALGOS[algo], spread(values)
        at = x + 0.8 * ((i + 0.5) / len(arms) - 0.5)
        axes.plot([at] * n, values, "o", color=colour, fillstyle="full" if stage == "final" else "none",
                  label=None if x else f"{label}, {stage} (n = {n})")
        axes.errorbar(at + 0.04, mean, sd, fmt="_", color=colour, markersize=9, markeredgewidth=2, capsize=3)
    axes.set(xticks=range(len(metrics)), xticklabels=metrics, ylabel="fraction of responses or prompts")

def figures(data):
    """-> {file: SVG text}; no date, no version and fixed ids, so that equal data give equal text."""
    import matplotlib
    from matplotlib.figure import Figure
    out, panels = {}, FIGURES if data.steps else {}
    panels = panels | ({"evaluation": {"": ""}} if data.base["evaluations"] else {})
    with matplotlib.rc_context(STYLE):
        for name in panels:
            figure, text = Figure(figsize=(9.6, 3.6), layout="constrained"), io.StringIO()
            for i, (metric, unit) in enumerate(panels[name].items(), 1):
                axes = figure.add_subplot(1, len(panels[name]), i)
                draw_curves(axes, data, metric, unit) if metric else draw_evaluation(axes, data)
            figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            out[f"{name}.svg"] = text.getvalue()
    return out

def escape(value):
    """Text of runs for Markdown and HTML alike: what either reads as markup becomes character references."""
    return re.sub(r"[^\w .,:;=+/@%()±²-]|__+", lambda m: "".join(f"&#{ord(c)};" for c in m[0]), str(value))

def number(value, metric="", sign=""):
    """1 decimal for lengths, counts, rates and times, 6 for losses and k2, 4 for all others; n/a for None."""
    digits = 1 if re.match("mean_len|response_|t_|peak|unp|err", metric) else 4
    digits = 6 if re.match("pg_|kl|ref_k2|ret", metric) else digits
    return "n/a" if value is None else re.sub(r"^[-+](0\.0*)$", r"\1", f"{value:{sign}.{digits}f}")

def build(texts):
    """{base table: CSV text} -> {file: bytes} of a report; depends on its argument and on versions only."""
    import jinja2
    import markdown
    import matplotlib
    data, here = Data(texts), Path(__file__).parent
    tables = data.base | {"algorithms": [*data.aggregate()], "differences": [*data.differences()]}
    tables["run_means"] = [{"algo": algo, "seed": seed, "part": part, "metric": metric, "mean": float(mean)}
                           for (algo, seed, part), of in data.per_run.items() for metric, mean in of.items()]
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
        reasons = [judge(run, not cfg.no_checkpoints)[1] for run in runs]
        for run, reason in zip(runs, reasons, strict=True):
            print(f"{run}: " + (f"rejected: {reason}" if reason else "accepted"))
        return int(any(reasons))
    tables = {name: paths[0] / f"{name}.csv" for name in BASE if (paths[0] / f"{name}.csv").exists()}
    if tables and len(paths) > 1:
        raise ValueError(f"{paths[0]}: a folder of CSV files does not mix with other inputs")
    files = build({name: path.read_bytes().decode() for name, path in tables.items()}
                  or tables_from_runs(runs, not cfg.no_checkpoints))
    out = paths[0] if cfg.check else Path(cfg.out)
    if cfg.check:
        stale = [n for n in files if not (out / n).exists() or (out / n).read_bytes() != files[n]]
        print("\n".join(f"differs: {name}" for name in stale) or "the CSV files give the same bytes")
        return int(bool(stale))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    print(f"{len(files)} files in {out}; open report.html")
    return 0

if __name__ == "__main__":
    with cli.user_errors():
        raise SystemExit(main(cli.parse(Config, __doc__)))

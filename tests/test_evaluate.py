"""Evaluation: pass@k against enumeration, every response in the denominator, every prompt once whatever the
number of processes, results equal byte for byte, and a killed evaluation that goes on."""

import itertools
import json
import math
import os
import re
import signal
import time
from pathlib import Path

import pytest
import small
import torch

import cli
import evaluate
import reward
from evaluate import pass_at_k, summarize


# ------------------------------------------------------------------------------------------------------ pass@k
@pytest.mark.parametrize("n, c, k, value", [
    (4, 1, 4, 1.0), (8, 3, 4, 0.928571), (200, 1, 1, 0.005), (2, 0, 1, 0.0), (3, 3, 2, 1.0), (4, 2, 1, 0.5),
    (1000, 1, 1000, 1.0), (10000, 5, 2, 1 - 9995 * 9994 / (10000 * 9999))])
def test_known_values(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-6)


def test_against_enumeration():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations(range(n), k))
            hits = sum(any(i < c for i in draw) for draw in draws)
            assert pass_at_k(n, c, k) == pytest.approx(hits / len(draws), abs=1e-12)


@pytest.mark.parametrize("n, c, k", [(2, 0, 5), (2, 1, 3), (2, 0, 0), (2, 3, 1), (2, -1, 1), (0, 0, 1)])
def test_more_draws_than_samples_are_refused(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


# ----------------------------------------------------------------------------------------------------- summary
def records(verdicts, samples, finish=(), length=7):
    """Records of len(verdicts) / samples rows; `finish`: indices that hit the cap."""
    return [{"row": 10 * (i // samples), "sample": i % samples, "verdict": v, "length": length + i,
             "finish": "length" if i in finish else "stop"} for i, v in enumerate(verdicts)]


def test_errors_and_unparsed_answers_stay_in_the_denominator():
    found = summarize(records(["right"] * 6 + ["wrong"] * 2 + ["error", "timeout"], 2), 2)
    assert found["pass@1"] == 0.6 and (found["right"], found["wrong"], found["errors"]) == (6, 2, 2)
    assert "grader errors 2/10" in evaluate.table(found)
    found = summarize(records(["right", "unparsed", "unparsed", "wrong"], 2), 2)
    assert found["pass@1"] == 0.25 and found["unparsed"] == 2 and found["errors"] == 0


def test_truncation_is_in_the_same_table_and_a_truncated_right_one_counts():
    found = summarize(records(["right", "wrong"] + ["wrong"] * 6, 4, finish=(0, 3, 5)), 4)
    assert found["truncation"] == 0.375 and found["pass@1"] == 0.125 and found["pass@4"] == 0.5
    assert "truncated 37.5%" in evaluate.table(found) and "pass@1 0.1250" in evaluate.table(found)
    assert found["mean_length"] == 10.5


def test_pass_at_k_is_a_mean_over_prompts():
    verdicts = ["right"] * 1 + ["wrong"] * 3 + ["right"] * 4 + ["wrong"] * 4
    found = summarize(records(verdicts, 4), 4)
    assert found["pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert found["pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3) and "pass@3" not in found
    assert found["per_prompt"] == [[0, 4, 1], [10, 4, 4], [20, 4, 0]] and found["prompts"] == 3
    assert set(summarize(records(verdicts, 4), 4, k_list=(3,))) >= {"pass@3", "pass@1_ci95"}


def test_interval_and_decoding_noise():
    verdicts = ["right", "wrong", "wrong"] + ["right", "right", "wrong"] + ["right"] * 3 + ["wrong"] * 3
    found, p = summarize(records(verdicts, 3), 3), [1 / 3, 2 / 3, 1.0, 0.0]
    sd = math.sqrt(sum((x - 0.5) ** 2 for x in p) / 3)
    assert found["pass@1_ci95"] == pytest.approx([0.5 - 1.959964 * sd / 2, 0.5 + 1.959964 * sd / 2])
    unbiased = [3 / 2 * x * (1 - x) for x in p]         # E[p(1-p)] from 3 draws
    assert found["decoding_noise"] == pytest.approx(math.sqrt(sum(unbiased) / 4 / (3 * 4)))
    one = summarize(records(["right", "wrong"], 1), 1)
    assert one["decoding_noise"] is None and "decoding noise n/a" in evaluate.table(one)
    low, high = summarize(records(["right", "wrong"], 1), 1)["pass@1_ci95"]
    assert low == 0.0 and high == 1.0, "clipped to [0, 1]"


def test_a_missing_response_is_an_error():
    with pytest.raises(ValueError, match="3 records"):
        summarize(records(["right"] * 3, 2), 2)


# ------------------------------------------------------------------------------------------------------ a model
@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = small.make_folder(tmp_path_factory.mktemp("small"))
    small.write_problems(folder / "test.jsonl", 11, start=40)
    return folder


@pytest.fixture(scope="module")
def processes():
    with small.Processes() as helper:
        yield helper


def words(home, out, **changes):
    return small.argv({"model": str(home / "model"), "data": str(home / "test.jsonl"), "reward": small.REWARD,
                       "reward_workers": 1, "rows": 9, "samples": 3, "max_new_tokens": 8, "slots": 5,
                       "out": str(out), **changes})


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("responses.jsonl", "summary.json", "settings.json")}


CHUNK = "evaluate.CHUNK = 2"        # several meetings of the ranks in 9 rows


@pytest.fixture(scope="module")
def finished(home, processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert processes.run(folder / "log", "evaluate", words(home, folder / "out"), patch=CHUNK) == [0]
    return folder / "out"


def test_what_is_written(home, finished):
    found = [json.loads(line) for line in (finished / "responses.jsonl").read_text().splitlines()]
    summary = json.loads((finished / "summary.json").read_text())
    assert len(found) == 27 == 3 * summary["prompts"] and len({(r["row"], r["sample"]) for r in found}) == 27
    assert [(r["row"], r["sample"]) for r in found] == sorted((r["row"], r["sample"]) for r in found)
    assert all(set(r) == {"row", "sample", "text", "reward", "verdict", "finish", "length"} for r in found)
    assert {r["finish"] for r in found} == {"stop", "length"} and {r["reward"] for r in found} == {0.0, 1.0}
    assert summary["pass@1"] == pytest.approx(sum(r["reward"] for r in found) / 27) and "pass@2" in summary
    assert summary["seed"] == 29 and summary["settings"]["model"] == "model"
    assert {r["row"] for r in found} == {row for row, *_ in summary["per_prompt"]} < set(range(11))
    rows = evaluate.data.subset_rows(11, 9, 29)
    problems = [json.loads(line) for line in (home / "test.jsonl").read_text().splitlines()]
    import hashlib
    lines = [json.dumps([row, problems[row]["question"], problems[row]["answer"]], ensure_ascii=False) + "\n"
             for row in rows]
    assert summary["subset_sha256"] == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert not re.search(rb"NaN|Infinity", (finished / "summary.json").read_bytes())


@pytest.mark.parametrize("world, patch", [(1, ""), (2, CHUNK), (3, "")])
def test_any_number_of_processes_writes_the_same_bytes(home, processes, finished, tmp_path, world, patch):
    """Nine rows divide by 3 and not by 2; in chunks of 2, 5 ranks' worth is left over, and a rank is without a row."""
    assert processes.run(tmp_path / "log", "evaluate", words(home, tmp_path / "out"), world, patch) == [0] * world
    assert files(tmp_path / "out") == files(finished)
    said = (tmp_path / "log0").read_text()
    assert "9 prompts x 3 samples" in said and said.count("pass@1 95 %") == 1


def test_a_rank_without_a_prompt(home, processes, tmp_path):
    for world in (1, 3):
        assert processes.run(tmp_path / "log", "evaluate", words(home, tmp_path / str(world), rows=2),
                             world) == [0] * world
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_killed_evaluations_go_on(home, processes, finished, tmp_path):
    """kill -9 after the first rows, again after some more: the same command ends with the same bytes, and rows that
    were there are not run again."""
    out, log = tmp_path / "out", tmp_path / "log"
    slow = CHUNK + """
import time
real = evaluate.write_rows
def write_rows(path, rows, mode="w"):
    real(path, rows, mode)
    time.sleep(0.5 if mode == "a" else 0)
evaluate.write_rows = write_rows
"""
    for rows in (2, 6):
        pid = processes.start(log, "evaluate", words(home, out), patch=slow)
        deadline = time.monotonic() + 60
        path = out / "responses.jsonl"
        while not (path.exists() and path.read_bytes().count(b"\n") >= 3 * rows):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        assert processes.wait(pid) == -signal.SIGKILL
        assert path.read_bytes().count(b"\n") < 27
    with open(out / "responses.jsonl", "a") as file:           # as a kill inside a write leaves it
        file.write('{"row": 3, "sample": 1, "te')
    assert processes.run(log, "evaluate", words(home, out), 2, CHUNK) == [0, 0]
    assert files(out) == files(finished)
    assert re.search(r"(18|24) responses from before", Path(f"{log}0").read_text())


def test_a_row_with_a_lost_sample_is_run_again(home, processes, finished, tmp_path):
    out = small.copy(finished, tmp_path / "out")
    (out / "summary.json").unlink()
    lines = (out / "responses.jsonl").read_bytes().splitlines(keepends=True)
    (out / "responses.jsonl").write_bytes(b"".join(lines[:4] + lines[5:]))
    assert processes.run(tmp_path / "log", "evaluate", words(home, out)) == [0]
    assert files(out) == files(finished) and "24 responses from before" in (tmp_path / "log0").read_text()


def test_print_only(home, processes, tmp_path):
    assert processes.run(tmp_path / "log", "evaluate", [w for w in words(home, "x") if w not in ("--out", "x")]) == [0]
    assert "pass@1" in (tmp_path / "log0").read_text()


# -------------------------------------------------------------------------------------------- in this process
@pytest.fixture(autouse=True)
def quick(monkeypatch):
    threads, real = torch.get_num_threads(), reward.Grader
    torch.set_num_threads(1)
    monkeypatch.setattr(reward, "Grader", lambda spec, *rest, **named: (
        small.Grader() if spec == small.REWARD else real(spec, *rest, **named)))
    yield
    torch.set_num_threads(threads)


def run(home, out, **changes):
    evaluate.main(cli.parse(evaluate.Config, "", words(home, out, **changes)))
    return json.loads((out / "summary.json").read_text())


def test_greedy_twice_and_every_option_of_decoding(home, tmp_path):
    base = run(home, tmp_path / "base")
    assert run(home, tmp_path / "again") == base
    greedy = run(home, tmp_path / "greedy", temperature=0.0)
    texts = [json.loads(line) for line in (tmp_path / "greedy/responses.jsonl").read_text().splitlines()]
    assert all(len({r["text"] for r in texts if r["row"] == row}) == 1 for row in {r["row"] for r in texts})
    assert greedy["decoding_noise"] == 0
    seen = {json.dumps(base["per_prompt"])}
    for number, changes in enumerate((dict(seed=30), dict(top_k=2), dict(top_p=0.5), dict(temperature=0.5),
                                      dict(max_new_tokens=3), dict(thinking=False))):
        run(home, tmp_path / str(number), **changes)
        seen.add((tmp_path / str(number) / "responses.jsonl").read_text())
    assert len(seen) == 7, "an option changed nothing"
    assert len(run(home, tmp_path / "all", rows=0)["per_prompt"]) == 11
    assert set(run(home, tmp_path / "k", k=(3,))) >= {"pass@3"}
    for number, changes in enumerate((dict(slots=2), dict(dtype="float32"))):
        same = run(home, tmp_path / f"m{number}", **changes)
        assert same["per_prompt"] == base["per_prompt"]


def test_own_rewards_read_their_own_labels(home, tmp_path):
    (tmp_path / "words.jsonl").write_text('{"question": "Capital of France?", "answer": "Paris"}\n')
    assert run(home, tmp_path / "out", data=str(tmp_path / "words.jsonl"), rows=1)["prompts"] == 1


def refused(home, capsys, out, **changes):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(home, out, **changes)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said, said
    return said


@pytest.mark.parametrize("changes, expected", [
    (dict(samples=0), "--samples 0"), (dict(k=(4,)), "--k 4"), (dict(k=(1, 0)), "--k 1 0"), (dict(rows=-1), "--rows -1"),
    (dict(rows=12), "--rows 12"), (dict(seed=-1), "--seed -1"), (dict(max_new_tokens=0), "--max-new-tokens 0"),
    (dict(temperature=-1.0), "temperature"), (dict(top_p=0.0), "top_p"), (dict(top_k=-1), "top_k"),
    (dict(slots=0), "--slots 0"), (dict(timeout_minutes=0.0), "--timeout-minutes"), (dict(data="no.jsonl"), "no.jsonl"),
    (dict(answer_key="answers"), "'answers'"), (dict(model="no_model"), "no_model"),
    (dict(reward="no.py:f"), "no.py"), (dict(reward_workers=0), "--reward-workers 0"), (dict(dtype="float16"), "float16"),
    (dict(device="tpu"), "tpu")])
def test_wrong_use_is_one_line_and_status_2(home, tmp_path, capsys, monkeypatch, changes, expected):
    monkeypatch.setattr(evaluate, "load_model", lambda *_, **__: pytest.fail("the weights were loaded first"))
    assert expected in refused(home, capsys, tmp_path / "out", **changes)


def test_a_prompt_longer_than_the_context_is_refused(home, tmp_path, capsys):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "word " * 200, "answer": "1"}) + "\n")
    said = refused(home, capsys, tmp_path / "out", data=str(tmp_path / "long.jsonl"), rows=1)
    assert "row 0" in said and "context is 96" in said


def test_a_folder_with_something_else_is_refused(home, finished, tmp_path, capsys):
    out = small.copy(finished, tmp_path / "out")
    said = refused(home, capsys, out, max_new_tokens=9, samples=2)
    assert "max_new_tokens" in said and "samples" in said and files(out) == files(finished)
    other = tmp_path / "run"
    other.mkdir()
    (other / "summary.json").write_text("{}")
    assert "is not empty" in refused(home, capsys, other) and (other / "summary.json").read_text() == "{}"
    (out / "settings.json").write_text("{")
    assert "settings.json" in refused(home, capsys, out)
    changed = small.copy(home, tmp_path / "home")
    from model import load_model, save_model
    model = load_model(changed / "model")
    model.model.norm.weight.data[0] += 1
    save_model(model, changed / "model")
    assert "weights_sha256" in refused(changed, capsys, small.copy(finished, tmp_path / "out2"))

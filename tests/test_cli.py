"""Command lines: every script's options from one dataclass, a mistake is one line that names it and status 2."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

import bench
import cli
import evaluate
import report
import reward
import sample
import train

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass
class Config:
    lr: float = 1e-4            # the step
    kl_coef: float | None = None
    algo: Literal["one", "two"] = "one"
    samples_per_prompt: int = 8
    thinking: bool = True
    no_kl: bool = False
    seeds: tuple[int, ...] = (1,)
    out: str = ""


def parse(*words):
    return cli.parse(Config, "A script.", words)


def refused(capsys, *words, config=Config):
    with pytest.raises(SystemExit) as stop:
        cli.parse(config, "A script.", words)
    said = capsys.readouterr()
    assert stop.value.code == 2 and not said.out
    assert said.err.count("\n") == 1 and said.err.endswith("\n") and ": error: " in said.err
    return said.err


# ----------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("text", ["1e-6", "2e-5", "1.0e-6", "1E-6", "0.000001", "3"])
def test_numbers_are_numbers(text):
    assert parse("--lr", text).lr == float(text) and type(parse("--lr", text).lr) is float
    assert parse(f"--kl-coef={text}").kl_coef == float(text)


def test_forms():
    assert parse() == Config()
    assert parse("--no-thinking", "--no-kl", "--out", "a b").thinking is False
    assert parse("--samples_per_prompt", "4").samples_per_prompt == 4          # underscores too
    assert parse("--seeds", "3", "4", "--algo", "two") == Config(seeds=(3, 4), algo="two")
    assert parse("--lr", "-1").lr == -1 and parse("--out", "").out == ""


# --------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize("words, suggestion", [
    (["--learing-rate", "1e-6"], "--lr"), (["--learning_rate=1e-6"], "--lr"), (["--kl", "0.1"], "--kl-coef"),
    (["--kl-coeff", "0.1"], "--kl-coef"), (["--samples", "3"], "--samples-per-prompt"),
    (["--sample-per-promt", "3"], "--samples-per-prompt"), (["--no-thinkin"], "--no-thinking"), (["--alg", "one"], "--algo"),
    (["--lr", "1", "--ot", "x"], "--out")])
def test_a_misspelt_option_is_refused_with_the_nearest(capsys, words, suggestion):
    said = refused(capsys, *words)
    assert f"did you mean {suggestion}?" in said and next(w for w in words[::-1] if w[:2] == "--").split("=")[0] in said


def test_unlike_anything(capsys):
    assert "--zzzzqq" in refused(capsys, "--zzzzqq") and "did you mean" not in refused(capsys, "--zzzzqq")


@pytest.mark.parametrize("words, expected", [
    (["--lr", "abc"], ["--lr", "'abc'"]), (["--lr", "1e-6x"], ["--lr", "'1e-6x'"]), (["--lr"], ["--lr"]),
    (["--samples-per-prompt", "1e3"], ["--samples-per-prompt", "'1e3'"]),
    (["--samples-per-prompt", "2.5"], ["--samples-per-prompt", "'2.5'"]),
    (["--algo", "three"], ["--algo", "'three'", "'one'", "'two'"]), (["--seeds", "x"], ["--seeds", "'x'"]),
    (["stray"], ["stray"]), (["--no-kl", "yes"], ["yes"]), (["--lr", "1", "2"], ["2"]), (["--x\ny"], ["--x y"])])
def test_a_wrong_value_is_named(capsys, words, expected):
    said = refused(capsys, *words)
    assert all(word in said for word in expected), said
    assert "did you mean" not in said or words[0] not in ("--lr", "--samples-per-prompt")


@pytest.mark.parametrize("script", [train, evaluate, sample, reward, bench, report])
def test_every_script_explains_its_options(capsys, script):
    config = getattr(script, "Config", None) or script.Options
    with pytest.raises(SystemExit) as stop:
        cli.parse(config, script.__doc__, ["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    for field in dataclasses.fields(config):
        if field.name not in ("what", "paths", "file", "questions"):            # by position
            assert "-" + field.name.replace("_", "-") in said, field.name
    assert script.__doc__.split()[0] in said


def test_every_option_of_training_has_its_line_of_help(capsys):
    with pytest.raises(SystemExit):
        cli.parse(train.Config, "", ["--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "PPO clip of the ratio" in said and "(default: 0.2)" in said


# ------------------------------------------------------------------------------------------------- user errors
def test_user_errors_are_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py"])
    for error in (ValueError("a\nb   c"), FileNotFoundError(2, "No such file", "x.jsonl"), OSError("disk")):
        with pytest.raises(SystemExit) as stop, cli.user_errors():
            raise error
        assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "train.py: error: a b c", "train.py: error: [Errno 2] No such file: 'x.jsonl'", "train.py: error: disk"]


def test_only_the_first_process_of_a_machine_speaks(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        cli.fail("x")
    assert stop.value.code == 2 and not capsys.readouterr().err


def test_other_errors_and_tracebacks_on_demand(monkeypatch):
    with pytest.raises(KeyError), cli.user_errors():
        raise KeyError("a mistake of the program's")
    monkeypatch.setenv("NANORPP_TRACEBACK", "1")
    with pytest.raises(ValueError, match="x"), cli.user_errors():
        raise ValueError("x")


def test_from_the_shell():
    done = subprocess.run([sys.executable, "reward.py", "no_such_file.jsonl"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert done.stderr.startswith("reward.py: error: ") and "no_such_file.jsonl" in done.stderr

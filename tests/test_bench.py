"""bench.py: what it writes, how it takes turns and medians, and its count of FLOPs."""

import json

import pytest
import torch

import bench


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """It takes longer than all else here, since every library of the suite is loaded."""
    monkeypatch.setattr(bench.gc, "collect", lambda: None)


def test_flops_against_a_count_of_every_matrix():
    """2 per weight of every matrix product of one token, the head with the tied embedding's weights."""
    shape = dict(zip(bench.NAMES, (97, 12, 20, 3, 4, 2, 5, 64), strict=True))
    q, k, v, o = 12 * 4 * 5, 12 * 2 * 5, 12 * 2 * 5, 4 * 5 * 12
    body = 2 * 3 * (q + k + v + o + 3 * 12 * 20)
    assert bench.matmul_flops(shape, with_head=False) == body == 8640
    assert bench.matmul_flops(shape) == body + 2 * 97 * 12


def test_turns_alternate_and_the_ratio_is_the_median_of_pairs(monkeypatch):
    """A scripted clock: the warm-up and one slow pair move neither the medians nor the ratio."""
    seconds = {"ours": [90, 1, 2, 40, 3, 2], "peer": [1, 3, 2, 200, 6, 10]}        # the first: warm-up
    calls, now = [], [0.0]

    def call(name):
        calls.append(name)
        now[0] += seconds[name][(len(calls) - 1) // 2]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    ours, peer, ratio = bench.medians(
        bench.turns((lambda: call("ours"), lambda: call("peer")), 5, torch.device("cpu")))
    assert calls == ["ours", "peer"] * 6
    assert (ours, peer, ratio) == (2, 6, 3)         # pairs: 3, 1, 5, 2, 5; medians of all: 6 / 2 = 3


def test_median_of_ratios_is_not_the_ratio_of_medians(monkeypatch):
    seconds, now = iter([5, 5, 1, 10, 2, 2, 4, 4]), [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += next(seconds)
    assert bench.medians(bench.turns((call, call), 3, torch.device("cpu"))) == (2, 4, 1)    # pairs 10, 1, 1


@pytest.mark.parametrize("what", ["sampler", "learner"])
def test_the_file_has_name_ours_peer_ratio_of_every_case(tmp_path, monkeypatch, what):
    """The whole path on a model so small that it takes no time."""
    monkeypatch.setitem(bench.SIZES, "tiny", bench.SIZES["tiny"] | {"num_hidden_layers": 1, "hidden_size": 16,
                                                                   "intermediate_size": 8, "head_dim": 4})
    monkeypatch.setattr(bench, "limits", lambda device, dtype: (1e9, 1e9))
    monkeypatch.setattr(bench, "refill_case", lambda b: None)
    out = tmp_path / "figures.json"
    bench.main(bench.Config(what, device="cpu", repeats=1, only="tiny", json=str(out)))
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["what"], written["device"]) == (what, "cpu")
    names = {"sampler": ["prefill 32", "whole 32 x 30 + 60", "decode 32 x 30 + 60", "prefill 4 x 8 shared"],
             "learner": ["fwd+bwd equal", "fwd+bwd ragged"]}[what]
    assert len(written["cases"]) == len(names)
    for case, name in zip(written["cases"], names, strict=True):
        assert case["name"].startswith(f"tiny {name}") and case["ours"] > 0 and case["peer"] > 0
        rate = case["ours"] / case["peer"] if case["unit"] == "tok/s" else case["ratio"]     # ms: two pairs
        assert case["ratio"] == pytest.approx(rate) and case["ratio"] > 0


def test_decode_is_what_the_tokens_after_the_first_add(monkeypatch):
    """For both sides: 60 tokens in 7 s and one in 1 s are 59 in 6 s; the peer's 25 s and 7 s make 18."""
    cases = []
    monkeypatch.setattr(bench, "limits", lambda device, dtype: (1e9, 1e9))
    b = bench.Bench("tiny", bench.Config("sampler", repeats=3), torch.device("cpu"), cases)
    monkeypatch.setattr(bench, "turns", lambda functions, *_: [[1, 7, 7, 25]] * 3)
    monkeypatch.setattr(bench, "refill_case", lambda b: None)
    bench.bench_sampler(b)
    decode, = (case for case in cases if "decode" in case["name"])
    assert [case["name"].split()[1] for case in cases] == ["prefill", "whole", "decode", "prefill"]
    assert (decode["ours"], decode["peer"], decode["ratio"]) == (32 * 59 / 6, 32 * 59 / 18, 3)
    assert decode["ms_per_step"] == pytest.approx(6000 / 59)
    cases.clear()
    b.size = "0.6B"         # two lengths, one prefill
    monkeypatch.setattr(bench, "turns", lambda functions, *_: [[1, 7, 5, 17, 9, 71]] * 3)
    monkeypatch.setattr(bench, "peak_mib", lambda device, f: 1.0)
    bench.bench_sampler(b)
    assert [case["ratio"] for case in cases[:-1]] == [7, 17 / 5, 10 / 4, 71 / 9, 64 / 8]


def test_both_models_hold_the_same_weights(monkeypatch):
    monkeypatch.setattr(bench, "limits", lambda device, dtype: (1e9, 1e9))
    b = bench.Bench("tiny", bench.Config("learner"), torch.device("cpu"), [])
    ids = bench.random_ids(1, 11, 512)[0]
    with torch.no_grad():
        theirs = b.peer(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(b.ours.logits(ids), theirs, atol=1e-4, rtol=1e-4)


def test_repeats_are_checked(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(bench.Config("learner", repeats=0))
    assert stop.value.code == 2 and "--repeats 0: at least 1" in capsys.readouterr().err

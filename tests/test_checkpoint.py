"""Checkpoints: complete or absent under kill -9 and full disks, damage found, resume exact, folders that
transformers loads."""

import datetime
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import checkpoint
from checkpoint import latest_complete, load, save, verify
from model import ModelConfig, Qwen3, load_model, pack

RAW = {"model_type": "qwen3", "vocab_size": 23, "hidden_size": 14, "intermediate_size": 19,
       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
       "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": True,
       "hidden_act": "silu"}


def build(seed=0, tied=True, **changes):
    model = Qwen3(ModelConfig.from_dict({**RAW, "tie_word_embeddings": tied, **changes})).init_weights(seed)
    return model, adamw(model)


def groups_of(model):
    return [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]


def adamw(model):
    return torch.optim.AdamW(groups_of(model), lr=3e-3, betas=(0.9, 0.98), eps=1e-8)


def train(model, optimizer, steps):
    """Real gradients: log-probs of two responses that depend on the step."""
    for step in steps:
        batch = pack([[1, 2, 3], [4 + step, 5]], [0, 1, 1], [[7, 8 + step], [9], [10, 11, 12, step]])
        logp, _ = model(batch)
        (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def fingerprint(model, optimizer):
    """Every bit of weights and optimizer state."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        named |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return {name: (t.dtype, t.numpy().tobytes()) for name, t in named.items()}


def flip(path, offset=-3):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def names(run):
    return sorted(p.name for p in run.iterdir())


# ------------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("tied", [True, False])
def test_resume_is_bitwise(tmp_path, tied):
    through, optimizer = build(tied=tied)
    train(through, optimizer, range(6))
    first, optimizer_1 = build(tied=tied)
    train(first, optimizer_1, range(3))
    state = {"next_step": 3, "initial": {"pass@1": 0.1 + 0.2, "per_prompt": [[5, 4, 1]]}, "seconds": 1e-17}
    folder = save(tmp_path, 3, first, optimizer_1, state)
    second, optimizer_2 = build(seed=5, tied=tied)
    train(second, optimizer_2, range(2))                                       # stale state must vanish
    kept = [p.data_ptr() for p in second.parameters()]
    assert load(folder, second, optimizer_2) == state
    assert kept == [p.data_ptr() for p in second.parameters()]         # in place: DDP and sampler hold them
    assert fingerprint(second, optimizer_2) == fingerprint(first, optimizer_1)
    train(second, optimizer_2, range(3, 6))
    assert fingerprint(second, optimizer_2) == fingerprint(through, optimizer)


def test_group_options_return(tmp_path):
    model, optimizer = build()
    optimizer.param_groups[1].update(lr=0.1 + 0.2, betas=(0.5, 0.75), eps=1e-5)
    folder = save(tmp_path, 1, model, optimizer, {})
    other, fresh = build(seed=1)
    load(folder, other, fresh)
    group = fresh.param_groups[1]
    assert (group["lr"], tuple(group["betas"]), group["eps"]) == (0.1 + 0.2, (0.5, 0.75), 1e-5)
    assert group["weight_decay"] == 0.0
    assert fresh.param_groups[0]["lr"] == 3e-3 and fresh.param_groups[0]["weight_decay"] == 0.1


def test_save_at_step_zero_of_a_tied_model(tmp_path):
    """Before any update (no optimizer state), and a tied head is written once."""
    model, optimizer = build()
    folder = save(tmp_path, 0, model, optimizer, {"next_step": 0})
    assert folder.name == "step_000000" and (tmp_path / "latest").read_text() == "step_000000\n"
    written = checkpoint.read_tensors(folder / "model.safetensors")
    assert set(written) == {name for name, _ in model.named_parameters()} and "lm_head.weight" not in written
    again, optimizer_2 = build(seed=3)
    load(folder, again, optimizer_2)
    assert again.head_weight is again.model.embed_tokens.weight and not optimizer_2.state
    train(model, optimizer, range(2))
    train(again, optimizer_2, range(2))
    assert fingerprint(model, optimizer) == fingerprint(again, optimizer_2)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_folder_bit_for_bit(tmp_path, tied):
    from transformers import AutoModelForCausalLM
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
                 "trainer_state.json", "manifest.json", "model.safetensors.index.json"):
        (source / name).write_text("{}" if name != "tokenizer.json" else '{"x": 1}')
    model, optimizer = build(seed=2, tied=tied)
    train(model, optimizer, range(1))
    folder = save(tmp_path / "run", 7, model, optimizer, {"a": 1}, source=source)
    assert (folder / "tokenizer.json").read_text() == '{"x": 1}' and (folder / "chat_template.jinja").exists()
    assert not (folder / "model.safetensors.index.json").exists()
    (folder / "generation_config.json").unlink()
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float32 and theirs.config.tie_word_embeddings == tied
    ours, loaded = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == loaded.keys() and all(torch.equal(ours[name], loaded[name]) for name in ours)
    ids = [3, 1, 4, 1, 5]
    torch.testing.assert_close(theirs(torch.tensor([ids])).logits[0], model.logits(ids), atol=1e-5, rtol=1e-5)
    assert load_model(folder).config.rope_theta == 1e4


# -------------------------------------------------------------------------------------------------- rotation
def test_keep_one_leaves_the_last(tmp_path):
    """The last one stays, the older ones go."""
    model, optimizer = build()
    for step in (10, 20, 30):
        folder = save(tmp_path, step, model, optimizer, {"next_step": step}, keep=1)
        assert names(tmp_path) == ["latest", f"step_{step:06d}"] and verify(folder) == []
    assert latest_complete(tmp_path) == (tmp_path / "step_000030", [])


def test_keep_counts_complete_ones_only(tmp_path):
    model, optimizer = build()
    for step in (10, 20, 30, 40):
        save(tmp_path, step, model, optimizer, {})                              # keep=0: all stay
    assert len(names(tmp_path)) == 5
    truncate(tmp_path / "step_000040" / "model.safetensors")
    save(tmp_path, 50, model, optimizer, {}, keep=2)                        # 40 is broken and does not count
    assert names(tmp_path) == ["latest", "step_000030", "step_000040", "step_000050"]
    for keep in (3, 4, 9):                                                      # fewer than `keep`: none goes
        save(tmp_path, 60, model, optimizer, {}, keep=keep)
        assert len(names(tmp_path)) == 5
    save(tmp_path, 35, model, optimizer, {}, keep=1)                    # a rollback: newer ones are not older
    assert names(tmp_path) == ["latest", "step_000035", "step_000040", "step_000050", "step_000060"]


def test_save_over_an_existing_step(tmp_path):
    model, optimizer = build()
    save(tmp_path, 5, model, optimizer, {"n": 1})
    train(model, optimizer, range(1))
    folder = save(tmp_path, 5, model, optimizer, {"n": 2}, keep=1)
    assert names(tmp_path) == ["latest", "step_000005"] and load(folder, *build(seed=4)) == {"n": 2}


# ---------------------------------------------------------------------------------------------------- damage
@pytest.fixture
def two(tmp_path):
    """A run with complete checkpoints of steps 10 and 20."""
    model, optimizer = build()
    train(model, optimizer, range(1))
    for step in (10, 20):
        save(tmp_path, step, model, optimizer, {"next_step": step})
    return tmp_path


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
@pytest.mark.parametrize("harm", [truncate, flip, os.remove, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_found_and_skipped(two, name, harm):
    """Whatever happened to whichever file, the newest whole checkpoint is taken and the file named."""
    newest = two / "step_000020"
    if harm is flip and name == "manifest.json":        # a flipped digit of a digest
        text = (newest / name).read_text()
        at = text.index('"sha256": "') + 12
        (newest / name).write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1:])
    elif harm is truncate and name == "manifest.json":
        os.truncate(newest / name, (newest / name).stat().st_size - 2)         # the last byte is a line feed
    else:
        harm(newest / name)
    assert len(verify(newest)) == 1
    folder, notes = latest_complete(two)
    assert folder == two / "step_000010" and len(notes) == 1 and notes[0].startswith("step_000020 ")
    assert (name if name != "manifest.json" or harm is not flip else "SHA-256") in notes[0]
    model, optimizer = build(seed=9)
    before = fingerprint(model, optimizer)
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        load(newest, model, optimizer)
    assert fingerprint(model, optimizer) == before and load(folder, model, optimizer) == {"next_step": 10}


def test_nothing_whole_gives_none_and_says_why(two, tmp_path):
    for step in (10, 20):
        truncate(two / f"step_0000{step}" / "model.safetensors")
    folder, notes = latest_complete(two)
    assert folder is None and [n.split()[0] for n in notes] == ["step_000020", "step_000010"]
    assert latest_complete(tmp_path / "no such run") == (None, []) and not (tmp_path / "no such run").exists()
    (two / "step_000030.bak").mkdir()                   # such names are no candidates
    (two / "step_30").mkdir()
    assert len(latest_complete(two)[1]) == 2


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "..", "", "sub/file.txt", "link", "a\0b",
                                  "x" * 300])
def test_names_stay_inside_the_folder(two, name):
    folder = two / "step_000020"
    (two / "outside.txt").write_text("x")
    (folder / "sub").mkdir()
    (folder / "sub" / "file.txt").write_text("x")
    (folder / "link").symlink_to(two / "outside.txt")
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = checkpoint._sha256(two / "outside.txt")
    manifest["files"][name] = {"bytes": 1, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    problems = verify(folder)
    assert len(problems) == 1 and repr(name) in problems[0]
    assert latest_complete(two)[0].name == "step_000010"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": []}', '{"files": {"a": 1}}', "{",
                                  '{"files": {"a": {}}}', '{"files": {}}', "\x00\xff", '"files"', "[" * 9999])
def test_any_manifest_is_survived(two, text):
    (two / "step_000020" / "manifest.json").write_text(text, encoding="latin-1")
    assert verify(two / "step_000020") and latest_complete(two)[0].name == "step_000010"


def reseal(folder):
    """A consistent manifest over doctored files: what the checks behind the manifest are for."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": checkpoint._sha256(p)}
             for p in folder.iterdir() if p.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def test_another_model_or_optimizer_is_refused(two):
    folder = two / "step_000020"
    for changes, what in (({"hidden_size": 18}, "hidden_size is 14, the model's is 18"),
                          ({"rope_theta": 1e6}, "rope_theta is 10000.0, the model's is 1000000.0"),
                          ({"tied": False}, "tie_word_embeddings is True, the model's is False")):
        with pytest.raises(ValueError, match=what):
            load(folder, *build(**changes))
    model, _ = build(seed=8)
    before = fingerprint(model, adamw(model))
    for groups in (list(model.parameters()), groups_of(model)[::-1], groups_of(model)[:1]):
        with pytest.raises(ValueError, match="parameter groups"):
            load(folder, model, torch.optim.AdamW(groups))
    assert fingerprint(model, adamw(model)) == before


def test_doctored_tensors_are_named(two):
    from safetensors.torch import load_file, save_file
    folder = two / "step_000020"
    whole = {name: load_file(folder / name) for name in ("model.safetensors", "optimizer.safetensors")}
    for file, name, tensor in (("model.safetensors", "model.norm.weight", None),
                               ("model.safetensors", "model.norm.weight", torch.zeros(3)),
                               ("model.safetensors", "model.extra.weight", torch.zeros(14)),
                               ("optimizer.safetensors", "model.norm.weight.exp_avg", torch.zeros(13)),
                               ("optimizer.safetensors", "model.other.weight.exp_avg", torch.zeros(14))):
        tensors = {**whole[file], name: tensor}
        save_file({n: t for n, t in tensors.items() if t is not None}, folder / file)
        reseal(folder)
        model, optimizer = build(seed=8)
        before = fingerprint(model, optimizer)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            load(folder, model, optimizer)
        assert fingerprint(model, optimizer) == before
        save_file(whole[file], folder / file)


def test_nothing_is_unpickled(two, monkeypatch):
    import pickle
    (two / "step_000020" / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    (two / "step_000020" / "optimizer.pt").write_bytes(pickle.dumps(print))

    def refuse(*_args, **_kwargs):
        raise AssertionError("unpickled")
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    folder, _ = latest_complete(two)
    assert load(folder, *build()) == {"next_step": 20}


def test_state_must_be_json(tmp_path):
    model, optimizer = build()
    for state in ({"x": float("nan")}, {"x": torch.zeros(1)}, {"x": {1, 2}}):
        with pytest.raises((ValueError, TypeError)):
            save(tmp_path / "run", 1, model, optimizer, state)
    assert not (tmp_path / "run").exists()


def test_tensors_do_not_hang_on_the_file(two):
    """A rotated checkpoint must free its disk space; a changed file must not reach into a running model."""
    model, optimizer = build(seed=1)
    folder = two / "step_000020"
    load(folder, model, optimizer)
    before = fingerprint(model, optimizer)
    for name in ("model.safetensors", "optimizer.safetensors"):
        size = (folder / name).stat().st_size
        with open(folder / name, "r+b") as file:
            file.write(b"\xff" * size)
    assert fingerprint(model, optimizer) == before


# ------------------------------------------------------------------------------------------------- full disks
def check_failed_save(run, model, optimizer, match):
    before = names(run)
    with pytest.raises(OSError, match=match) as caught:
        save(run, 20, model, optimizer, {"next_step": 20}, keep=1)
    message = str(caught.value)
    assert "\n" not in message and "step_000020" in message and "bytes" in message and "free" in message
    assert names(run) == before == ["latest", "step_000010"]
    assert (run / "latest").read_text() == "step_000010\n"
    assert latest_complete(run) == (run / "step_000010", [])


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    model, optimizer = build()
    train(model, optimizer, range(1))
    save(tmp_path, 10, model, optimizer, {})
    monkeypatch.setattr(checkpoint, "save_model", lambda *_: pytest.fail("wrote all the same"))
    floats = 3 * sum(p.numel() for p in model.parameters())                     # weights and two moments
    needed = floats * 4 + 2 ** 20
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    check_failed_save(tmp_path, model, optimizer, f"disk full.*{needed:,} were free")


@pytest.fixture
def tiny_disk(tmp_path):
    """A tmpfs of 160 KiB: room for one checkpoint, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True).returncode == 0
    if not done:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_disk_fills_up_during_the_save(tiny_disk, monkeypatch):
    """Really full, at whichever file comes last; once there is room, it works again."""
    model, optimizer = build()
    train(model, optimizer, range(1))
    with pytest.raises(OSError, match="disk full"):                   # asked first: 1 MiB is kept in reserve
        save(tiny_disk, 10, model, optimizer, {})
    assert names(tiny_disk) == []
    usage, filler, failures = shutil.disk_usage(tiny_disk), tiny_disk / ".filler", 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 ** 9))   # others fill it then
    save(tiny_disk, 10, model, optimizer, {}, keep=1)
    for spare in range(0, usage.total, 2 * 4096):
        disk = os.statvfs(tiny_disk)
        filler.write_bytes(b"x" * max(0, disk.f_bavail * disk.f_frsize - spare))
        try:
            save(tiny_disk, 20, model, optimizer, {"next_step": 20}, keep=1)
            break
        except OSError as error:
            failures += 1
            assert "No space left" in str(error) and "free" in str(error)
            assert names(tiny_disk) == [".filler", "latest", "step_000010"]
            assert latest_complete(tiny_disk) == (tiny_disk / "step_000010", [])
        finally:
            filler.unlink()
    assert failures > 5 and latest_complete(tiny_disk) == (tiny_disk / "step_000020", [])
    assert names(tiny_disk) == ["latest", "step_000020"]


# --------------------------------------------------------------------------------------------- real processes
def fork(action):
    """Runs action in a forked process, which says with its exit status whether it failed -> pid."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(number, run, step, model, optimizer):
    """A save whose operation `number` on the disk is the last thing its process lives to see."""
    left = [number]

    def wrap(module, name):
        real = getattr(module, name)

        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(module, name, counted)
    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
                         (checkpoint, "save_model"), (checkpoint, "save_file"), (Path, "write_text")):
        wrap(module, name)
    save(run, step, model, optimizer, {"next_step": step, "take": 2}, keep=1)


@pytest.mark.parametrize("step, outcomes", [(30, [(20, 1), (30, 2)]), (20, [(20, 1), (20, 2)])])
def test_kill_before_every_operation_of_a_save(tmp_path, step, outcomes):
    """A new step, and one that replaces a checkpoint of the same step, with rotation to one."""
    model, optimizer = build()
    for earlier in (10, 20):
        save(tmp_path / "start", earlier, model, optimizer, {"next_step": earlier, "take": 1})
    train(model, optimizer, range(1))
    seen, status = [], None
    while status != 0:
        run = tmp_path / f"run-{len(seen)}"
        shutil.copytree(tmp_path / "start", run)
        status = wait(fork(lambda: die_at(len(seen) + 1, run, step, model, optimizer)))      # noqa: B023
        assert status in (0, -signal.SIGKILL)
        newest, notes = latest_complete(run)
        assert not notes                                                # complete or absent: nothing to skip
        state = load(newest, *build(seed=7))
        seen.append((state["next_step"], state["take"]))
        named = (run / "latest").read_text().strip()
        assert named == newest.name or (named, newest.name) == ("step_000020", "step_000030")
        assert not [n for n in names(run) if n.startswith(".")]         # no leftovers
        assert all(verify(folder) == [] for folder in run.glob("step_*"))
    assert seen == sorted(seen) and set(seen) == set(outcomes) and len(seen) > 20
    assert names(run) == ["latest", f"step_{step:06d}"]


def test_kill_at_random_moments(tmp_path):
    model, optimizer = build()
    dice, inside = random.Random(5), 0
    newest = save(tmp_path, 0, model, optimizer, {"next_step": 0})

    def save_for_ever(step):
        while True:
            step += 1
            save(tmp_path, step, model, optimizer, {"next_step": step}, keep=1 + step % 3)
    for _ in range(20):
        pid = fork(lambda: save_for_ever(int(newest.name[5:])))         # noqa: B023
        time.sleep(dice.uniform(0.001, 0.08))
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL
        inside += any(n.startswith((".tmp-", ".old-")) for n in names(tmp_path))
        before, (newest, notes) = newest, latest_complete(tmp_path)
        assert not notes and newest >= before
        assert newest.name == f"step_{load(newest, *build(seed=7))['next_step']:06d}"
    assert inside > 0 and newest.name > "step_000000"


def test_a_write_that_fails(tmp_path):
    """A file size limit breaks off the weights, the optimizer or the first small file, as a quota would."""
    model, optimizer = build()
    train(model, optimizer, range(1))
    save(tmp_path, 10, model, optimizer, {})

    def limited():
        for limit in (1, 5000, 20000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            check_failed_save(tmp_path, model, optimizer, "File too large")
    assert wait(fork(limited)) == 0
    save(tmp_path, 20, model, optimizer, {}, keep=1)
    assert names(tmp_path) == ["latest", "step_000020"]


def test_a_save_in_progress_is_left_alone(tmp_path):
    """Looking for the newest checkpoint while another process saves waits, and does not tidy up meanwhile."""
    half = tmp_path / ".tmp-step_000001-1"

    def slow_save():
        with checkpoint._alone(tmp_path):
            half.mkdir()
            time.sleep(0.4)
            assert half.exists()
    pid = fork(slow_save)
    while not half.exists():
        time.sleep(0.01)
    assert latest_complete(tmp_path) == (None, []) and names(tmp_path) == []
    assert wait(pid) == 0


def noise_steps(model, optimizer, steps):
    """Updates with made-up gradients, the same on every rank (a forked process should not run autograd)."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def sharded_rank(rank, folder):
    """One of two ranks: saves a sharded state, and goes on from a sharded and from a whole one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60))

    def fresh(seed):
        model, _ = build(seed=seed)
        return model, ZeroRedundancyOptimizer(groups_of(model), optimizer_class=torch.optim.AdamW, lr=3e-3,
                                              betas=(0.9, 0.98), eps=1e-8)

    def save_on_rank_0(name, step):
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            save(folder / name, step, model, optimizer, {"next_step": step})
        dist.barrier()
    model, optimizer = fresh(0)
    noise_steps(model, optimizer, range(3))
    save_on_rank_0("sharded", 3)
    for source in ("sharded", "whole"):
        model, optimizer = fresh(6)
        assert load(folder / source / "step_000003", model, optimizer) == {"next_step": 3}
        noise_steps(model, optimizer, range(3, 6))
        save_on_rank_0(f"from-{source}", 6)
    dist.destroy_process_group()


def test_sharded_optimizer_on_two_ranks(tmp_path):
    """ZeroRedundancyOptimizer: saved sharded and resumed whole, saved whole and resumed sharded, exactly."""
    through, optimizer = build()
    noise_steps(through, optimizer, range(3))
    save(tmp_path / "whole", 3, through, optimizer, {"next_step": 3})
    ranks = [fork(lambda: sharded_rank(rank, tmp_path)) for rank in range(2)]          # noqa: B023
    assert [wait(pid) for pid in ranks] == [0, 0]
    at_3, optimizer_3 = build(seed=6)
    assert load(tmp_path / "sharded" / "step_000003", at_3, optimizer_3) == {"next_step": 3}
    assert fingerprint(at_3, optimizer_3) == fingerprint(through, optimizer)
    noise_steps(through, optimizer, range(3, 6))
    for source in ("sharded", "whole"):
        at_6, optimizer_6 = build(seed=6)
        load(tmp_path / f"from-{source}" / "step_000006", at_6, optimizer_6)
        assert fingerprint(at_6, optimizer_6) == fingerprint(through, optimizer)

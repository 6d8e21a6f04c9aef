"""Checkpoints that are complete or absent, and an exact resume: weights, optimizer and loop state, no pickle.

    save("out/run", 50, model, optimizer, {"next_step": 50}, source="Qwen/Qwen3-0.6B", keep=2)    # rank 0
    newest, notes = latest_complete("out/run")           # notes: what was skipped, and why
    state = load(newest, model, optimizer)               # every rank; bit for bit

RUN/step_000050/ is a Hugging Face folder plus optimizer.safetensors, trainer_state.json and manifest.json
({"files": {name: {"bytes", "sha256"}}}). It is written under another name, flushed to the disk and renamed;
then RUN/latest moves; then old ones go. A kill at any moment leaves the old state or the new one; damage done
later is found by its SHA-256. No random state is kept: every draw is a function of seed and step.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from model import load_model, local_folder, open_tensors, save_model

FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json")
OPTIONS = ("lr", "betas", "eps", "weight_decay")        # of a parameter group: saved, and restored by `load`
NAMES = "step_" + 6 * "[0-9]"


def save(run_dir, step, model, optimizer, state, source=None, keep=0):
    """Writes RUN/step_<step>, then removes older complete ones until `keep` are left (0: none) -> its Path.

    state: JSON values, for `load`. source: the model folder whose tokenizer and generation config are copied.
    A ZeroRedundancyOptimizer must have been consolidated to this rank. OSError with the bytes needed and free
    when the disk is full or a write fails; earlier checkpoints and `latest` are then as they were.
    """
    run_dir, name, source = Path(run_dir), f"step_{step:06d}", source and local_folder(source)
    groups = _named_groups(model, optimizer)
    order = [name for group in groups for name in group["params"]]       # by the index in state_dict()
    moments = {f"{order[i]}.{key}": torch.as_tensor(x).detach().cpu().contiguous()
               for i, entry in optimizer.state_dict()["state"].items() for key, x in (entry or {}).items()}
    trainer = json.dumps({"format": 1, "step": step, "groups": groups, "state": state}, allow_nan=False)
    needed = 2 ** 20 + sum(t.nbytes for t in (*model.parameters(), *moments.values()))
    needed += sum(p.stat().st_size for p in source.glob("*.[jt]*")) if source else 0
    run_dir.mkdir(parents=True, exist_ok=True)
    with _alone(run_dir):
        free, tmp = shutil.disk_usage(run_dir).free, run_dir / f".tmp-{name}-{os.getpid()}"
        try:
            if free < needed:
                raise OSError("disk full")
            save_model(model, tmp, source)
            save_file(moments, tmp / "optimizer.safetensors")
            (tmp / "trainer_state.json").write_text(trainer, encoding="utf-8")
            _publish(tmp, run_dir / name)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{run_dir / name}: checkpoint not written ({error}); it needs {needed:,} bytes, "
                          f"{free:,} were free; earlier checkpoints are untouched") from None
        older = [f for f in sorted(run_dir.glob(NAMES)) if f.name < name and not verify(f, hashes=False)]
        for folder in older[:max(0, len(older) + 1 - keep)] if keep else ():
            os.rename(folder, run_dir / f".tmp-{folder.name}")      # its files go in `_clean`, killed or not
    return run_dir / name


def _named_groups(model, optimizer):
    names = {p: name for name, p in model.named_parameters()}
    return [{"params": [names[p] for p in group["params"]], **{k: group[k] for k in OPTIONS if k in group}}
            for group in optimizer.param_groups]


def _publish(tmp, final):
    """Flushes a folder, its manifest last, gives it its name, moves `latest`. A checkpoint of the same step
    steps aside; `_clean` puts it back if we die between the two renames."""
    files, pointer = {}, final.parent / f".tmp-latest-{os.getpid()}"
    for path in sorted(tmp.iterdir()):
        _flush(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (tmp / "manifest.json").write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    pointer.write_text(final.name + "\n", encoding="utf-8")
    for path in (tmp / "manifest.json", tmp, pointer):
        _flush(path)
    if final.exists():
        os.rename(final, final.parent / f".old-{final.name}")
    os.rename(tmp, final)
    os.replace(pointer, final.parent / "latest")
    _flush(final.parent)


@contextlib.contextmanager
def _alone(run_dir):
    """One process at a time (the kernel frees a dead holder's lock); clears leftovers before and after."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):          # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _clean(run_dir)
        yield
    finally:
        _clean(run_dir)
        os.close(descriptor)


def _clean(run_dir):
    with contextlib.suppress(OSError):              # a run folder may be read-only by now
        for old in run_dir.glob(".old-" + NAMES):   # replaced: back again if its replacement never came
            final = run_dir / old.name.removeprefix(".old-")
            shutil.rmtree(old) if final.exists() else os.rename(old, final)
        for left in run_dir.glob(".tmp-*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def latest_complete(run_dir):
    """(newest checkpoint whose files all verify or None, a line for each newer one that is skipped). Clears
    what a killed save left; waits for a process that is saving here right now."""
    run_dir, notes = Path(run_dir), []
    with _alone(run_dir) if run_dir.is_dir() else contextlib.nullcontext():
        folders = sorted(run_dir.glob(NAMES), reverse=True)
    for folder in folders:
        if not (problems := verify(folder)):
            return folder, notes
        notes.append(f"{folder.name} is not complete and is skipped: {'; '.join(problems)}")
    return None, notes


def verify(folder, hashes=True):
    """What is wrong with a checkpoint, a line per file; none when it is whole. `hashes=False`: sizes only."""
    folder, problems = Path(folder), []
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except Exception as error:              # of any kind: a damaged file may hold anything
        return [f"manifest.json is missing or damaged ({type(error).__name__})"]
    for name in sorted({*FILES, *wanted}):
        path, (size, digest) = folder / name, wanted.get(name, (None, None))
        try:
            if os.path.basename(name) != name or path.is_symlink() or not path.is_file():
                problems.append(f"{name!r} is not a file in this folder")
            elif path.stat().st_size != size:
                problems.append(f"{name} has {path.stat().st_size} bytes, the manifest says {size}")
            elif hashes and _sha256(path) != digest:
                problems.append(f"{name} has another SHA-256 than the manifest says")
        except OSError as error:
            problems.append(f"{name!r} cannot be read ({error.strerror})")
    return problems


def load(folder, model, optimizer):
    """Restores weights (in place), optimizer state and options bit for bit -> the `state` that was saved.
    ValueError, before anything is changed, for a damaged checkpoint or one of another model or optimizer."""
    folder = Path(folder)
    if problems := verify(folder):
        raise ValueError(f"{folder}: not a complete checkpoint: {'; '.join(problems)}")
    trainer = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    groups, parameters = trainer["groups"], dict(model.named_parameters())
    stored = load_model(folder, dtype=model.head_weight.dtype)
    for key, value in vars(stored.config).items():
        if key != "raw" and value != getattr(model.config, key):
            raise ValueError(f"{folder}: {key} is {value}, the model's is {getattr(model.config, key)}")
    if [g["params"] for g in groups] != [g["params"] for g in _named_groups(model, optimizer)]:
        raise ValueError(f"{folder}: the parameter groups of the optimizer are others")
    entries = {name: {} for group in groups for name in group["params"]}        # by the index in state_dict()
    with open_tensors(folder / "optimizer.safetensors") as file:
        for name in file.keys():
            parameter, _, key = name.rpartition(".")
            tensor = file.get_tensor(name).clone()      # not a view of a file that rotation will remove
            if parameter not in entries or tensor.ndim and tensor.shape != parameters[parameter].shape:
                raise ValueError(f"{folder / 'optimizer.safetensors'}: tensor {name} does not fit the model")
            entries[parameter][key] = tensor
    model.load_state_dict(stored.state_dict())
    index = {name: i for i, name in enumerate(entries)}
    packed = [{**group, **saved, "params": [index[name] for name in saved["params"]]}
              for group, saved in zip(optimizer.param_groups, groups, strict=True)]
    state = {index[name]: entry for name, entry in entries.items() if entry}
    optimizer.load_state_dict({"state": state, "param_groups": packed})
    return trainer["state"]


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2 ** 22):
            digest.update(block)
    return digest.hexdigest()

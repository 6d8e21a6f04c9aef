"""Checkpoints that are complete or absent, and an exact resume: weights, optimizer and loop state, no pickle.

    save("out/run", 50, model, optimizer, {"next_step": 50}, source="Qwen/Qwen3-0.6B", keep=2)    # rank 0
    newest, notes = latest_complete("out/run")           # notes: what was skipped, and why
    state = load(newest, model, optimizer)               # every rank; bit for bit

RUN/step_000050/ is a Hugging Face folder plus optimizer.safetensors, trainer_state.json and manifest.json
(sizes, SHA-256): written under another name, flushed, renamed; RUN/latest moves; then old ones go. A kill
leaves the old state or the new one. No random state is kept: every draw is a function of seed and step.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from model import load_model, local_folder, read_tensors, save_model

FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json")
NAMES = "step_" + 6 * "[0-9]"


def save(run_dir, step, model, optimizer, state, source=None, keep=0):
    """Writes RUN/step_<step>, then removes older complete ones until `keep` are left (0: removes none) -> its
    Path. state: JSON values. source: the model folder with the tokenizer. A ZeroRedundancyOptimizer must have
    been consolidated to this rank. OSError, with nothing changed, when the disk is full or a write fails."""
    final, source = Path(run_dir) / f"step_{step:06d}", source and local_folder(source)
    groups, order = _named_groups(model, optimizer)
    trainer = json.dumps({"format": 1, "step": step, "groups": groups, "state": state}, allow_nan=False)
    moments = {f"{order[i]}.{key}": x.detach().cpu().contiguous()
               for i, entry in optimizer.state_dict()["state"].items() for key, x in (entry or {}).items()}
    needed = 2 ** 20 + sum(t.nbytes for t in (*model.parameters(), *moments.values()))
    needed += sum(path.stat().st_size for path in source.glob("*.[jt]*")) if source else 0
    final.parent.mkdir(parents=True, exist_ok=True)
    with _alone(final.parent):
        tmp, pointer = (final.with_name(f".tmp-{name}-{os.getpid()}") for name in (final.name, "latest"))
        free = shutil.disk_usage(final.parent).free
        try:
            if free < needed:
                raise OSError("disk full")
            save_model(model, tmp, source)
            save_file(moments, tmp / "optimizer.safetensors")
            (tmp / "trainer_state.json").write_text(trainer, encoding="utf-8")
            files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(tmp.iterdir())}
            manifest = json.dumps({"files": files}, indent=2) + "\n"
            (tmp / "manifest.json").write_text(manifest, encoding="utf-8")
            pointer.write_text(final.name + "\n", encoding="utf-8")
            _flush(*tmp.iterdir(), tmp, pointer)
            if final.exists():              # `_clean` puts it back if we die between the two renames
                os.rename(final, final.with_name(f".old-{final.name}"))
            os.rename(tmp, final)
            os.replace(pointer, final.with_name("latest"))
            _flush(final.parent)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{final}: checkpoint not written ({error}); it needs {needed:,} bytes, "
                          f"{free:,} were free; earlier checkpoints are untouched") from None
        steps = sorted(final.parent.glob(NAMES), reverse=True)
        older = [path for path in steps if path < final and not verify(path, hashes=False)]
        for path in older[keep - 1:] if keep else ():
            os.rename(path, path.with_name(f".tmp-{path.name}"))     # its files go in `_clean`, killed or not
    return final


def _named_groups(model, optimizer):
    names, options = {p: name for name, p in model.named_parameters()}, ("lr", "betas", "eps", "weight_decay")
    groups = [{"params": [names[p] for p in group["params"]], **{key: group[key] for key in options}}
              for group in optimizer.param_groups]
    return groups, [name for group in groups for name in group["params"]]


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


def _flush(*paths):
    for descriptor in (os.open(path, os.O_RDONLY) for path in paths):
        os.fsync(descriptor)
        os.close(descriptor)


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2 ** 22):
            digest.update(block)
    return digest.hexdigest()


def latest_complete(run_dir):
    """(newest whole checkpoint or None, a line for each newer one that is not); waits for a running save."""
    run_dir, notes = Path(run_dir), []
    with _alone(run_dir) if run_dir.is_dir() else contextlib.nullcontext():
        for folder in sorted(run_dir.glob(NAMES), reverse=True):
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
            if path.name != name or path.is_symlink() or not path.is_file():
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
    stored, parameters = load_model(folder, dtype=model.head_weight.dtype), dict(model.named_parameters())
    for key, value in vars(stored.config).items():
        if key != "raw" and value != getattr(model.config, key):
            raise ValueError(f"{folder}: {key} is {value}, the model's is {getattr(model.config, key)}")
    (groups, order), state = _named_groups(model, optimizer), {}
    if [group["params"] for group in groups] != [group["params"] for group in trainer["groups"]]:
        raise ValueError(f"{folder}: the parameter groups of the optimizer are others")
    for name, tensor in read_tensors(folder / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition(".")
        if parameter not in order or tensor.ndim and tensor.shape != parameters[parameter].shape:
            raise ValueError(f"{folder / 'optimizer.safetensors'}: tensor {name} does not fit the model")
        state.setdefault(order.index(parameter), {})[key] = tensor.clone()    # not a view of a file that goes
    model.load_state_dict(stored.state_dict())
    groups = [{**group, **saved, "params": list(map(order.index, saved["params"]))}
              for group, saved in zip(optimizer.param_groups, trainer["groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return trainer["state"]

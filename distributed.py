"""Processes: the group, sums over ranks, gathered objects, and printing once.

torchrun is the engine, on one machine or many; without it everything here is the identity. Gloo on CPU, NCCL
on CUDA. Means are sums divided by sums (Gloo has no AVG).
"""

import contextlib
import datetime
import gc
import os
import sys
import traceback

import torch
import torch.distributed as dist

_timeout = datetime.timedelta(minutes=30)       # of the process group


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def pick_device(name="auto"):
    """'auto' is this process's CUDA device if there is one, else the CPU. ValueError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if name == "cuda" and here > gpus:      # on every process alike: the first one, which prints, has a GPU
        raise ValueError(f"--device cuda: {here} process(es) on this machine, {gpus} visible GPU(s); "
                         "use --device cpu or fewer processes")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: not available on this machine; use --device cpu")
    return torch.device(name + f":{os.environ.get('LOCAL_RANK', '0')}" * (name == "cuda"))


def compute_dtype(name, device):
    """'auto' is bfloat16 on CUDA and float32 elsewhere."""
    return getattr(torch, {"auto": "bfloat16" if device.type == "cuda" else "float32"}.get(name, name))


@contextlib.contextmanager
def process_group(device, timeout_minutes):
    """Joins torchrun's process group, if any, and leaves it at the end. A collective that waits longer than
    the time-out ends the job. A DDP module holds the group and can hang the exit: drop it before. A failing
    process ends at once, without destructors, so that its peers see it go."""
    global _timeout
    _timeout = datetime.timedelta(minutes=timeout_minutes)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # torchrun keeps its store over a restart, with the addresses of the dead in it: so a prefix. Several
        # agents count restarts apart: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start a new one
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") * (os.environ.get("GROUP_WORLD_SIZE") == "1")
        store, number, count = next(dist.rendezvous("env://", timeout=_timeout))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_timeout, rank=number,
                                world_size=count, store=dist.PrefixStore(start, store))
    try:
        yield
    except BaseException as error:
        if not dist.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(error.code if isinstance(error, SystemExit) else 1)
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def stage(name):
    """Around code with collectives: a failure (a time-out, a lost peer) says what it was in."""
    try:
        yield
    except RuntimeError as error:
        if world_size() > 1:
            print(f"[rank {rank()}] failed in {name}: {error}".split("\n")[0], file=sys.stderr, flush=True)
        raise


def all_sum(values, device, op=dist.ReduceOp.SUM):
    """{name: number or 0-dim tensor}, summed over ranks in one fp64 collective, as {name: float}."""
    total = torch.tensor([float(v) for v in values.values()], dtype=torch.float64,
                         device="cpu" if device.type == "mps" else device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return dict(zip(values, total.tolist(), strict=True))


def all_max(value, device):
    """The largest of every rank's number, as a float on every rank."""
    return all_sum({"max": value}, device, dist.ReduceOp.MAX)["max"]


def gather_objects(obj):
    """List of every rank's object (pickled between our own processes only), in rank order, on every rank.
    Ranks meet here after work of unequal length: on Gloo rank 0 names the late ones, a little before the
    others lose patience and end the job."""
    if world_size() == 1:
        return [obj]
    if dist.get_backend() == "gloo":
        dist.monitored_barrier(timeout=_timeout * 0.9, wait_all_ranks=True)
    out = [None] * world_size()
    dist.all_gather_object(out, obj)
    return out


def print0(*args, **kwargs):
    if os.environ.get("RANK", "0") == "0":          # also before the group exists
        print(*args, flush=True, **kwargs)

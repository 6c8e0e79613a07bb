"""Starts the processes of a run, from Detectron2's own flags or under ``torchrun``, and words errors for people."""

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from detectron2.engine import launch
from detectron2.utils import comm
from torch.multiprocessing.spawn import ProcessExitedException

Result = TypeVar("Result")

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PACKAGE = Path(__file__).parent.parent
_FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_FILE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)


def launch_from_args(main: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> None:
    """Runs ``main(args)`` in every process that the flags, or ``torchrun``, ask for.

    ``--num-gpus --num-machines --machine-rank --dist-url`` work as in Detectron2. Under ``torchrun`` the processes
    exist already and only join: with nccl on GPUs, with gloo where there is no GPU or ``--num-gpus 0`` is given.

    What the user can put right is one message on stderr and exit status 1; any other error keeps its traceback.

    Args:
        main: a function at the top level of its module, since processes are spawned.
        args: what :func:`gw_detectron.engine.get_parser` parses.

    Raises:
        SystemExit: with status 1, after a message.
    """
    with errors_reported():
        if all(name in os.environ for name in _TORCHRUN_VARIABLES):
            _join_torchrun(cpu=args.num_gpus == 0)
            try:
                _worker(main, args)
            except BaseException:
                if dist.get_backend() == "gloo":  # nccl would wait here for processes that wait for this one
                    dist.destroy_process_group()
                raise
            dist.destroy_process_group()
            return
        _check_gpus(args)
        launch(
            _worker,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(main, args),
        )


def _worker(main: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> None:
    with errors_reported():
        main(args)


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Turns an error the user can put right into a message on stderr and exit status 1."""
    try:
        yield
    except ProcessExitedException as error:
        if error.signal_name:
            raise  # killed from outside, often for want of memory: the traceback names the signal
        raise SystemExit(error.exit_code) from None  # the process itself has said why
    except Exception as error:
        if not is_for_the_user(error):
            raise
        _say(error)
        raise SystemExit(1) from None


def in_all_processes(action: Callable[[], Result]) -> Result:
    """Does something that has to succeed in every process of a run before any of them goes on.

    If it fails, the first process that it failed in says why, and all end; errors that all of them have are said once.

    Args:
        action: what to do; it must not wait for other processes.

    Raises:
        SystemExit: in a run of several processes. In a run of one, the error of ``action`` itself.
    """
    if comm.get_world_size() == 1:
        return action()
    failure = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failed = comm.all_gather(failure is not None)
    if not any(failed):
        return result
    if failure is not None and comm.get_rank() == failed.index(True):
        if is_for_the_user(failure):
            _say(failure)
        else:
            traceback.print_exception(failure)
    # A launcher ends all processes when the first is gone, so none goes before the reason is out.
    comm.synchronize()
    raise SystemExit(1)


def _say(error: Exception) -> None:
    process = "" if comm.is_main_process() else f" in process {comm.get_rank()}"
    print(f"\nError{process}: {error}", file=sys.stderr, flush=True)


def is_for_the_user(error: BaseException) -> bool:
    """Whether an error speaks about input, files or the machine, so that its traceback helps nobody.

    These are missing or unusable files, a full disk, and the ValueErrors, OSErrors, ImportErrors and
    FloatingPointErrors that this package raises itself; the same classes from inside a library may be a bug.
    """
    if isinstance(error, _FILE_ERRORS) or getattr(error, "errno", None) in _FILE_ERRNOS:
        return True
    if not isinstance(error, (ValueError, OSError, ImportError, FloatingPointError)):
        return False
    if type(error).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _PACKAGE in Path(frames[-1].filename).parents


def _check_gpus(args: argparse.Namespace) -> None:
    processes = args.num_gpus * args.num_machines
    if args.num_gpus < 0 or args.num_machines < 1:
        raise ValueError(
            f"--num-gpus {args.num_gpus} --num-machines {args.num_machines}: give at least 0 GPUs and 1 machine"
        )
    if not 0 <= args.machine_rank < args.num_machines:
        raise ValueError(
            f"--machine-rank {args.machine_rank}: with --num-machines {args.num_machines} it is 0 to "
            f"{args.num_machines - 1}, another one on each machine"
        )
    available = torch.cuda.device_count()
    if (args.num_gpus == 0 and args.num_machines > 1) or (processes > 1 and available == 0):
        raise ValueError(
            f"--num-gpus {args.num_gpus} --num-machines {args.num_machines}, but several processes without a GPU are "
            f"started by torchrun: torchrun --nproc_per_node {max(args.num_gpus, 2)} {sys.argv[0]} --num-gpus 0 ..."
        )
    if processes > 1 and args.num_gpus > available:
        raise ValueError(f"--num-gpus {args.num_gpus}, but this machine has {available}; give at most {available}")


def _join_torchrun(*, cpu: bool) -> None:
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cpu = cpu or not torch.cuda.is_available()
    if not cpu:
        if local_size > torch.cuda.device_count():
            raise ValueError(
                f"torchrun --nproc_per_node {local_size}, but this machine has {torch.cuda.device_count()} GPUs; give "
                "at most as many, or --num-gpus 0 to run on the CPU"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("gloo" if cpu else "nccl")
    if hasattr(comm, "create_local_process_group"):
        comm.create_local_process_group(local_size)
    else:
        _create_local_process_group(local_size)
    comm.synchronize()


def _create_local_process_group(local_size: int) -> None:
    """What Detectron2's own launcher does up to v0.6, which has no function for it: set the group of this machine."""
    for first in range(0, dist.get_world_size(), local_size):
        group = dist.new_group(list(range(first, first + local_size)))
        if first <= dist.get_rank() < first + local_size:
            comm._LOCAL_PROCESS_GROUP = group

"""Launch training processes with Detectron2's flags or torchrun."""

import argparse
import contextlib
import multiprocessing
import os
import re
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from detectron2.engine import launch
from detectron2.utils import comm

from ...errors import ConfigError, RunError, first_line, is_user_error
from ..console import Interrupted, errors_reported, report_error, safe_imports

# gloo raises a RuntimeError; its other messages are bugs, e.g. processes that call different operations
_GLOO_CONNECTION_LOST = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|timed out)", re.IGNORECASE
)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launch_from_args(
    main: Callable[[argparse.Namespace], object], args: argparse.Namespace
) -> None:
    """Run ``main(args)`` in every process that the flags or ``torchrun`` ask for.

    Detectron2's flags work as there; processes are spawned, so ``main`` is a function at the top level of its module.
    Under ``torchrun`` the processes already exist and only join: with nccl on GPUs, with gloo without a GPU or with
    ``--num-gpus 0``.
    """
    timeout = timedelta(seconds=args.dist_timeout)
    with safe_imports(), _lost_processes_reported(timeout):
        if all(name in os.environ for name in _TORCHRUN_VARIABLES):
            _join_torchrun(cpu=args.num_gpus == 0, timeout=timeout)
            with contextlib.ExitStack() as stack:
                if (
                    dist.get_backend() == "gloo"
                ):  # nccl would wait for processes that wait for this one
                    stack.callback(dist.destroy_process_group)
                main(args)
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        spawned = args.num_gpus * args.num_machines > 1
        if spawned and torch.cuda.device_count() == 0:
            raise ConfigError(
                f"--num-gpus {args.num_gpus}: this machine has no GPU. Fix: give --num-gpus 0; for several processes "
                "on the CPU, run torchrun --nproc_per_node N SCRIPT --num-gpus 0 ..."
            )
        try:
            launch(
                _spawned if spawned else main,
                args.num_gpus,
                num_machines=args.num_machines,
                machine_rank=args.machine_rank,
                dist_url=args.dist_url,
                args=(main, args) if spawned else (args,),
                timeout=timeout,
            )
        except (Interrupted, KeyboardInterrupt):
            for child in (children := multiprocessing.active_children()):
                child.terminate() if spawned else child.kill()  # loader workers may miss a second SIGTERM
            for child in children:
                child.join()
            raise


def _spawned(main: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> None:
    with errors_reported(), _lost_processes_reported(timedelta(seconds=args.dist_timeout)):
        main(args)


@contextlib.contextmanager
def _lost_processes_reported(timeout: timedelta) -> Iterator[None]:
    """Raise RunError where the communication failed because of another process."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _GLOO_CONNECTION_LOST.search(
            str(error)
        ):
            raise
        raise RunError(
            f"process group: another process ended, or did not answer for {timeout.total_seconds():.0f} s: "
            f"{first_line(error)}. Fix: see the error of that process; if it was only slow, raise --dist-timeout."
        ) from error


@contextlib.contextmanager
def in_all_processes() -> Iterator[None]:
    """Continue only if the body, which must not wait for other processes, succeeds in all of them.

    Else the first process in which it failed reports the error, and all end by SystemExit. A single process raises it.
    """
    if comm.get_world_size() == 1:
        yield
        return
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = comm.all_gather(failure is not None)
    if not any(failed):
        return
    if failure is not None and comm.get_rank() == failed.index(True):
        if is_user_error(failure):
            report_error(failure)
        else:
            traceback.print_exception(failure)
    comm.synchronize()  # a launcher ends all processes when the first one exits, so all wait for the report
    raise SystemExit(1)


def _join_torchrun(*, cpu: bool, timeout: timedelta) -> None:
    """Join the processes that torchrun has started, and the process group of this machine."""
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    cpu = cpu or not torch.cuda.is_available()
    if not cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu else "nccl", timeout=timeout)
    if hasattr(comm, "create_local_process_group"):  # after v0.6
        comm.create_local_process_group(local_size)
    else:
        for first in range(0, dist.get_world_size(), local_size):
            group = dist.new_group(list(range(first, first + local_size)), timeout=timeout)
            if first <= dist.get_rank() < first + local_size:
                comm._LOCAL_PROCESS_GROUP = group
    comm.synchronize()

"""Launch training processes with Detectron2's flags or torchrun."""

import argparse
import contextlib
import functools
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

from ...errors import ConfigError, RunError, first_line, is_user_error, message_of
from ..console import errors_reported, report_error, safe_imports
from ..signals import Interrupted, end_processes

Main = Callable[[argparse.Namespace], object]

# gloo raises a RuntimeError; its other messages are bugs, e.g. of processes that call different
# operations
_GLOO_CONNECTION_LOST = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|timed out)", re.IGNORECASE
)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launch_from_args(main: Main, args: argparse.Namespace) -> None:
    """Run ``main(args)`` in every process that the flags or ``torchrun`` ask for.

    Detectron2's flags work as there; processes are spawned, so ``main`` is a function at the top
    level of its module. Under ``torchrun`` the processes already exist and only join: with nccl on
    GPUs, with gloo without a GPU or with ``--num-gpus 0``.
    """
    with safe_imports(), _lost_processes_reported(args):
        if all(name in os.environ for name in _TORCHRUN_VARIABLES):
            _run_under_torchrun(main, args)
        else:
            _launch(main, args)


@contextlib.contextmanager
def spare_core(device: str) -> Iterator[None]:
    """Compute on a CPU with a thread less than before, or one, unless OMP_NUM_THREADS is set.

    A core stays for the loaders and for other programs, because threads wait for the slowest of them. Where two other
    programs work on two cores, an iteration takes 1.7 s with one thread and 5.6 s with two, and predicting ten photos
    10 to 12 s and 21 to 56 s.
    """
    threads = torch.get_num_threads()
    if device == "cpu" and not os.environ.get("OMP_NUM_THREADS"):  # which torch obeys
        torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _launch(main: Main, args: argparse.Namespace) -> None:
    """Run in this process, or in processes that Detectron2 spawns."""
    spawns = args.num_gpus * args.num_machines > 1
    if spawns and torch.cuda.device_count() == 0:
        raise ConfigError(
            f"--num-gpus {args.num_gpus}: this machine has no GPU. Fix: give --num-gpus 0; for "
            "several processes on the CPU, run torchrun --nproc_per_node N SCRIPT --num-gpus 0 ..."
        )

    try:
        launch(
            functools.partial(_run_spawned, main) if spawns else main,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(args,),
            timeout=_timeout(args),
        )
    except (Interrupted, KeyboardInterrupt):
        # spawned trainings write a checkpoint; loader workers may miss a second SIGTERM
        patience = None if spawns else 0
        end_processes(multiprocessing.active_children(), patience)
        raise


def _run_spawned(main: Main, args: argparse.Namespace) -> None:
    with errors_reported(), _lost_processes_reported(args):
        main(args)


def _timeout(args: argparse.Namespace) -> timedelta:
    return timedelta(seconds=args.dist_timeout)


@contextlib.contextmanager
def _lost_processes_reported(args: argparse.Namespace) -> Iterator[None]:
    """Raise RunError where the communication failed because of another process."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or _GLOO_CONNECTION_LOST.search(
            str(error)
        )
        if not lost:
            raise
        raise RunError(
            f"process group: another process ended, or did not answer for {args.dist_timeout} s: "
            f"{first_line(error)}. Fix: see the error of that process; if it was only slow, raise "
            "--dist-timeout."
        ) from error


@contextlib.contextmanager
def in_all_processes() -> Iterator[None]:
    """Continue only if the body, which must not wait for other processes, succeeds in all of them.

    Else the first process in which it failed reports the error, and all end by SystemExit. A single
    process raises it.
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
            report_error(message_of(failure))
        else:
            traceback.print_exception(failure)
    # a launcher ends all processes when the first one exits, so all wait for the report
    comm.synchronize()
    raise SystemExit(1)


def _run_under_torchrun(main: Main, args: argparse.Namespace) -> None:
    """Run in the process group of the processes that torchrun has started."""
    cpu = args.num_gpus == 0 or not torch.cuda.is_available()
    if not cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    timeout = _timeout(args)
    dist.init_process_group("gloo" if cpu else "nccl", timeout=timeout)
    # after v0.6 comm.create_local_process_group sets it
    comm._LOCAL_PROCESS_GROUP, _ = dist.new_subgroups(
        int(os.environ["LOCAL_WORLD_SIZE"]), timeout=timeout
    )
    comm.synchronize()

    try:
        main(args)
    except BaseException:
        if cpu:  # with nccl, a failed process would wait for processes that wait for it
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()

"""One pool of gloo worker processes for the whole test session.

A distributed test costs tenths of a second because its processes already exist: `Pool.run` sends a top-level function
to the first `world_size` workers, gives each a fresh default process group over them, and collects what it returned.
A task that fails, hangs or kills a worker never poisons the next one: the pool then starts over.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_WORLD_SIZE = 8
GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed, before they are killed."""


class WorkerError(RuntimeError):
    """A task raised, died or ran out of time on some rank; the message has every rank's traceback, `errors` by rank."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join((message, *(f"-- rank {rank}:\n{text}" for rank, text in errors.items()))))


class Pool:
    """Worker processes that each hold one rank. Start it once, `run` many functions, `close` it."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0
    ) -> list[Any]:
        """The results of `function(*args)` on each of `world_size` ranks, in rank order.

        `function` must be importable by its name and run with a default gloo process group. Raises WorkerError.
        """
        assert 1 <= world_size <= MAX_WORLD_SIZE, f"the pool has ranks for world sizes 1 to {MAX_WORLD_SIZE}"
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            # Plain pickle: the pipe's own pickler would pass tensors as shared memory owned by this process.
            task = pickle.dumps((function, args, world_size, str(Path(folder, "store"))))
            for _, connection in self._workers[:world_size]:
                connection.send_bytes(task)
            results, errors = self._collect(world_size, timeout_seconds)
        if errors:
            name = getattr(function, "__name__", function)
            raise WorkerError(f"{name} failed on {len(errors)} of {world_size} ranks", errors)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends every worker."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))  # spawned processes inherit it and find `tests` and `galv` there
        for rank in range(len(self._workers), size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), name=f"rank-{rank}", daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _collect(self, world_size: int, timeout_seconds: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Each rank's result and each failed rank's traceback; the pool starts over after a failure."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_seconds
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]  # `wait` gives back what it was given
                try:
                    worked, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    worked, value = False, "the process died"
                (results if worked else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            errors[rank] = f"no answer (limit {timeout_seconds:g} s, or {GRACE_SECONDS:g} s after another rank failed)"
        if errors:
            # Also after an exception: connections that a rank left half open have made the next group fail to connect.
            self.close()
        return results, errors


# ----------------------------------------------------------------------------------------------- in the workers


def _serve(rank: int, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, world_size, store = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        except Exception:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        connection.send_bytes(_answer(function, args, rank, world_size, store))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: str) -> bytes:
    """The pickled (worked, result or traceback) of one task."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        answer = pickle.dumps((True, function(*args)))
        dist.barrier()  # no rank may close its connections while another still reads from them
        return answer
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers results by mesh, and a mesh of a task to come would be taken for a destroyed one like it."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()

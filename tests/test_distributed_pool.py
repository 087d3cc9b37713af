"""The pool that distributed tests run on keeps its promises."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed_pool import Pool, WorkerError


def _sum_of_ranks(offset: int) -> tuple[int, int]:
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return os.getpid(), int(value)


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("two and two")
    dist.barrier()


def _hang() -> None:
    time.sleep(60)


def _die() -> None:
    os._exit(3)


@pytest.mark.parametrize("world_size", [1, 2, 4, 3])
def test_results_come_back_in_rank_order(pool: Pool, world_size: int) -> None:
    """A task's collectives span exactly its world, whatever the sizes before it."""
    results = pool.run(_sum_of_ranks, world_size, 10)

    assert [value for _, value in results] == [sum(range(world_size)) + 10 * world_size] * world_size


def test_workers_are_reused(pool: Pool) -> None:
    """Two tasks run in the same processes."""
    first, second = pool.run(_sum_of_ranks, 2, 0), pool.run(_sum_of_ranks, 2, 0)

    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_a_failure_brings_its_traceback_and_the_pool_goes_on(pool: Pool) -> None:
    """An exception on one rank is reported with its traceback, and the next task works."""
    with pytest.raises(WorkerError, match="ArithmeticError: two and two") as caught:
        pool.run(_fail_on_rank_one, 2)

    assert 1 in caught.value.errors
    assert pool.run(_sum_of_ranks, 2, 0)[0][1] == 1


def test_a_hanging_task_is_ended(pool: Pool) -> None:
    """A task that gives no answer in time is killed, and the next one works."""
    with pytest.raises(WorkerError, match="no answer"):
        pool.run(_hang, 2, timeout_seconds=0.5)

    assert pool.run(_sum_of_ranks, 2, 0)[0][1] == 1


def test_a_dying_worker_is_replaced(pool: Pool) -> None:
    """A process that exits is reported, and the next task works."""
    with pytest.raises(WorkerError, match="the process died"):
        pool.run(_die, 1)

    assert pool.run(_sum_of_ranks, 1, 5)[0][1] == 5

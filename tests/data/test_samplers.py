import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from histocoder.data.samplers import BucketSampler, SequentialSampler


def sampler(n: int, *, batch_size: int, num_replicas: int = 1, rank: int = 0, seed: int = 7) -> BucketSampler:
    rng = np.random.default_rng(3)
    lengths, blocks = rng.integers(5, 60, n), rng.integers(1, 4, n)
    return BucketSampler(
        lambda _: lengths, blocks, batch_size=batch_size, seed=seed, num_replicas=num_replicas, rank=rank
    )


@given(n=st.integers(8, 200), batch_size=st.integers(1, 8), world=st.integers(1, 5), epoch=st.integers(0, 3))
def test_each_row_once_for_any_ranks(n: int, batch_size: int, world: int, epoch: int):
    ranks = [sampler(n, batch_size=batch_size, num_replicas=world, rank=rank) for rank in range(world)]
    for one in ranks:
        one.set_position(epoch, 0)
    shares = [list(one) for one in ranks]
    assert {len(steps) for steps in shares} == {len(ranks[0])}  # equal step counts
    seen = np.concatenate([share.rows for steps in shares for share in steps if share.weight])
    assert sorted(seen) == list(range(n))
    assert all(len(share.rows) for steps in shares for share in steps)


def test_order_is_a_function_of_seed_and_epoch():
    def rows(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in sampler(50, batch_size=8, seed=seed).global_batches(epoch)]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1) and rows(1, 0) != rows(2, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=5))
def test_each_row_once_when_ranks_change(parts: list[tuple[int, int]]):
    seen: list[int] = []
    for world, steps in [*parts, (1, 99)]:
        ranks = [sampler(50, batch_size=8, num_replicas=world, rank=rank) for rank in range(world)]
        for one in ranks:
            one.set_position(0, len(seen))
        for shares in itertools.islice(zip(*ranks, strict=True), steps):
            seen += [row for share in shares for row in share.rows.tolist() if share.weight]
    assert sorted(seen) == list(range(50))


@pytest.mark.parametrize(("n", "world"), [(7, 2), (1, 3), (20, 1), (9, 4)])
def test_validation_counts_each_row_once(n: int, world: int):
    lengths = np.random.default_rng(0).integers(5, 60, n)
    shares = [s for r in range(world) for s in SequentialSampler(lengths, batch_size=4, num_replicas=world, rank=r)]
    assert sorted(np.concatenate([share.rows for share in shares])) == list(range(n))

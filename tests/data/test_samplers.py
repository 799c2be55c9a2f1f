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


def test_global_batches_are_independent_of_ranks():
    one = sampler(50, batch_size=8)
    first, second = (sampler(50, batch_size=8, num_replicas=2, rank=r) for r in (0, 1))
    for whole, a, b in zip(one, first, second, strict=True):
        assert set(whole.rows) == {*a.rows, *b.rows}
        assert (whole.num_rows, whole.num_target_blocks) == (a.num_rows, a.num_target_blocks)


def test_order_is_a_function_of_seed_and_epoch():
    def rows(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in sampler(50, batch_size=8, seed=seed).global_batches(epoch)]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1) and rows(1, 0) != rows(2, 0)


def test_an_epoch_goes_on_where_it_was_left():
    whole, rest = sampler(50, batch_size=8), sampler(50, batch_size=8)
    rest.set_position(0, sum(share.num_rows for share in list(whole)[:3]))
    assert [s.rows.tolist() for s in rest] == [s.rows.tolist() for s in list(whole)[3:]]


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


def test_parts_of_a_batch_make_it_up():
    options = {"batch_size": 24, "seed": 1, "num_replicas": 2, "rank": 1}
    lengths, blocks = np.arange(50) % 20 + 3, np.ones(50, dtype=int)
    whole = list(BucketSampler(lambda _: lengths, blocks, **options))
    parts = BucketSampler(lambda _: lengths, blocks, num_parts=3, **options)
    found = list(parts)
    assert len(found) == len(parts) == 3 * len(whole)
    for i, share in enumerate(whole):
        mine = [part for part in found[3 * i : 3 * i + 3] if part.weight]
        assert np.array_equal(np.concatenate([part.rows for part in mine]), share.rows)
        assert {(p.num_rows, p.num_target_blocks) for p in mine} == {(share.num_rows, share.num_target_blocks)}


@pytest.mark.parametrize(("n", "world"), [(7, 2), (1, 3), (20, 1), (9, 4)])
def test_validation_counts_each_row_once(n: int, world: int):
    lengths = np.random.default_rng(0).integers(5, 60, n)
    shares = [s for r in range(world) for s in SequentialSampler(lengths, batch_size=4, num_replicas=world, rank=r)]
    assert sorted(np.concatenate([share.rows for share in shares])) == list(range(n))

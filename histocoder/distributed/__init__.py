"""Processes that train together: what a launcher says, how they meet, what they tell one another, how they end."""

from histocoder.distributed.collectives import (  # noqa: F401
    Ballot,
    broadcaster,
    gather,
    gather_texts,
    mean_of_rows,
    reduce_sum,
)
from histocoder.distributed.primary import from_primary, run_on_primary, wait_for_all  # noqa: F401
from histocoder.distributed.process_group import (  # noqa: F401
    RANK_TIMEOUT,
    backend,
    control_group,
    expect_end,
    is_first_here,
    is_lost_contact,
    is_primary,
    leave,
    nccl_version,
    rank,
    start,
    stop,
    world_size,
)

"""Processes that train together: launch environment, process group, collectives, watchdog and signals."""

from histocoder.distributed.collectives import Ballot, gather, gather_texts, mean_of_rows, reduce_sum
from histocoder.distributed.logger import log
from histocoder.distributed.primary import broadcast_from_primary, run_on_primary, wait_for_all
from histocoder.distributed.process_group import (
    backend,
    control_group,
    expect_end,
    is_local_primary,
    is_lost_contact,
    is_primary,
    leave,
    nccl_version,
    rank,
    start,
    stop,
    world_size,
)

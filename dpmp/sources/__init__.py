"""Loads the datasets of users, and puts their rows on the devices.

Everything that is loaded is sensitive: errors show neither the records of a batch nor
their number.
"""

from dpmp.sources._batches import (
    check_devices,
    check_sharding,
    load_shards,
    prefetched,
)
from dpmp.sources._check_source import check_source
from dpmp.sources._source import Load, Source, loader_of

__all__ = [
    "Load",
    "Source",
    "check_devices",
    "check_sharding",
    "check_source",
    "load_shards",
    "loader_of",
    "prefetched",
]

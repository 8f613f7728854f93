"""The requests of a store on S3: bounds per block, and what does not depend on their number."""

from __future__ import annotations

import dask
import pytest

from tests.benchmarks.s3_requests import CountingServer, counted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:moto"),
]


def test_counted__per_block() -> None:
    server = CountingServer()
    with server.running() as options, dask.config.set(scheduler="threads", num_workers=2):
        few, many = (dict(counted(server, options, n)) for n in (2, 5))
    per_block = {name: (many[name].total() - few[name].total()) / 3 for name in few}
    assert per_block["save"] <= 3  # features, and its record, which is read when it is packed
    assert per_block["save, with gram"] <= 4
    assert per_block["read"] == per_block["read features"] == 1
    assert per_block["score"] == 1
    assert per_block["resume"] == per_block["open"] == 0
    assert few["open"].total() <= 3
    assert few["resume"].total() <= 34

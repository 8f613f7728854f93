"""The common part of all tests: hypothesis profiles, one thread, and two kinds of cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from distributed import Client, LocalCluster
from hypothesis import settings

from tests import fakegpu
from tests.clusters import PATIENT, local_cluster
from trakdask.errors import forget_warnings

HERE = Path(__file__).parent

# Scripts, run by `make benchmarks`: the doctest collector would import them.
collect_ignore = [
    str(script.relative_to(HERE))
    for script in (HERE / "benchmarks").glob("*.py")
    if not script.name.startswith("test_")
]

# No deadline: one slow moment of a shared machine is not a failure. `dev` and `ci` repeat the same
# examples in each run, `nightly` looks for new ones.
settings.register_profile("dev", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

dask.config.set(PATIENT)


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("a test module computes while it is imported")


# Workers import test modules on their event loop, and would wait there for what never comes.
dask.config.set(scheduler=_refuse)
# No test cuts the power, and a disk takes milliseconds for each file that has to be on it.
os.fsync = lambda descriptor: None
# Tests are about the code of long runs; the tests of the start of a process unset it.
os.environ.setdefault("TRAKDASK_NUMBA", "1")
matplotlib.use("Agg")
if os.environ.get("TESTS_WITH") == "dask-array":  # `make unit-dask-array`
    from dask_array.xarray import register

    register()
# Only a process that starts with the device can have it, and then has it in all of its tests.
if os.environ.get("TESTS_WITH") != "fakegpu":  # `make unit-fakegpu`
    collect_ignore.append("devices")
elif not fakegpu.missing():
    fakegpu.start()
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, and skip tests marked ``gpu`` where there is no CUDA device.

    A file runs as a whole in one of the processes of ``make unit``. If a long one came last, the
    other processes would wait for it. The longest of all is one test.
    """
    n_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    n_tests = Counter(item.path for item in items)
    longest = HERE / "test_readme.py"
    items.sort(
        key=lambda item: (item.path == longest, n_slow[item.path], n_tests[item.path]), reverse=True
    )
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    """Close what a test has drawn: pyplot warns of more than 20 open figures."""
    yield
    plt.close("all")


def pytest_collection_finish() -> None:
    """From here on, tests may compute."""
    dask.config.set(scheduler=None)


@pytest.fixture(scope="session")
def thread_cluster() -> Iterator[LocalCluster]:
    """Two workers inside this process."""
    with local_cluster(processes=False) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def process_cluster() -> Iterator[LocalCluster]:
    """Two worker processes: they find what cannot be pickled."""
    with local_cluster(processes=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of networks that are trained once for all processes of a run."""
    of_process = tmp_path_factory.getbasetemp()
    return (of_process.parent if "PYTEST_XDIST_WORKER" in os.environ else of_process) / "digits"


@pytest.fixture(autouse=True)
def _warnings_are_shown_again() -> None:
    """No test sees fewer warnings because another one came first."""
    forget_warnings()


@pytest.fixture
def client(thread_cluster: LocalCluster) -> Iterator[Client]:
    """Make the in-process cluster the active one, for this test only."""
    with Client(thread_cluster, set_as_default=False) as client, client.as_current():
        yield client


@pytest.fixture
def process_client(process_cluster: LocalCluster) -> Iterator[Client]:
    """Make the process cluster the active one, for this test only."""
    with Client(process_cluster, set_as_default=False) as client, client.as_current():
        yield client


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, object]]:
    """Return the options of a real server that speaks S3, in this process."""
    from moto.server import ThreadedMotoServer  # seconds to import

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
    server.stop()


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    """Test on a device that stands for a GPU: with float64, and nothing counted yet."""
    if os.environ.get("TESTS_WITH") != "fakegpu" or fakegpu.missing():
        pytest.skip(fakegpu.missing() or "no fake GPU in this process; try: make unit-fakegpu")
    fakegpu.calls()
    yield
    fakegpu.allow_float64(True)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run the interpreter in a folder and return what it printed; fail with what went wrong."""

    def run(*arguments: str, cwd: Path = HERE.parent, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=cwd, env=os.environ | environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run

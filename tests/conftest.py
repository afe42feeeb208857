"""What all tests share: one Ray on this machine, and the places of optional real data."""

import os
import sys
from pathlib import Path

import pytest

# Before Ray is imported anywhere: one authentication mode for heads and clients, and quick looks at workers.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = str(ROOT)  # workers import faults from tests/
SHARED = Path(os.environ.get("MMRAY_SHARED", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    """Ray with 8 logical CPUs on this machine, left running for the next module that needs it.

    A module that starts a cluster of its own ends this one first; the next that asks gets another.
    """
    import ray
    import ray.data

    if not ray.is_initialized():
        os.environ["MMRAY_TEST_FAULTS"] = str(tmp_path_factory.mktemp("faults"))  # workers inherit it from the start
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False


def pytest_sessionfinish():
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def one_thread():
    """Tiny models run faster on one thread, and much faster where other work has the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_data():
    """Real images beside the checkout, where there are any."""
    if not SHARED.is_dir():
        pytest.skip("needs the data folder beside the checkout (or MMRAY_SHARED)")
    return SHARED

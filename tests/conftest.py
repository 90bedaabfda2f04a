"""Settings of the whole test run."""

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

OFFLINE = str(Path(__file__).with_name("offline"))
sys.path.append(OFFLINE)
os.environ["PYTHONPATH"] = os.pathsep.join([OFFLINE, *filter(None, [os.environ.get("PYTHONPATH")])])

import no_network  # noqa: E402

os.environ.pop("COLUMNS", None)  # the workers of xdist have one: tables would be as narrow as somebody's window

# The promises tested here (byte-identity, float64 to 1e-9) are the CPU's; a GPU in the machine must not change them.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on the CPU

import torch  # noqa: E402

# The tests' tensors are tiny: two OpenMP threads that wait for each other on a busy machine made the lane
# tests ten times slower than one thread. Byte-identity is promised for a fixed thread count, too.
torch.set_num_threads(1)

CACHE = tempfile.TemporaryDirectory(prefix="perada-cache-")  # decoded images of tests are nothing to keep at home
atexit.register(CACHE.cleanup)
os.environ["PERADA_CACHE"] = CACHE.name

BLOCKED = Path(CACHE.name) / "blocked.log"
os.environ[no_network.LOG] = str(BLOCKED)


@pytest.fixture(autouse=True)
def stay_on_this_machine() -> Iterator[None]:
    """Fails a test that tried to leave this machine, in any of its processes and even if it hid the error."""
    BLOCKED.unlink(missing_ok=True)
    yield
    assert not BLOCKED.exists(), BLOCKED.read_text()

import os
import sys

import pytest
from hypothesis import settings

from .loggers import reset_loggers

# Several test processes share the machine's cores; threads that wait for each other would only slow
# all of them. Set before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS gives the same bits twice only with a workspace of a fixed size; torch reads this once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# No limit for the time of an example: a machine can be busy. The same examples each time, and no
# database of them.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.register_profile("long", deadline=None, max_examples=3400)  # make fuzz
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def loggers_reset():
    yield
    reset_loggers()


@pytest.fixture(autouse=True)
def datasets_forgotten():
    """Forget the datasets that a test registers, except for those of an import."""
    data = sys.modules.get("detectron2.data")
    if not data:
        yield
        return

    before = set(data.DatasetCatalog)
    yield
    for name in set(data.DatasetCatalog) - before:
        data.DatasetCatalog.pop(name)
        data.MetadataCatalog.pop(name, None)


@pytest.fixture
def one_thread():
    """Use one thread: the tensors of small images are too small for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Write the small dataset of shapes once per process; return its folder."""
    from .shapes import write_small_shapes  # imports torch

    folder = tmp_path_factory.mktemp("datasets") / "shapes"
    write_small_shapes(folder)
    return folder


@pytest.fixture(scope="module")
def small_dataset(shapes):
    """Register the small dataset for the tests of a module; return its folder."""
    from .shapes import registered

    with registered(shapes):
        yield shapes

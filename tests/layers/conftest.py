"""The tests of the layer run over every path that the machine has."""

import os

import pytest

from gw_detectron.ops.group_whitening.op import ENVIRONMENT_SWITCH

#: Triton's kernels run where there is a GPU, or slowly in its interpreter
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PATHS = ["chosen"] if INTERPRETED else ["matmul", "reference"]
ON_EVERY_PATH = {
    "test_degenerate_samples",
    "test_group_whitening",
    "test_group_whitening_module",
    "test_group_whitening_properties",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in ON_EVERY_PATH:
        metafunc.parametrize("path", PATHS, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def path(request: pytest.FixtureRequest):
    """The path that group whitening takes: one of a parametrised test's, or what the layer chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENVIRONMENT_SWITCH, raising=False)
        if getattr(request, "param", "chosen") != "chosen":
            patch.setenv(ENVIRONMENT_SWITCH, request.param)
        yield getattr(request, "param", None)

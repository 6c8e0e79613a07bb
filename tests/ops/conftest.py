"""Tests in ``ON_EVERY_BACKEND`` run once per backend of this machine."""

import os

import pytest

from gw_detectron.ops.group_whitening.op import ENVIRONMENT_SWITCH

#: Triton runs on a GPU, or slowly in its interpreter
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["chosen"] if INTERPRETED else ["matmul", "reference"]
ON_EVERY_BACKEND = {
    "test_degenerate_samples",
    "test_group_whitening",
    "test_group_whitening_module",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in ON_EVERY_BACKEND:
        metafunc.parametrize("backend", BACKENDS, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop repetitions: other solvers than newton have one backend, the reference."""
    items[:] = [
        item for item in items if not _repeated(getattr(item, "callspec", None))
    ]


def _repeated(callspec) -> bool:
    if callspec is None or callspec.params.get("backend") not in ("matmul", "chosen"):
        return False
    params = callspec.params
    found = (
        params.get("solver")
        or params.get("setting")
        or params.get("args", {}).get("solver", "newton")
    )
    return getattr(found, "solver", found) != "newton"


@pytest.fixture(scope="module", autouse=True)
def backend(request: pytest.FixtureRequest):
    """Force the backend of a parametrized test, or leave the choice to the operator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ENVIRONMENT_SWITCH, raising=False)
        if getattr(request, "param", "chosen") != "chosen":
            patch.setenv(ENVIRONMENT_SWITCH, request.param)
        yield getattr(request, "param", None)

from ..weights.conftest import detector_cfg, r18, r18_file  # noqa: F401, fixtures

"""What weight files record about their network, and configs that do not fit it."""

import pytest

from gw_detectron.config import default_config
from gw_detectron.weights.network_record import Preprocessing, preprocessing_errors


@pytest.mark.parametrize(
    ("expected", "given", "named"),
    [
        ((57.375, 57.12, 58.395), [57.38, 57.1, 58.4], ""),
        ((0.229, 0.224, 0.225), [0.25, 0.25, 0.25], "MODEL.PIXEL_STD"),
        ((1.0, 1.0, 1.0), [1.04, 1.04, 1.04], "MODEL.PIXEL_STD"),
    ],
)
def test_rounded_values_fit_and_others_are_named(expected, given, named):
    cfg = default_config()
    cfg.MODEL.PIXEL_STD = given
    needed = Preprocessing("BGR", tuple(cfg.MODEL.PIXEL_MEAN), expected, True)

    errors = preprocessing_errors(cfg, needed, "MODEL.WEIGHTS ('a.pth')")

    assert [named in error for error in errors] == ([True] if named else [])

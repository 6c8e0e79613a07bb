"""A model that Detectron2 cannot build is reported as one sentence."""

import pytest
from detectron2.config import get_cfg

from gw_detectron import add_gw_config
from gw_detectron.errors import ConfigError
from gw_detectron.modeling import build_checked_model


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("MODEL.META_ARCHITECTURE", "NoSuchModel", ["NoSuchModel", "META_ARCH"]),
        ("MODEL.RESNETS.OUT_FEATURES", ["res9"], ["AssertionError", "resnet.py, line"]),
        ("MODEL.ANCHOR_GENERATOR.SIZES", [], ["cannot be empty", "anchor_generator.py, line"]),
        ("MODEL.RESNETS.NORM", "GW:groups=3", ["MODEL.RESNETS.NORM ('GW:groups=3')"]),
    ],
)
def test_one_sentence_with_the_reason(key, value, words):
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError) as raised:
        build_checked_model(cfg, "meta")
    message = str(raised.value)
    assert message.startswith("MODEL: the model cannot be built: ") and "Fix: " in message, (
        message
    )
    assert all(word in message for word in words) and "\n" not in message, message
    assert cfg.MODEL.DEVICE == "cuda" and raised.value.__cause__ is not None

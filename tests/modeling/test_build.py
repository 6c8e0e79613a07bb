"""A model that Detectron2 cannot build is reported as one sentence."""

import pytest

from gw_detectron.config import default_config
from gw_detectron.errors import ConfigError
from gw_detectron.modeling import build_checked_model


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("MODEL.META_ARCHITECTURE", "NoSuchModel", ["NoSuchModel", "META_ARCH"]),
        ("MODEL.RESNETS.OUT_FEATURES", ["res9"], ["AssertionError", "resnet.py, line"]),
        (
            "MODEL.ANCHOR_GENERATOR.SIZES",
            [],
            ["cannot be empty", "anchor_generator.py, line"],
        ),
        ("MODEL.RESNETS.NORM", "GW:groups=3", ["MODEL.RESNETS.NORM ('GW:groups=3')"]),
    ],
)
def test_one_sentence_with_the_reason(key, value, words):
    cfg = default_config()
    cfg.merge_from_list([key, value])

    with pytest.raises(ConfigError) as raised:
        build_checked_model(cfg, "meta")

    message = str(raised.value)
    assert message.startswith("MODEL: the model cannot be built: ")
    assert "\n" not in message
    for word in (*words, "Fix: "):
        assert word in message
    assert raised.value.__cause__ is not None
    assert cfg.MODEL.DEVICE == "cuda"

"""gw_detectron.model_zoo: the shipped configs by name, and the models built from them."""

from pathlib import Path

import pytest
import torch

from gw_detectron import GroupWhitening2d, model_zoo

DEMO = "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml"
GW_R50 = "COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml"


def test_list_configs_names_every_config_that_trains():
    root = Path(__file__).resolve().parent.parent / "configs"
    every = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.*")
        if path.suffix in (".yaml", ".py") and path.name != "datasets.yaml"
    }
    parts = {
        name
        for name in every
        if Path(name).name.startswith("Base-") or name.startswith("common/")
    }
    assert set(model_zoo.list_configs()) == every - parts
    assert model_zoo.list_configs() == sorted(model_zoo.list_configs())
    assert {DEMO, GW_R50} <= set(model_zoo.list_configs())


def test_get_config_reads_the_yaml_and_its_base():
    cfg = model_zoo.get_config(GW_R50)
    assert cfg.MODEL.RESNETS.WHITEN_POSITIONS == "S1-B2"  # from the yaml
    assert cfg.MODEL.BACKBONE.NAME == "build_gw_resnet_fpn_backbone"  # from its _BASE_
    assert Path(model_zoo.get_config_file("Base-RCNN-FPN.yaml")).is_file()


@pytest.mark.parametrize(
    "name", [GW_R50.removesuffix(".yaml"), "../pyproject.toml", "/etc/passwd", ""]
)
def test_names_that_are_no_configs(name: str):
    with pytest.raises(ValueError, match=r"unknown") as error:
        model_zoo.get_config(name)
    assert GW_R50 in str(error.value) or name[:2] != "CO"


def test_get_builds_a_lazy_config():
    name = "new_baselines/mask_rcnn_R_50_FPN_100ep_LSJ_GW.py"
    assert model_zoo.get_config(name).train.max_iter == 184375
    model = model_zoo.get(name, device="cpu")
    assert any(isinstance(module, GroupWhitening2d) for module in model.modules())


def test_get_builds_a_detector():
    model = model_zoo.get(DEMO, device="cpu")
    assert any(isinstance(module, GroupWhitening2d) for module in model.modules())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with torch.no_grad():
        (result,) = model.eval()(
            [{"image": torch.rand(3, 64, 64) * 255, "height": 64, "width": 64}]
        )
    assert {"pred_boxes", "scores", "pred_classes", "pred_masks"} <= set(
        result["instances"].get_fields()
    )


def test_get_loads_the_weights_the_config_names(tmp_path, monkeypatch):
    weight = "backbone.bottom_up.stem.conv1.weight"
    state = model_zoo.get(DEMO, device="cpu").state_dict()
    expected = torch.full_like(state[weight], 0.25)
    torch.save({"model": {**state, weight: expected}}, tmp_path / "w.pth")
    cfg = model_zoo.get_config(DEMO)
    cfg.MODEL.WEIGHTS = str(tmp_path / "w.pth")
    monkeypatch.setattr(model_zoo, "get_config", lambda name: cfg)
    assert torch.equal(model_zoo.get(DEMO, device="cpu").state_dict()[weight], expected)

"""A layer whose matrices are so large that it dominates the training step is named before the run."""

import pytest

from gw_detectron.analysis.norm_shapes import norm_shapes
from gw_detectron.model_zoo import get_config
from gw_detectron.preflight.findings import Findings
from gw_detectron.preflight.model_checks import _check_solver_cost


@pytest.mark.parametrize(("groups", "warned"), [(64, False), (256, True)])
def test_large_groups_in_a_head_on_regions_are_expensive(groups, warned):
    cfg = get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml")
    cfg.MODEL.ROI_BOX_HEAD.NORM = f"GW:groups={groups}"
    findings = Findings()
    _check_solver_cost(norm_shapes(cfg, 64, 64, 2), findings)
    assert bool(findings.warnings) == warned
    if warned:
        assert "roi_heads.box_head.conv1.norm (GW:groups=256" in findings.warnings[0]
        assert "Fix: use 64" in findings.warnings[0]

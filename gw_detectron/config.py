"""The config keys this package adds to Detectron2's."""

from detectron2.config import CfgNode


def add_gw_config(cfg: CfgNode) -> None:
    """Adds the package's keys with their defaults; a second call changes nothing.

    Norm names are described in :mod:`gw_detectron.modeling.norm`. ``MODEL.RESNETS.NORM``, ``MODEL.FPN.NORM``,
    ``MODEL.ROI_BOX_HEAD.NORM`` and ``MODEL.ROI_MASK_HEAD.NORM`` are Detectron2's keys and take these names as well.
    """
    defaults = (
        # The norm at WHITEN_POSITIONS of the backbone. "GW" is the paper's: 64 groups, 5 iterations, eps 1e-5.
        (cfg.MODEL.RESNETS, "WHITEN_NORM", "GW"),
        # Where WHITEN_NORM stands; every other norm of the backbone is MODEL.RESNETS.NORM.
        # "" nowhere, "S1" stem, "S1-B1" "S1-B2" "S1-B3" "S1-B12" stem and the first / second / third / first two
        # norms of every block, "ALL" these and the shortcuts. The paper's choice is S1-B2.
        (cfg.MODEL.RESNETS, "WHITEN_POSITIONS", "S1-B2"),
        # One ReLU after the convolutions of the box head instead of one after each. The authors' released detection
        # code has it so; the paper does not, hence False.
        (cfg.MODEL.ROI_BOX_HEAD, "SINGLE_RELU", False),
    )
    for node, key, value in defaults:
        if key not in node:
            node[key] = value

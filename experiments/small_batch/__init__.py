"""Small-batch study: AP of norms at 1 to 8 images per batch, see experiments/small_batch/study.md."""

from gw_detectron.data import register_synthetic

from .dataset import HardSyntheticConfig

register_synthetic(config=HardSyntheticConfig())

"""Small-batch study: AP of norms at 1 to 8 images per batch, see docs/small_batch_study.md."""

from gw_detectron.data import register_synthetic

from .dataset import HardSyntheticConfig

register_synthetic(config=HardSyntheticConfig())

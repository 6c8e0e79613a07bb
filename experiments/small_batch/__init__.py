"""Small-batch study: AP of norms at 1 to 8 images per batch, see docs/small_batch_study.md."""

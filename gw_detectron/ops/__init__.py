"""Whitening operations in torch (and Triton): plain functions without modules or Detectron2."""

"""The workbench: train, judge and use a detector on your own data, with Detectron2.

The method (``ops``, ``layers``, ``norms``, ``modeling``, ``weights``) does not import it.
"""

"""Group Whitening: ``reference.py`` has the equations, ``op.py`` the custom operator, the rest its backends."""

"""``python -m gw_detectron COMMAND`` is ``gw-detectron COMMAND``."""

from .workbench.commands import main

if __name__ == "__main__":
    main()

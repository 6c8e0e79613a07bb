"""Draw a COCO dataset of textured shapes.

    python -m examples.shapes datasets/gw_synthetic

The folder gets annotations/instances_{train,val}.json and the photos in train/ and val/. The
configs in configs/quick_schedules train on this one. The flags are the parameters of ShapesConfig.
"""

import argparse

from gw_detectron.workbench.console import errors_reported

from .dataset import ShapesConfig, write_shapes


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="new folder of the dataset")
    for name, default in vars(ShapesConfig()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=type(default), default=default, help="default: %(default)s"
        )
    return parser


def main() -> None:
    values = vars(get_parser().parse_args())
    folder = values.pop("folder")
    with errors_reported():
        write_shapes(folder, ShapesConfig(**values))
    print(f"{folder}: a COCO dataset of drawn shapes")


if __name__ == "__main__":
    main()

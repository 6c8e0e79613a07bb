"""The one thing pyproject.toml cannot say: the wheel holds the folder configs/ as gw_detectron/configs/."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["gw_detectron", "gw_detectron.*"]),
        "gw_detectron.configs",
    ],
    package_dir={"gw_detectron.configs": "configs"},
    package_data={
        "gw_detectron": ["py.typed"],
        "gw_detectron.configs": ["**/*.yaml", "**/*.py"],
    },
)

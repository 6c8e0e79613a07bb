"""The files of a run, checked before minutes of measuring go into them."""

import os
import tempfile
from pathlib import Path


def output_files(output: Path, reference: str | os.PathLike[str] | None = None) -> tuple[Path, Path]:
    """The names of the table and the picture of a run, in a folder that exists then.

    Args:
        output: both without their suffix.
        reference: an existing table that has to stay as it is.

    Raises:
        ValueError: ``output`` names no file, or the reference.
        OSError: the files cannot be written.
    """
    if output.name in ("", ".."):
        raise ValueError(f"output {str(output)!r} names no file: give a folder and a name, as output/benchmark/layer")
    table, picture = (output.with_name(output.name + suffix) for suffix in (".csv", ".png"))
    if reference is not None and table.exists() and table.samefile(reference):
        raise ValueError(f"{table} is the reference itself: give the table of this run another name (--output)")
    for path in (table, picture):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: give the files of this run another name (--output)")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # as long as the names that a file has before it is whole
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{table.name}.", suffix=".check.tmp"):
            pass
    except OSError as error:
        raise OSError(f"{table} cannot be written ({error.strerror}): give another name (--output)") from None
    return table, picture

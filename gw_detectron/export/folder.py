"""An output folder that is there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import summarize_names


@contextmanager
def whole_folder(output: Path, files: Collection[str]) -> Iterator[Path]:
    """Yields an empty folder beside ``output`` that takes its place if the block ends without an error.

    Args:
        output: the folder to make. It may exist if it is empty or holds nothing but an earlier export of this kind.
        files: the names that an export of this kind writes.

    Raises:
        FileExistsError: ``output`` exists and holds something else, which is left as it is.
        OSError: it cannot be made.
    """
    output = output.resolve()
    _check_replaceable(output, files)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise OSError(f"{output} cannot be made: {error.strerror}. Name another folder") from error
    try:
        new = work / "new"
        new.mkdir()
        yield new
        _check_replaceable(output, files)  # it may have been filled meanwhile
        if output.exists():
            os.rename(output, work / "old")
        try:
            os.rename(new, output)
        except OSError:
            if (work / "old").exists():
                os.rename(work / "old", output)
            raise
    finally:
        shutil.rmtree(work)


def _check_replaceable(output: Path, files: Collection[str]) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise FileExistsError(f"{output} is a file; name a folder for the export")
    others = sorted(entry.name for entry in output.iterdir() if entry.name not in files)
    if others:
        raise FileExistsError(
            f"the folder {output} holds {summarize_names(others)}, which is no earlier export of this kind "
            f"({', '.join(sorted(files))}); name another folder, or empty it"
        )

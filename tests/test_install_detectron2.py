"""tools/install_detectron2.py on small synthetic archives, without downloads and installations."""

import io
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import install_detectron2
import pytest
from install_detectron2 import InstallError


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny archive like the release, with a patch that fits it."""
    files = {
        "setup.py": "import a_module_that_is_not_there",
        "tools/train_net.py": "",
        "detectron2/__init__.py": "",
        "detectron2/masks.py": "a = np.bool\nb = np.bool_\n",
        "detectron2/projects/__init__.py": "",
        "detectron2/model_zoo/__init__.py": "",
        "detectron2/model_zoo/configs/COCO-Detection/a.yaml": "VERSION: 2\n",
        "detectron2/model_zoo/configs/common/train.py": "",
        **{
            f"projects/{project}/__init__.py": ""
            for project in install_detectron2.PROJECTS
        },
    }

    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"release/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))

    monkeypatch.setattr(
        install_detectron2, "PATCHES", [("masks.py", r"\bnp\.bool\b", "bool")]
    )
    monkeypatch.setattr(install_detectron2, "read_archive", Path.read_bytes)
    return archive


def test_wheel_of_a_patched_tree(release: Path, tmp_path: Path):
    wheel = install_detectron2.build_wheel(release, tmp_path / "out")

    with zipfile.ZipFile(wheel) as file:
        contents = {name for name in file.namelist() if ".dist-info/" not in name}
        masks = file.read("detectron2/masks.py").decode()
        metadata = file.read(
            f"detectron2-{install_detectron2.VERSION}.dist-info/METADATA"
        ).decode()

    projects = [
        f"detectron2/projects/{Path(project).name}/__init__.py"
        for project in install_detectron2.PROJECTS
    ]
    assert contents == {
        "detectron2/__init__.py",
        "detectron2/_C.py",
        "detectron2/masks.py",
        "detectron2/projects/__init__.py",
        "detectron2/model_zoo/__init__.py",
        "detectron2/model_zoo/configs/COCO-Detection/a.yaml",
        "detectron2/model_zoo/configs/common/train.py",
        *projects,
    }
    assert masks == "a = bool\nb = np.bool_\n"
    assert "Requires-Dist: fvcore" in metadata


def test_patch_that_does_not_fit_is_refused(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        install_detectron2, "PATCHES", [("masks.py", "pkg_resources", "")]
    )
    with pytest.raises(InstallError, match=r"masks\.py"):
        install_detectron2.build_wheel(release, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stub_of_the_compiled_operators():
    stub = types.ModuleType("detectron2._C")
    exec(install_detectron2.STUB, stub.__dict__)
    with pytest.raises(ImportError, match="nms_rotated"):
        _ = stub.nms_rotated
    assert not hasattr(stub, "__path__")  # `import detectron2._C` asks for it


def test_another_archive_is_refused_unexecuted(tmp_path, monkeypatch, capsys):
    executed = tmp_path / "executed"
    text = f"""
open({str(executed)!r}, "w")
import setuptools
setuptools.setup(name="pb1-detectron2", version="0.6")
"""
    (tmp_path / "registry").mkdir()
    (tmp_path / "setup.py").write_text(text)
    archive = tmp_path / "registry" / "pb1-detectron2-0.6.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "setup.py", "pb1-detectron2-0.6/setup.py")

    flags = ["--sdist", str(archive), "--wheel-dir", str(tmp_path / "out")]
    assert install_detectron2.main(flags) == 1
    assert install_detectron2.SDIST_SHA256 in capsys.readouterr().err

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    monkeypatch.setattr(
        install_detectron2, "pip_commands", lambda: [[sys.executable, "-m", "pip"]]
    )
    with pytest.raises(InstallError, match="HASHES"):
        install_detectron2.download(tmp_path)
    assert not executed.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("version", "flags", "builds"),
    [
        ("0.6", [], False),
        ("unknown", [], False),
        ("0.6", ["--force"], True),
        (install_detectron2.VERSION, [], False),
        ("0.5+pure", [], True),
        ("", [], True),
    ],
)
def test_installed_detectron2(monkeypatch, capsys, version, flags, builds):
    def build_wheel(archive: Path | None, folder: Path) -> Path:
        raise InstallError("a build was attempted")

    monkeypatch.setattr(install_detectron2, "installed_version", lambda: version)
    monkeypatch.setattr(install_detectron2, "check_import", lambda: None)
    monkeypatch.setattr(install_detectron2, "build_wheel", build_wheel)
    assert install_detectron2.main(flags) == builds
    assert ("a build was attempted" in capsys.readouterr().err) is builds


def test_broken_detectron2_is_reported_and_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "detectron2").mkdir()
    (tmp_path / "detectron2" / "__init__.py").write_text(
        "raise ImportError('undefined symbol: _ZN3c10')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert install_detectron2.main([]) == 1
    error = capsys.readouterr().err
    assert "_ZN3c10" in error and "--force" in error and "Traceback" not in error

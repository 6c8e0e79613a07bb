"""tools/install_detectron2.py on small synthetic archives, without downloads and installations."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import types
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import detectron2
import detectron2_wheel
import install_detectron2
import pytest
from detectron2.evaluation import coco_evaluation
from detectron2_patches import PATCHES, STUB, InstallError, Patch
from pycocotools.cocoeval import COCOeval

SETUP_PY = """
from setuptools import setup
import a_module_that_is_not_there
PROJECTS = {"detectron2.projects.point_rend": "projects/PointRend/point_rend"}
"""


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A tiny source tree like the release."""
    root = tmp_path / "pb1-detectron2-0.6"
    files = {
        "setup.py": SETUP_PY,
        "LICENSE": "licence",
        "tools/train_net.py": "",
        "projects/PointRend/point_rend/__init__.py": "",
        "detectron2/__init__.py": '__version__ = "0.6"\n',
        "detectron2/layers/__init__.py": "from detectron2 import _C\n",
        "detectron2/masks.py": "a = np.bool\nb = np.bool_\nc = np.int(1)\n",
        "detectron2/model_zoo/__init__.py": "",
        "detectron2/model_zoo/configs/COCO-Detection/a.yaml": "VERSION: 2\n",
        "detectron2/model_zoo/configs/common/__init__.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- patches ---


def test_patch_replaces_the_expected_matches(release: Path):
    Patch("detectron2/masks.py", r"\bnp\.(bool|int)\b", r"\1", 2).apply(release)
    assert (release / "detectron2/masks.py").read_text() == "a = bool\nb = np.bool_\nc = int(1)\n"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (Patch("detectron2/masks.py", r"\bnp\.(bool|int)\b", "", 3), r"masks\.py: .* matches 2 .* expected 3\."),
        (Patch("detectron2/masks.py", "pkg_resources", ""), r"matches 0 .* expected 1\. .*nothing was installed"),
        (Patch("detectron2/gone.py", "a", "b"), r"detectron2/gone\.py: not in the source archive"),
    ],
)
def test_patch_of_another_release_is_refused(release: Path, patch: Patch, message: str):
    before = (release / "detectron2/masks.py").read_text()
    with pytest.raises(InstallError, match=message):
        patch.apply(release)
    with pytest.raises(InstallError, match="another release"):
        detectron2_wheel.prepare_tree(release, PATCHES)
    assert (release / "detectron2/masks.py").read_text() == before


# --- the stub of the compiled operators ---


def test_stub():
    stub = types.ModuleType("detectron2._C")
    exec(STUB, stub.__dict__)
    with pytest.raises(ImportError, match=r"detectron2\._C\.nms_rotated: compiled operator.* https://detectron2\.read"):
        _ = stub.nms_rotated
    assert not hasattr(stub, "__path__")  # `import detectron2._C` asks for it
    assert "pure Python" in stub.get_compiler_version()
    assert stub.has_cuda() is False


def test_pure_build_evaluates_without_compiled_operators():
    operators = pytest.importorskip("detectron2._C", exc_type=ImportError)
    if "PURE_BUILD" not in vars(operators):
        pytest.skip("detectron2 here is not the pure Python build")
    assert coco_evaluation.COCOeval_opt is COCOeval


# --- the archive ---


@pytest.mark.parametrize("flags", [[], ["--force"], ["--wheel-dir", "{tmp_path}/out"]], ids=["kept", "forced", "wheel"])
def test_another_archive_is_refused_before_anything_else(tmp_path, monkeypatch, capsys, flags):
    put_detectron2(tmp_path, monkeypatch)
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(b"another release")
    flags = [flag.format(tmp_path=tmp_path) for flag in flags]
    assert install_detectron2.main(["--sdist", str(archive), *flags]) == 1
    error = capsys.readouterr().err
    assert "a.tar.gz: SHA-256 is " in error and f"expected {detectron2_wheel.SDIST_SHA256}. " in error
    assert not (tmp_path / "out").exists()


def test_archive_is_read_once(tmp_path, monkeypatch):
    """A file that changes after the check must not be built."""
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(b"checked")
    monkeypatch.setattr(detectron2_wheel, "SDIST_SHA256", hashlib.sha256(b"checked").hexdigest())
    data = detectron2_wheel.read_archive(archive)
    archive.write_bytes(b"changed")
    assert data == b"checked"


def test_wheel_of_a_patched_tree(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(release, release.name)
    patch = Patch("detectron2/masks.py", r"\bnp\.bool\b", "bool")
    prepare = detectron2_wheel.prepare_tree
    monkeypatch.setattr(detectron2_wheel, "prepare_tree", lambda root: prepare(root, [patch]))
    wheel = detectron2_wheel.build_wheel(archive.read_bytes(), tmp_path / "work")
    assert wheel.name == "detectron2-0.6+pure-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        contents = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = file.read("detectron2-0.6+pure.dist-info/METADATA").decode()
        masks, stub = file.read("detectron2/masks.py").decode(), file.read("detectron2/_C.py").decode()
    assert contents == {
        "detectron2/__init__.py",
        "detectron2/_C.py",
        "detectron2/layers/__init__.py",
        "detectron2/masks.py",
        "detectron2/model_zoo/__init__.py",
        "detectron2/model_zoo/configs/COCO-Detection/a.yaml",
        "detectron2/model_zoo/configs/common/__init__.py",
        "detectron2/projects/point_rend/__init__.py",
    }
    assert masks.startswith("a = bool\n")
    assert detectron2_wheel.RECIPE in stub
    assert "Requires-Dist: fvcore" in metadata


# --- download ---


def fake_pips(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    pips = [[sys.executable, "-c", script] for script in scripts]
    monkeypatch.setattr(detectron2_wheel, "pip_commands", lambda: pips)


def test_download_tries_the_next_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saves = "import sys; open(sys.argv[sys.argv.index('--dest') + 1] + '/a.tar.gz', 'w')"
    fake_pips(monkeypatch, "raise SystemExit('cannot declare direct URL dependencies')", saves)
    assert detectron2_wheel.download(tmp_path) == tmp_path / "a.tar.gz"
    requirement = (tmp_path / "requirements.txt").read_text()
    assert requirement == f"{detectron2_wheel.SDIST} --hash=sha256:{detectron2_wheel.SDIST_SHA256}\n"


def wrong_release(folder: Path) -> Path:
    """Pack another archive under the name of the release; its setup script leaves a file."""
    files = {"PKG-INFO": "Metadata-Version: 2.1\nName: pb1-detectron2\nVersion: 0.6\n"}
    files["setup.py"] = f"open({str(folder / 'executed')!r}, 'w')\nimport setuptools\n"
    files["setup.py"] += "setuptools.setup(name='pb1-detectron2', version='0.6')\n"
    archive = folder / "pb1-detectron2-0.6.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"pb1-detectron2-0.6/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return archive


def test_wrong_archive_in_the_registry_is_refused_unexecuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong_release(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(detectron2_wheel, "pip_commands", lambda: [[sys.executable, "-m", "pip"]])
    (tmp_path / "work").mkdir()
    with pytest.raises(InstallError, match="The registry has another file of this name; nothing was installed"):
        detectron2_wheel.download(tmp_path / "work")
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_wrong_archive_in_the_cache_of_pip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = wrong_release(tmp_path)
    served: list[str] = []

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.append(self.path)
            page = f'<!DOCTYPE html><a href="/{archive.name}">{archive.name}</a>'.encode()
            body = archive.read_bytes() if self.path.endswith(".gz") else page
            self.send_response(200)
            self.send_header("Content-Type", "application/gzip" if self.path.endswith(".gz") else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "max-age=3600")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    pip = [sys.executable, "-m", "pip"]
    monkeypatch.setattr(detectron2_wheel, "pip_commands", lambda: [pip])
    options = {"CONFIG_FILE": os.devnull, "CACHE_DIR": str(tmp_path / "cache"), "FIND_LINKS": ""}
    options["TRUSTED_HOST"] = "127.0.0.1"  # pip caches no other file from http://
    for name, value in options.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "work").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        unchecked = [*pip, "download", "--no-deps", "--no-build-isolation", "--dest", str(tmp_path / "first")]
        subprocess.run([*unchecked, detectron2_wheel.SDIST], check=True, capture_output=True, timeout=120)
        (tmp_path / "executed").unlink()
        with pytest.raises(InstallError, match="DO NOT MATCH THE HASHES"):
            detectron2_wheel.download(tmp_path / "work")
        server.shutdown()
    assert served.count(f"/{archive.name}") == 1, "the second download was not from the cache"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "Fix: use another registry"),
        ("cannot declare direct URL dependencies", "pip<=26.0"),
        ("Temporary failure in name resolution", "without a network.*--wheel-dir DIR.*--sdist FILE"),
    ],
)
def test_failed_download_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, advice: str):
    fake_pips(monkeypatch, f"raise SystemExit({output!r})")
    with pytest.raises(InstallError, match=rf"(?s){output}.*{advice}"):
        detectron2_wheel.download(tmp_path)


def test_pip_of_this_interpreter_is_tried_first():
    commands = detectron2_wheel.pip_commands()
    assert commands[0] == [sys.executable, "-m", "pip"]
    assert all(Path(command[1]).parent.is_file() for command in commands[1:])


# --- what is installed already ---


def no_build(sdist: Path | None, work: Path) -> Path:
    raise InstallError("a build was attempted")


def put_detectron2(folder: Path, monkeypatch: pytest.MonkeyPatch, operators: str = "", modeling: str = "") -> None:
    """Put a fake detectron2 before the real one on the path of new processes; report builds instead of building."""
    package = folder / "detectron2"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.4.2"\n')
    (package / "_C.py").write_text(operators)
    (package / "modeling.py").write_text(f"from detectron2 import _C\n{modeling}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(install_detectron2, "check_environment", lambda: None)
    monkeypatch.setattr(install_detectron2, "build_wheel", no_build)


@pytest.mark.parametrize(
    ("operators", "flags", "builds"),
    [
        ("", [], False),
        ("", ["--force"], True),
        ("", ["--wheel-dir", "{tmp_path}/out"], True),
        (f"PURE_BUILD = {detectron2_wheel.RECIPE!r}", [], False),
        ("PURE_BUILD = 'older'", [], True),
    ],
    ids=["kept", "forced", "wheel", "pure build kept", "older pure build replaced"],
)
def test_existing_detectron2(tmp_path, monkeypatch, capsys, operators, flags, builds):
    put_detectron2(tmp_path, monkeypatch, operators)
    status = install_detectron2.main([flag.format(tmp_path=tmp_path) for flag in flags])
    output = capsys.readouterr()
    assert status == builds
    assert ("a build was attempted" in output.err) is builds
    kept = f"detectron2 0.4.2 at {tmp_path / 'detectron2'} works and stays as it is"
    assert (kept in output.out) is not builds
    assert not (tmp_path / "out").exists()


def test_broken_detectron2_is_reported_and_kept(tmp_path, monkeypatch, capsys):
    put_detectron2(tmp_path, monkeypatch, modeling="raise ImportError('undefined symbol: _ZN3c10')")
    assert install_detectron2.main([]) == 1
    error = capsys.readouterr().err
    assert "cannot be imported: ImportError: undefined symbol: _ZN3c10" in error
    assert "--force" in error
    assert "Traceback" not in error and "a build was attempted" not in error


@pytest.mark.parametrize("flag", ["--sdist", "--constraint"])
def test_missing_file_is_refused_beside_an_existing_detectron2(tmp_path, monkeypatch, capsys, flag):
    put_detectron2(tmp_path, monkeypatch)
    assert install_detectron2.main([flag, "nowhere"]) == 1
    assert f"{flag} ('nowhere'): file not found (cwd: " in capsys.readouterr().err


@pytest.mark.slow
def test_detectron2_of_this_environment_is_found():
    found = install_detectron2.find_detectron2()
    assert found is not None
    assert (found.error, found.version) == ("", detectron2.__version__)


def test_empty_environment_needs_torch_first(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert install_detectron2.find_detectron2() is None
    with pytest.raises(InstallError, match="torch: cannot be imported: .* Fix: install torch and torchvision first"):
        detectron2_wheel.check_environment()


# --- installing, and being interrupted ---


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as site-packages; the installation of the dependencies succeeds."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(install_detectron2, "site_packages", lambda: folder)
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(install_detectron2.subprocess, "run", lambda *args, **kwargs: done)
    return folder


def half_install(site: Path) -> None:
    for name in ("detectron2/layers", "detectron2-0.6+pure.dist-info"):
        (site / name).mkdir(parents=True)


@pytest.mark.parametrize("error", [InstallError("disk full"), KeyboardInterrupt()])
def test_interrupted_installation_is_removed(site: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def interrupted(command: list[str], task: str) -> None:
        half_install(site)
        raise error

    monkeypatch.setattr(install_detectron2, "run", interrupted)
    with pytest.raises(type(error)):
        install_detectron2.install_wheel(Path("a.whl"), None)
    assert not list(site.iterdir())


def test_killed_installation_is_removed_by_the_next_run(site: Path):
    half_install(site)
    install_detectron2.remove_unfinished()
    assert len(list(site.iterdir())) == 2  # not ours without the mark: kept
    install_detectron2.unfinished_mark().touch()
    install_detectron2.remove_unfinished()
    assert not list(site.iterdir())


def test_finished_installation_is_kept(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(install_detectron2, "run", lambda command, task: half_install(site))
    install_detectron2.install_wheel(Path("a.whl"), None)
    assert {path.name for path in site.iterdir()} == {"detectron2", "detectron2-0.6+pure.dist-info"}


def test_failing_dependencies_leave_detectron2_alone(site: Path, monkeypatch: pytest.MonkeyPatch):
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(install_detectron2.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(InstallError, match="Installing the dependencies failed"):
        install_detectron2.install_wheel(Path("a.whl"), None)
    assert not list(site.iterdir())

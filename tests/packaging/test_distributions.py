"""What users install: the wheel, the sdist, and an archive of the repository."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("tiering", "transports", "clients", "bench")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def sources() -> set[str]:
    """Every module, under the path that it must have in the wheel."""
    core = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "blobstore").rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in ROOMS
    }
    rooms = {
        f"blobstore/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    return core | rooms


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "--wheel", "--sdist")
    return out


def test_the_wheel_holds_every_module_once_and_nothing_else(dist: Path) -> None:
    names = zipfile.ZipFile(only(dist, "*.whl")).namelist()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == {"blobstore", "kv_blobstore-0.1.0.dist-info"}
    assert {name for name in names if name.endswith(".py")} == sources()
    assert "blobstore/py.typed" in names


def test_the_wheel_names_its_commands_licence_and_extras(dist: Path) -> None:
    wheel = zipfile.ZipFile(only(dist, "*.whl"))
    folder = "kv_blobstore-0.1.0.dist-info"
    points = wheel.read(f"{folder}/entry_points.txt").decode()
    assert "blobstore = blobstore.cli:main" in points
    assert "blobstored = blobstore.cli:serve_main" in points
    metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert metadata["Name"] == "kv-blobstore"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"gpu", "ucx", "demo", "peers", "transformers", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()


def test_the_sdist_keeps_the_folders_and_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = only(tmp_path, "kv_blobstore-*")
    for room in (*ROOMS, "tests", "docs"):
        assert (tree / room).is_dir()
        assert not (tree / "blobstore" / room).exists()
    build(tree, tmp_path / "again", "--wheel")
    first, again = only(dist, "*.whl"), only(tmp_path / "again", "*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(first).namelist())


def test_an_archive_of_the_repository_installs_and_imports(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    archive, site = tmp_path / "blobstore.zip", tmp_path / "site"
    run("git", "archive", "--format=zip", f"--output={archive}", "HEAD")
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-deps", "--no-build-isolation", "--root-user-action=ignore", "--target", site),
        archive,
    )
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
import blobstore.tiering, blobstore.transports, blobstore.clients, blobstore.bench
print(blobstore.__file__)
"""
    assert run(sys.executable, "-c", program, cwd=tmp_path).startswith(str(site))

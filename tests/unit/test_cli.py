from __future__ import annotations

import json
import os
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from blobstore import __version__, host
from blobstore.cli import main, plugins
from blobstore.cli.output import duration, exact_size, report
from blobstore.config import ENV_PREFIX, KEYS
from blobstore.errors import (
    BY_CODE,
    BlobStoreError,
    Full,
    InvalidRequest,
    SetupError,
    Unavailable,
    UnknownNamespace,
)
from blobstore.units import GIB, MIB, parse_size

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX) or name == "BLOBSTORE_CONFIG":
            monkeypatch.delenv(name)


def one_line(capsys: Output) -> str:
    """The error on standard error, which must be one line and all there is."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", [["put"], ["explain"], ["config", "init"]])
def test_help_is_wrapped_to_the_terminal_and_no_sooner(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command, "--help"]) == 0
    prose = capsys.readouterr().out.partition("Examples:")[0]
    prose = prose.partition("╭")[0]
    paragraphs = [text for text in re.split(r"\n\s*\n", prose) if "Usage:" not in text]
    assert paragraphs
    for text in paragraphs:
        *full, _ = text.rstrip().splitlines() or [""]
        assert all(len(line.rstrip()) > 150 for line in full), text


def test_version_and_help_succeed(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"blobstore {__version__}\n"
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["stat", "--no-such-option"],
        ["config"],
        ["stats", "--timeout", "0"],
        ["stats", "--timeout", "soon"],
        ["config", "show", "extra"],
    ],
)
def test_usage_errors_are_one_line_and_exit_2(arguments: list[str], capsys: Output) -> None:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in out + err


def test_a_mistyped_option_names_the_command_that_explains_it(capsys: Output) -> None:
    assert main(["doctor", "--dramm", "1GiB"]) == 2
    assert "blobstore doctor --help" in one_line(capsys)


@pytest.mark.parametrize("kind", [BY_CODE[code] for code in sorted(BY_CODE)])
def test_every_error_has_its_exit_code_and_one_line(
    kind: type[BlobStoreError], capsys: Output
) -> None:
    assert report(kind("wanted 1,\nfound 2")) == kind.exit_code
    assert one_line(capsys) == "error: wanted 1, found 2\n"


def test_exit_codes_are_the_documented_ones() -> None:
    assert [kind.exit_code for kind in (SetupError, InvalidRequest, Unavailable, Full)] == [
        *(1, 2, 3, 3)
    ]
    assert UnknownNamespace.exit_code == 2


def test_an_unforeseen_exception_is_one_line_too(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> host.Memory:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(host, "memory", fail)
    assert main(["doctor"]) == 1
    assert "RuntimeError: a fault of ours" in one_line(capsys)
    monkeypatch.setenv("BLOBSTORE_DEBUG", "1")
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_config_show_prints_every_key_with_its_source(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "b.toml"
    path.write_text('[ssd]\nsize = "off"\n')
    monkeypatch.setenv("BLOBSTORE__DRAM__SIZE", "1536MiB")
    assert main(["config", "show", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line.strip()} >= set(KEYS)
    dram = next(line for line in lines if line.startswith("dram.size"))
    assert "1536MiB" in dram
    assert "environment BLOBSTORE__DRAM__SIZE" in dram
    ssd = next(line for line in lines if line.startswith("ssd.size"))
    assert f"file {path}" in ssd


def test_config_show_json_holds_values_and_sources(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE__LOCAL__UIDS", "1,2")
    assert main(["config", "show", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["local"]["uids"] == {
        "value": [1, 2],
        "source": "environment BLOBSTORE__LOCAL__UIDS",
    }
    assert tree["dram"]["size"] == {"value": "auto", "source": "default"}


def test_config_init_writes_a_file_that_changes_nothing_and_keeps_an_existing_one(
    capsys: Output, tmp_path: Path
) -> None:
    path = tmp_path / "b.toml"
    assert main(["config", "init", "--output", str(path)]) == 0
    text = path.read_text()
    assert main(["config", "init"]) == 0
    assert capsys.readouterr().out == text
    assert all(body == {} for body in tomllib.loads(text).values())
    uncommented = "\n".join(
        line.removeprefix("# ") for line in text.splitlines() if " = " in line or "[" in line[:1]
    )
    tree = tomllib.loads(uncommented)
    assert {f"{section}.{key}" for section, body in tree.items() for key in body} == set(KEYS)
    path.write_text(uncommented)
    assert main(["config", "show", "--config", str(path)]) == 0
    capsys.readouterr()
    assert main(["config", "init", "--output", str(path)]) == 1
    assert str(path) in one_line(capsys)
    assert path.read_text() == uncommented


def test_a_bad_configuration_exits_2_with_the_hint(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE__DRAM__SIEZ", "1GiB")
    assert main(["config", "show"]) == 2
    assert "did you mean dram.size?" in one_line(capsys)


def machine(root: Path, **files: str) -> list[str]:
    """A fake machine's root, as options of doctor through the environment."""
    meminfo = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"
    for path, text in ({"proc/meminfo": meminfo} | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return ["--data", str(root / "data"), "--socket", str(root / "b.sock")]


def doctor(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, root: Path, *arguments: str
) -> tuple[int, dict[str, dict[str, str]]]:
    monkeypatch.setenv("BLOBSTORE__HOST__ROOT", str(root))
    code = main(["doctor", "--json", *arguments])
    body = json.loads(capsys.readouterr().out)
    assert body["ok"] == (code == 0)
    return code, {finding["subject"]: finding for finding in body["findings"]}


def test_doctor_covers_what_a_daemon_depends_on(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, found = doctor(capsys, monkeypatch, tmp_path, *machine(tmp_path))
    assert code == 0
    assert set(found) >= {"memory", "memory limit", "memlock", "swap", "huge pages", "O_DIRECT"}
    assert set(found) >= {"disk", "socket", "open files", "GPU", "UCX"}
    assert "4.8 GiB" in found["memory"]["used"]
    assert not (tmp_path / "data").exists()


def test_doctor_stops_at_a_size_above_the_limit_with_both_numbers(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"sys/fs/cgroup/memory.max": str(512 * MIB), "proc/self/cgroup": "0::/\n"}
    options = machine(tmp_path, **files)
    code, found = doctor(capsys, monkeypatch, tmp_path, *options, "--dram", "600MiB")
    assert code == 1
    assert found["memory"]["verdict"] == "stop"
    assert "600 MiB" in found["memory"]["change"]
    assert "512 MiB" in found["memory"]["change"]


def test_doctor_stops_at_a_network_file_system(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = machine(tmp_path, **{"proc/self/mounts": "server:/x / nfs4 rw 0 0\n"})
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert code == 1
    assert found["disk"]["verdict"] == "stop"


def test_doctor_stops_at_a_socket_in_no_directory(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = [*machine(tmp_path), "--socket", str(tmp_path / "none" / "b.sock")]
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert code == 1
    assert "does not exist" in found["socket"]["found"]


def test_doctor_stops_at_an_http_door_that_cannot_be_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = machine(tmp_path)
    code, found = doctor(capsys, monkeypatch, tmp_path, *options, "--http", "0.0.0.0:8470")
    assert code == 1
    assert "no TLS" in found["http"]["change"]
    code, found = doctor(capsys, monkeypatch, tmp_path, *options, "--http", "127.0.0.1:8470")
    assert code == 0
    assert found["http"]["used"] == "http://127.0.0.1:8470"
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert "http" not in found


def test_doctor_stops_at_sizes_that_contradict_each_other(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BLOBSTORE__DRAM__STAGING", "1GiB")
    options = [*machine(tmp_path), "--dram", "1GiB"]
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert code == 1
    assert found["sizes"]["verdict"] == "stop"


def test_doctor_advises_without_stopping(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 1024 kB\n"
    options = machine(tmp_path, **{"proc/meminfo": meminfo})
    code, found = doctor(capsys, monkeypatch, tmp_path, *options, "--ssd", "900TiB")
    assert code == 0
    assert found["swap"]["verdict"] == found["disk"]["verdict"] == "better"


def test_doctor_says_what_huge_pages_would_need(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offer = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    options = machine(tmp_path, **{offer: "always advise [never]\n"})
    monkeypatch.setenv("BLOBSTORE__DRAM__HUGE_PAGES", "require")
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert (code, found["huge pages"]["verdict"]) == (1, "stop")
    monkeypatch.setenv("BLOBSTORE__DRAM__HUGE_PAGES", "auto")
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert (code, found["huge pages"]["verdict"]) == (0, "better")
    (tmp_path / offer).write_text("always [advise] never\n")
    code, found = doctor(capsys, monkeypatch, tmp_path, *options)
    assert (code, found["huge pages"]["verdict"]) == (0, "ok")


def test_doctor_tells_people_in_tables_and_a_verdict(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = machine(tmp_path)
    monkeypatch.setenv("BLOBSTORE__HOST__ROOT", str(tmp_path))
    assert main(["doctor", *options]) == 0
    assert "A daemon can start here." in capsys.readouterr().out
    assert main(["doctor", *options, "--dram", "900GiB"]) == 1
    out = capsys.readouterr().out
    assert "STOP" in out
    assert "A daemon would not start here." in out


def hello(name: str = "you") -> None:
    """Greet somebody."""
    print(f"hello {name}")


group = typer.Typer(help="Several commands.")
group.command("one")(hello)
group.command("two")(hello)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        name: EntryPoint(name, value, plugins.GROUP)
        for name, value in {
            "hello": f"{__name__}:hello",
            "group": f"{__name__}:group",
            "broken": "no_such_module_at_all:x",
            "stat": f"{__name__}:hello",
        }.items()
    }

    def found(group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for point in points.values() if name in (None, point.name)]

    monkeypatch.setattr(plugins, "entry_points", found)


@pytest.mark.usefixtures("entry_points")
def test_commands_of_entry_points_join_as_functions_and_as_groups(capsys: Output) -> None:
    assert main(["hello", "--name", "me"]) == 0
    assert main(["group", "two"]) == 0
    assert capsys.readouterr().out == "hello me\nhello you\n"
    assert main(["hello", "--nmae", "me"]) == 2


@pytest.mark.usefixtures("entry_points")
def test_a_broken_entry_point_fails_alone_and_says_why(capsys: Output) -> None:
    assert main(["--help"]) == 0
    assert "Greet somebody." in capsys.readouterr().out
    assert main(["broken"]) == 1
    assert "no_such_module_at_all" in one_line(capsys)


@pytest.mark.usefixtures("entry_points")
def test_an_entry_point_cannot_replace_a_built_in_command(capsys: Output) -> None:
    assert main(["stat", "--name", "me"]) == 2
    assert "hello" not in capsys.readouterr().out


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 1536 * MIB, 4 * GIB, 4_000_000_000])
def test_exact_sizes_parse_back(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (59.9, "59.9 s"), (61, "1 min 1 s"), (3700, "1 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text

"""What tells weights apart: files read whole, commits of the hub, seeds; and adapters by theirs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blobstore.clients.vllm import files
from blobstore.clients.vllm.adapters import Adapters
from blobstore.clients.vllm.files import path_digest
from blobstore.clients.vllm.weights import Weights, config_digest, digest_of, weights_of
from blobstore.errors import InvalidRequest
from tests.support.vllm_engine import HfConfig, engine

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "model")


def made(folder: Path, weights: bytes = b"w" * 1000) -> Path:
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(weights)
    (folder / "part" / "b.safetensors").write_bytes(b"b")
    (folder / "README.md").write_text("a model")
    return folder


def weights(model: object, given: str = "", **changes: Any) -> Weights:
    return weights_of(engine(str(model), **changes), given)


def test_the_digest_of_a_folder_follows_its_files(folder: Path, tmp_path: Path) -> None:
    seen = {path_digest(folder)}
    assert path_digest(made(tmp_path / "copy")) in seen
    (folder / "README.md").write_text("another text")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.bin").write_bytes(b"x")
    assert path_digest(folder) in seen
    for change in (
        lambda: (folder / "a.safetensors").write_bytes(b"w" * 999 + b"v"),
        lambda: (folder / "config.json").write_text("{ }"),
        lambda: (folder / "modeling.py").write_text(""),
        lambda: (folder / "part" / "b.safetensors").rename(folder / "b.safetensors"),
        lambda: (folder / "b.safetensors").write_bytes(b""),
    ):
        change()
        seen.add(path_digest(folder))
    assert len(seen) == 6


def test_large_files_are_read_in_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_RUN_BYTES", 256)
    monkeypatch.setattr(files, "_READ_BYTES", 100)
    before = path_digest(folder / "a.safetensors")
    assert path_digest(folder / "a.safetensors") == before
    for at in 0, 255, 256, 999:
        changed = bytearray(b"w" * 1000)
        changed[at] = 0
        (folder / "a.safetensors").write_bytes(changed)
        assert path_digest(folder / "a.safetensors") != before


def test_a_file_that_shrinks_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a.safetensors"
    run = files._Run(path, 0, 2000)
    with pytest.raises(OSError, match="ended 1000 bytes early"):
        files._run_digest(run)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="holds no weights"):
        path_digest(tmp_path)


def test_folders_and_files_are_named_by_their_last_part(folder: Path) -> None:
    whole, one = weights(folder), weights(folder / "a.safetensors")
    assert whole.model == "model"
    assert whole.digest() == f"files {path_digest(folder)}"
    assert one.model == "a.safetensors"
    assert one.digest() == f"files {path_digest(folder / 'a.safetensors')}"


def test_snapshots_of_the_hub_are_known_by_their_commit(tmp_path: Path) -> None:
    snapshot = made(tmp_path / "models--HuggingFaceTB--SmolLM2-135M" / "snapshots" / COMMIT)
    found = weights(snapshot)
    assert found.model == "HuggingFaceTB/SmolLM2-135M"
    assert found.digest() == f"commit {COMMIT}"
    online = weights("HuggingFaceTB/SmolLM2-135M", model_config__hf_config=HfConfig({}, COMMIT))
    assert (online.model, online.digest()) == (found.model, found.digest())


def test_a_commit_says_nothing_of_a_folder(folder: Path) -> None:
    found = weights(folder, model_config__hf_config=HfConfig({}, COMMIT))
    assert found.digest().startswith("files ")


def test_dummy_and_given_weights() -> None:
    assert weights("m", load_config__load_format="dummy").digest() == "dummy 0"
    dummy = SimpleNamespace(value="dummy")
    assert weights("m", load_config__load_format=dummy).digest() == "dummy 0"
    assert weights("s3://m", "v7").digest() == "v7"


def test_what_tells_weights_apart_is_asked_for_in_order(folder: Path, tmp_path: Path) -> None:
    """A tier asks the same, with less to go by."""
    snapshot = made(tmp_path / "models--org--m" / "snapshots" / COMMIT)

    def told(model: object, given: str = "", commit: str = "") -> str | None:
        digest = digest_of(str(model), given, commit)
        return None if digest is None else digest()

    assert told(snapshot, "given", "other") == "given"
    assert told(snapshot, commit="other") == f"commit {COMMIT}"
    assert told(folder, commit="other") == f"files {path_digest(folder)}"
    assert told("org/m", commit="other") == "commit other"
    assert told("org/m") is None


@pytest.mark.parametrize(
    "changes", [{}, {"model_config__model_weights": "s3://bucket/m"}], ids=["nowhere", "bucket"]
)
def test_weights_elsewhere(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match='name them by "weights_digest"'):
        weights("org/model", **changes)


def test_weights_in_a_bucket_with_a_folder(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="'s3://bucket/m' are neither"):
        weights(folder, model_config__model_weights="s3://bucket/m")


def test_configurations() -> None:
    facts = {"hidden_size": 64, "_name_or_path": "here", "use_cache": True}
    plain = engine("m").model_config
    plain.hf_config = HfConfig(facts)
    before = config_digest(plain)
    plain.hf_config = HfConfig(facts | {"_name_or_path": "there", "use_cache": False})
    assert config_digest(plain) == before
    plain.hf_config = HfConfig(facts | {"rope_scaling": {"factor": 2}})
    assert config_digest(plain) != before


def test_the_longest_context_matters_to_some_rotary_embeddings() -> None:
    def digest(rope: str, length: int) -> str:
        config = engine("m", model_config__max_model_len=length).model_config
        config.hf_config = HfConfig({"rope_scaling": {"rope_type": rope}})
        return config_digest(config)

    assert digest("yarn", 4096) == digest("yarn", 8192)
    assert digest("longrope", 4096) != digest("longrope", 8192)


def test_how_pictures_are_read() -> None:
    told = SimpleNamespace(mm_processor_kwargs={"num_crops": 4})
    pictures = engine("m", model_config__multimodal_config=told).model_config
    assert config_digest(pictures) != config_digest(engine("m").model_config)


def lora(name: str = "sql", path: object = "", number: int = 1, **more: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, **more)


def test_adapters_are_named_by_their_files(folder: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", b"v" * 1000)
    adapters = Adapters(SimpleNamespace(lora_dtype="auto"))
    names = {
        adapters.name_of(None),
        adapters.name_of(lora(path=folder)),
        adapters.name_of(lora(path=other)),
        adapters.name_of(lora("xml", folder)),
        Adapters(SimpleNamespace(lora_dtype="fp16")).name_of(lora(path=folder)),
    }
    assert len(names) == 5
    assert adapters.name_of(lora(path=folder, number=2)) in names
    assert adapters.name_of(lora(path=folder)).startswith("sql ")


def test_an_adapter_is_read_once(folder: Path) -> None:
    adapters = Adapters(None)
    before = adapters.name_of(lora(path=folder))
    (folder / "a.safetensors").write_bytes(b"changed")
    assert adapters.name_of(lora(path=folder)) == before


def test_adapters_that_cannot_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = Adapters(None)
    with pytest.raises(InvalidRequest, match="loaded anew under the same name"):
        adapters.name_of(lora(path=tmp_path, load_inplace=True))
    with pytest.raises(InvalidRequest, match="holds no weights"):
        adapters.name_of(lora(path=tmp_path))
    hub = ModuleType("huggingface_hub")

    def snapshot_download(path: str, *, local_files_only: bool) -> str:
        if path != "org/known":
            raise FileNotFoundError(path)
        return str(made(tmp_path / "snapshot"))

    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    with pytest.raises(InvalidRequest, match="'org/gone' is not on this machine"):
        adapters.name_of(lora(path="org/gone"))
    assert adapters.name_of(lora(path="org/known"))

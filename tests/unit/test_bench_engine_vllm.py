"""`bench engine --runner vllm` without vLLM: its rows and picture, and how its engines are run."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from blobstore.bench import commands, engine_vllm_bench, engine_vllm_model, engine_vllm_process
from blobstore.bench.engine_process import EngineDied
from blobstore.bench.engine_vllm import Answer, Answers
from blobstore.bench.engine_vllm_plot import to_svg
from blobstore.bench.engine_vllm_process import VllmProcess, find_python
from blobstore.bench.engine_vllm_report import (
    Sample,
    VllmReport,
    beside_row,
    first_token_row,
    throughput_row,
)
from blobstore.bench.model_file import ModelFile
from blobstore.bench.pairs import Pairs
from blobstore.errors import SetupError

ENGINE = f"""#!{sys.executable}
import json, os, sys
print("a warning", file=sys.stderr)
if "null" not in sys.argv:
    sys.exit("no such connector")
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    answers = [
        {{"tokens": prompt[: question["max_tokens"]], "cached_tokens": 0, "first_token_s": 0.5}}
        for prompt in question["prompts"]
    ]
    print(json.dumps({{"answers": answers, "total_s": 1.0}}), flush=True)
    if question["forget"]:
        sys.exit("killed: /" + os.environ["VLLM_CPU_OMP_THREADS_BIND"])
"""


def sample(
    ttft_s: float,
    *,
    way: str = "dram",
    tokens: tuple[int, ...] = (5, 6),
    prompt: int = 0,
    own_s: float = 0.3,
) -> Sample:
    answer = Answer(list(tokens), cached_tokens=1792, first_token_s=ttft_s)
    return Sample(prompt, way, answer, Answer([5, 6], first_token_s=4.0), own_s)


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class TestRows:
    def test_medians_beside_the_cold_start_of_the_same_prompt(self) -> None:
        found = first_token_row([sample(0.4), sample(0.5), sample(0.8)], 5.0)
        assert found.name == "vllm.dram"
        assert (found.ttft_s, found.value, found.limit, found.n) == (0.5, 0.5, 4.0, 3)
        assert (found.ratio, found.of_cold) == (8.0, 0.125)
        assert found.cached_tokens == 1792
        assert found.met

    def test_other_tokens_are_a_miss_however_soon_they_came(self) -> None:
        found = first_token_row([sample(0.1), sample(0.1, tokens=(5, 7))], 5.0)
        assert found.ratio == pytest.approx(40.0)
        assert not found.tokens_equal
        assert not found.met

    def test_one_way_beside_another_is_compared_prompt_by_prompt(self) -> None:
        ours = [sample(0.4, prompt=0), sample(0.8, prompt=1)]
        theirs = [sample(0.6, prompt=0), sample(0.4, prompt=1)]
        found = beside_row("vllm.beside", ours, theirs, "the other", 1.1)
        assert found.ratio == pytest.approx(1.0)
        assert found.of_cold == pytest.approx(0.15)
        assert not found.met

    def test_an_engine_that_computes_faster_is_compared_at_the_pace_of_the_other(self) -> None:
        ours, theirs = [sample(0.5, own_s=0.4)], [sample(0.4, own_s=0.3)]
        found = beside_row("vllm.beside", ours, theirs, "the other", 1.0)
        assert found.ratio == pytest.approx(0.4 * 0.4 / 0.3 / 0.5)

    def test_throughput_says_what_it_had_to_reach_and_whether_tokens_were_equal(self) -> None:
        pairs = Pairs((2.0,), (1.98,), (0.99,))
        found = throughput_row("vllm.no_reuse", pairs, "none", 0.95, tokens_equal=True)
        body = found.as_json()
        assert (body["ratio"], body["wanted"], body["tokens_equal"]) == (0.99, 0.95, True)
        assert found.met
        assert not replace(found, tokens_equal=False).met

    def test_json_has_the_rows_and_every_answer(self) -> None:
        report = VllmReport({}, [first_token_row([sample(0.4)], 5.0)], [sample(0.4)])
        body = json.loads(report.to_json())
        assert body["rows"][0]["wanted"] == 5.0
        assert body["turns"] == [
            {
                "prompt": 0,
                "way": "dram",
                "cached_tokens": 1792,
                "ttft_s": 0.4,
                "of_cold": 0.1,
                "own_cache_s": 0.3,
                "tokens_equal": True,
            }
        ]

    def test_the_picture_has_a_bar_for_each_way_once(self) -> None:
        rows = [
            first_token_row([sample(4.0, way="cold")], 0.0),
            first_token_row([sample(0.5)], 5.0),
            beside_row("vllm.dram_beside_other", [sample(0.5)], [sample(0.6)], "other", 1.0),
            throughput_row(
                "vllm.no_reuse", Pairs((2.0,), (2.0,), (1.0,)), "none", 0.95, tokens_equal=True
            ),
        ]
        drawn = ET.fromstring(to_svg(rows))
        bars = [rect for rect in drawn.iter() if rect.get("fill") in ("#3a7", "#c44")]
        assert len(bars) == 2
        assert "500 ms, 0.12 of cold" in to_svg(rows)


class TestFindPython:
    def test_what_does_not_run_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match="nowhere does not run"):
            find_python(tmp_path / "nowhere")

    def test_one_without_vllm_gets_the_line_that_mends_it(self, tmp_path: Path) -> None:
        python = executable(tmp_path / "python", "#!/bin/sh\necho False; echo True; echo 0\n")
        with pytest.raises(SetupError, match=rf"{python} -m pip install vllm \. in a checkout"):
            find_python(python)

    def test_another_version_of_the_store_is_refused(self, tmp_path: Path) -> None:
        python = executable(tmp_path / "python", "#!/bin/sh\necho True; echo True; echo 0.0\n")
        with pytest.raises(SetupError, match="lacks vLLM or blobstore"):
            find_python(python)

    def test_the_environment_beside_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = f"#!/bin/sh\necho True; echo True; echo {version('kv-blobstore')}\n"
        (tmp_path / ".venv-vllm/bin").mkdir(parents=True)
        beside = executable(tmp_path / ".venv-vllm/bin/python", lines)
        monkeypatch.setattr(sys, "executable", str(executable(tmp_path / "ours", "#!/bin/sh\n")))
        monkeypatch.chdir(tmp_path)
        assert find_python(None) == beside

    def test_none_at_all_gets_the_lines_that_make_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_vllm_process, "_usual", lambda: iter([]))
        with pytest.raises(SetupError, match=r"python3 -m venv \.venv-vllm"):
            find_python(None)


class TestProcess:
    @pytest.fixture
    def python(self, tmp_path: Path) -> Path:
        return executable(tmp_path / "python", ENGINE)

    def test_prompts_of_one_question_are_answered_in_order(self, python: Path) -> None:
        with VllmProcess(python, Path("model"), None) as engine:
            found = engine.ask([[1, 2, 3], [4, 5, 6]], 2, forget=False)
        answers = [Answer([1, 2], 0, 0.5), Answer([4, 5], 0, 0.5)]
        assert found == Answers(answers, 1.0)

    def test_an_engine_that_does_not_start_says_why(self, python: Path) -> None:
        with pytest.raises(EngineDied, match="a warning / no such connector"):
            VllmProcess(python, Path("model"), {"kv_connector": "?"})

    def test_an_engine_that_ends_says_why_and_leaves_a_core_to_the_daemon(
        self, python: Path
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        bound = ",".join(map(str, cores[:-1] or cores))
        with VllmProcess(python, Path("model"), None) as engine:
            engine.ask([[1]], 1, forget=True)
            with pytest.raises(EngineDied, match=f"killed: /{bound}$"):
                engine.ask([[1]], 1)

    def test_one_that_hangs_is_ended(self, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hanging = ENGINE.replace("question = json", "sys.stdin.read()\n    question = json")
        with VllmProcess(executable(python, hanging), Path("model"), None) as engine:
            monkeypatch.setattr(engine, "_reply_s", 0.01)
            with pytest.raises(EngineDied):
                engine.ask([[1]], 1)


class TestModel:
    def test_the_directory_has_the_weights_and_the_words_of_the_gguf(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        directory = engine_vllm_model.model_directory(layers=1)
        assert engine_vllm_model.model_directory(layers=1) == directory
        assert [path.name for path in directory.parent.iterdir()] == [directory.name]
        raw = (directory / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header, name = json.loads(raw[8:start]), "model.layers.0.self_attn.k_proj.weight"
        first, last = header[name]["data_offsets"]
        bits = np.frombuffer(raw[start + first : start + last], "<u2").astype(np.uint32) << 16
        kept = bits.view(np.float32).reshape(header[name]["shape"])
        given = ModelFile(layers=1).weights()["blk.0.attn_k.weight"]
        # Rows 0 and 1 of a head turn together in the GGUF, rows 0 and 32 here.
        assert np.allclose(kept[[64, 96]], given[[64, 65]], rtol=2**-8, atol=0)
        assert last <= len(raw) - start == max(one["data_offsets"][1] for one in header.values())
        read = Tokenizer.from_file(str(directory / "tokenizer.json"))
        text = "<|im_start|>user\nThe lamp of 1899.<|im_end|>\n"
        assert read.decode(read.encode(text).ids, skip_special_tokens=False) == text


class TestCommand:
    def test_the_runner_and_its_python_reach_the_bench(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []

        def report(setup: object, python: Path | None) -> VllmReport:
            asked.append(python)
            return VllmReport({}, [first_token_row([sample(0.4)], 5.0)])

        monkeypatch.setattr(engine_vllm_bench, "report", report)
        monkeypatch.setattr(commands, "_end_in_order", lambda: None)
        arguments = ["engine", "--runner", "vllm", "--json", "--data", str(tmp_path)]
        result = CliRunner().invoke(commands.bench, [*arguments, "--vllm-python", "/a/python"])
        assert json.loads(result.stdout)["rows"][0]["name"] == "vllm.dram"
        CliRunner().invoke(commands.bench, arguments, env={commands.PYTHON_VARIABLE: "/b/python"})
        assert asked == [Path("/a/python"), Path("/b/python")]

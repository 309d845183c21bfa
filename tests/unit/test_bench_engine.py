"""The conversations, rows and picture of `bench engine`, without a model or a daemon."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from blobstore.bench.chat import Chat
from blobstore.bench.engine import Turn
from blobstore.bench.engine_conversation import AGENT, TINY, Conversation, Request
from blobstore.bench.engine_plot import to_svg
from blobstore.bench.engine_report import EngineReport, Sample, estimate_rows, row
from blobstore.bench.model_file import ModelFile
from tests.support.engine_scripts import drawn


def turn(restore_s: float, ttft_s: float, tokens: tuple[int, ...] = (5, 6)) -> Turn:
    return Turn(tokens=list(tokens), restore_s=restore_s, first_token_s=ttft_s, restored_bytes=1000)


def sample(
    restore_s: float, *, way: str = "dram", tokens: tuple[int, ...] = (5, 6), alone_s: float = 0.0
) -> Sample:
    alone = (alone_s, 2 * alone_s) if alone_s else ()
    ours, cold = turn(restore_s, restore_s + 1, tokens), turn(8.0, 9.0)
    return Sample("follow-up", way, 1536, ours, cold, alone)


class TestRow:
    def test_medians_of_its_turns_beside_the_cold_prefill_of_the_same_prefix(self) -> None:
        found = row([sample(0.1), sample(0.2), sample(0.8)], 30.0)
        assert found.name == "engine.dram"
        assert (found.restore_s, found.ttft_s) == (0.2, 1.2)
        assert found.speedup == found.ratio == pytest.approx(40.0)
        assert found.ttft_speedup == pytest.approx(7.5)
        assert (found.bytes, found.prefix_tokens, found.n) == (1000, 1536, 3)
        assert found.met

    def test_other_tokens_are_a_miss_however_soon_they_came(self) -> None:
        found = row([sample(0.1), sample(0.1, tokens=(5, 7))], 30.0)
        assert found.speedup == pytest.approx(80.0)
        assert not found.tokens_equal
        assert not found.met

    def test_other_bytes_are_a_miss_even_with_equal_tokens(self) -> None:
        other = sample(0.1)
        other.turn.state = "another"
        assert not row([other], 30.0).tokens_equal

    def test_two_ways_at_once_are_measured_by_the_faster_one_alone(self) -> None:
        found = row([sample(5.0, way="both", alone_s=9.0)], 1.6)
        assert found.speedup == pytest.approx(1.6)
        assert found.ratio == pytest.approx(1.8)
        assert found.limit == 9.0

    def test_a_rebuild_is_measured_by_what_its_own_runner_takes(self) -> None:
        one = replace(sample(5.0, way="rebuild"), alone_s=(4.0,))
        found = row([one], 0.9)
        assert found.speedup == pytest.approx(1.6)
        assert found.ratio == pytest.approx(0.8)
        assert found.limit_name == "cold prefill by its runner"
        assert not found.met

    def test_json_has_the_rows_and_every_turn(self) -> None:
        samples = [sample(0.1), sample(5.0, way="both", alone_s=9.0)]
        report = EngineReport({}, [row([one], 0.0) for one in samples], samples)
        body = json.loads(report.to_json())
        wanted = {"restore_s", "ttft_s", "speedup", "ttft_speedup", "bytes", "tokens_equal"}
        assert all(wanted <= found.keys() for found in body["rows"])
        assert [told["way"] for told in body["turns"]] == ["dram", "both"]
        assert "tokens" not in body["turns"][0]


def test_estimates_may_be_off_by_a_quarter() -> None:
    told = {"fetch": {"error": 0.1}, "rebuild": {"error": 0.5}, "other": {"error": None}}
    fetch, rebuild = estimate_rows(told, wanted=True)
    assert (fetch.name, fetch.ratio, fetch.met) == ("engine.estimate_fetch", 2.5, True)
    assert (rebuild.name, rebuild.ratio, rebuild.met) == ("engine.estimate_rebuild", 0.5, False)
    assert all(found.met for found in estimate_rows(told, wanted=False))


def test_the_picture_has_two_bars_for_each_way() -> None:
    rows = [row([sample(seconds)], 0.0) for seconds in (0.01, 0.2, 8.0)]
    rows.append(row([sample(1e-4, way="nothing", tokens=(1,))], 0.0))
    tree = ET.fromstring(to_svg(rows))
    bars = [one for one in tree if one.tag.endswith("rect") and one.get("height") == "16"]
    lengths = [int(one.get("width", "0")) for one in bars]
    assert len(bars) == 2 * len(rows)
    assert lengths[0] < lengths[2] < lengths[4]
    assert any("other tokens" in (one.text or "") for one in tree)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(ModelFile())


class TestConversation:
    @pytest.mark.parametrize("script", [TINY, *(drawn(seed, 90) for seed in range(5))])
    def test_a_request_goes_on_from_the_context_that_it_names(
        self, chat: Chat, script: tuple[Request, ...]
    ) -> None:
        conversation = Conversation(chat, script, 1)
        contexts: list[list[int]] = []
        for number, request in enumerate(script):
            prompt = conversation.prompt(number)
            if request.after is not None:
                before = contexts[request.after]
                assert prompt[: len(before)] == before
                assert len(prompt) - len(before) == pytest.approx(request.n_tokens, abs=16)
            contexts.append(conversation.answered(number, [number + 40, number + 41]))
            assert contexts[-1][: len(prompt)] == prompt
        shared = conversation.prompt(0)[:64]
        assert all(context[:64] == shared for context in contexts)

    def test_the_same_seed_gives_the_same_prompts(self, chat: Chat) -> None:
        one, same, other = (Conversation(chat, TINY, seed).prompt(0) for seed in (1, 1, 2))
        assert one == same != other

    def test_the_measured_one_has_all_that_an_agent_does(self) -> None:
        outputs = [request.n_tokens for request in AGENT if request.role == "tool"]
        assert (min(outputs), max(outputs)) == (50, 5000)
        assert any(request.pause for request in AGENT)
        assert any(request.compacts is not None for request in AGENT)
        parents = [request.after for request in AGENT if request.after is not None]
        assert len(set(parents)) < len(parents)  # a branch

    def test_drawn_ones_name_requests_before_them(self) -> None:
        for seed in range(50):
            for number, request in enumerate(drawn(seed, 90)):
                assert request.after is None or request.after < number
                assert request.compacts is None or request.compacts < number

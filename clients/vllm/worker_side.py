"""The connector's half in a worker of the engine: moves the bytes that the scheduler names.

Nothing here raises, or blocks for longer than a moment. What a forward did not compute to
its end is never stored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from blobstore.clients.vllm.copies import Copies, copies_for
from blobstore.clients.vllm.daemon import Daemon
from blobstore.clients.vllm.faults import Faults
from blobstore.clients.vllm.identity import Identity
from blobstore.clients.vllm.lane import launch_cores
from blobstore.clients.vllm.libraries import Tensor
from blobstore.clients.vllm.loads import Loads
from blobstore.clients.vllm.metadata import Outcomes, StepPlan
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.pages import Pages
from blobstore.clients.vllm.recorder import Recorder
from blobstore.clients.vllm.saves import Saves

IDLE_S = 0.01
"""How long a step that computes nothing waits for a load that runs, or for the store's answer.

Else the engine would spin meanwhile, and take the time of those who copy.
"""


class WorkerSide:
    """Loads and saves of one rank; called by the engine's thread, step by step.

    An engine that does not compute a request itself whose load failed ends it with an error.
    """

    def __init__(
        self,
        identity: Identity,
        daemon: Daemon,
        options: Options,
        recorder: Recorder,
        faults: Faults,
        *,
        recomputes: bool = True,
    ) -> None:
        self._identity = identity
        self._faults = faults
        leads = identity.shard is None or identity.shard.tp_rank == 0
        told = (identity, daemon, recorder, faults, options.timeout_s)
        self._loads = Loads(*told, tells_tokens=leads, may_fail=recomputes)
        self._saves = Saves(*told, tells_tokens=leads)
        self._copies: Copies | None = None
        self._numbers: dict[str, tuple[int, int | None]] = {}
        """Of each layer, its number, and its part's among those that this rank writes."""
        self._loaded: dict[str, int] = {}
        self._plan = StepPlan()
        self._computing = False
        """A step's forward has begun, and was not finished."""
        self._handled: BaseException | None = None
        """What was being handled around the engine when the step began."""

    def register(self, kv_cache_config: Any, kv_caches: Mapping[str, Tensor]) -> None:
        """These are the engine's cache tensors. InvalidRequest if they are not understood."""
        pages = Pages(self._identity, kv_cache_config, kv_caches)
        for name in kv_caches:
            at = pages.index(name)
            if at is not None:
                part = sum(pages.written[:at]) if pages.written[at] else None
                self._numbers[name] = at, part
        self._copies = copies_for(pages)
        if pages.device.type == "cpu":
            cores = launch_cores()
            self._loads.spread(cores)
            self._saves.spread(cores)
        self._saves.prepare()

    def begin(self, plan: StepPlan) -> None:
        """A step begins: what it loads may start now, beside the forward."""
        if self._computing:
            self._distrust()
        self._plan, self._computing, self._handled = plan, not plan.idle, sys.exc_info()[1]
        self._loads.start(plan.loads, self._copies)
        self._faults.guarded(None, self._saves.begin, plan.saves)

    def layer(self, layer_name: str) -> None:
        """The step's forward has computed a layer."""
        if self._copies is not None and layer_name in self._numbers:
            layer, part = self._numbers[layer_name]
            self._faults.guarded(None, self._saves.layer, self._copies, layer, part)

    def finish(self) -> None:
        """The step's forward has been run, or launched on the current stream; or it raised.

        vLLM calls this then, too, while the exception is under way.
        """
        computing, self._computing = self._computing, False
        if self._raised() and computing:
            self._distrust()
        elif self._copies is not None:
            self._faults.guarded(None, self._saves.finish, self._copies)

    def end(self) -> None:
        """The step is over: an exception that it ran under is let go, and all that it holds."""
        self._handled = None

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        if self._raised():  # vLLM drops what it is told now
            return set(), set()
        wait_s = IDLE_S if self._plan.idle and not self._plan.at_once else 0.0
        ended = self._loads.take(wait_s, anyway=self._plan.waiting)
        failed = {load.request_id: load.blobs for load in ended if not load.whole}
        self._loaded.update(failed)
        return {load.request_id for load in ended}, set(failed)

    def take_outcomes(self) -> Outcomes | None:
        """What the scheduler's half should know of; None if all went well."""
        if self._raised():
            return None
        loaded, self._loaded = self._loaded, {}
        return Outcomes(loaded, self._saves.take_unsaved()) or None

    def close(self, timeout_s: float) -> None:
        """Seal what was copied, within `timeout_s`."""
        self._saves.close(timeout_s)
        self._loads.close(timeout_s)

    def _raised(self) -> bool:
        """Whether an exception ends this step."""
        return sys.exc_info()[1] is not self._handled

    def _distrust(self) -> None:
        """A forward has failed: its blocks count as computed in vLLM, which may go on with them."""
        self._saves.stop()
        self._faults.note(
            "the forward", "it failed, so nothing is saved any more until the engine is restarted"
        )

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A KV connector of vLLM's own interface that has just the KV that a case says, and stores none.

vLLM makes both halves, by the path of this module (``KVTransferConfig.kv_connector_module_path``): the scheduler's half
offers tokens and is told what was taken, the worker's half says when a load is over. Which tokens, and when, comes with
each request as its ``kv_transfer_params``: the fields of ``fuzz.case.Load``. No byte is moved; ``record.py`` notes what
a load would have written. Imports vLLM, so only vLLM may import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass(slots=True)
class Begun:
    """A load for which vLLM has just allocated blocks."""

    tokens: int
    """External ones, of those offered."""
    groups: tuple[int, ...]
    """KV-cache groups that it writes."""
    steps: int
    """0: sync."""
    fails: bool


@dataclass(slots=True)
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What begins in a step, by request id."""

    begun: dict[str, Begun] = field(default_factory=dict)


class Connector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Either half; vLLM says which by ``role``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = range(len(kv_cache_config.kv_cache_groups))
        cacheable = tuple(kv_cache_config.prefix_cacheable_group_ids)
        windows = [group for group in groups if group not in cacheable]
        self._groups = {"whole": tuple(groups), "part": (*cacheable, *windows[1:]), "none": cacheable}
        self._begun: dict[str, Begun] = {}
        self._failed: set[str] = set()
        self._over: list[tuple[str, bool]] = []
        self._under_way: dict[str, Begun] = {}

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded after the local hit, and whether they take time."""
        load = request.kv_transfer_params
        if not load or request.request_id in self._failed:
            return 0, False
        tokens = max(load["tokens"] - num_computed_tokens, 0)
        return tokens, tokens > 0 and load["steps"] > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups that the request's load writes."""
        return self._groups[request.kv_transfer_params["window"]]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        """vLLM has taken so many of the tokens offered."""
        if num_external_tokens:
            load = request.kv_transfer_params
            groups = self.get_loaded_kv_cache_group_ids(request)
            fails = load["how"] == "fails"
            self._begun[request.request_id] = Begun(num_external_tokens, groups, load["steps"], fails)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:  # noqa: ARG002
        """For the worker's half, and for who records the step."""
        begun, self._begun = self._begun, {}
        return Loads(begun)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker's half reported."""
        for name in sorted(connector_output.finished_recving or ()):
            failed = name in connector_output.failed_recving
            self._over.append((name, failed))
            if failed:
                self._failed.add(name)

    def take_over(self) -> list[tuple[str, bool]]:
        """Loads of which the scheduler was told since the last call that they are over, and whether they failed."""
        over, self._over = self._over, []
        return over

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """Nothing is stored, so blocks may be freed at once."""
        return False, None

    # The worker's half.

    @property
    def busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._under_way)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin what the step's metadata says. A sync load is there at once."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        self._under_way.update((name, load) for name, load in loads.begun.items() if load.steps)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Loads that are over with this step; also of requests that are gone, whose blocks vLLM keeps till then."""
        results = KVConnectorTransferResults()
        for name, load in list(self._under_way.items()):
            load.steps -= 1
            if not load.steps:
                del self._under_way[name]
                results.finished_recving.add(name)
                if load.fails:
                    results.failed_recving.add(name)
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is no layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """There is no layer."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The probe: a vLLM architecture, small and exact, that reads and writes KV as DeepSeek-V4.1 does.

``invariants/weights.py`` says what it computes. All that it knows of where KV lies comes from vLLM's metadata: window
indices and slots from the sliding-window builder, compressed slots and block tables from the sparse MLA builder, replay
from ``DeepseekV41ModelState``. Rows are computed independently of each other (``arithmetic.py``), so that two runs in
different batches can be compared to the bit. A model folder needs nothing but a config.json with "replay_probe" in it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

from fuzz.probe.arithmetic import attend, linear, norm
from fuzz.probe.caches import cells, make_caches, store
from fuzz.probe.plugin import ARCHITECTURE
from invariants.trace import Probe
from invariants.weights import CODE_GAIN, LOGIT_GAIN, VOCAB, decoder_start, position_codes, weights


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The "replay_probe" of a config.json: the probe, and the sizes that vLLM has no option for. In tokens."""

    probe: Probe
    window: int
    block_size: int
    """Of the compressed cache: a multiple of the compress ratio."""
    swa_block_size: int

    @property
    def compress_ratio(self) -> int:
        """Tokens a compressed state."""
        return self.probe.compress_ratio


def hf_config(sizes: Sizes, max_model_len: int) -> dict[str, Any]:
    """A config.json for the probe."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": sizes.probe.layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "replay_probe": msgspec.to_builtins(sizes),
    }


class Layer(nn.Module):  # type: ignore[misc]
    """Window attention, compressed attention and an MLP."""

    def __init__(self, number: int, config: VllmConfig, sizes: Sizes, matrices: dict[str, Tensor]) -> None:
        super().__init__()
        self.deep = sizes.probe.kind != "exact"
        self.trimmed = number >= decoder_start(sizes.probe)
        """Whether decoder-side replay trims it; its states are then written with those of the first such layer."""
        self.ratio = sizes.compress_ratio
        self.window, self.compressed = make_caches(f"layers.{number}", config, sizes)
        for name, matrix in matrices.items():
            # Not persistent: vLLM's dummy loader fills what is in the state dict.
            self.register_buffer(name, matrix, persistent=False)

    def forward(self, x: Tensor, embedded: Tensor, positions: Tensor, code: Tensor) -> Tensor:
        """float32 [tokens, WIDTH] like x; code [tokens, WIDTH]: of the positions."""
        self.write_window(x if self.deep else embedded, code)
        x = x + linear(self._window(norm(x), _metadata(self.window)), self.wo)
        if not self.trimmed:
            self.write_compressed(x, code)
        x = x + linear(self._compressed(norm(x), positions, _metadata(self.compressed)), self.go)
        hidden = linear(norm(x), self.up)
        return x + linear(torch.clamp(hidden, min=0), self.down)

    def write_window(self, source: Tensor, code: Tensor) -> None:
        """The window keys of the batch that the metadata is of."""
        slots = _metadata(self.window).slot_mapping[: len(source)]
        store(self.window.kv_cache, slots, norm(linear(norm(source), self.wk) + code))

    def write_compressed(self, x: Tensor, code: Tensor) -> None:
        """The compressed states of the batch that the metadata is of."""
        slots = _metadata(self.compressed).slot_mapping[: len(x)]
        store(self.compressed.kv_cache, slots, norm(linear(norm(x), self.gk) + code))

    def _window(self, x: Tensor, metadata: Any) -> Tensor:
        cache = self.window.kv_cache
        indices = [metadata.decode_swa_indices[:, 0], metadata.prefill_swa_indices]
        indices[1:] = [] if indices[1] is None else [indices[1][:, 0]]
        slots = torch.cat(indices).long()
        visible = slots >= 0
        slots = torch.where(visible, slots, 0)
        rows = cache.shape[1]
        keys = cells(cache)[slots // rows, slots % rows]
        return attend(norm(linear(x, self.wq)), keys, visible)

    def _compressed(self, x: Tensor, positions: Tensor, metadata: Any) -> Tensor:
        cache = self.compressed.kv_cache
        query = norm(linear(x, self.gq))
        counts = (positions + 1) // self.ratio
        bounds = metadata.query_start_loc[: metadata.num_reqs + 1].tolist()
        rows = cache.shape[1]
        read = []
        for request, (begin, end) in enumerate(pairwise(bounds)):
            if begin == end:
                continue
            state = torch.arange(int(counts[begin:end].max()), device=x.device)
            block = metadata.block_table[request].long()[state // rows]
            keys = cells(cache)[block, state % rows]
            visible = state < counts[begin:end, None]
            read.append(
                attend(query[begin:end], keys.unsqueeze(0), visible)
                if len(state)
                else x.new_zeros(query[begin:end].shape)
            )
        return torch.cat(read)


def _metadata(cache: Any) -> Any:
    return get_forward_context().attn_metadata[cache.prefix]


class ReplayProbeForCausalLM(nn.Module):  # type: ignore[misc]
    """See the module."""

    token_lookback_depth = 0
    """Of DeepSeek-V4.1's n-gram hash, which the probe does without."""
    decoder_replay_layers: Any = None
    """vLLM's ``DecoderReplayLayers`` for the decoder kind, where replay is on."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002
        super().__init__()
        config = vllm_config.model_config.hf_config
        sizes = msgspec.convert(config.replay_probe, Sizes)
        # What vLLM's builders look up; a sliding_window in the config.json would make vLLM plan for another model.
        config.sliding_window = sizes.window
        config.compress_ratios = [sizes.compress_ratio] * sizes.probe.layers
        config.index_topk = 1
        values = {name: torch.tensor(value) for name, value in weights(sizes.probe).items()}
        for name, value in (
            ("embed", values.pop("embed")),
            ("head", values.pop("head").T.contiguous()),
            ("codes", torch.tensor(position_codes(vllm_config.model_config.max_model_len) * CODE_GAIN)),
        ):
            self.register_buffer(name, value, persistent=False)
        self.layers = nn.ModuleList(
            Layer(
                number,
                vllm_config,
                sizes,
                {
                    name.partition(".")[2]: value.T.contiguous()
                    for name, value in values.items()
                    if name.startswith(f"{number}.")
                },
            )
            for number in range(sizes.probe.layers)
        )
        self._start = decoder_start(sizes.probe)
        if self._start < len(self.layers) and self.layers[self._start].window.bounded_replay:
            self.decoder_replay_layers = self._decoder_replay(sizes.window)

    def _decoder_replay(self, window: int) -> Any:
        """vLLM's own: it gathers the rows, and runs the layers under a forward context of their own."""
        from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers

        first, *rest = self.layers[self._start :]
        caches = {cache.prefix for layer in (first, *rest) for cache in (layer.window, layer.compressed)}
        return DecoderReplayLayers(
            window,
            lambda *inputs: (self._last_layers(*inputs),),
            lambda x, _embedded, _positions, code: first.write_window(x, code),
            caches,
            first.window.prefix,
        )

    def _last_layers(self, x: Tensor, embedded: Tensor, positions: Tensor, code: Tensor) -> Tensor:
        for layer in self.layers[self._start :]:
            x = layer(x, embedded, positions, code)
        return x

    @staticmethod
    def get_model_state_cls() -> type[Any]:
        """DeepSeek-V4.1's own."""
        state: type[Any] = DeepseekV41ModelState
        return state

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """float32 [tokens, WIDTH]"""
        embedded: Tensor = self.embed[input_ids.long()]
        return embedded

    def forward(self, input_ids: Tensor, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        """float32 [tokens, WIDTH]: hidden states, normed."""
        x = embedded = self.embed_input_ids(input_ids)
        if get_forward_context().attn_metadata is None:
            return x  # vLLM measures memory with a batch that has no KV
        code = self.codes[positions]
        for layer in self.layers[: self._start]:
            x = layer(x, embedded, positions, code)
        for layer in self.layers[self._start :]:
            layer.write_compressed(x, code)
        if self.decoder_replay_layers is not None:
            (x,) = self.decoder_replay_layers(x, embedded, positions, code)
        else:
            x = self._last_layers(x, embedded, positions, code)
        return norm(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """float32 [rows, VOCAB]"""
        return linear(hidden_states, self.head) * float(LOGIT_GAIN)

    def load_weights(self, weights: Any) -> set[str]:  # noqa: ARG002
        """Nothing to load: they come from the seed."""
        return set()

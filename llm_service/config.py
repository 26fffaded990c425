"""Options of the LLM service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.config import is_port, json_object, option, size, words
from common.hardware import check_device, cuda_memory, default_device
from common.media.item import Modality
from common.nixl.agent import BACKENDS
from common.rpc.channel import ChannelSecurity
from common.rpc.client_options import check_addresses, security
from common.rpc.server import LISTEN, ServerConfig
from llm_service.cache_choice import AS_DTYPE, IN_8_BITS
from llm_service.generation_config import check_override
from llm_service.prompt.output_marks import REASONING_PARSERS, TOOL_CALL_PARSERS

_CPU_LIMITS, _GPU_LIMITS, _LARGE_GPU_LIMITS = (64, 512), (256, 4096), (256, 8192)
"""Most sequences at once and most tokens of a step, unless configured."""
_LARGE_GPU = 60 << 30


@dataclass(frozen=True, slots=True)
class Meeting:
    """The hosts that share the ranks: how many, which one this is, and the first one's address."""

    nodes: int
    node_rank: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """host:port, or empty if there is one host."""
        return f"{self.host}:{self.port}" if self.host else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmConfig(ServerConfig):
    """Everything that `python -m llm_service` can be told."""

    model: str = option(
        "", "checkpoint folder, or a name on the Hugging Face hub", required=True, group="what is served, and where"
    )
    revision: str = option("", "branch, tag or commit of a model on the hub; empty is the newest")
    listen: str = option("127.0.0.1:7002", LISTEN)
    encoders: tuple[str, ...] = option(
        (), "encoders: host:port, dns:///name:port or file:///path, comma-separated", parse=words
    )
    device: str = option("auto", "auto, cpu or cuda:N; auto is cuda:0 if there is a GPU", group="devices and ranks")
    threads: int = option(0, "CPU threads of each rank; 0: an equal share of the cores", minimum=0)
    core_share: bool = option(
        True, "on a CPU, share the cores with other services that compute on all of them at the same time"
    )
    dtype: str = option(
        "auto",
        "type of weights and rows; auto is bfloat16 on GPUs, and on CPUs with AVX512-BF16 if the checkpoint is stored"
        " in it; else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    tp: int = option(1, "tensor-parallel ranks, each with a GPU of its own, or sharing the CPU", minimum=1)
    enable_expert_parallel: bool = option(
        False, "each rank holds some of a layer's experts whole, instead of a part of every expert"
    )
    symmetric_memory: bool = option(
        False,
        "ranks on GPUs of one host compute small sums by reading each other's memory, not by NCCL",
    )
    nodes: int = option(
        0, "hosts that the ranks are spread over; 0: WORLD_SIZE if MASTER_ADDR is set, else 1", minimum=0
    )
    node_rank: int = option(-1, "this host's number; 0 serves; -1: RANK, or 0", minimum=-1)
    rendezvous: str = option("", "host:port of the first host, where ranks meet; by default MASTER_ADDR:MASTER_PORT")
    rank_timeout_seconds: float = option(
        4.0, "a rank that keeps the others waiting this long counts as frozen", minimum=0.1
    )
    weight_dtype: str = option(
        "",
        "int8 rounds matrices to 8 bits when they are loaded; w8a8, on GPUs and CPUs with AVX512-VNNI, rounds layers'"
        " activations as well; by default both are as --dtype",
        choices=("", "int8", "w8a8"),
        group="how it is computed",
    )
    attention: str = option(
        "auto",
        "back end of attention: triton or flash on GPUs, numba or torch on CPUs",
        choices=("auto", "torch", "numba", "triton", "flash"),
    )
    kernels: str = option(
        "auto",
        "our own kernels for CPUs, compiled at the first start and kept; auto: torch computes until they are ready;"
        " wait: the service is not ready before they are; torch: never use them",
        choices=("auto", "wait", "torch"),
    )
    graphs: str = option("auto", "CUDA graphs of the decoder, if there is a GPU", choices=("auto", "off"))
    graph_bytes: int = option(1 << 30, "GPU memory for CUDA graphs on each rank", parse=size, minimum=0)
    compile: bool = option(
        False, "compile the layers except attention with torch.compile: a slower start; for one rank on a GPU"
    )
    step_seconds: float = option(
        600.0,
        "longest that one step may take before the engine counts as hung and is replaced",
        minimum=1,
        group="engines that fail",
    )
    start_seconds: float = option(
        1800.0,
        "longest that the engine may take to load the model, including the wait for other hosts' ranks, before it is"
        " killed",
        minimum=0.1,
    )
    spare_engine: bool = option(
        False, "keep a second engine process with everything imported: after a crash it serves in half the time"
    )
    max_handovers: int = option(2, "how many engine crashes a request may survive", minimum=0)
    handover_seconds: float = option(
        60.0, "how long requests, including new ones, wait for the next engine", minimum=0.0
    )
    kv_memory_share: float = option(
        0.0,
        "KV blocks' share of the memory that the largest step leaves free; 0: 0.9 of a GPU's, 0.4 of a CPU's",
        minimum=0.0,
        maximum=1.0,
        group="memory",
    )
    kv_cache_dtype: str = option(
        "auto",
        "what keys and values are kept in: int8, with a scale for each token and head; fp8, e4m3 with the checkpoint's"
        " scales; or what --dtype is; auto is that, or on GPUs what the checkpoint suggests",
        choices=("auto", *AS_DTYPE, *IN_8_BITS),
    )
    kv_cache_bytes: int = option(
        0, "memory for KV blocks, on each rank; 0: --kv-memory-share of what is free", parse=size, minimum=0
    )
    snapshot_share: float = option(
        0.2,
        "share of the memory for KV blocks that snapshots take in models whose layers have states",
        minimum=0.0,
        maximum=0.9,
    )
    block_size: int = option(16, "tokens of a KV block", minimum=1, maximum=256)
    prefix_cache: bool = option(True, "reuse computed KV blocks for prompts that begin alike")
    max_context: int = option(
        0,
        "longest prompt and output together, in tokens, if the model and the cache allow it; 0: what they allow",
        minimum=0,
    )
    row_cache_bytes: int = option(512 << 20, "shared memory for embedding rows", parse=size, minimum=1 << 16)
    max_step_tokens: int = option(
        0,
        "tokens computed in one step: bounds how long a prefill delays decodes; 0: 512 on a CPU, 4096 on a GPU, 8192 on"
        " one with 60 GiB, and more if the model computes an item or a prompt at once",
        minimum=0,
        group="steps, and what waits for them",
    )
    decode_slowdown: float = option(
        0.0,
        "while prompts are prefilled, the time between a running answer's tokens grows at most by this factor;"
        " 0: unbounded",
        minimum=0.0,
    )
    max_running: int = option(0, "sequences computed at once; 0: 64 on a CPU, 256 on a GPU", minimum=0)
    max_requests: int = option(
        0,
        "requests served or waiting; further ones are refused at once; 0: twice --max-running plus --max-waiting plus"
        " --max-waiting-media",
        minimum=0,
    )
    max_waiting: int = option(
        256,
        "requests that wait for their first token, not counting those of --max-waiting-media; further ones are refused"
        " at once",
        minimum=1,
    )
    max_waiting_tokens: int = option(
        1 << 20,
        "prompt tokens that may wait for the engine, and as many again that may wait for media; a request beyond either"
        " is refused at once",
        minimum=1,
    )
    max_waiting_media: int = option(
        192,
        "requests that wait for rows from encoders, or for room for them; further ones are refused at once, but not"
        " texts, nor media whose rows are here",
        minimum=1,
    )
    keep_media_whole: bool = option(
        False, "a step computes all of a picture's or frame group's rows or none, if they fit a step"
    )
    early_prefill_tokens: int = option(
        64, "fewest tokens by which to prefill a prompt whose rows are not all here; 0: wait for all rows", minimum=0
    )
    overlap: str = option(
        "auto",
        "plan the next step while one is computed; the tokens are the same; auto: on GPUs",
        choices=("auto", "yes", "no"),
    )
    speculative_tokens: int = option(
        0,
        "most drafts of a sequence that a step verifies; the tokens are the same with any number",
        minimum=0,
        maximum=32,
        group="speculative decoding",
    )
    speculative_method: str = option(
        "",
        "where drafts come from: ngram (the default), what followed the sequence's last tokens earlier; draft_model"
        " (the default with --draft-model); mtp, the checkpoint's own layer for multi-token prediction; eagle3, the"
        " EAGLE-3 head that --draft-model names",
        choices=("", "ngram", "draft_model", "mtp", "eagle3"),
    )
    draft_model: str = option(
        "",
        "checkpoint folder, or a hub name, of a small model with the same tokenizer that proposes drafts, or of an"
        " EAGLE-3 head",
    )
    video_pruning_rate: float = option(
        0.0,
        "share of a video's rows to drop unless a request says: those that change least from frame to frame",
        minimum=0.0,
        group="media of a request",
    )
    max_images: int = option(16, "pictures in one request", minimum=0)
    max_videos: int = option(2, "videos in one request", minimum=0)
    max_audios: int = option(4, "sounds in one request", minimum=0)
    kv_host_bytes: int = option(
        0,
        "each rank's host memory for KV blocks evicted from the device; 0: they are dropped",
        parse=size,
        minimum=0,
        group="KV blocks elsewhere",
    )
    kv_events: str = option(
        "",
        "where to publish events of KV blocks by ZeroMQ, as vLLM does: tcp://*:PORT, or tcp://HOST:PORT of a subscriber"
        " that waits for it; empty: nowhere",
    )
    kv_events_topic: str = option("", "topic of these events, such as kv@HOST:PORT@MODEL for llm-d")
    kv_events_replay: str = option("", "where subscribers ask for events that they missed: tcp://*:PORT")
    kv_events_replay_bytes: int = option(64 << 20, "memory for events to replay", parse=size, minimum=0)
    lend_prefill: bool = option(
        False, "compute prompts for other services of this model, which read the KV blocks (their --prefill-services)"
    )
    prefill_services: tuple[str, ...] = option(
        (),
        "services of this model that compute long prompts in place of this one, addresses as of --encoders; where they"
        " fail, it computes them itself",
        parse=words,
    )
    prefill_tokens: int = option(
        512, "prompts that lack so many tokens of KV or more are computed by --prefill-services", minimum=1
    )
    prefill_seconds: float = option(
        60.0, "longest that a prompt may take at --prefill-services before it is computed here", minimum=0.1
    )
    prefill_ca: str = option("", "PEM roots of the certificates of --prefill-services; turns TLS on towards them")
    prefill_cert: str = option("", "PEM client certificate shown to --prefill-services")
    prefill_key: str = option("", "PEM private key of --prefill-cert")
    prefill_token_file: str = option("", "file that holds the bearer token sent to --prefill-services")
    session_seconds: float = option(
        600.0, "how long a conversation is kept warm after its last turn", minimum=0.0, group="conversations"
    )
    session_share: float = option(
        0.25, "most of KV blocks and of rows that one tenant's conversations keep", minimum=0.0, maximum=1.0
    )
    max_sessions: int = option(1024, "conversations kept warm; the least recently used is dropped", minimum=1)
    max_tenant_sessions: int = option(64, "conversations kept warm for one tenant", minimum=1)
    served_model_name: tuple[str, ...] = option(
        (),
        "names that requests may ask for, comma-separated; the first is the model's; by default the folder's name, or"
        " that on the hub",
        parse=words,
        group="names, sampling, and the chat template",
    )
    generation_config: str = option(
        "auto",
        "defaults of sampling: auto takes the checkpoint's generation_config.json, none no file, a folder that folder's"
        " file",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "parameters that override that file's, as a JSON object; max_new_tokens bounds every answer",
        parse=json_object,
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "defaults for variables of the chat template, as a JSON object",
        parse=json_object,
    )
    chat_template: str = option("", "file with a chat template (Jinja), instead of the checkpoint's own")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows; none: calls stay in the text",
        choices=("auto", *TOOL_CALL_PARSERS),
    )
    reasoning_parser: str = option(
        "auto",
        "what marks the model's reasoning; auto: as its chat template shows; none: it stays in the text",
        choices=("auto", *REASONING_PARSERS),
    )
    strict_tools: str = option(
        "refuse",
        "what to do with strict functions if the model's way of writing calls cannot be held to a schema: refuse them,"
        " or serve them as others (best-effort)",
        choices=("refuse", "best-effort"),
    )
    lora_dir: str = option(
        "", "folder from below which LoRA adapters in peft's form are read; empty: none", group="LoRA adapters"
    )
    lora_modules: tuple[str, ...] = option(
        (), "adapters to load at the start: name=folder, relative to --lora-dir, comma-separated", parse=words
    )
    max_loras: int = option(
        8, "slots: adapters that one step can use, whose memory is reserved", minimum=1, maximum=256
    )
    max_lora_rank: int = option(16, "largest rank of an adapter, and that of every slot", minimum=1, maximum=512)
    max_loaded_loras: int = option(64, "adapters loaded at once, including those in no slot", minimum=1)
    max_prompt_bytes: int = option(1 << 20, "longest prompt text", parse=size, minimum=1, group="bounds of a request")
    max_parts: int = option(4096, "messages of one conversation, and parts of all of them", minimum=1)
    max_choices: int = option(8, "n of one request", minimum=1)
    max_logprobs: int = option(20, "logprobs of one request", minimum=0)
    max_stop_texts: int = option(8, "stop texts of one request", minimum=0)
    max_stop_bytes: int = option(256, "longest stop text", minimum=1)
    max_bad_words: int = option(128, "bad words of one request", minimum=0)
    max_bad_word_bytes: int = option(256, "longest bad word", minimum=1)
    max_token_ids: int = option(1024, "tokens in stop_token_ids, and in logit_bias, of one request", minimum=0)
    max_structure_bytes: int = option(
        64 << 10, "longest schema, regex, grammar or choice", parse=size, minimum=1, group="structured answers"
    )
    max_schema_depth: int = option(32, "deepest nesting of a JSON schema", minimum=1)
    max_schema_multiple: int = option(
        10_000,
        "bound on multipleOf in a JSON schema, as digits without decimal point and trailing zeros: on the sum of all of"
        " them, and on the product of those that apply to one value",
        minimum=1,
    )
    max_structure_repeats: int = option(
        65_536, "length of a regex, grammar or schema with minimum repetitions written out", minimum=1
    )
    max_structure_depth: int = option(128, "deepest nesting of groups in a regex or grammar", minimum=1)
    max_compiled_bytes: int = option(32 << 20, "memory of one compiled structure", parse=size, minimum=1 << 16)
    structure_cache_bytes: int = option(
        128 << 20, "memory for compiled structures that no request uses now", parse=size, minimum=0
    )
    encode_timeout_seconds: float = option(
        120.0, "longest that an item's encoding may take", minimum=0.1, group="encoders, and their rows"
    )
    encoder_silence_seconds: float = option(
        2.5,
        "an encoder that is silent for this long counts as frozen, on a stream alone for four times as long",
        minimum=1.5,
    )
    encoder_wait_seconds: float = option(
        5.0, "how long an item waits for room if all encoders are full, at most to its deadline", minimum=0
    )
    encoder_hedge_seconds: float = option(
        10.0,
        "an item that waits this long for a row, and far longer than it would elsewhere, is sent to another encoder as"
        " well; 0: never",
        minimum=0,
    )
    encoder_connections: int = option(
        1, "connections to each encoder; with several, a large item's rows come over all of them", minimum=1, maximum=16
    )
    shared_memory: bool = option(True, "read rows from the memory of encoders of the same user on the same host")
    local_dir: str = option("", "folder of the sockets for shared memory, if encoders have a --local-dir")
    nixl: str = option(
        "",
        "read rows of encoders with the same option by NIXL, by RDMA if the network has it: UCX for InfiniBand and"
        " RoCE, LIBFABRIC for EFA",
        choices=BACKENDS,
    )
    nixl_bytes: int = option(64 << 20, "memory for rows in transit by NIXL", parse=size, minimum=4 << 20)
    row_mirror: bool = option(
        False,
        "mirror the row cache in each rank's GPU memory (another --row-cache-bytes), so that encoders with"
        " --device-pool-bytes hand rows over by CUDA IPC",
    )
    encoder_ca: str = option("", "PEM roots of the encoders' certificates; turns TLS on towards them")
    encoder_cert: str = option("", "PEM client certificate shown to encoders")
    encoder_key: str = option("", "PEM private key of --encoder-cert")
    encoder_token: str = option("", "bearer token sent to encoders", secret=True)
    encoder_token_file: str = option("", "file that holds that token; of several, one a line, the first")
    stall_seconds: float = option(
        60.0, "longest that a caller may take to accept one message", minimum=0.1, group="calls"
    )
    stream_interval: int = option(
        1,
        "tokens of an answer that are streamed in one message; the first is sent at once. More save CPU time of this"
        " process and of gateways",
        minimum=1,
        maximum=64,
    )

    @property
    def chosen_device(self) -> str:
        """The device of the model: as configured, or the best of this machine."""
        return default_device() if self.device == "auto" else self.device

    @property
    def method(self) -> str:
        """The source of drafts, in vLLM's words."""
        return self.speculative_method or ("draft_model" if self.draft_model else "ngram")

    @property
    def max_items(self) -> dict[Modality, int]:
        """Most items of each modality in one request, for modalities that the model takes."""
        return {Modality.IMAGE: self.max_images, Modality.VIDEO: self.max_videos, Modality.AUDIO: self.max_audios}

    def step_limits(self) -> tuple[int, int]:
        """Most sequences at once and most tokens of a step, as configured or by device; a step has room for a token of
        each."""
        kind, _, index = self.chosen_device.partition(":")
        running, tokens = _CPU_LIMITS
        if kind == "cuda":
            running, tokens = _LARGE_GPU_LIMITS if cuda_memory(int(index or 0)) >= _LARGE_GPU else _GPU_LIMITS
        if self.max_step_tokens:
            running, tokens = min(running, self.max_step_tokens), self.max_step_tokens
        if self.max_running:
            running, tokens = self.max_running, max(tokens, self.max_running)
        return running, tokens

    def request_limit(self) -> int:
        """Requests served or waiting, as it was asked for or as the device is."""
        return self.max_requests or 2 * self.step_limits()[0] + self.max_waiting + self.max_waiting_media

    def validate(self) -> None:
        """Raises ValueError if options are missing or contradict each other."""
        self.check_server()
        check_override(self.override_generation_config or {})
        if not self.video_pruning_rate < 1:
            raise ValueError("--video-pruning-rate must be below 1")
        self._check_adapters()
        if not self.model:
            raise ValueError("--model is needed: a checkpoint's folder, or its name on the Hugging Face hub")
        check_addresses("--encoders", self.encoders)
        self._check_ranks()
        if self.kernels == "torch" and self.attention == "numba":
            raise ValueError("--attention numba is one of the kernels that --kernels torch does without")
        if 0.0 < self.decode_slowdown <= 1.0:
            raise ValueError("--decode-slowdown must be above 1, or 0: prefill always takes some time from decodes")
        if self.max_running > self.max_step_tokens > 0:
            raise ValueError("--max-step-tokens must be at least --max-running, so that every decode fits a step")
        self._check_speculation()
        if self.kv_host_bytes and not self.prefix_cache:
            raise ValueError("--kv-host-bytes needs --prefix-cache, which finds these blocks")
        self._check_kv_events()
        self._check_prefill()
        if self.row_mirror and not self.shared_memory:
            raise ValueError("--row-mirror needs --shared-memory, which proves that both are on one host")
        self.encoder_security()

    def _check_prefill(self) -> None:
        check_addresses("--prefill-services", self.prefill_services)
        option = "--lend-prefill" if self.lend_prefill else "--prefill-services" if self.prefill_services else ""
        if option and not self.kv_host_bytes:
            raise ValueError(f"{option} needs --kv-host-bytes: KV blocks go from host to host")
        if option and self.meeting().nodes > 1:
            raise ValueError(f"{option} is for ranks on one host")
        self.prefill_security()

    def _check_ranks(self) -> None:
        device, nodes = self.chosen_device, self.meeting().nodes
        check_device(device, self.tp // nodes)
        if self.row_mirror and nodes > 1:
            raise ValueError("--row-mirror is for ranks on one host: those of other hosts need rows in host memory")
        if self.symmetric_memory and (self.tp == 1 or nodes > 1):
            raise ValueError("--symmetric-memory is for several --tp ranks on one host")
        if self.symmetric_memory and device == "cpu":
            raise ValueError("--symmetric-memory is for ranks on GPUs")

    def _check_speculation(self) -> None:
        if (self.draft_model or self.speculative_method) and not self.speculative_tokens:
            option = "--draft-model" if self.draft_model else "--speculative-method"
            raise ValueError(f"{option} needs --speculative-tokens, the number of drafts")
        if bool(self.draft_model) != (self.method in ("draft_model", "eagle3")):
            raise ValueError("--draft-model and --speculative-method draft_model or eagle3 go together")
        if self.speculative_tokens and self.overlap == "yes":
            raise ValueError("--speculative-tokens and --overlap yes exclude each other: a draft follows a known token")

    def _check_kv_events(self) -> None:
        for name, endpoint in (("--kv-events", self.kv_events), ("--kv-events-replay", self.kv_events_replay)):
            if endpoint and not _is_endpoint(endpoint):
                raise ValueError(f"{name}: {endpoint} is not tcp://*:PORT, tcp://HOST:PORT or ipc://PATH")
        if self.kv_events and not self.prefix_cache:
            raise ValueError("--kv-events needs --prefix-cache: without it no block is cached")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("--kv-events-replay needs --kv-events")

    def _check_adapters(self) -> None:
        if self.lora_modules and not self.lora_dir:
            raise ValueError("--lora-modules needs --lora-dir, the folder below which adapters may be read")
        if any(not all(each.partition("=")[::2]) for each in self.lora_modules):
            raise ValueError("--lora-modules must be name=folder, comma-separated")
        if self.lora_dir and self.compile:
            raise ValueError("--lora-dir and --compile exclude each other: adapters cannot be compiled")

    def meeting(self, environ: Mapping[str, str] = os.environ) -> Meeting:
        """Where and with how many hosts the ranks meet, by the options or the variables that launchers set.

        Raises ValueError if these are inconsistent.
        """
        launched = environ if "MASTER_ADDR" in environ else {}
        nodes = self.nodes or int(launched.get("WORLD_SIZE", 1))
        node_rank = self.node_rank if self.node_rank >= 0 else int(launched.get("RANK", 0))
        if nodes == 1:
            return Meeting(1, 0, "", 0)
        known = f"{launched.get('MASTER_ADDR', '')}:{launched.get('MASTER_PORT', '')}"
        host, _, port = (self.rendezvous or known).rpartition(":")
        if not host or not is_port(port):
            raise ValueError("several --nodes need --rendezvous HOST:PORT, or MASTER_ADDR and MASTER_PORT")
        if node_rank >= nodes:
            raise ValueError(f"--node-rank {node_rank} is not below --nodes {nodes}")
        if self.tp % nodes:
            raise ValueError(f"--tp {self.tp} cannot be spread evenly over {nodes} --nodes")
        return Meeting(nodes, node_rank, host, int(port))

    def prefill_security(self) -> ChannelSecurity:
        """How services that compute prompts for this one are spoken to. Raises ValueError as `security`."""
        return security(
            "--prefill",
            ca=self.prefill_ca,
            cert=self.prefill_cert,
            key=self.prefill_key,
            token_file=self.prefill_token_file,
        )

    @property
    def exchanges_blocks(self) -> bool:
        """Whether KV blocks come from other services, or go to them."""
        return self.lend_prefill or bool(self.prefill_services)

    def encoder_security(self) -> ChannelSecurity:
        """How encoders are spoken to. Raises ValueError as `security`."""
        return security(
            "--encoder",
            ca=self.encoder_ca,
            cert=self.encoder_cert,
            key=self.encoder_key,
            token=self.encoder_token,
            token_file=self.encoder_token_file,
        )


def _is_endpoint(text: str) -> bool:
    scheme, _, place = text.partition("://")
    host, _, port = place.rpartition(":")
    return bool(place) if scheme == "ipc" else scheme == "tcp" and bool(host) and is_port(port) and int(port) > 0

"""The configuration of the HTTP server; `mmjax.config.engine_config` has it among the others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmjax.config.settings import check_settings, setting
from mmjax.errors import ConfigError
from mmjax.system.logger import LogLevel

ReasoningParserName = Literal["gemma4", "glm45", "mistral", "qwen3"]
ToolCallParserName = Literal[
    "gemma4",
    "glm45",
    "hermes",
    "internlm",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
]


def _is_api_key(text: str) -> bool:
    # Headers cannot contain other keys; an empty one would admit every request.
    return bool(text) and text.isascii() and text.isprintable() and text.strip() == text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server; settings of `mmjax.serve` only."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=2**16 - 1)
    uds: Path | None = setting(
        None, "Unix domain socket to listen on, instead of host and port.", unset="none"
    )
    ssl_keyfile: Path | None = setting(
        None,
        "Private key of the certificate, as PEM; with it the server speaks HTTPS.",
        unset="none",
    )
    ssl_certfile: Path | None = setting(
        None, "Certificate, with its chain, as PEM.", unset="none; required with `ssl_keyfile`"
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "API keys, of which requests need one, in `Authorization: Bearer KEY`.",
        name="api_key",
        unset="no request needs one",
        is_valid=_is_api_key,
        expected="a key of printable ASCII characters with no space around them",
        is_secret=True,
        environment="MMJAX_API_KEY",
    )
    allow_engine_control: bool = setting(
        False,
        """Whether clients with an API key may free the engine's memory (`/sleep`, `/wake_up`), halt
        it (`/pause`, `/resume`), and replace its weights (`/update_weights`); needs `api_key`.""",
    )
    weights_dir: Path | None = setting(
        None,
        "Directory below which `/update_weights` may load weights from, after links are resolved.",
        unset="none",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins that browsers may call the server from (CORS).",
        unset="none",
        list_flag="json",
        expected="""a list of texts, as in '["https://example.com"]'""",
    )
    root_path: str = setting("", "Prefix that a proxy strips from paths.", unset="none")
    max_request_bytes: int = setting(
        32 * 2**20, "A body with more bytes is refused with 413.", minimum=1
    )
    request_timeout_s: float = setting(
        0.0,
        """Seconds after which an unfinished request gets 408 (or, once streaming, an error event);
        0: never.""",
        name="request_timeout",
        minimum=0,
    )
    request_body_timeout_s: float = setting(
        30.0,
        "Seconds without data in the middle of a body after which a request gets 408; 0: never.",
        name="request_body_timeout",
        minimum=0,
    )
    sse_keep_alive_interval_s: float = setting(
        15.0,
        """Seconds without an event after which a stream gets a comment line, from its first token
        on (its status is not known before); 0: never.""",
        name="sse_keep_alive_interval",
        minimum=0,
    )
    shutdown_timeout_s: float = setting(
        30.0,
        """Seconds that running requests have to finish after SIGTERM or Ctrl-C; a second signal
        ends them at once.""",
        name="shutdown_timeout",
        minimum=0,
    )
    trust_request_chat_template: bool = setting(
        False,
        """Whether HTTP clients may send a `chat_template`, which is rendered in a process of its
        own, and `chat_template_kwargs` that are not just true or false.""",
    )
    chat_template_render_timeout_s: float = setting(
        10.0,
        "Seconds after which the rendering of a request's own chat template is ended.",
        name="chat_template_render_timeout",
        above=0,
        maximum=3600,
    )
    response_role: str = setting(
        "assistant",
        """Role of answers, and of their first chunks; one that continues the last message has that
        message's.""",
        is_valid=lambda role: 0 < len(role) <= 64 and role.isprintable(),
        expected="a printable name of at most 64 characters",
    )
    enable_auto_tool_choice: bool = setting(
        False,
        """Whether answers to requests with `tools` and `tool_choice` "auto" are read for tool
        calls.""",
    )
    tool_call_parser: ToolCallParserName | None = setting(
        None,
        "Format of the model's tool calls.",
        unset="by the marks in the chat template",
    )
    reasoning_parser: ReasoningParserName | None = setting(
        None,
        """Format of the model's reasoning, which a chat's answers then have in fields of its
        own.""",
        unset="it stays in the text",
    )
    max_num_stored_responses: int = setting(
        1024,
        """Responses of `/v1/responses` that are kept for `previous_response_id` and for being
        read again; 0: none.""",
        minimum=0,
    )
    max_stored_responses_bytes: int = setting(
        256 * 2**20, "Size of the kept responses, with the pictures in them.", minimum=1
    )
    batch_dir: Path | None = setting(
        None,
        """Directory of `/v1/files` and `/v1/batches`, of this server alone; it keeps what clients
        upload, and the answers.""",
        unset="none; there are no such routes",
    )
    max_batch_file_bytes: int = setting(
        200 * 2**20, "Size of an uploaded file; larger ones are refused with 413.", minimum=1
    )
    max_batch_dir_bytes: int = setting(
        10 * 2**30,
        """Size of all files in `batch_dir`, with which no more are taken; a batch that runs is
        finished.""",
        minimum=1,
    )
    h11_max_incomplete_event_size: int = setting(
        64 * 2**10, "Size of a request's line and headers; larger ones are refused.", minimum=1024
    )
    h11_max_header_count: int = setting(
        256, "Number of a request's headers; more are refused with 431.", minimum=1
    )
    max_num_connections: int = setting(
        4096, "Open connections; further ones are closed at once.", minimum=1
    )
    request_head_timeout_s: float = setting(
        30.0,
        "Seconds from a connection's beginning to the end of its first request's headers; 0: any.",
        name="request_head_timeout",
        minimum=0,
    )
    disable_fastapi_docs: bool = setting(False, "Whether `/docs` and `/openapi.json` are left out.")
    enable_log_requests: bool = setting(
        False,
        "Whether to log each request: its prompt, its number of tokens, its sampling parameters.",
    )
    enable_log_outputs: bool = setting(
        False, "Whether to log each answer, too; with `enable_log_requests`."
    )
    max_log_len: int | None = setting(
        None,
        "Characters of a prompt or an answer in the log.",
        unset="4000, the limit of a line",
        minimum=0,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        """Address that OpenTelemetry traces are sent to, as http://localhost:4318/v1/traces; needs
        `pip install 'mmjax[otel]'`.""",
        unset="none are made",
        is_valid=lambda url: url.startswith(("http://", "https://")),
        expected="an http or https address",
    )
    uvicorn_log_level: LogLevel = setting("info", "Log level of uvicorn.")
    disable_access_log_for_endpoints: tuple[str, ...] = setting(
        ("/health", "/ready", "/ping", "/metrics"),
        "Paths without access log, such as those of probes; '' for none.",
        list_flag="commas",
        is_valid=lambda path: path.startswith("/"),
        expected="paths that begin with /, as in /health,/ready",
    )
    engine_hang_timeout_s: float = setting(
        7.0,
        """Seconds of silence of the engine process, or of a step in which it uses no CPU, after
        which it is replaced; raise it where a step of the device takes as long. Of several hosts:
        at least 60.""",
        name="engine_hang_timeout",
        minimum=1,
    )
    enable_standby_engine: bool = setting(
        True,
        """Whether a second engine process, which has imported JAX and nothing else, waits to
        replace the first; it makes a restart shorter.""",
    )
    request_quarantine_s: float = setting(
        600.0,
        """Seconds for which a request is refused that ended the engine process whenever it was
        computed; 0: it is not.""",
        name="request_quarantine",
        minimum=0,
    )
    renderer_num_workers: int = setting(
        2,
        """Threads that process prompts and media, each with its own processor; half as many more
        process requests that have much to decode.""",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            raise ConfigError(f"`{missing}` is missing; a key and a certificate are given together")
        if self.allow_engine_control and not self.api_keys:
            raise ConfigError(
                "`allow_engine_control` is set without `api_key`, so that anybody could replace "
                "the weights; give a key"
            )
        if self.weights_dir is not None and not self.allow_engine_control:
            raise ConfigError("`weights_dir` is set without `allow_engine_control`; give both")
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ConfigError(
                "`enable_log_outputs` is set without `enable_log_requests`; give both"
            )

"""`mmjax chat`: talk to a running server, or to a model in this process."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmjax.cli.api_client import ApiClient
from mmjax.cli.messages import LIMITS, NO_LIMITS, user_message
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import MMJaxError

_HELP = (
    "/image FILE, /audio FILE: send it with the next question; /new: forget all; "
    "/quit or Ctrl-D: leave"
)
_HUB_ID = re.compile(r"tiny_scenes|[\w.-]+/[\w.-]+", re.ASCII)

Answer = Callable[[Sequence[dict[str, Any]]], Iterator[str]]
"""Yields the parts of the next message's text."""


def _ask_server(client: ApiClient, lora: str | None, fields: dict[str, Any]) -> Answer:
    fields = {"model": lora or client.find_model(), **fields}

    def answer(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
        for event in client.stream_chat({**fields, "messages": list(messages)}):
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""

    return answer


def _ask_here(model: str | None, lora: str | None, fields: dict[str, Any]) -> Answer:
    """Load the model into this process."""
    from mmjax.models.model_source import resolve_adapter
    from mmjax.params.sampling_params import SamplingParams

    params = SamplingParams(**fields)
    path = None if lora is None else str(resolve_adapter(lora))
    # Imported here: it loads jax.
    from mmjax import LLM, LoRARequest

    adapter = None if path is None else LoRARequest("adapter", 1, path)
    settings = {} if lora is None else {"enable_lora": True, "max_loras": 1}
    llm = LLM(model, max_num_seqs=1, **settings)

    def answer(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
        for output in llm.stream_chat(messages, params, lora_request=adapter):
            yield output.outputs[0].text

    return answer


def main(argv: Sequence[str], *, prog: str) -> int:
    """Answer one question, or ask for questions until there are no more."""
    options = _parse(argv, prog)
    try:
        limits = LIMITS if options.url is None else NO_LIMITS
        user_message(
            "", options.image, limits, clips=options.audio
        )  # refused before a model is loaded
        conversation = _Conversation(_choose(options), options, limits)
        if options.text:
            conversation.ask(" ".join(options.text))
        else:
            conversation.run()
    except KeyboardInterrupt:
        print()
    return 0


def _choose(options: argparse.Namespace) -> Answer:
    if options.url is None:
        return _ask_here(options.model, options.lora, _sampling(options))
    client = ApiClient(options.url, options.api_key)
    return _ask_server(client, options.lora, _sampling(options))


class _Conversation:
    """The messages so far."""

    def __init__(self, answer: Answer, options: argparse.Namespace, limits: MediaLimits) -> None:
        self._answer = answer
        self._limits = limits
        self._system = options.system
        self._images: list[str] = list(options.image)
        self._clips: list[str] = list(options.audio)
        self._messages: list[dict[str, Any]] = []
        self._forget()

    def run(self) -> None:
        """Read questions from the terminal, or a pipe, to its end."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(_HELP)
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                return
            if line in ("/quit", "/exit"):
                return
            try:
                self._obey(line)
            except MMJaxError as error:
                # The question that failed is not part of the conversation.
                print(error, file=sys.stderr)

    def ask(self, text: str) -> None:
        """Print the answer as it comes, and keep both."""
        message = user_message(text, self._images, self._limits, clips=self._clips)
        asked = [*self._messages, message]
        parts: list[str] = []
        for part in self._answer(asked):
            parts.append(part)
            print(part, end="", flush=True)
        print()
        self._messages = [*asked, {"role": "assistant", "content": "".join(parts)}]
        self._images, self._clips = [], []

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        file = rest.strip()
        if command == "/image" and file:
            user_message("", [file], self._limits)  # it can be used
            self._images.append(file)
        elif command == "/audio" and file:
            user_message("", limits=self._limits, clips=[file])
            self._clips.append(file)
        elif command == "/new":
            self._forget()
        elif command.startswith("/"):
            print(_HELP)
        elif line:
            self.ask(line)

    def _forget(self) -> None:
        system = {"role": "system", "content": self._system}
        self._messages = [system] if self._system else []


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    return {name: value for name, value in fields.items() if value is not None}


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add: Any = parser.add_argument
    add("text", nargs="*", help="a question; without one, questions are read from the terminal")
    add("--image", action="append", default=[], help="a file or a URL; may be given repeatedly")
    add("--audio", action="append", default=[], help="a file or a URL; may be given repeatedly")
    add("--url", help="of a running server, as http://127.0.0.1:8000")
    add("--api-key", help="of that server; else $MMJAX_API_KEY")
    add("--model", help="without --url: a directory or a hub id; default: the embedded one")
    add("--lora", help="an adapter: a directory or a hub id; with --url: its name there")
    add("--system", help="a system message")
    add("--max-tokens", type=int, default=512, help="of an answer (default: %(default)s)")
    add("--temperature", type=float, help="0: greedy; default: the checkpoint's")
    options = parser.parse_args(argv)
    if options.url is not None and options.model is not None:
        parser.error("--model is for a model in this process; a server of --url has its own")
    if options.text and _names_a_model(options.text[0]):
        name = options.text[0]
        parser.error(
            f"`{name}` stands where the question begins, and looks like a model; give "
            f"`--model {name}` to load it into this process, or `--url` of the server that serves "
            "it, and a question in quotes"
        )
    return options


def _names_a_model(word: str) -> bool:
    """Whether an argument, which is no question of several words in quotes, names a checkpoint."""
    if _HUB_ID.fullmatch(word):
        return True
    return not re.search(r"\s", word) and (Path(word).expanduser() / "config.json").is_file()

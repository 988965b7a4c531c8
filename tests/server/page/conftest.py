"""The page in headless Chromium, over the echo engine."""

import base64
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from mmjax.config.engine_config import LoRAConfig, SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.server.app import create_app
from mmjax.transport.messages import EngineCoreRequest, Heartbeat, RequestOutputDelta
from tests.echo_engine import EchoEngine, EchoSupervisor

WAIT_S = 60.0
WIDE, PHONE = (1280, 800), (390, 844)

expect.set_options(timeout=1000 * WAIT_S)


def find_chromium() -> str:
    """Return the browser's path; a test without one fails."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail(
            "the page's tests need Chromium: `apt-get install chromium`, or set CHROMIUM to its "
            "path",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        # Containers have no user namespaces; the pages are our own.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class PacedEngine(EchoEngine):
    """An echo that answers no more than `num_steps_left` tokens, until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps_left: int | None = None
        self.has_aborted = threading.Event()

    def step(self) -> list[RequestOutputDelta]:
        if self.num_steps_left is not None:
            if not self.num_steps_left:
                return []
            self.num_steps_left -= 1
        return super().step()

    def abort(self, request_ids: Iterable[str]) -> None:
        super().abort(request_ids)
        if self.aborted:
            self.has_aborted.set()


class PageSupervisor(EchoSupervisor):
    """Its engine is paced; its state may be set from the test's thread."""

    def __post_init__(self) -> None:
        self.engine = self.paced = PacedEngine()
        self.delay_s = 0.002

    async def start(self, listener: Any) -> None:
        await super().start(listener)
        self.loop = self._task.get_loop()

    def call(self, function: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(function)

    def say_programs_left(self, num_programs_left: int) -> None:
        """Set what the next look at the server's state sees."""
        self._say(num_programs_left=num_programs_left)

    def say_running(self, num_running: int) -> None:
        self._say(num_running=num_running)

    def _say(self, *, num_running: int = 0, num_programs_left: int = 0) -> None:
        self.heartbeat: Heartbeat | None = Heartbeat(
            num_running=num_running,
            num_waiting=0,
            kv_cache_usage=0.0,
            num_compilations=0,
            num_programs_left=num_programs_left,
        )


class BackgroundServer:
    """An application on a port of its own, in a thread."""

    def __init__(self, app: FastAPI, port: int = 0) -> None:
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=port,
            log_level="error",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "BackgroundServer":
        self._thread.start()
        deadline = time.monotonic() + WAIT_S
        while not self._server.started:
            assert self._thread.is_alive(), "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)

    @property
    def port(self) -> int:
        return self._server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def kill(self) -> None:
        """Break off every connection and listen no more, as where a process is killed."""

        def break_off() -> None:
            self._server.servers[0].close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        loop = self._server.servers[0].get_loop()
        loop.call_soon_threadsafe(break_off)


@dataclass
class Playground:
    """An open page, and the server behind it."""

    page: Page
    url: str
    # A function: Pyrefly takes a class without an `__init__` of its own for its parent here.
    supervisor: PageSupervisor = field(default_factory=lambda: PageSupervisor())
    server: BackgroundServer | None = None
    start_again: Callable[[int], PageSupervisor] | None = None
    """Starts another server at a port."""
    processor: InputProcessor | None = None

    @property
    def engine(self) -> PacedEngine:
        return self.supervisor.paced

    @property
    def requests(self) -> Sequence[EngineCoreRequest]:
        """What the engine was asked."""
        return self.engine.added

    def open(self) -> "Playground":
        self.page.goto(self.url)
        expect(self.page.locator("body[data-started]")).to_be_attached()
        return self

    def drop(self, *colors: str) -> None:
        """Drop pictures on the page."""
        files = as_files(colors)
        self.page.evaluate(
            f"{MAKE_TRANSFER} document.dispatchEvent(new DragEvent('drop', "
            "{dataTransfer: transfer, bubbles: true, cancelable: true})); }",
            files,
        )

    def paste(self, *colors: str) -> None:
        """Paste pictures."""
        self.page.evaluate(
            f"{MAKE_TRANSFER} document.dispatchEvent(new ClipboardEvent('paste', "
            "{clipboardData: transfer, bubbles: true, cancelable: true})); }",
            as_files(colors),
        )

    def ask(self, text: str) -> None:
        """Ask, and wait for the whole answer."""
        count = self.page.locator(".assistant").count()
        self.send(text)
        self.wait_for_answers(count + 1)

    def send(self, text: str) -> None:
        """Ask, and do not wait."""
        self.page.get_by_role("textbox", name="Message").fill(text)
        self.page.keyboard.press("Enter")

    def wait_for_answers(self, count: int) -> None:
        expect(self.page.locator(".assistant .actions")).to_have_count(count)

    def kill_server(self) -> int:
        """Kill the server; return its port."""
        assert self.server is not None
        port = self.server.port
        self.server.kill()
        return port

    def restart_server(self, port: int) -> None:
        assert self.start_again is not None
        self.supervisor = self.start_again(port)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        assert self.processor is not None
        return self.processor.tokenizer.decode(list(token_ids))

    def will_say(self, text: str) -> None:
        """Let the engine answer with `text` from now on, instead of an echo."""
        assert self.processor is not None
        tokenizer = self.processor.tokenizer
        self.engine.answer = tokenizer.encode(text, add_special_tokens=False)

    def pick(self, name: str, kind: str, content: bytes) -> None:
        """Pick a file by the button."""
        file: Any = {"name": name, "mimeType": kind, "buffer": content}
        self.page.locator("#files").set_input_files([file])

    def add(self, *colors: str) -> None:
        """Drop pictures, and wait until they can be sent."""
        self.drop(*colors)
        expect(self.page.locator("#drafts img")).to_have_count(len(colors))

    def open_strip(self) -> None:
        """Open what the last answer cost."""
        self.page.locator("details.cost summary").last.click()
        expect(self.page.locator("details.cost").last.locator(".strip")).to_be_visible()


def answers(page: Page) -> Locator:
    """Return the texts of the answers."""
    return page.locator(".assistant .text")


MAKE_TRANSFER = """(files) => {
  const transfer = new DataTransfer();
  for (const [name, data] of files) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    transfer.items.add(new File([bytes], name, {type: 'image/png'}));
  }
"""


def as_files(colors: Iterable[str]) -> list[list[str]]:
    return [[f"{color}.png", base64.b64encode(make_png(color)).decode()] for color in colors]


def make_png(color: str) -> bytes:
    picture = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(picture).ellipse((90, 60, 210, 180), fill=color)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def make_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that opens an empty page; errors in its console fail the test."""
    problems: list[str] = []
    with ExitStack() as stack:

        def make(*, size: tuple[int, int] = WIDE, scheme: Any = "light") -> Page:
            context = browser.new_context(
                viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
            )
            stack.callback(context.close)
            page = context.new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: _note(message, problems))
            return page

        yield make
    assert problems == []


def _note(message: Any, problems: list[str]) -> None:
    # Chromium writes a line for every status of 400 and above.
    if message.type == "error" and "Failed to load resource" not in message.text:
        problems.append(message.text)


MakePlayground = Callable[..., Playground]


@pytest.fixture
def make_playground(
    server_input_processor: InputProcessor, make_page: Callable[..., Page]
) -> Iterator[MakePlayground]:
    """Return a function that opens the page of a new server."""
    with ExitStack() as stack:

        def make(
            *,
            size: tuple[int, int] = WIDE,
            scheme: str = "light",
            is_started_ready: bool = True,
            processor: InputProcessor = server_input_processor,
            lora: LoRAConfig | None = None,
            **config: Any,
        ) -> Playground:
            def start(port: int) -> tuple[BackgroundServer, PageSupervisor]:
                supervisor = PageSupervisor(is_started_ready=is_started_ready)
                client = AsyncEngineClient(processor, supervisor, SchedulerConfig(), lora=lora)
                chat = ChatParser.for_model(processor)
                app = create_app(client, chat, ServerConfig(**config), lora)
                return stack.enter_context(BackgroundServer(app, port)), supervisor

            server, supervisor = start(0)
            page = make_page(size=size, scheme=scheme)
            return Playground(
                page,
                server.url,
                supervisor,
                server,
                lambda port: start(port)[1],
                processor,
            ).open()

        yield make


@pytest.fixture
def playground(make_playground: MakePlayground) -> Playground:
    """The page of a server with the default configuration."""
    return make_playground()

"""`LLM`: vLLM's calls, one or many of each, in one process."""

import base64
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams
from mmjax.cache import MultiModalProcessorSenderCache, MultiModalReceiverCache
from mmjax.errors import CheckpointError, MultiModalCacheMissError, RequestError, RequestValueError
from mmjax.llm.arguments import adapters_for, as_conversations, as_prompts, params_for
from mmjax.transport.messages import EngineCoreRequest
from tests.kit import IMAGE_START, draw

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(scope="module")
def llm(tiny_gemma3: Path) -> Iterator[LLM]:
    with LLM(
        str(tiny_gemma3),
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        use_tqdm_on_load=False,
        allow_private_media_addresses=True,
    ) as made:
        yield made


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_what_fails_while_it_opens_is_told_and_closed(
    tiny_gemma3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        is_closed = False

        def __init__(self, config: Any, **options: Any) -> None: ...

        def close(self) -> None:
            Engine.is_closed = True

    def fail(self: Any) -> None:
        raise ZeroDivisionError("a processor that cannot process")

    monkeypatch.setattr("mmjax.llm.llm.EngineCore", Engine)
    monkeypatch.setattr("mmjax.llm.llm.InputProcessor.warm_up", fail)
    with pytest.raises(ZeroDivisionError, match="cannot process"):
        LLM(str(tiny_gemma3), max_model_len=128)
    assert Engine.is_closed


def test_one_or_many_prompts(llm: LLM) -> None:
    one = generate(llm, "a red circle")
    assert len(one) == 1
    many = generate(llm, ["a red circle", {"prompt": "a star"}, [2, 100, 101]])
    assert [output.prompt for output in many] == ["a red circle", "a star", None]
    assert many[0].outputs == one[0].outputs
    assert many[0].prompt_token_ids == llm.get_tokenizer().encode("a red circle")
    assert all(output.finished for output in many)
    assert generate(llm, []) == []


@pytest.mark.parametrize(
    ("read", "given", "says"),
    [
        (as_prompts, (3,), "`prompts` is a int; give a text, a dict"),
        (as_prompts, (None,), "`prompts` is a NoneType; give a text, a dict"),
        (as_prompts, (b"red",), "`prompts` is a bytes; give a text, a dict"),
        (params_for, ({"temperature": 0}, 1), "is a dict; give a SamplingParams"),
        (params_for, ([{"temperature": 0}], 1), "is a list; give a SamplingParams"),
        (params_for, (0.5, 1), "is a float; give a SamplingParams"),
        (adapters_for, ("italian", 1), "`lora_request` is a str; give a LoRARequest"),
        (adapters_for, (["italian"], 1), "`lora_request` is a list; give a LoRARequest"),
        (as_conversations, (3,), "`messages` is a int; give a list of messages"),
        (as_conversations, ("a",), "`messages` is a str; give a list of messages, as in"),
        (as_conversations, ({"role": "user"},), "is a dict; give a list of messages, as in"),
    ],
)
def test_wrong_arguments_are_refused_by_name(read: Any, given: tuple[Any, ...], says: str) -> None:
    # In the tests alone a call's types are checked before.
    with pytest.raises(TypeError, match=says):
        inspect.unwrap(read)(*given)


def test_media_that_are_no_dict_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match="`multi_modal_data` must be a dict, not list"):
        generate(llm, {"prompt": f"{IMAGE_START} red", "multi_modal_data": [draw(90, 70, 0)]})


def test_more_prompts_than_the_engine_holds(llm: LLM) -> None:
    prompts = [f"red {i} circle" for i in range(12)]
    together = [output.outputs[0].token_ids for output in generate(llm, prompts)]
    alone = [generate(llm, prompt)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_params_for_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 3)]
    outputs = generate(llm, ["red", "red"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    with pytest.raises(RequestError, match="2 prompts and 1"):
        generate(llm, ["red", "red"], params[:1])


def test_priority_wants_a_policy_and_one_for_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r'make the LLM with `scheduling_policy="priority"'):
        llm.generate(["a", "b"], priority=[0, 1], use_tqdm=False)


def test_priorities_reach_the_scheduler(tiny_gemma3: Path) -> None:
    settings = {"max_model_len": 64, "max_num_seqs": 1, "use_tqdm_on_load": False}
    with LLM(str(tiny_gemma3), scheduling_policy="priority", **settings) as llm:
        with pytest.raises(RequestError, match="2 prompts and 1 priorities"):
            llm.generate(["a", "b"], priority=[0], use_tqdm=False)
        seen: list[EngineCoreRequest] = []
        add = llm.engine.add_request

        def watch(message: EngineCoreRequest) -> None:
            seen.append(message)
            add(message)

        llm.engine.add_request = watch
        llm.generate(["a", "b", "c"], GREEDY, priority=[3, -2, 0], use_tqdm=False)
    assert [message.priority for message in seen] == [3, -2, 0]


def test_seeds_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6)
    first, second = (generate(llm, "a red", params)[0].outputs for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert len({tuple(output.token_ids) for output in first}) > 1


def test_images_in_every_form(llm: LLM, tmp_path: Path) -> None:
    image = draw(40, 30)
    file = tmp_path / "picture.png"
    image.save(file)
    data = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    with served(tmp_path) as address:
        forms: list[Any] = [
            *(image, [image], np.asarray(image), file, str(file), file.read_bytes(), data),
            *(f"{address}/picture.png", [f"{address}/picture.png"]),
        ]
        # An iterator is answered by one.
        outputs: Any = generate(
            llm,
            (
                {"prompt": f"{IMAGE_START} red", "multi_modal_data": {"image": form}}
                for form in forms
            ),
        )
        answers = list(outputs)
    assert len(answers) == len(forms)
    assert {answer.num_image_tokens for answer in answers} == {4}
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP; yield its address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()


def test_a_url_that_cannot_be_fetched_is_named(llm: LLM) -> None:
    prompt = {"prompt": IMAGE_START, "multi_modal_data": {"image": "http://127.0.0.1:9/a.png"}}
    with pytest.raises(RequestError, match=r"`image\[0\]`"):
        generate(llm, prompt)


def test_conversations_of_a_generator(llm: LLM) -> None:
    asked = ([{"role": "user", "content": text}] for text in ("a red circle", "a star"))
    outputs: Any = llm.chat(asked, GREEDY, use_tqdm=False)
    assert next(outputs).outputs[0].token_ids
    assert [len(output.outputs) for output in outputs] == [1]
    messages = ({"role": "user", "content": text} for text in ["a star"])
    assert len(llm.chat(messages, GREEDY, use_tqdm=False)) == 1


def test_an_iterator_is_answered_by_an_iterator(llm: LLM) -> None:
    """In its order, with the answers of a list, and without reading it far ahead."""
    prompts = [f"a red circle {number}" for number in range(200)]
    num_read = 0

    def count() -> Iterator[str]:
        nonlocal num_read
        for prompt in prompts:
            num_read += 1
            yield prompt

    outputs: Any = llm.generate(count(), GREEDY)
    assert num_read <= 1
    first = next(outputs)
    assert 1 <= num_read < len(prompts) / 2
    found = [first, *outputs]
    assert [one.prompt for one in found] == prompts
    whole = llm.generate(prompts[:9], GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found[:9]] == [
        one.outputs[0].token_ids for one in whole
    ]
    assert list(llm.generate(iter([]), GREEDY)) == []


def test_an_iterator_that_is_closed_leaves_nothing_behind(llm: LLM) -> None:
    outputs: Any = llm.generate((f"a star {number}" for number in range(100)), GREEDY)
    next(outputs)
    outputs.close()
    assert not llm.engine.has_unfinished()
    assert len(generate(llm, "a star")) == 1
    broken = llm.generate((1 // (3 - number) * "a" for number in range(9)), GREEDY)
    with pytest.raises(ZeroDivisionError):
        list(broken)
    assert not llm.engine.has_unfinished()
    with pytest.raises(RequestError, match="`sampling_params` is a list"):
        llm.generate(iter(["a"]), [GREEDY])
    tokens = iter([2, 5, 6])
    assert len(llm.generate(tokens, GREEDY, use_tqdm=False)) == 1


def test_who_interrupts_a_step_may_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook: what the step should have computed must not be found."""

    def interrupt(output: Any) -> Any:
        raise KeyboardInterrupt

    prompt: Any = {
        "prompt": f"{IMAGE_START} a red star, a blue square and a green circle, side by side",
        "multi_modal_data": {"image": draw(40, 30, 77)},
    }
    expected = generate(llm, prompt)[0].outputs[0].token_ids
    llm.engine.recover()
    monkeypatch.setattr(llm.engine._runner, "dispatch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompt)
    monkeypatch.undo()
    assert generate(llm, prompt)[0].outputs[0].token_ids == expected


def test_the_picture_matters(llm: LLM) -> None:
    prompts: Any = [
        {"prompt": f"{IMAGE_START} red", "multi_modal_data": {"image": draw(40, 30, seed)}}
        for seed in range(6)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)
    first = [output.outputs[0].cumulative_logprob for output in generate(llm, prompts, params)]
    assert len(set(first)) > 1


def test_nothing_else_can_be_asked_while_a_stream_is_read(llm: LLM) -> None:
    conversation: Any = [{"role": "user", "content": "a star"}]
    stream: Any = llm.stream_chat(conversation, GREEDY)
    outputs = [next(stream)]
    with pytest.raises(RuntimeError, match="answers another call"):
        generate(llm, "a circle")
    outputs += stream
    assert outputs[-1].finished
    left: Any = llm.stream_chat(conversation, GREEDY)
    next(left)
    left.close()
    assert len(generate(llm, "a circle")) == 1


def test_chat(llm: LLM) -> None:
    conversation: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": draw(40, 30)},
                {"type": "text", "text": "What color?"},
            ],
        }
    ]
    (answer,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert answer.prompt == (
        f"<bos><start_of_turn>user\n{IMAGE_START}What color?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert answer.num_image_tokens == 4
    two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [output.outputs for output in two] == [answer.outputs] * 2
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (other,) = llm.chat(
        [{"role": "user", "content": "red"}], GREEDY, use_tqdm=False, chat_template=plain
    )
    assert other.prompt == "red"


def test_chat_in_pieces_with_tools_and_options(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "red"}]
    (whole,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    pieces = list(llm.stream_chat(conversation, GREEDY))
    assert len(pieces) > 1
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    # One that is not read to its end leaves nothing behind.
    next(iter(llm.stream_chat(conversation, GREEDY)))
    assert not llm.engine.has_unfinished()
    template = "{{ style }} {{ tools[0].function.name }}: {{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (answer,) = llm.chat(
        conversation,
        GREEDY,
        use_tqdm=False,
        chat_template=template,
        tools=tools,
        chat_template_kwargs={"style": "short"},
    )
    assert answer.prompt == "short f: red"
    with pytest.raises(RequestValueError, match="has no effect"):
        llm.chat(conversation, GREEDY, use_tqdm=False, chat_template_kwargs={"style": "short"})


def test_explain_shows_what_a_request_gets(llm: LLM) -> None:
    prompt = {"prompt": f"{IMAGE_START} what", "multi_modal_data": {"image": draw(31, 17, seed=9)}}
    explanation = llm.explain(prompt)
    assert explanation.items[0].cache == "miss"
    (output,) = generate(llm, prompt)
    assert explanation.prompt_token_ids == output.prompt_token_ids
    again = llm.explain(prompt)
    assert again.items[0].cache == "hit"
    assert again.items[0].tensors == explanation.items[0].tensors
    content = [{"type": "image_pil", "image_pil": draw(31, 17, seed=9)}]
    chat = llm.explain([{"role": "user", "content": content}])
    assert chat.items[0].mm_hash == explanation.items[0].mm_hash
    assert chat.prompt is not None
    assert "user" in chat.prompt
    assert "image 0" in chat._repr_html_()


def test_explain_of_an_id_alone_says_that_the_engine_holds_it(llm: LLM) -> None:
    def prompt(image: Any) -> Any:
        return {
            "prompt": f"{IMAGE_START} what",
            "multi_modal_data": {"image": [image]},
            "multi_modal_uuids": {"image": ["scene-1"]},
        }

    generate(llm, prompt(draw(20, 20)))
    (item,) = llm.explain(prompt(None)).items
    assert (item.mm_hash, item.cache, item.tensors) == ("scene-1", "hit", None)


def test_a_bad_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(RequestError, match="0 images"):
        generate(llm, ["red", "circle", IMAGE_START, "star"])
    assert not llm.engine.has_unfinished()
    with pytest.raises(RequestError, match="empty"):
        llm.chat([], use_tqdm=False)
    assert generate(llm, "red")[0].finished


# ---- the caches ----------------------------------------------------------------------------------


def pictures(*seeds: int, text: str = "red") -> dict[str, Any]:
    images = [draw(40, 30, seed) for seed in seeds]
    return {"prompt": IMAGE_START * len(seeds) + text, "multi_modal_data": {"image": images}}


def tokens(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[tuple[int, ...]]:
    outputs = generate(llm, prompts, params)
    return [tuple(item.token_ids) for output in outputs for item in output.outputs]


def mirrors(llm: LLM) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what P0 believes that P1 holds, and what it holds."""
    p0, p1 = llm._input_processor.cache, llm.engine._receiver_cache
    assert isinstance(p0, MultiModalProcessorSenderCache)
    assert isinstance(p1, MultiModalReceiverCache)
    return p0.order, p1.order


def test_a_hit_sends_nothing_and_answers_the_same(llm: LLM) -> None:
    prompts = [pictures(1), pictures(2, 1, 2), pictures(1)]
    first = tokens(llm, prompts)
    sent: list[bool] = []
    add_request = llm.engine.add_request

    def watch(message: EngineCoreRequest) -> None:
        sent.extend(feature.data is not None for feature in message.mm_features)
        add_request(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "add_request", watch)
        assert tokens(llm, prompts) == first
    assert sent == [False] * 5
    believed, held = mirrors(llm)
    assert believed == held


def test_an_engine_that_forgets_is_told_again(llm: LLM) -> None:
    prompts = [pictures(3, 4), pictures(4), pictures(5, 3)]
    params = [SamplingParams(temperature=0.0, max_tokens=5, n=n) for n in (2, 1, 3)]
    first = tokens(llm, prompts, params)
    for _ in range(2):
        assert llm.engine._receiver_cache is not None
        llm.engine._receiver_cache.clear_cache()
        assert tokens(llm, prompts, params) == first
        believed, held = mirrors(llm)
        assert believed[-len(held) :] == held, "what nobody asked for since is not missed yet"
    llm.engine._receiver_cache.clear_cache()
    llm._requests.on_ready()


def test_an_engine_that_never_takes_an_item_is_an_error_and_no_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `python -O` as well: it is told, and the next request is served."""

    def lose(message: EngineCoreRequest) -> None:
        raise MultiModalCacheMissError([feature.identifier for feature in message.mm_features])

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", lose)
        with pytest.raises(RuntimeError, match=r"came 4 times .* `mm_processor_cache_gb=0`"):
            generate(llm, pictures(77))
    assert tokens(llm, pictures(77)) == tokens(llm, pictures(77))


def test_a_failed_call_leaves_the_mirrors_equal(llm: LLM) -> None:
    good = [pictures(seed, text="circle") for seed in range(6, 12)]
    bad: dict[str, Any] = {"prompt": IMAGE_START}
    for place in range(len(good) + 1):
        with pytest.raises(RequestError, match="0 images"):
            generate(llm, [*good[:place], bad, *good[place:]])
        believed, held = mirrors(llm)
        assert believed == held
        assert not llm.engine.has_unfinished()
        assert not llm._committed
    assert tokens(llm, good) == [tokens(llm, prompt)[0] for prompt in good]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 2**-6}, id="shm"),
        pytest.param({"mm_processor_cache_gb": 1e-5}, id="tiny"),
        pytest.param(
            {"mm_processor_cache_type": "processor_only"},
            id="processor only",
            marks=pytest.mark.slow,
        ),
        pytest.param({"mm_processor_cache_gb": 0.0}, id="none", marks=pytest.mark.slow),
    ],
)
def test_every_cache_gives_the_same_answers(
    llm: LLM, tiny_gemma3: Path, settings: dict[str, Any]
) -> None:
    prompts = [pictures(1), pictures(2, 1, 2), pictures(1), pictures(3)]
    with LLM(
        str(tiny_gemma3),
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        use_tqdm_on_load=False,
        **settings,
    ) as other:
        for _ in range(2):
            assert tokens(other, prompts) == tokens(llm, prompts)
        other.close()
        with pytest.raises(RuntimeError, match="this LLM is closed; make another one"):
            tokens(other, prompts)


def test_an_output_tells_its_times_and_what_each_cache_had(llm: LLM) -> None:
    prompt = pictures(71, 72, text="a star and a red circle")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (first,) = generate(llm, prompt, params)
    assert [(item.processing, item.encoding) for item in first.items] == [
        ("computed", "computed"),
        ("computed", "computed"),
    ]
    ids = first.prompt_token_ids
    assert [item.index for item in first.items] == [0, 1]
    assert all(0 < item.offset < item.offset + item.length < len(ids) for item in first.items)
    times = first.times
    assert min(times.process, times.tokenize, times.encode, times.prefill, times.generate) > 0
    assert times.arrived_at < times.first_token_at < times.last_token_at
    assert times.total <= times.last_token_at - times.arrived_at

    (again,) = generate(llm, prompt, params)
    in_prefix = [item.offset + item.length <= again.num_cached_tokens for item in again.items]
    expected = ["prefix_cache" if is_in else "encoder_cache" for is_in in in_prefix]
    assert [item.encoding for item in again.items] == expected
    assert {item.processing for item in again.items} == {"processor_cache"}
    assert again.times.encode == again.times.decode == 0.0

    llm.engine.reset_prefix_cache()
    (warm,) = generate(llm, prompt, params)
    assert [item.encoding for item in warm.items] == ["encoder_cache", "encoder_cache"]


def test_no_prefix_is_found_after_a_reset(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7, 9] * 16}
    generate(llm, prompt)
    (found,) = generate(llm, prompt)
    assert llm.reset_prefix_cache()
    (reset,) = generate(llm, prompt)
    assert (found.num_cached_tokens > 0, reset.num_cached_tokens) == (True, 0)
    assert reset.outputs[0].token_ids == found.outputs[0].token_ids


def test_the_default_sampling_params(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    (output,) = llm.generate("red", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_nothing_was_compiled_meanwhile(llm: LLM) -> None:
    generate(llm, ["red"] * 5)
    assert llm.engine.compilations == 0


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        LLM(tmp_path / "missing")

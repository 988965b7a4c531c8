"""P1 is killed under load, at every stage: no request is lost, no token is lost or doubled."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmjax.frontend.output.pooled import vectors_of
from mmjax.frontend.prompt.pooling import pooling_request
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.pooling_params import PoolingParams
from tests.chaos.service import (
    DEADLINE_S,
    Answer,
    Service,
    default_config,
    params,
    question,
    serving,
    until,
)
from tests.families.family import Family
from tests.families.lfm2_vl import LFM2_VL
from tests.families.minicpmv4_6 import MINICPMV4_6
from tests.families.qwen3_vl import QWEN3_5
from tests.kit import draw

FEW = ("--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
"""As tests/test_serve.py: their programs are compiled once."""
MANY = ("--max-model-len", "512", "--max-num-seqs", "32")
LONG = ("--max-model-len", "512", "--max-num-seqs", "4", "--precompile", "none")


async def ask_all(service: Service, numbers: Sequence[int], max_tokens: int) -> list[Answer]:
    """Ask many questions at once, every third about a picture."""
    return await asyncio.gather(
        *(
            service.ask(
                question(number, number if number % 3 == 0 else None), params(number, max_tokens)
            )
            for number in numbers
        )
    )


async def test_a_kill_while_streams_run_and_one_while_p1_starts(tiny_gemma3: Path) -> None:
    """A small sample; `benchmarks/kills.py` has the counts."""
    async with asyncio.timeout(DEADLINE_S):
        config = default_config(str(tiny_gemma3), *FEW, "--precompile", "none")
        async with serving(config, has_standby=True) as service:
            numbers = range(4)
            expected = await ask_all(service, numbers, 16)
            asked = asyncio.create_task(ask_all(service, numbers, 16))
            await until_tokens(service, 6)
            first = service.pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: service.pid != first)
            late = asyncio.create_task(ask_all(service, [100], 4))
            await service.kill()
            assert await asked == expected
            await late
            assert service.supervisor.num_restarts == 2
            assert service.client.num_requests == 0


async def until_tokens(service: Service, count: int) -> None:
    """Wait until the streams have so many more tokens, or all have ended."""
    sequences = service.client.requests.outputs.sequences

    def num_tokens() -> int:
        return sum(len(one.token_ids) for one in sequences.values())

    await until(lambda: num_tokens() > 0)
    before = num_tokens()
    await until(lambda: not sequences or num_tokens() >= before + count or num_tokens() < before)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_kills_at_every_stage() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with serving(default_config(*MANY), has_standby=True) as service:
            numbers = range(8)
            expected = await ask_all(service, numbers, 64)
            print(f"\nidle: {await service.kill():.1f} s")
            assert await ask_all(service, numbers, 64) == expected
            for stage, is_there in STAGES.items():
                asked = asyncio.create_task(ask_all(service, numbers, 64))
                await until(lambda is_there=is_there: is_there(service))
                print(f"{stage}: {await service.kill():.1f} s")
                assert await asked == expected, stage
            # While it starts, and five times in a row.
            asked = asyncio.create_task(ask_all(service, numbers, 64))
            await until(lambda: bool(service.computed))
            for _ in range(5):
                os.kill(service.pid, signal.SIGKILL)
                dead = service.pid
                await until(lambda dead=dead: service.pid != dead)
            assert await asked == expected
            assert service.client.num_requests == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [QWEN3_5, LFM2_VL, MINICPMV4_6], ids=lambda one: one.name)
def test_50_kills_of_recurrent_states(family: Family, tmp_path: Path) -> None:
    """Each is a start of seconds. Prompts and answers of 1 to 5 chunks, begun again at any step."""
    path, rng = family.write(tmp_path), random.Random(0)

    def make_prompt(number: int) -> Any:
        text = f"What is the color of number {number}? " * (2 + 6 * (number % 3))
        if number % 2:
            return text
        image = draw(64 + 8 * number, 64, number)
        return {"prompt": f"{family.placeholder} {text}", "multi_modal_data": {"image": image}}

    async def ask(service: Service) -> list[Answer]:
        asked = (service.ask(make_prompt(one), params(one, 80)) for one in range(6))
        return await asyncio.gather(*asked)

    async def body() -> None:
        config = default_config(str(path), *LONG)
        async with serving(config, has_standby=True) as service:
            expected = await ask(service)
            for number in range(50):
                asked = asyncio.create_task(ask(service))
                await until_tokens(service, rng.randrange(400))
                await service.kill()
                assert await asked == expected, f"{number=}"
            assert service.supervisor.num_restarts == 50
            assert service.client.num_requests == 0

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_kills_while_blocks_are_written_to_a_directory(tmp_path: Path) -> None:
    """The device holds fewer blocks than are asked for; what a dead process left is read or missed.

    A file that it was writing is nobody's block.
    """
    folder, rng, numbers = tmp_path / "kv", random.Random(0), range(9)
    directory = ("--kv-offload-gb", "0.01", "--kv-offload-dir", str(folder))
    small = ("--kv-cache-memory-bytes", "1500000", "--precompile", "none", *FEW)

    async with serving(default_config(*small)) as service:
        expected = await ask_all(service, numbers, 32)
    async with serving(default_config(*small, *directory), has_standby=True) as service:
        num_files = 0
        for number in range(8):
            asked = asyncio.create_task(ask_all(service, numbers, 32))
            await until_tokens(service, rng.randrange(1, 200))
            await service.kill()
            assert await asked == expected, f"{number=}"
            found = len([*folder.glob("*.mmjax")])
            assert found >= num_files, "blocks outlive the process"
            num_files = found
        assert await ask_all(service, numbers, 32) == expected
        heartbeat = service.supervisor.heartbeat
        assert heartbeat is not None
        assert heartbeat.kv_files_hits > 0
        assert service.supervisor.num_restarts == 8


async def embed(service: Service, number: int) -> bytes:
    """Return the vectors of a prompt: one, or one for each token."""
    service.num_requests += 1
    pooling = PoolingParams(task="token_embed" if number % 2 else "embed")
    request = GenerateRequest(
        str(service.num_requests),
        question(number, number if number % 3 == 0 else None),
        pooling_request(pooling),
    )
    (output,) = [output async for output in await service.client.add_request(request)]
    assert output.finished
    return vectors_of(output).tobytes()


async def embed_through_kills(count: int) -> None:
    """Kill P1 `count` times, each while it computes other prompts than it has in a cache."""
    flags = (*FEW, "--precompile", "none", "--runner", "pooling", "--no-enable-prefix-caching")
    async with serving(default_config(*flags), has_standby=count > 1) as service:
        numbers, rng = range(12), random.Random(0)
        expected = [await embed(service, number) for number in numbers]
        assert len({*expected}) == len(numbers)
        for _ in range(count):
            asked = asyncio.gather(*(embed(service, number) for number in numbers))
            await until(lambda: bool(service.computed))
            await asyncio.sleep(rng.random() * 0.05 * (count > 1))
            assert not asked.done(), "none is left to be lost"
            await service.kill()
            assert await asked == expected
        assert service.supervisor.num_restarts == count
        assert service.client.num_requests == 0


@pytest.mark.slow  # 19 s; streams survive one by default
async def test_vectors_survive_a_kill() -> None:
    async with asyncio.timeout(DEADLINE_S):
        await embed_through_kills(1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_vectors_survive_20_kills() -> None:
    """Each is a start of seconds; at any step of prompts of several chunks."""
    await embed_through_kills(20)


def _num_tokens(service: Service) -> list[int]:
    """Return how many tokens each sequence has that P1 computes."""
    sequences = map(service.client.requests.outputs.sequences.get, service.computed)
    return [0 if one is None else len(one.token_ids) for one in sequences]


def _is_new(service: Service) -> bool:
    return 0 in _num_tokens(service)


def _decodes(service: Service) -> bool:
    return min(_num_tokens(service), default=0) > 3


STAGES = {"taken in, encoded, prefill": _is_new, "decode": _decodes}

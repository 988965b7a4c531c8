"""Eight replicas in simulation beside one server with all their memory: hit rates of each level.

python -m benchmarks.replica_hits [--chats 3000] [--replicas 8] [--seeds 3]

Chats of several turns about pictures, some of which many ask about, arrive at random; a replica is
chosen for each turn by the front's own table, from keys and loads as a front sees them.
Each replica has the engine's own bookkeeping of KV blocks, on the device and in host memory, and of
processed pictures and encoder outputs. Nothing is computed, and no time is measured.
"""

import argparse
import heapq
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mmjax.cache.kv.host_blocks import HostBlocks
from mmjax.cache.kv.kv_cache_manager import KVCacheManager
from mmjax.cache.media.lru import LRUCache
from mmjax.deploy.affinity import AffinityTable

BLOCK_SIZE = 16
PICTURE_TOKENS = 256
MAX_MODEL_LEN = 4096
LEVELS = ("processor", "encoder", "device", "host")


class Memory(NamedTuple):
    """What all replicas have together."""

    pictures: int = 240
    """Processed ones, and as many encoder outputs."""
    device_blocks: int = 4_000
    host_blocks: int = 4_000


class Turn(NamedTuple):
    """A request; all of a prompt before its new question is that of the chat's last turn."""

    chat: int
    picture: int
    num_tokens: int


class Replica:
    """What a server's caches know, without their contents."""

    def __init__(self, memory: Memory, share: int) -> None:
        self._processed = LRUCache[int, int](memory.pictures // share)
        self._encoded = LRUCache[int, int](memory.pictures // share)
        self._kv = KVCacheManager(
            num_blocks=memory.device_blocks // share,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            host=HostBlocks(memory.host_blocks // share),
        )
        self.seen, self.found = Counter[str](), Counter[str]()
        self._num_requests = 0

    def serve(self, turn: Turn) -> None:
        """Look a prompt up, compute what is missing, and keep it."""
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._count("processor", 1, turn.picture in self._processed)
        self._processed[turn.picture] = 1
        hashes = list(_hashes(turn))
        in_host = self._kv.host_info.hits
        limit = (turn.num_tokens - 1) // BLOCK_SIZE
        num_found = self._kv.start(request_id, hashes[:limit])
        assert self._kv.allocate_slots(request_id, turn.num_tokens), "a replica has room for one"
        self._kv.restore_blocks(request_id, turn.num_tokens)
        in_host = self._kv.host_info.hits - in_host
        self._kv.pop_copied()
        self._kv.cache_blocks(request_id, hashes, turn.num_tokens)
        self._kv.free(request_id)
        self._count("device", turn.num_tokens, num_found - in_host)
        self._count("host", turn.num_tokens - (num_found - in_host), in_host)
        if num_found < PICTURE_TOKENS:
            self._count("encoder", 1, turn.picture in self._encoded)
            self._encoded[turn.picture] = 1

    def _count(self, level: str, asked: int, found: int) -> None:
        self.seen[level] += asked
        self.found[level] += found


def _hashes(turn: Turn) -> Iterator[bytes]:
    """Yield names of a prompt's full blocks: its picture's are those of all chats about it."""
    for number in range(turn.num_tokens // BLOCK_SIZE):
        is_shared = (number + 1) * BLOCK_SIZE <= PICTURE_TOKENS
        yield f"{turn.picture if is_shared else f'chat {turn.chat}'} {number}".encode()


def make_load(num_chats: int, seed: int) -> list[tuple[float, Turn]]:
    """Return turns and when they arrive: each chat's one after the other."""
    draw, arrivals = random.Random(seed), list[tuple[float, Turn]]()
    start = 0.0
    for chat in range(num_chats):
        start += draw.expovariate(1.0)
        # Each other picture is the chat's own; of the others a few are asked about again and again.
        picture = -chat if draw.random() < 0.5 else int(draw.paretovariate(1.0))
        at, num_tokens = start, PICTURE_TOKENS + 32
        for _ in range(draw.randint(1, 6)):
            arrivals.append((at, Turn(chat, picture, num_tokens)))
            at += 2.0 + draw.expovariate(1 / 60)
            num_tokens += draw.randint(48, 320)
    return sorted(arrivals)


def simulate(num_replicas: int, load: list[tuple[float, Turn]], memory: Memory) -> dict[str, float]:
    """Return the hit rate of each level over all replicas."""
    replicas = {f"replica {n}": Replica(memory, num_replicas) for n in range(num_replicas)}
    table, draw = AffinityTable(), random.Random(0)
    loads, ends = dict.fromkeys(replicas, 0), list[tuple[float, str]]()
    for now, turn in load:
        while ends and ends[0][0] <= now:
            loads[heapq.heappop(ends)[1]] -= 1
        keys = [f"session {turn.chat}", f"picture {turn.picture}"]
        chosen = table.rank(keys, loads, now=now)[0]
        table.note(keys, chosen, now=now)
        replicas[chosen].serve(turn)
        loads[chosen] += 1
        heapq.heappush(ends, (now + draw.expovariate(1 / 5), chosen))
    seen, found = Counter[str](), Counter[str]()
    for replica in replicas.values():
        seen.update(replica.seen)
        found.update(replica.found)
    return {level: found[level] / max(1, seen[level]) for level in LEVELS}


def main() -> None:
    """Print a row for each level."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chats", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    flags = parser.parse_args()
    loads = [make_load(flags.chats, seed) for seed in range(flags.seeds)]
    print(f"hit rates, medians of {flags.seeds} loads: one server, {flags.replicas} replicas")
    rows = {
        number: [simulate(number, load, Memory()) for load in loads]
        for number in (1, flags.replicas)
    }
    for level in LEVELS:
        medians = (statistics.median(one[level] for one in found) for found in rows.values())
        print(f"{level:10}", *(f"{one:8.3f}" for one in medians))


if __name__ == "__main__":
    main()

"""Files whose bytes are changed at random."""

import random


def damage(rng: random.Random, file: bytes, *, first: int | None = None) -> bytes:
    """Return a file with one to five changes, among its `first` bytes where that is given."""
    data = bytearray(file)
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(min(len(data), first or len(data)))
        match rng.randrange(4):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place : place + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
            case 2:
                del data[place : place + rng.randrange(1, 40)]
            case _:
                data[place:place] = rng.randbytes(rng.randrange(1, 20))
        data = data or bytearray(1)
    return bytes(data)

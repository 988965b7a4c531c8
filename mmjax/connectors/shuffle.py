"""Pixel shuffle (arXiv 1609.05158), backwards: fewer and wider states of the same picture."""

from jaxtyping import Array, Float


def pixel_shuffle(
    states: Float[Array, "I P D"], factor: int, *, is_transposed: bool = False
) -> Float[Array, "I _tokens _width"]:
    """Join each square of `factor` by `factor` patches into one state, row by row.

    `is_transposed`: the squares stand column by column (`ps_version` v1, as models before 2024 saw
    them).
    """
    images, num_patches, width = states.shape
    side = round(num_patches**0.5) // factor
    squares = states.reshape(images, side, factor, side, factor, width)
    order = (0, 3, 1, 2, 4, 5) if is_transposed else (0, 1, 3, 2, 4, 5)
    return squares.transpose(order).reshape(images, side * side, factor**2 * width)

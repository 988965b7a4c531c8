"""Keep a product from being rounded only after a sum that follows it."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rounded(product: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return a product as its dtype has it, and NaN for what is not finite.

    Compilers round a product and a sum once where they can. Of two products that are added they
    take either one, so that a number would depend on the program that it is computed in.
    """
    largest = float(jnp.finfo(product.dtype).max)
    return jnp.where(jnp.abs(product) <= largest, product, jnp.nan)

"""Arrays by the checkpoint's names take the places that its files' tensors take."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, SingleDeviceSharding

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.weights.rules import Rule, Split, Squeeze, Stack, StackPart, Transposition, map_tensor
from mmjax.weights.sharding import param_sharding
from mmjax.weights.update import flatten_given, match_update, place_update
from tests.families import TINY_FAMILIES
from tests.families.default_run import mark
from tests.oracle import params_of

FAMILIES = [
    pytest.param(family, marks=mark("updates of weights", name), id=name)
    for name, family in TINY_FAMILIES.items()
]


def describe(abstract: Any, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a tree's leaves with their shardings."""
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=param_sharding(name, leaf.shape, mesh)
        )
        for name, leaf in flatten_params(abstract).items()
    }


def on_device(params: Mapping[str, torch.Tensor]) -> dict[str, jax.Array]:
    return {name: jnp.array(tensor.numpy()) for name, tensor in params.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_dict_of_hf_becomes_the_tree(family: Any):
    reference = family.make_reference(**family.served)
    rules = family.model_class.rules(reference.config)
    _, abstract = build_abstract(family.model_class, reference.config, dtype=jnp.float32)
    expected = describe(abstract)
    given = on_device(reference.state_dict())
    # A name of the tree is no file's name of something else, or of something turned; an axis more
    # or less is told by the shape, and a stack is turned only where its shape asks for it.
    for name in expected:
        for mapped, change in map_tensor(name, rules):
            is_other = mapped in expected and (mapped != name or change is not None)
            assert not is_other or isinstance(change, Squeeze | StackPart), (name, mapped, change)
    tree = flatten_params(params_of(reference, abstract, rules))
    placed = dict(
        place_update(match_update(given, expected, rules), expected, current={}, donate=True)
    )
    assert placed.keys() == expected.keys()
    for name, leaf in tree.items():
        np.testing.assert_array_equal(placed[name], leaf, err_msg=name)
    # What was cut or cast is freed; what was taken as it is, is the engine's.
    kept = {id(leaf) for leaf in placed.values()}
    mapped = {id(one.array) for each in match_update(placed, expected, ()) for one in each.sources}
    assert mapped == kept
    for name, array in given.items():
        is_used = any(one in expected for one, _ in map_tensor(name, rules))
        assert array.is_deleted() or id(array) in kept or not is_used, name


EXPECTED = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    for name, shape in {
        "language_model.embed_tokens.weight": (8, 4),
        "language_model.q.weight": (2, 4),
        "language_model.k.weight": (2, 4),
        "language_model.experts": (2, 3, 4),
        "tower.turned": (3, 2),
        "tower.flat": (4,),
    }.items()
}
RULES = (
    Split(r"^model\.qk", ["language_model.q", "language_model.k"], (2, 2)),
    Stack(r"^model\.experts\.(?P<index>\d+)$", "language_model.experts"),
    Rule(r"^tower\.matrix$", "tower.turned", Transposition()),
    Rule(r"^tower\.long$", "tower.flat", Squeeze(2)),
    Rule(r"^model\.unused", None),
    Rule(r"^model\.", "language_model."),
)


def draw(*shape: int) -> jax.Array:
    return jnp.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def place(given: Mapping[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Return what is placed of arrays by the files' names."""
    found = match_update(given, EXPECTED, RULES, **options)
    placed = place_update(found, EXPECTED, current={}, donate=False)
    return {name: np.asarray(leaf) for name, leaf in placed}


def test_each_change_of_a_rule_is_made_on_the_device():
    given = {
        "model.qk.weight": draw(4, 4),
        "model.experts.1": draw(3, 4),
        "model.experts.0": draw(3, 4) + 1,
        "tower.matrix": draw(2, 3),
        "tower.long": draw(1, 1, 4),
        "model.unused.weight": draw(1),
    }
    with jax.transfer_guard_device_to_host("disallow"):
        found = match_update(given, EXPECTED, RULES)
        placed = dict(place_update(found, EXPECTED, current={}, donate=False))
    wanted = {
        "language_model.q.weight": given["model.qk.weight"][:2],
        "language_model.k.weight": given["model.qk.weight"][2:],
        "language_model.experts": jnp.stack([given["model.experts.0"], given["model.experts.1"]]),
        "tower.turned": given["tower.matrix"].T,
        "tower.flat": given["tower.long"][0, 0],
    }
    assert placed.keys() == wanted.keys()
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(placed[name], leaf)
    assert not any(array.is_deleted() for array in given.values())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model.qk.weight": (5, 4)}, r"`model.qk.weight` must have shape \(2, 4\); got \(5, 4\)"),
        ({"model.experts.1": (3, 4)}, r"`language_model.experts\[0\]`"),
        (
            {f"model.experts.{n}": (3, 4) for n in range(3)},
            "1 unexpected(.|\n)*`model.experts.2`",
        ),
        ({"tower.matrix": (3, 3)}, r"must have shape \(3, 2\); got \(3, 3\)"),
        ({"tower.long": (2, 1, 4)}, r"must have shape \(4,\)"),
        (
            {"model.q.weight": (2, 4), "language_model.q.weight": (2, 4)},
            "`language_model.q.weight` and `model.q.weight` are both `language_model.q.weight`",
        ),
        ({"model.other": (2,)}, "1 unexpected"),
    ],
)
def test_what_does_not_fit_is_named(given: Mapping[str, tuple[int, ...]], says: str):
    with pytest.raises(CheckpointError, match=says):
        match_update({name: draw(*shape) for name, shape in given.items()}, EXPECTED, RULES)


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.ones(2), "Tensor"), (3, "int"), ([1.0], "list"), (None, "NoneType")]
)
def test_what_is_no_array_is_named(value: Any, kind: str):
    # Of adapters, too, whose arrays have PEFT's names.
    with pytest.raises(TypeError, match=f"`model.q.weight` of the given weights is a `{kind}`"):
        flatten_given({"model": {"q.weight": value}})


def test_a_whole_tree_keeps_its_names_where_the_engine_leaves_a_tower_out():
    # Else the files' rule would turn the experts, which may be square, as gpt-oss's are.
    name, square = "language_model.experts", jax.ShapeDtypeStruct((2, 3, 3), jnp.float32)
    rules = (Split(f"^{name}$", [name], [3], of_stack=True, is_transposed=True),)
    given = {name: draw(2, 3, 3), "tower.flat": draw(4)}
    (found,) = match_update(given, {name: square}, rules, left_out=["tower"])
    np.testing.assert_array_equal(found.read(), given[name])


def test_a_tied_head_must_be_the_table():
    table, head = draw(8, 4), "model.lm_head.weight"
    own = "language_model.embed_tokens.weight"
    assert place({"model.embed_tokens.weight": table, head: table}).keys() == {own}
    assert place({"model.embed_tokens.weight": table, head: table + 0}).keys() == {own}
    # Alone beside another parameter, it is compared with the present table.
    more = {"model.q.weight": draw(2, 4), head: table + 0}
    assert place(more, current={own: table}).keys() == {"language_model.q.weight"}
    for other in ({"model.embed_tokens.weight": table, head: table + 1}, {head: table[:4]}):
        with pytest.raises(CheckpointError, match="differs from the token embedding"):
            place(other, current={own: table})

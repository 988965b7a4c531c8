"""Ids that clients claim: one content each, in one domain each, and bounded memory of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mmjax.errors import MediaIdConflictError, RequestError
from mmjax.processing import MultiModalDataItems, MultiModalHasher, VideoProcessorItems
from mmjax.processing.hashing.item_hashes import MAX_MEDIA_ID_LENGTH, ItemHasher, MediaId, RecentMap
from mmjax.processing.media.encoded import EncodedImage
from tests.kit import draw
from tests.processing.test_item_hashes import (
    FILES,
    LIMITS,
    forbid_decoding,
    hash_images,
    hash_items,
)


@pytest.fixture
def hasher() -> ItemHasher:
    return ItemHasher("model")


class TestClaims:
    def test_the_content_decides(self, hasher: ItemHasher) -> None:
        plain = hash_images(hasher, FILES[0], draw(3, 3), id_domain="d")
        assert plain == hash_images(hasher, FILES[0], draw(3, 3))
        claimed = hash_images(hasher, FILES[0], draw(3, 3), uuids=["x", "y"], id_domain="d")
        assert claimed == plain

    def test_an_id_alone_leads_to_its_content(
        self, hasher: ItemHasher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given_once = hash_images(hasher, FILES[0], draw(3, 3), uuids=["x", "y"], id_domain="d")
        forbid_decoding(monkeypatch)
        assert hash_images(hasher, None, None, uuids=["x", "y"], id_domain="d") == given_once

    def test_with_other_factors_it_is_another_item(self, hasher: ItemHasher) -> None:
        hash_images(hasher, FILES[0], uuids=["x"], id_domain="d")
        kwargs = {"a": 1}
        with pytest.raises(ValueError, match="Cache miss"):
            hash_images(hasher, None, uuids=["x"], mm_kwargs=kwargs, id_domain="d")
        (other,) = hash_images(hasher, FILES[0], uuids=["x"], mm_kwargs=kwargs, id_domain="d")
        assert hash_images(hasher, None, uuids=["x"], mm_kwargs=kwargs, id_domain="d") == [other]
        assert [other] == hash_images(hasher, FILES[0], mm_kwargs=kwargs)

    def test_an_id_stays_in_its_domain(self, hasher: ItemHasher) -> None:
        hash_images(hasher, FILES[0], uuids=["x"], id_domain="alice")
        hash_images(hasher, None, uuids=["x"])
        with pytest.raises(
            ValueError, match="Cache miss for image at index 0 but data is not provided"
        ) as caught:
            hash_images(hasher, None, uuids=["x"], id_domain="bob")
        assert isinstance(caught.value, RequestError)
        assert caught.value.status == 400
        bobs = hash_images(hasher, FILES[1], uuids=["x"], id_domain="bob")
        assert bobs == hash_images(hasher, FILES[1])

    def test_another_content_contradicts(self, hasher: ItemHasher) -> None:
        hash_images(hasher, FILES[0], uuids=["x"], id_domain="d")
        for item in (FILES[1], draw(4, 4), draw(3, 3)):
            with pytest.raises(MediaIdConflictError, match="'x' of image 0 came with") as caught:
                hash_images(hasher, item, uuids=["x"], id_domain="d")
            assert caught.value.status == 409
            assert caught.value.param == "multi_modal_uuids"
        hash_images(hasher, FILES[0], uuids=["x"], id_domain="d")

    def test_a_request_that_contradicts_itself_binds_nothing(self, hasher: ItemHasher) -> None:
        with pytest.raises(MediaIdConflictError):
            hash_images(hasher, *FILES[:3], uuids=["y", "x", "x"], id_domain="d")
        hash_images(hasher, FILES[3], FILES[2], uuids=["y", "x"], id_domain="d")

    def test_an_id_beside_its_content(self, hasher: ItemHasher) -> None:
        one = hash_images(hasher, None, FILES[0], None, uuids=["x", "x", "x"], id_domain="d")
        assert len(set(one)) == 1

    def test_an_id_never_is_a_hash(self, hasher: ItemHasher) -> None:
        """Who knows another client's hash, or its id, gains nothing by it."""
        (secret,) = hash_images(hasher, FILES[0])
        with pytest.raises(ValueError, match="Cache miss"):
            hash_images(hasher, None, uuids=[secret], id_domain="d")
        assert hash_images(hasher, FILES[1], uuids=[secret], id_domain="d") != [secret]

    @pytest.mark.parametrize("bad", ["x" * (MAX_MEDIA_ID_LENGTH + 1), "a\r\nb", "\0", "\u200e"])
    def test_ids_are_short_and_printable(self, bad: str, hasher: ItemHasher) -> None:
        with pytest.raises(ValueError, match="it must have 1 to 128, all printable") as caught:
            hash_images(hasher, FILES[0], uuids=[MediaId(bad, "place")], id_domain="d")
        assert isinstance(caught.value, RequestError)
        assert caught.value.param == "place"
        assert bad not in caught.value.message

    def test_modalities_number_their_own_items(self, hasher: ItemHasher) -> None:
        hash_images(hasher, FILES[0], uuids=["0"], id_domain="d")
        frames = np.zeros((2, 4, 4, 3), np.uint8)
        items = MultiModalDataItems(video=VideoProcessorItems([frames]))
        hash_items(hasher, items, {"video": ["0"]}, id_domain="d")

    def test_only_so_many_ids_are_remembered(self) -> None:
        hasher = ItemHasher("model", max_remembered=2)
        hash_images(hasher, *FILES[:3], uuids=["0", "1", "2"], id_domain="d")
        hash_images(hasher, None, None, uuids=["1", "2"], id_domain="d")
        with pytest.raises(ValueError, match="Cache miss"):
            hash_images(hasher, None, uuids=["0"], id_domain="d")


class ClaimsMachine(RuleBasedStateMachine):
    """Any order of contents, ids and domains: an id means its first content there, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.hasher = ItemHasher("model")
        self.bound: dict[tuple[str, str], int] = {}
        self.processed: set[tuple[int, int]] = set()

    def expected(self, content: int, factor: int) -> str:
        return MultiModalHasher().hash_kwargs(
            model_id="model",
            image=EncodedImage(FILES[content], LIMITS),
            **({"mm_processor_kwargs": {"f": factor}} if factor else {}),
        )

    @rule(
        domain=st.sampled_from("ab"),
        uuid=st.sampled_from(["x", "y", None]),
        content=st.integers(0, 2),
        factor=st.integers(0, 1),
    )
    def give(self, domain: str, uuid: str | None, content: int, factor: int) -> None:
        kwargs = {"f": factor} if factor else {}
        known = content if uuid is None else self.bound.get((domain, uuid), content)

        def run() -> list[str]:
            return hash_images(
                self.hasher, FILES[content], uuids=[uuid], mm_kwargs=kwargs, id_domain=domain
            )

        if known != content:
            with pytest.raises(MediaIdConflictError):
                run()
        else:
            assert run() == [self.expected(content, factor)]
            if uuid is not None:
                self.bound[domain, uuid] = content
        self.processed.add((content, factor))

    @rule(domain=st.sampled_from("ab"), uuid=st.sampled_from("xyz"), factor=st.integers(0, 1))
    def name(self, domain: str, uuid: str, factor: int) -> None:
        kwargs = {"f": factor} if factor else {}
        content = self.bound.get((domain, uuid))

        def run() -> list[str]:
            return hash_images(self.hasher, None, uuids=[uuid], mm_kwargs=kwargs, id_domain=domain)

        if content is None or (content, factor) not in self.processed:
            with pytest.raises(ValueError, match="Cache miss"):
                run()
        else:
            assert run() == [self.expected(content, factor)]

    @rule(uuid=st.sampled_from("xy"))
    def trust(self, uuid: str) -> None:
        assert hash_images(self.hasher, None, uuids=[uuid]) == [uuid]

    @invariant()
    def few_ids(self) -> None:
        assert len(self.bound) <= 4


TestClaimsMachine = ClaimsMachine.TestCase
TestClaimsMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


@settings(max_examples=200)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("gp"), st.integers(0, 6), st.integers(0, 9))),
)
def test_the_least_recently_used_goes_first(
    capacity: int, operations: list[tuple[str, int, int]]
) -> None:
    real: RecentMap[int, int] = RecentMap(capacity)
    model: dict[int, int] = {}  # in order of use
    for name, key, value in operations:
        if name == "g":
            assert real.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        else:
            model.pop(key, None)
            model[key] = value
            real.put(key, value)
            while len(model) > capacity:
                del model[next(iter(model))]
        assert len(real) == len(model)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        RecentMap(0)

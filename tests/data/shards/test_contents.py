"""What a shard holds, for the line that says why nothing of it can be used."""

from pathlib import Path

import pytest

from clipscale.common.errors import UserError
from clipscale.data.shards.reader import unusable
from tests.data.files import Members, picture, write_tar
from tests.data.streams import open_stream


def members(picture_name: str, caption_name: str) -> Members:
    keys = [f"{number:06d}" for number in range(8)]
    pairs = [((picture_name.format(key), picture()), (caption_name.format(key), b"words")) for key in keys]
    return [member for pair in pairs for member in pair]


PAIRS = members("{}.png", "{}.txt")
UNUSABLE = {
    "other extensions": (
        members("{}.img", "{}.cap"),
        [".cap and .img", "KEY.jpg, .jpeg, .png", "data.captions is [txt]"],
    ),
    "apart": (PAIRS[::2] + PAIRS[1::2], ["hold .png, or .txt", "one after the other"]),
    "dots in keys": (members("www.a.com_{}.png", "www.a.com_{}.txt"), ["hold .a.com_000000.png", "first dot"]),
    "no extensions": (members("{}_png", "{}_txt"), ["hold no sample", "KEY.jpg", "first dot"]),
}


@pytest.mark.parametrize(("content", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_the_line_that_ends_a_run_says_what_its_samples_hold(tmp_path: Path, content: Members, said: list[str]) -> None:
    path = write_tar(tmp_path / "0.tar", content)
    with pytest.raises(UserError) as error, open_stream(path, batch=4) as stream:
        stream.next_batch().pixels(0, 4)
    assert [words for words in said if words not in str(error.value)] == [], error.value


def test_nothing_is_said_of_a_shard_with_a_pair_or_without_a_file(tmp_path: Path) -> None:
    for content in (members("{}.img", "{}.cap") + PAIRS[:2], []):
        assert unusable(str(write_tar(tmp_path / "0.tar", content)), ["txt"]) == ""

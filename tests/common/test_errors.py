"""The message of an error is one line, whatever value it quotes."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipscale.common.errors import StoppedError, UserError, one_line, to_user_error


@given(st.text(st.characters(categories=None, codec=None)), st.sampled_from([UserError, StoppedError]))
def test_a_message_is_one_printable_line(value: str, kind: type[UserError]) -> None:
    error = kind(f"model.name={value}: choose another")
    assert str(error).isprintable() and str(error).endswith(": choose another")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)


def test_a_mistake_of_ours_is_not_one_line_of_a_library() -> None:
    with pytest.raises(NameError), to_user_error("the file"):
        raise NameError("x")
    with pytest.raises(UserError, match="TypeError: no subscript"), to_user_error("the file"):
        raise TypeError("no subscript")


def test_a_library_that_asserts_is_no_mistake_of_ours() -> None:
    with pytest.raises(UserError, match=r"the file .*must be divisible"), to_user_error("the file"):
        torch.nn.MultiheadAttention(7, 2)
    with pytest.raises(AssertionError), to_user_error("the file"):
        assert not "ours"


def test_a_message_has_no_colours_and_no_addresses_of_objects() -> None:
    error = ValueError(f"\x1b[1mcannot\x1b[0m identify {object()}")
    assert one_line(error) == "cannot identify <object object>"

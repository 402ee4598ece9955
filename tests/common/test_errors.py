"""The message of an error is one line, whatever value it quotes."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from clipscale.common.errors import StoppedError, UserError


@given(st.text(st.characters(categories=None, codec=None)), st.sampled_from([UserError, StoppedError]))
def test_a_message_is_one_printable_line(value: str, kind: type[UserError]) -> None:
    error = kind(f"model.name={value}: choose another")
    assert str(error).isprintable() and str(error).endswith(": choose another")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)

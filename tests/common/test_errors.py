"""The message of an error is one line, whatever value it quotes."""

import pickle
import signal

from hypothesis import given
from hypothesis import strategies as st

from clipscale.common.errors import StoppedError, UserError


@given(st.text(st.characters(categories=None, codec=None)), st.sampled_from([UserError, StoppedError]))
def test_a_message_is_one_printable_line(value: str, kind: type[UserError]) -> None:
    error = kind(f"model.name={value}: choose another")
    assert str(error).isprintable() and str(error).endswith(": choose another")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)


def test_a_stopped_run_knows_its_signal() -> None:
    assert StoppedError("stopped").number == signal.SIGTERM
    assert pickle.loads(pickle.dumps(StoppedError("stopped", signal.SIGINT))).number == signal.SIGINT

"""The first signal is recorded, a later Ctrl-C ends the run, and the handlers are restored."""

import signal

import pytest

from clipscale import stopping
from clipscale.stopping import Stop


def test_one_ctrl_c_is_recorded_and_a_later_one_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop, before = Stop(announce=True), signal.getsignal(signal.SIGINT)
    with stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, forwarded by the launcher
        assert stop.number == signal.SIGINT
        assert capfd.readouterr().err.count("Ctrl-C again") == 1
        monkeypatch.setattr(stopping, "AGAIN_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_schedulers_warning_may_come_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stopping, "AGAIN_S", -1.0)
    with (stop := Stop(announce=False)):
        assert stop.number == 0
        signal.raise_signal(signal.SIGUSR1)
        assert stop.number == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    assert capfd.readouterr().err == ""

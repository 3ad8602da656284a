"""The time of idle steps."""

import pytest
import torch

from loka.probe.clock import StepClock


class FakeEvent:
    """Keeps the stream it was recorded on; steps take 2 ms."""

    def __init__(self, enable_timing: bool) -> None:
        self.stream: object = None

    def record(self, stream: object = "that of the current device") -> None:
        self.stream = stream

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 2.0 if self.stream == end.stream == "that of cuda:1" else 0.0


def test_a_step_is_timed_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another one's stream there is nothing to wait for, and only the host's time would be seen."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    clock = StepClock(torch.device("cuda:1"))
    with clock.timed():
        pass
    assert clock.median_us() == 2000


def test_a_step_that_fails_is_not_timed() -> None:
    clock = StepClock(torch.device("cpu"))
    with pytest.raises(RuntimeError), clock.timed():
        raise RuntimeError
    assert clock.median_us() is None

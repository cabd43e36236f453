"""Which device a rank computes on, and what is refused before anything is started."""

from __future__ import annotations

import pytest
import torch

from m3stack.config import WorkerConfig
from m3stack.errors import StartupError
from m3stack.hardware import choose_hardware


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says on a machine with two GPUs; nothing here touches one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_every_rank_takes_the_gpu_of_its_number() -> None:
    config = WorkerConfig(tensor_parallel=2)
    devices = [choose_hardware(config, rank).device for rank in range(2)]
    assert devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_hardware(WorkerConfig(device="cuda:1")).device == torch.device("cuda", 1)


@pytest.mark.usefixtures("two_gpus")
def test_every_rank_of_several_hosts_takes_a_gpu_of_its_own_host() -> None:
    config = WorkerConfig(tensor_parallel=4, hosts=2)
    devices = [choose_hardware(config, rank).device for rank in range(4)]
    assert devices == [torch.device("cuda", index) for index in (0, 1, 0, 1)]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (WorkerConfig(tensor_parallel=4), "tensor_parallel is 4, but there are only 2 GPUs"),
        (
            WorkerConfig(tensor_parallel=6, hosts=2),
            "tensor_parallel is 6 over 2 hosts, but there are only 2 GPUs",
        ),
        (WorkerConfig(tensor_parallel=2, device="cuda:1"), "2 ranks take one GPU each"),
        (WorkerConfig(device="cuda:2"), "device is cuda:2, but there are only 2 GPUs"),
    ],
)
def test_gpus_that_are_not_there_are_named(config: WorkerConfig, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        choose_hardware(config)


def test_ranks_share_a_cpu() -> None:
    config = WorkerConfig(device="cpu", tensor_parallel=4)
    assert {choose_hardware(config, rank).device for rank in range(4)} == {torch.device("cpu")}

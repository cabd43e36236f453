"""The life of one rank of `bench multi-gpu`: every arm in turn, each row written at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from m3stack.bench.kernels.harness import measure_ceilings
from m3stack.bench.multi_gpu import floors, report
from m3stack.bench.multi_gpu.arms import Arm, arms_of
from m3stack.bench.multi_gpu.measure import Answer, ArmBench, Machine, Row, Sizes
from m3stack.bench.multi_gpu.shards import page_shape, truncated
from m3stack.cache.pool import KvPool
from m3stack.checkpoints import builtin_checkpoint
from m3stack.kernels.reference_table import reference_kernels
from m3stack.kernels.select import build_kernels
from m3stack.layers import Place
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.config import M3Config
from m3stack.rank_model import kernel_shape

REAL = Sizes(
    batches=(1, 8, 64),
    contexts=(8192, 131_072, 524_288),
    chunk=8192,
    num_pages=16_384,
    prompt_tokens=5000,
    output_tokens=8,
    repeats=5,
)
SMALL = Sizes(
    batches=(1, 3),
    contexts=(256, 1024),
    chunk=200,
    num_pages=32,
    prompt_tokens=900,
    output_tokens=4,
    repeats=2,
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    world: int
    small: bool
    dtype: str
    num_layers: int
    arms: tuple[str, ...]
    deadline_s: float
    port: int
    out: Path


def run_rank(rank: int, options: Options, command: str) -> None:
    """The life of one rank; rank 0 writes what was measured, after every row."""
    machine = _machine(rank, options)
    config, sizes = _config(options)
    rows: list[Row] = [_about(machine, config, options)]

    def keep(row: Row) -> None:
        rows.append(row)
        if rank == 0:
            print(report.line(row), flush=True)
            report.write(options.out, rows, command)

    for row in _memory_rows(machine, options):
        keep(row)
    # all are compared before any is timed
    truth = _truth(machine, config, sizes)
    for arm in arms_of(options.world):
        if arm.ranks <= options.world and _is_time_left(machine, options):
            bench = ArmBench(arm, config, sizes, machine)
            keep(bench.compared(truth))
            if machine.place.device.type == "cuda":
                keep(bench.replayed())
            del bench
            _forget(machine)
    for arm in _timed_arms(options):
        if not _is_time_left(machine, options):
            keep({"kind": "not run", "arm": arm.name, "why": "the deadline"})
            continue
        for row in ArmBench(arm, config, sizes, machine).timed_rows():
            keep(row)
        _forget(machine)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _timed_arms(options: Options) -> list[Arm]:
    """Those that were asked for, in that order; all of them where none was."""
    by_name = {arm.name: arm for arm in arms_of(options.world)}
    return [by_name[name] for name in options.arms or by_name]


def _forget(machine: Machine) -> None:
    """Gives back what an arm has held."""
    if machine.place.device.type == "cuda":
        torch.cuda.empty_cache()


def _truth(machine: Machine, config: M3Config, sizes: Sizes) -> Answer:
    """What the undivided model gives in fp32 and plain torch, on every rank for itself."""
    plain = replace(
        machine,
        place=Place(machine.place.device, torch.float32),
        kernels=reference_kernels(),
        group=None,
    )
    needed = -(-(sizes.prompt_tokens + sizes.output_tokens) // config.block_tokens)
    answer = ArmBench(Arm(1), config, replace(sizes, num_pages=needed), plain).answer(None)
    _forget(machine)
    return answer


def _config(options: Options) -> tuple[M3Config, Sizes]:
    if options.small:
        return truncated(M3Config.from_dir(builtin_checkpoint("tiny")), 2), SMALL
    return truncated(released_model_config(), options.num_layers), REAL


def _machine(rank: int, options: Options) -> Machine:
    if options.small:
        torch.set_num_threads(1)
        group = None
        if options.world > 1:
            _join(rank, options)
            group = dist.group.WORLD
        place = Place(torch.device("cpu"), getattr(torch, options.dtype))
        # a CPU's ceilings are not what this is about
        return Machine(rank, place, reference_kernels(), group, floors.Ceiling(1e10, 1e11))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = None
    if options.world > 1:
        _join(rank, options)
        group = dist.new_group(backend="nccl", device_id=device)
        assert isinstance(group, dist.ProcessGroup)
    place = Place(device, torch.bfloat16)
    shape = kernel_shape(released_model_config(), place.dtype)
    kernels = build_kernels("auto", shape=shape, device=device)
    reached = measure_ceilings()
    ceiling = floors.Ceiling(reached.copy_bytes_per_s, reached.matmul_flops_per_s)
    return Machine(rank, place, kernels, group, ceiling)


def _join(rank: int, options: Options) -> None:
    store = open_store(options.port, options.world, is_leader=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world)


def open_store(port: int, size: int, *, is_leader: bool) -> Any:
    """Where ranks find each other; port 0 picks a free one."""
    # torch exports it without saying so
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store("127.0.0.1", port, size, is_master=is_leader, wait_for_workers=False)


def _is_time_left(machine: Machine, options: Options) -> bool:
    """The same answer on all ranks: what rank 0's clock says."""
    left = torch.tensor([time.monotonic() < options.deadline_s])
    if machine.group is not None:
        dist.broadcast(left, src=0)
    return bool(left)


def _about(machine: Machine, config: M3Config, options: Options) -> Row:
    device = machine.place.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "kind": "machine",
        "arm": "",
        "gpus": options.world,
        "device": name,
        "torch": torch.__version__,
        "kernels": machine.kernels.name,
        "layers": config.num_layers,
        "copy_tb_per_s": machine.ceiling.bytes_per_s / 1e12,
        "matmul_tflops": machine.ceiling.flops_per_s / 1e12,
    }


def _memory_rows(machine: Machine, options: Options) -> list[Row]:
    """Bytes of cache a token takes on a rank of the whole model, allocated and by the formula."""
    config = M3Config.from_dir(builtin_checkpoint("tiny"))
    num_pages = 8
    if not options.small:
        config, num_pages = released_model_config(), 512
    rows: list[Row] = []
    for arm in (Arm(n, index_in_parts=p) for n in (1, 2, 4, 8) for p in (False, True) if n > p):
        place = arm.place(0)
        shape = page_shape(config, place, machine.place.dtype)
        measured = _allocated(lambda shape=shape: KvPool(shape, num_pages, machine.place.device))
        formula = floors.cache_bytes_per_token(config, place)
        if machine.place.dtype == torch.float32:
            formula *= 2
        rows.append(
            {
                "kind": "memory",
                "arm": arm.name,
                "bytes_per_token": measured / (num_pages * config.block_tokens),
                "formula_bytes_per_token": formula,
            }
        )
    return rows


def _allocated(make: Callable[[], KvPool]) -> int:
    """Bytes of the tensors of a pool, by the allocator where there is one."""
    if not torch.cuda.is_available():
        pool = make()
        parts = [(layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD) for layer in pool.layers]
        return sum(part.nbytes for layer in parts for part in layer if part is not None)
    before = torch.cuda.memory_allocated()
    pool = make()
    taken = torch.cuda.memory_allocated() - before
    del pool
    return taken

"""run_check: checks that this installation can train, on one device and on all of them."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fleet.common.command_text import typed
from fleet.errors import FleetError

_CPU_PROCESSES = 2
_GPU_CAUSES = (
    " 1. fewer GPUs can be used than torch counts: check CUDA_VISIBLE_DEVICES;\n"
    " 2. some of the GPUs are busy or full: check nvidia-smi;\n"
    " 3. NCCL is not installed correctly, or the devices cannot reach each other."
)
_CPU_CAUSES = (
    " 1. this build of torch has no gloo: check torch.distributed.is_gloo_available();\n"
    " 2. a firewall or a container keeps processes from connecting to 127.0.0.1;\n"
    " 3. too few processes or too little shared memory are allowed: check ulimit -u and /dev/shm."
)
_TIMES = 2.0  # every input and weight of the single check is a constant, so the right results are known


def run_check() -> None:
    """Trains two small layers on one device, then on every device of this machine, and prints the result.

    Prints, in order: that the check begins; that one device works; with several devices, that all of them work
    together; that the installation is complete. Without a GPU two processes on the CPU train together, over gloo. Where
    they work alone but not together, it warns with the cause, and the last line says that only one can be used.

    Raises:
        RuntimeError: one device does not work; nothing then says success.

    Example:
        >>> fleet.utils.run_check()
        Running verify fleet program ...
        fleet works well on 1 CPU.
        fleet works well on 2 processes of the CPU.
        fleet is installed successfully. You can start training with fleet now.
    """
    print("Running verify fleet program ...", flush=True)
    device, count = choose_devices()
    name = "GPU" if device.type == "cuda" else device.type.upper()
    check_single(device)
    print(f"fleet works well on 1 {name}.", flush=True)
    if count > 1:
        is_gpu = device.type == "cuda"
        several = f"{count} GPUs" if is_gpu else f"{count} processes of the CPU"
        try:
            check_parallel(count, "nccl" if is_gpu else "gloo")
        except Exception as error:  # noqa: BLE001 - whatever the devices or the network raise
            causes = _GPU_CAUSES if is_gpu else _CPU_CAUSES
            warnings.warn(
                f"fleet does not work on {several} together. Possible causes:\n{causes}\n"
                f"The original error is: {error}",
                stacklevel=2,
            )
            print(f"fleet is installed successfully ONLY for a single {name}.", flush=True)
            return
        print(f"fleet works well on {several}.", flush=True)
    print("fleet is installed successfully. You can start training with fleet now.", flush=True)


def choose_devices() -> tuple[torch.device, int]:
    """Returns the device to check and how many workers train together; prints the choice where it is not obvious.

    If torch was built for GPUs and cannot use one, it warns with the original error and returns the CPU.
    """
    others = [kind for kind in ("xpu", "mps") if _is_usable(kind)]
    if torch.cuda.is_available():
        if others:
            print(f"Found GPUs and {', '.join(others)} devices: checking the GPUs.", flush=True)
        return torch.device("cuda", 0), torch.cuda.device_count()
    if torch.version.cuda is not None or torch.version.hip is not None:
        warnings.warn(
            f"torch was built for GPUs and cannot use one: {_gpu_error()}. The check continues on the CPU.",
            stacklevel=3,
        )
        print("No GPU can be used: checking the CPU.", flush=True)
    return torch.device("cpu"), _CPU_PROCESSES


def _is_usable(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _gpu_error() -> str:
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:  # noqa: BLE001 - torch raises AssertionError, RuntimeError and its own classes
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return "no device is visible"


def check_single(device: torch.device) -> None:
    """Runs forward and backward of a layer from 2 to 4 features, plain and compiled, and checks the results.

    Raises:
        RuntimeError: a result is wrong; or whatever the device raises.
    """
    layer = nn.Linear(2, 4, device=device)
    with torch.no_grad():
        layer.weight.fill_(_TIMES)
        layer.bias.fill_(1.0)
    inputs = torch.ones(3, 2, device=device)
    _check_pass(layer, layer, inputs, "plain")
    try:
        # This backend needs no C++ compiler, which a machine for training may lack.
        compiled = torch.compile(layer, backend="aot_eager")
    except (ImportError, RuntimeError):
        return  # torch does not compile on this Python or platform; training does not need it
    _check_pass(compiled, layer, inputs, "compiled")


def _check_pass(run: Callable[..., Any], layer: nn.Linear, inputs: torch.Tensor, kind: str) -> None:
    layer.zero_grad()
    output = run(inputs)
    output.sum().backward()
    weight_grad = layer.weight.grad
    bias_grad = layer.bias.grad
    right = (
        bool((output == 2 * _TIMES + 1).all())
        and weight_grad is not None
        and bias_grad is not None
        and bool((weight_grad == len(inputs)).all())
        and bool((bias_grad == len(inputs)).all())
    )
    if not right:
        raise RuntimeError(
            f"run_check: the {kind} layer on {inputs.device} gave wrong numbers: output {output.tolist()}, gradient of "
            f"the weight {None if weight_grad is None else weight_grad.tolist()}."
        )


def check_parallel(count: int, backend: str, start_method: str = "spawn") -> None:
    """Trains two layers for one step in ``count`` processes, one for each device.

    Raises:
        FleetError: the workers could not be started, or their rendezvous failed.
        torch.multiprocessing.ProcessRaisedException: a worker failed; carries its traceback.
    """
    from fleet.parallel import spawn

    with _without_script():
        spawn(_train_step, nprocs=count, backend=backend, start_method=start_method)


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Keeps new processes from running the user's script, which may call run_check() outside of any function."""
    main = sys.modules["__main__"].__dict__
    kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.update(dict.fromkeys(kept))
    try:
        yield
    finally:
        main.update(kept)


def _train_step() -> None:
    import torch.distributed as dist

    import fleet

    fleet.init_parallel_env()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend_config() else "cpu"
    rank, count = fleet.get_rank(), fleet.get_world_size()
    torch.manual_seed(rank)
    model = fleet.DataParallel(nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 1)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    model(torch.full((4, 8), float(rank + 1), device=device)).mean().backward()
    optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    lowest, highest = flat.clone(), flat.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise FleetError(f"run_check: after one step the parameters of the {count} processes differ")
    dist.destroy_process_group()


def run(argv: Sequence[str]) -> int:
    """``python -m fleet run_check``: returns 0 when one device works, and raises when none does."""
    text = "The same as fleet.utils.run_check()."
    argparse.ArgumentParser(prog=typed("run_check"), description=text).parse_args(list(argv))
    run_check()
    return 0

"""What the loss asks of the machine it runs on. A dry run (clipscale.plan) replaces it to answer for a GPU that is not there."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipscale.loss.triton.tuning import INTERPRETER, Tiles, capability_of, tiles_for

T = TypeVar("T")


class Machine:
    """The machine of this process."""

    def gpu_name(self, device: torch.device) -> str | None:
        """The name of the GPU. None: the device is not a GPU."""
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None

    def parts(self, parts: Iterator[T]) -> Iterator[T]:
        """The tiles or panels of a block that are computed. A dry run takes the first: the others use the same buffers."""
        return parts

    def tiles(self, device: torch.device, kernel_pass: str, arithmetic: str) -> Tiles:
        """The entry of the tile table for a device; on the CPU that of Triton's interpreter."""
        return tiles_for(capability_of(device), kernel_pass, arithmetic) if device.type == "cuda" else INTERPRETER

    def compute_capability(self, device: torch.device) -> int:
        """90 for 9.0. Triton's interpreter loads operands as Ampere does, through pointers."""
        return capability_of(device) if device.type == "cuda" else 80

    def multiprocessors(self, device: torch.device) -> int:
        """Of the GPU; the interpreter has one."""
        return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def free_bytes(self, device: torch.device) -> int:
        """Memory of the GPU that is free, with what torch's allocator holds in reserve; none elsewhere."""
        if device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def aligned(self, x: Tensor, depth: int) -> Tensor:
        """x (n, D) with D padded by zeros to a multiple of `depth` and rows that load 16 bytes at a time."""
        x = x.detach()
        if x.device.type == "cpu" and x.dtype == torch.bfloat16:
            # Triton's interpreter multiplies bfloat16 by its bits. The products of widened numbers are those of the hardware.
            x = x.float()
        n, width = x.shape
        padded = -(-width // depth) * depth
        if padded == width and x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
            return x
        if padded == width:
            return x.clone(memory_format=torch.contiguous_format)
        out = x.new_zeros((n, padded))
        out[:, :width] = x
        return out

    def launch(
        self, kernel: Any, grid: int, device: torch.device, tiles: Tiles, *arguments: Any, **constants: Any
    ) -> None:
        """Run a Triton kernel. Raises RuntimeError with the kernel, the device, the tiles and the reason where that fails."""
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device:
                kernel[(grid,)](
                    *arguments, **constants, num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
                    enable_fp_fusion=True,
                )  # fmt: skip
        except Exception as error:
            name = getattr(kernel, "__name__", str(kernel))
            where = self.gpu_name(device) or "the interpreter"
            raise RuntimeError(
                f"the Triton kernel {name} failed on {where} with {tiles}: {type(error).__name__}: {error}"
            ) from error

    def add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """out += a b by the GEMM library, accumulated in float32."""
        if a.device.type == "cpu":
            out.addmm_(a.float(), b.float())
        elif a.dtype == torch.float32:
            out.addmm_(a, b)
        else:
            add_half_product(out, a, b)


def add_half_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out (float32) += a b for half-precision operands. Where addmm cannot widen, the product takes memory of its own."""
    if _addmm_widens(a.device, a.dtype):
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=torch.float32))


@cache
def _addmm_widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has addmm(float32, half, half, out_dtype=) for the device (pull request 167931, November 2025): tried once."""
    out, half = torch.zeros(16, 16, device=device), torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(out, half, half, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return True


@contextlib.contextmanager
def float32_matmuls(precision: str) -> Iterator[None]:
    """Inside, matmuls of float32 on CUDA have this precision, "ieee" or "tf32".

    `allow_tf32` sets torch's old and new interface alike. After the new one alone, reading the old one raises, as Inductor does.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if before == precision:
        yield
        return
    matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32 = before == "tf32"
        matmul.fp32_precision = before

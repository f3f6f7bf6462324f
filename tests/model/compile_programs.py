"""Compile the Triton programs for an H100 without one and print, as JSON, what their loops do with products.

Run without TRITON_INTERPRET, where programs are not compiled at all: the test starts it as a process of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from inlay.model.kernels import fused_bottleneck as fused
from inlay.model.kernels import grouped
from inlay.model.kernels.triton import attention_programs, grouped_programs
from inlay.model.kernels.triton import bottleneck_programs as fused_programs

BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
ROUTE = dict.fromkeys(("slots_ptr", "starts_ptr", "stops_ptr", "begins_ptr", "ends_ptr"), I32)
STRIDES = dict.fromkeys(("down_stride", "down_bias_stride", "up_stride", "up_bias_stride", "split_size", "salt"), "i32")
TOKENS = dict.fromkeys(("h_ptr", "grad_ptr", "z_ptr", "a_ptr", "dz_ptr", "dh_ptr", "out_ptr", "x_ptr", "y_ptr"), BF16)
WEIGHTS = ("down_ptr", "up_ptr", "down_bias_ptr", "up_bias_ptr", "w_ptr", "bias_ptr")
BOTTLENECK = ROUTE | STRIDES | TOKENS | {"scale_ptr": F32, "seed_ptr": I64}
PLACES = dict.fromkeys(("q_n", "q_h", "o_n", "o_h", "N", "W"), "i32") | {"scaling": "fp32", "dropout": "fp32"}
ATTENTION = PLACES | dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), BF16)
ATTENTION |= {"lse": F32, "starts": I32, "stops": I32}


def compile_loops(program: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, stages: int) -> str:
    """The program as Triton's GPU dialect; arguments of no known type are None."""
    names = program.arg_names
    signature = {name: "constexpr" if name in constants or name not in types else types[name] for name in names}
    constexprs = {(place,): constants.get(name) for place, name in enumerate(names) if signature[name] == "constexpr"}
    is_odd = {"salt", "N", "scaling", "dropout"} | {name for name in names if signature[name] == "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in is_odd}
    source = ASTSource(program, signature, constexprs, aligned)
    options = {"num_warps": num_warps, "num_stages": stages}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"])


def products(dialect: str) -> list[dict[str, Any]]:
    """Every product that may still be at work when the next step of its loop begins, and what it reads."""
    buffers: dict[str, int] = {}  # of what a product reads: how many there are
    found, in_loop, is_loop = [], [], False
    for line in dialect.splitlines():
        name, _, rest = line.strip().partition(" = ")
        if match := re.search(r"local_alloc : .*memdesc<(\d+)x", rest):
            buffers[name] = int(match[1])
        elif "local_alloc %" in rest and not is_loop:
            buffers[name] = 99  # written once, before the loop
        elif match := re.search(r"(?:memdesc_index|memdesc_trans|memdesc_subslice) (%\w+)", rest):
            buffers[name] = buffers.get(match[1], 1)
        elif "scf.for" in line or "scf.yield" in line:
            in_loop, is_loop = [], "scf.for" in line
        elif match := re.search(r"ttng.warp_group_dot (%\w+), (%\w+)", rest):
            is_left_register = ": tensor<" in rest.split("} ", 1)[-1].split("*", 1)[0]
            in_loop.append(
                {"left_in_registers": is_left_register, "buffers": [buffers.get(x, 1) for x in match.groups()]}
            )
        elif match := re.search(r"warp_group_dot_wait .*pendings = (\d+)", rest):
            found += in_loop if int(match[1]) else []
            in_loop = in_loop[len(in_loop) - int(match[1]) :] if int(match[1]) else []
    return found


def main() -> None:
    found: dict[str, Any] = {}
    for threshold in (0, 6554):
        for tile in (16, 64):
            for size in (16, 64, 128):
                cut = fused.FORWARD[2, tile]
                constants = {"D": 768, "R": size, "E": 768, "ACTIVATION": "gelu", "RESIDUAL": True, "BLOCK_N": tile}
                constants |= {"THRESHOLD": threshold, "STAGES": cut.num_stages, "BLOCK_R": size}
                constants |= {"BLOCK_D": fused._chunk_of(cut, size)}
                for name in ("bottleneck_forward", "bottleneck_backward_tokens"):
                    types = BOTTLENECK | dict.fromkeys(WEIGHTS, BF16)
                    program = getattr(fused_programs, name)
                    dialect = compile_loops(program, types, constants, cut.num_warps, cut.num_stages)
                    found[f"{name} {threshold} {tile} {size}"] = products(dialect)
        for size in (16, 64, 128):
            weights = fused.BACKWARD_WEIGHTS[2]
            constants = {"D": 768, "R": size, "E": 768, "THRESHOLD": threshold, "BLOCK_N": weights.num_rows}
            constants |= {"BLOCK_D": weights.block, "BLOCK_R": size}
            types, warps = BOTTLENECK | dict.fromkeys(WEIGHTS, F32), weights.num_warps * (2 if size > 64 else 1)
            program = fused_programs.bottleneck_backward_weights
            dialect = compile_loops(program, types, constants, warps, weights.num_stages)
            found[f"weights {threshold} {size}"] = products(dialect)
    forward, backward = grouped.FORWARD[2], grouped.BACKWARD_WEIGHTS[2]
    types = ROUTE | TOKENS | STRIDES | dict.fromkeys(WEIGHTS, BF16)
    constants = {"D": 768, "E": 768, "IS_TRANSPOSED": False, "BLOCK_N": 64, "BLOCK_D": forward.block, "BLOCK_E": 128}
    dialect = compile_loops(grouped_programs.linear_forward, types, constants, forward.num_warps, forward.num_stages)
    found["linear_forward"] = products(dialect)
    types |= {"grad_ptr": BF16} | dict.fromkeys(WEIGHTS, F32)
    constants = {"D": 768, "E": 768, "BLOCK_N": backward.block, "BLOCK_D": 128, "BLOCK_E": 128}
    program = grouped_programs.linear_backward_weights
    found["linear_backward_weights"] = products(
        compile_loops(program, types, constants, 2 * backward.num_warps, backward.num_stages)
    )
    for low, block, high in ((0, 32, 32), (32, 64, 64), (64, 64, 128), (0, 64, 512)):
        constants = {"MAX_LENGTH": 512, "D": 64, "WIDE": 64, "LOW": low, "BLOCK": block, "HIGH": high, "INNER": 32}
        constants |= {"HALF": 32 if high == 512 else block}
        for name in ("attention_forward", "attention_backward"):
            dialect = compile_loops(getattr(attention_programs, name), ATTENTION, constants, 4, 1)
            found[f"{name} {low} {high}"] = products(dialect)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

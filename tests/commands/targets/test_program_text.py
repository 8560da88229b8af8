"""Reading compiled programs: a text recorded from libtpu (shortened), and small texts made by hand."""

import pytest

from flaxformer_mt.commands.compiled_text import (
    Kernel,
    Traffic,
    bytes_of,
    read_calls,
    read_collectives,
    read_cycles,
    read_kernels,
)

# w - psum(gradient of sum(tanh(x @ w))) with pmap, compiled for v5e:2x2; shortened.
RECORDED = """\
HloModule jit__fun, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }, num_partitions=4

FunctionNames
1 "f"

%fused_computation (param_0.12: f32[1,64,512], param_1.22: f32[512,512]) -> f32[512,512] {
  %param_0.12 = f32[1,64,512]{2,1,0:T(8,128)} parameter(0)
  %param_1.22 = f32[512,512]{1,0:T(8,128)} parameter(1)
  %fusion.7 = bf16[64,512]{1,0:T(8,128)(2,1)} fusion(%param_1.22, %param_0.12), kind=kOutput, calls=%inner
  ROOT %convolution.2 = f32[512,512]{1,0:T(8,128)S(1)} convolution(%fusion.1, %fusion.7), dim_labels=fb_io->bf
}

%region_0.0 (psum.0: f32[], psum.1: f32[]) -> f32[] {
  %psum.1 = f32[]{:T(128)} parameter(1), metadata={op_name="psum"}
  ROOT %add.0 = f32[]{:T(128)} add(%psum.0, %psum.1), metadata={op_name="add" stack_frame_id=2}
}

ENTRY %main.0_spmd (param.2: f32[512,512], param.3: f32[1,64,512]) -> f32[512,512] {
  %param.2 = f32[512,512]{1,0:T(8,128)} parameter(0), metadata={op_name="flat_args[0]"}
  %param.3 = f32[1,64,512]{2,1,0:T(8,128)} parameter(1), metadata={op_name="flat_args[1]"}
  %fusion = f32[512,512]{1,0:T(8,128)S(1)} fusion(%param.3, %param.2), kind=kOutput, \
calls=%fused_computation, metadata={op_name="jit(_fun)/shard_map/transpose(jvp())/dot_general"}, \
backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"7632","iteration_bounds":["1","1","1"]}}
  %psum.7 = f32[512,512]{1,0:T(8,128)S(1)} all-reduce(%fusion), channel_id=1, \
replica_groups=mesh['d'=4] {'d'}, use_global_device_ids=true, to_apply=%region_0.0, \
metadata={op_name="jit(_fun)/shard_map/psum"}
  ROOT %sub.7 = f32[512,512]{1,0:T(8,128)} subtract(%param.2, %psum.7), \
metadata={op_name="jit(_fun)/shard_map/sub"}, \
backend_config={"window_config":{"estimated_cycles":"8404"}}
}
"""

# A loop of six steps that gathers and calls a kernel, a loop of unknown length, and a conditional.
BY_HAND = """\
HloModule by_hand

%cond (c: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %part = f32[8]{0} get-tuple-element(%c), index=1
  %gather = (f32[8]{0}, f32[32]{0}) all-gather-start(%part), dimensions={0}
  %whole = f32[32]{0} all-gather-done(%gather)
  %kernel = bf16[4] custom-call(%whole), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %part)
}

%async (p: f32[4]) -> f32[1] {
  %p = f32[4] parameter(0)
  ROOT %scatter = f32[1] reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

%apply (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %many = (f32[4], /*index=1*/f32[2]) all-reduce(%p, %q), to_apply=%add, \
backend_config={"estimated_cycles":"5"}, metadata={op_name="jit(f)/update"}
}

%skip (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %copy = f32[4] copy(%p), backend_config={"estimated_cycles":"1"}
}

%below (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  %state = (s32[], f32[8]{0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=LT, metadata={op_name="while/lt"}
}

ENTRY %main (p: f32[8]) -> f32[4] {
  %p = f32[8] parameter(0)
  %scan = (s32[], f32[8]{0}) while(%p), condition=%below, body=%skip, metadata={op_name="jit(f)/while"}
  %loop = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0"}}
  %endless = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%skip
  %start = ((f32[4]), f32[1], u32[]) async-start(%x), calls=%async
  %done = f32[1] async-done(%start), calls=%async
  ROOT %if = f32[4] conditional(%which, %x, %x), branch_computations={%skip, %apply}
}
"""


def test_a_recorded_program_has_one_all_reduce():
    assert read_collectives(RECORDED) == ({"all-reduce": Traffic(1, 512 * 512 * 4)}, 0)


def test_loops_branches_and_asynchronous_operations_count_as_often_as_they_run():
    found, loops = read_collectives(BY_HAND)
    assert found == {
        "all-gather": Traffic(6, 6 * 32 * 4),  # the results, which are larger than the operands
        "all-reduce": Traffic(1, (4 + 2) * 4),
        "reduce-scatter": Traffic(1, 4 * 4),  # the operands
    }
    assert loops == 1


@pytest.mark.parametrize(
    "result, size",
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30),
        ("(f32[2,3]{1,0}, bf16[4], pred[7], token[])", 24 + 8 + 7),
        ("f8e4m3fn[10]", 10),
        ("s32[<=6]", 24),
        ("f32[0,9]", 0),
    ],
)
def test_bytes_of_types(result, size):
    assert bytes_of(result) == size


# The start, a step and the end of one all-gather, and a sum of which each device keeps a part, from libtpu.
IN_FUSIONS = """\
%async_collective_fusion.1 (p: bf16[48,8]) -> bf16[192,8] {
  %all-gather.1 = bf16[192,8]{1,0} all-gather(%p), channel_id=640, dimensions={0}
}

%fused_computation.2 (p: bf16[48,8]) -> bf16[192,8] {
  %all-gather.2 = bf16[192,8]{1,0} all-gather(%p), channel_id=640, dimensions={0}
}

%all-reduce-scatter.30 (p: bf16[40]) -> bf16[10] {
  %all-reduce.419 = bf16[40]{0} all-reduce(%p), channel_id=541, to_apply=%add
}

%all-reduce-scatter.31 (p: bf16[12]) -> bf16[3] {
  %all-reduce.420 = bf16[12]{0} all-reduce(%p), channel_id=541, to_apply=%add
}

ENTRY %main (p: bf16[48,8]) -> bf16[192,8] {
  %p = bf16[48,8] parameter(0)
  %a = bf16[192,8] fusion(%p), kind=kCustom, calls=%async_collective_fusion.1
  %b = bf16[192,8] fusion(%p), kind=kOutput, calls=%fused_computation.2
  %c = bf16[192,8] fusion(%p), kind=kOutput, calls=%fused_computation.2
  %d = bf16[10] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.30
  %g = bf16[3] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.31
  %e = bf16[4] collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}
  %f = bf16[4] collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}
}
"""


def test_collectives_of_one_channel_are_told_apart_by_their_chains():
    """As libtpu 0.0.52 writes them."""
    text = IN_FUSIONS.replace("channel_id=640", 'channel_id=1, frontend_attributes={chain_id="7"}')
    more = text.replace("async_collective_fusion.1 (", "async_collective_fusion.3 (").partition("\n\n")[0]
    more = more.replace('chain_id="7"', 'chain_id="8"')
    text = text.replace("%fused_computation.2 (", f"{more}\n\n%fused_computation.2 (", 1)
    text = text.replace(
        "  %b = ", "  %h = bf16[192,8] fusion(%p), calls=%async_collective_fusion.3\n  %b = ", 1
    )
    assert read_collectives(text)[0]["all-gather"] == Traffic(2, 2 * 192 * 8 * 2)


@pytest.mark.parametrize(
    "header, groups, devices",
    [
        ("HloModule x, num_partitions=8", "", 8),
        ("HloModule x, num_partitions=8", "replica_groups={{0,1},{2,3},{4,5},{6,7}}, ", 2),
        ("HloModule x", "replica_groups=[2,4]<=[8], ", 4),
        ("HloModule x", "replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, ", 4),
        ("HloModule x", "replica_groups=mesh['x'=2,'y'=4,'z'=3] {'x','y':(1)2}, ", 4),
    ],
)
def test_a_device_sends_all_but_its_own_part(header, groups, devices):
    """Of 96 bytes; an all-reduce is a scatter of parts of the sum and a gathering of them."""
    found, _ = read_collectives(
        f"{header}\n\nENTRY %main (p: f32[24]) -> f32[24] {{\n"
        f"  %g = f32[24] all-gather(%p), {groups}dimensions={{0}}\n"
        f"  %r = f32[24] all-reduce(%p), {groups}to_apply=%add\n"
        "  %c = f32[24] collective-permute(%p), source_target_pairs={{0,1}}\n}\n"
    )
    sent = {kind: one.sent for kind, one in found.items()}
    own = 96 / devices
    assert sent == {"all-gather": 96 - own, "all-reduce": 2 * (96 - own), "collective-permute": 96}


def test_operands_in_the_result_of_a_start_do_not_count():
    """As compilers for GPUs write it."""
    found, _ = read_collectives(
        "HloModule x, num_partitions=4\n\nENTRY %main (p: f32[24]) -> f32[24] {\n"
        "  %p = f32[24]{0} parameter(0)\n"
        "  %s = ((f32[24]{0}), f32[24]{0}) all-reduce-start(%p), to_apply=%add\n"
        "  %d = f32[24]{0} all-reduce-done(%s)\n}\n"
    )
    assert found == {"all-reduce": Traffic(1, 96)} and found["all-reduce"].sent == 2 * 72


def test_bytes_that_are_sent_while_kernels_run_are_told():
    """Of two sums of 96 bytes that four GPUs send, one has a product between its start and its end."""
    start = "  %s{n} = f32[24]{{0}} all-reduce-start(%p), to_apply=%add\n"
    end = "  %d{n} = f32[24]{{0}} all-reduce-done(%s{n})\n"
    found, _ = read_collectives(
        "HloModule x, num_partitions=4\n\nENTRY %main (p: f32[24]) -> f32[24] {\n"
        "  %p = f32[24]{0} parameter(0)\n"
        + start.format(n=1)
        + "  %b = f32[2,12]{1,0} bitcast(%p)\n"
        + end.format(n=1)
        + start.format(n=2)
        + "  %f = f32[2,2]{1,0} fusion(%b), kind=kCustom, calls=%product\n"
        + end.format(n=2)
        + "}\n"
    )
    assert (found["all-reduce"].sent, found["all-reduce"].overlapped) == (4 * 72, 2 * 72)


# As XLA writes a program for an H100, shortened: names, layouts and attributes as they are.
FOR_A_GPU = """\
HloModule jit_f, is_scheduled=true

%sliced (p.0: f32[6,2,4], p.1: s32[]) -> bf16[2,4] {
  %p.0 = f32[6,2,4]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %c.1 = s32[] constant(0)
  %row = f32[1,2,4]{2,1,0} dynamic-slice(%p.0, %p.1, %c.1, %c.1), dynamic_slice_sizes={1,2,4}
  %flat = f32[2,4]{1,0} bitcast(%row)
  ROOT %small = bf16[2,4]{1,0} convert(%flat)
}

%stacked (p.2: f32[6,2,4], p.3: f32[2,4], p.4: s32[]) -> f32[6,2,4] {
  %p.2 = f32[6,2,4]{2,1,0} parameter(0)
  %p.3 = f32[2,4]{1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  %c.2 = s32[] constant(0)
  %one = f32[1,2,4]{2,1,0} bitcast(%p.3)
  ROOT %in_place = f32[6,2,4]{2,1,0} dynamic-update-slice(%p.2, %one, %p.4, %c.2, %c.2)
}

%added (p.5: f32[3,4]) -> f32[3] {
  %p.5 = f32[3,4]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %sum = f32[3]{0} reduce(%p.5, %zero), dimensions={1}, to_apply=%add
}

%multiplied (p.6: bf16[3,5], p.7: bf16[5,7]) -> f32[3,7] {
  %p.6 = bf16[3,5]{1,0} parameter(0)
  %p.7 = bf16[5,7]{1,0} parameter(1)
  ROOT %dot.1 = f32[3,7]{1,0} dot(%p.6, %p.7), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%step (s.1: (s32[], f32[6,2,4])) -> (s32[], f32[6,2,4]) {
  %s.1 = (s32[], f32[6,2,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s.1), index=0
  %all = f32[6,2,4]{2,1,0} get-tuple-element(%s.1), index=1
  %loop_fusion.1 = bf16[2,4]{1,0} fusion(%all, %i), kind=kLoop, calls=%sliced
  %loop_fusion.2 = f32[6,2,4]{2,1,0} fusion(%all, %w, %i), kind=kLoop, calls=%stacked
  ROOT %t = (s32[], f32[6,2,4]{2,1,0}) tuple(%i, %loop_fusion.2)
}

%refill (s.2: (s32[], f32[6,2,4])) -> (s32[], f32[6,2,4]) {
  %s.2 = (s32[], f32[6,2,4]{2,1,0}) parameter(0)
  %steps = (s32[], f32[6,2,4]{2,1,0}) while(%s.2), condition=%more, body=%step
  ROOT %copy.1 = (s32[], f32[6,2,4]{2,1,0}) copy(%steps)
}

ENTRY %main (q: bf16[3,5]) -> f32[3] {
  %q = bf16[3,5]{1,0} parameter(0)
  %k = bf16[5,7]{1,0} parameter(1)
  %x = f32[3,4]{1,0} parameter(2)
  %cublas = (bf16[3,7]{1,0}, s8[64]{0}) custom-call(%q, %k), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %wide = f32[3,7]{1,0} fusion(%q, %k), kind=kCustom, calls=%multiplied
  %attended = (bf16[3,4]{1,0}, u8[8]{0}) custom-call(%q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %own = bf16[3,4]{1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={debug = false, ir = "ML\\EFR\\22%q(", name = "attention_forward", num_stages = 1 : i32}
  %known = (s32[], f32[6,2,4]{2,1,0}) while(%w0), condition=%c, body=%step, \
backend_config={"known_trip_count":{"n":"6"}}
  %unknown = (s32[], f32[6,2,4]{2,1,0}) while(%w0), condition=%c, body=%refill
  ROOT %reduce = f32[3]{0} fusion(%x), kind=kInput, calls=%added
}
"""


def test_the_kernels_of_a_gpu_have_the_bytes_and_operations_of_their_shapes():
    """Of what they slice or update in place, the slices; six steps, and steps in loops of unknown length."""
    product = 2 * 3 * 7 * 5
    step = [Kernel("copies", "fusion", 32 + 4 + 16), Kernel("copies", "fusion", 32 + 4 + 32)]
    assert read_kernels(FOR_A_GPU) == [
        Kernel("products", "__cublas$gemm", 30 + 70 + 42, product),
        Kernel("products", "fusion", 30 + 70 + 84, product, in_float32=True),
        Kernel("attention", "__cudnn$fmhaSoftmax", 30 + 24 + 8),
        Kernel("attention", "attention_forward", 30 + 24),
        *(kernel._replace(times=6) for kernel in step),
        *(kernel._replace(loops=2) for kernel in step),
        Kernel("copies", "copy", 2 * (4 + 6 * 2 * 4 * 4), loops=1),
        Kernel("reductions", "fusion", 48 + 12),
    ]


def test_kernels_from_outside_are_called_by_their_names():
    names = ["__cublas$gemm", "__cudnn$fmhaSoftmax", "attention_forward"]
    assert read_calls(FOR_A_GPU) == names
    assert read_calls(
        '  %t = custom-call(%p), custom_call_target="tpu_custom_call", "kernel_name":"mix"'
    ) == ["mix"]
    assert (read_cycles(RECORDED), read_cycles(BY_HAND)) == (7632 + 8404, 10 + 5 + 1)


def test_a_text_without_a_program_has_nothing():
    assert read_collectives("HloModule nothing\n") == read_collectives("") == ({}, 0)

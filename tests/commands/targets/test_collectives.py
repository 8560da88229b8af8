"""Reading compiled programs: a text recorded from libtpu (shortened), and small texts made by hand."""

import pytest

from flaxformer_mt.commands.compile_for_target import Traffic, bytes_of, read_collectives

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
